"""Turn the corpus into a tokenizer, training pieces and prompts. CPU only, a minute or two.

Reads `*.jsonl.gz` files of {"text", "source"}; writes into --out
    tokenizer/      a byte-level BPE of 4,096 tokens as an ordinary Transformers folder
    pieces.npz      what the target reads: token pieces of at most 512 tokens and how often an epoch shows each
    prompts.npz     what the target later continues by itself, with one temperature each (0 is greedy)
    eval.npz        held-out prompts as chats, for evaluation only
"""

import argparse
import ast
import gzip
import json
import random
import re
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Digits stand alone: a small model computes better when every number is spelled the same way.
SPLIT = r"""'(?:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"""
REPEATS = {"gsm8k": 2, "mbpp": 4, "instruction": 4, "function": 1, "text": 1}
PIECE_TOKENS = 512
MAX_CHAT_TOKENS = 640


def read(corpus: Path, name: str) -> list[str]:
    with gzip.open(corpus / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines]


def chat(user: str, assistant: str | None = None) -> str:
    """One exchange in ChatML; without an answer it ends where the answer would begin."""
    opening = f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"
    return opening if assistant is None else f"{opening}{assistant}<|im_end|>\n"


def gsm8k_exchange(text: str) -> tuple[str, str]:
    question, answer = text.removeprefix("Question: ").split("\nAnswer: ", 1)
    return question.strip(), answer.strip()


def mbpp_exchange(text: str) -> tuple[str, str]:
    task, code = text.split("\n\n", 1)
    return task.strip(), code.split("\n\nassert ", 1)[0].strip()


def instruction_exchange(text: str) -> tuple[str, str] | None:
    parts = text.strip().split("\n\n")
    return ("\n\n".join(parts[:-1]), parts[-1]) if len(parts) > 1 else None


def function_exchanges(source: str) -> list[tuple[str, str]]:
    """Every documented top-level function: signature and docstring ask, the body answers."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return []
    lines, found = source.splitlines(), []
    for node in ast.walk(tree):
        if (
            not isinstance(node, ast.FunctionDef)
            or node.col_offset
            or len(node.body) < 2
            or not ast.get_docstring(node)
        ):
            continue
        stub = "\n".join(lines[node.lineno - 1 : node.body[0].end_lineno])
        body = "\n".join(lines[node.body[0].end_lineno : node.end_lineno]).strip("\n")
        if body.strip():
            found.append((stub + "\n", body))
    return found


def with_other_numbers(question: str, rng: random.Random) -> str:
    """The same story with other numbers of the same size: a prompt the target has never read."""

    def other(match: re.Match) -> str:
        digits = match.group()
        return (
            digits
            if rng.random() < 0.25
            else str(rng.randint(10 ** (len(digits) - 1) + (len(digits) == 1), 10 ** len(digits) - 1))
        )

    return re.sub(r"\d{1,6}", other, question)


def with_other_ending(question: str, other: str) -> str:
    """The first sentences of one question and the last ones of another."""
    first, second = (re.split(r"(?<=[.?!]) ", q) for q in (question, other))
    return " ".join(first[: max(1, len(first) // 2)] + second[len(second) // 2 :])


def train_tokenizer(texts: list[str], vocab_size: int, folder: Path) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", mask_token="<|mask|>",
        model_max_length=4096, clean_up_tokenization_spaces=False,
    )  # fmt: skip
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def save_ragged(path: Path, rows: list[list[int]], **columns: np.ndarray) -> None:
    """Rows of token ids as one flat array and their offsets."""
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    np.savez_compressed(
        path, tokens=np.concatenate([np.asarray(r, np.uint16) for r in rows]), offsets=offsets, **columns
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="folder of the *.jsonl.gz files")
    parser.add_argument(
        "--eval-prompts", type=Path, required=True, help='JSON lines with "turns"; the first 50 are kept'
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)

    python = read(args.corpus, "python_stdlib") + read(args.corpus, "python_packages")
    texts = python + read(args.corpus, "docs_prose")
    exchanges = {
        "gsm8k": [gsm8k_exchange(t) for t in read(args.corpus, "gsm8k_train")],
        "mbpp": [mbpp_exchange(t) for t in read(args.corpus, "mbpp_train")],
        "instruction": [e for t in read(args.corpus, "instructions") if (e := instruction_exchange(t))],
        "function": [e for source in python for e in function_exchanges(source)],
    }
    chats = {kind: [chat(*exchange) for exchange in pairs] for kind, pairs in exchanges.items()}

    # The questions count twice, so that the vocabulary serves them well beside six times as much code.
    tokenizer = train_tokenizer(
        texts + chats["gsm8k"] * 2 + chats["mbpp"] + chats["instruction"], args.vocab_size, args.out / "tokenizer"
    )

    def encode(strings: list[str]) -> list[list[int]]:
        return [e.ids for e in tokenizer.backend_tokenizer.encode_batch(strings, add_special_tokens=False)]

    end_of_text = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    pieces, repeats = [], []
    for kind, strings in [*chats.items(), ("text", texts)]:
        for ids in encode(strings):
            if kind != "text" and len(ids) > MAX_CHAT_TOKENS:
                continue
            ids = [*ids, end_of_text]
            cuts = [ids] if kind != "text" else [ids[i : i + PIECE_TOKENS] for i in range(0, len(ids), PIECE_TOKENS)]
            pieces += cuts
            repeats += [REPEATS[kind]] * len(cuts)
    save_ragged(args.out / "pieces.npz", pieces, repeats=np.asarray(repeats, np.int32))

    questions = [question for question, _ in exchanges["gsm8k"]]
    prompts: list[tuple[str, float]] = []
    prompts += [(chat(q), t) for q in questions for t in (0.0, 0.7)]
    prompts += [(chat(with_other_numbers(q, rng)), t) for q in questions for t in (0.0, 0.0, 0.0, 0.6)]
    prompts += [
        (chat(with_other_ending(with_other_numbers(q, rng), rng.choice(questions))), t)
        for q in questions
        for t in (0.0, 0.0)
    ]
    prompts += [
        (chat(user), t)
        for kind in ("mbpp", "instruction")
        for user, _ in exchanges[kind]
        for t in (0.0, 0.6, 0.8, 0.8, 1.0, 1.0)
    ]
    prompts += [(chat(user), t) for user, _ in exchanges["function"] for t in (0.0, 0.7)]
    rows = list(zip(encode([p for p, _ in prompts]), [t for _, t in prompts], strict=True))
    rows = [(ids, t) for ids, t in rows if len(ids) <= 224]
    windows = [p for p, r in zip(pieces, repeats, strict=True) if r == 1 and len(p) >= 64]
    for number in range(16_000):
        piece = rng.choice(windows)
        start = rng.randrange(len(piece) - 48)
        rows.append((piece[start : start + 48], 0.0 if number % 2 else 0.8))
    rng.shuffle(rows)
    save_ragged(
        args.out / "prompts.npz", [ids for ids, _ in rows], temperature=np.asarray([t for _, t in rows], np.float32)
    )

    with args.eval_prompts.open(encoding="utf-8") as lines:
        held_out = [json.loads(line)["turns"][0] for line in lines][:50]
    save_ragged(args.out / "eval.npz", encode([chat(q.strip()) for q in held_out]))
    counts = {kind: len(pairs) for kind, pairs in exchanges.items()}
    epoch = sum(len(p) * r for p, r in zip(pieces, repeats, strict=True))
    print(
        f"exchanges {counts}, pieces {len(pieces)}, tokens {sum(map(len, pieces))}, an epoch {epoch}, prompts {len(rows)}"
    )


if __name__ == "__main__":
    main()
