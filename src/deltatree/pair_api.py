"""What users touch: load a target with its drafter, generate, stream."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deltatree.decode.options import AUTO, GenerateOptions
from deltatree.errors import ArchitectureError, OptionError
from deltatree.files import SHIPPED

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from deltatree.decode import Conversation
    from deltatree.decode.auto import Experience
    from deltatree.decode.round import Round
    from deltatree.decode.trace import Trace
    from deltatree.drafter.dflash import DFlashDrafter
    from deltatree.drafter.protocol import Drafter
    from deltatree.models.protocol import Target
    from deltatree.models.reference import ReferenceTarget
    from deltatree.text import Prompt, TextStream
    from deltatree.transitions import TransitionTable


BACKENDS = ("fast", "fast-host", "reference")


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished generation."""

    text: str
    token_ids: list[int]  # new tokens, the end token included if one stopped it
    prompt_length: int  # tokens
    method: str
    budget: int | str  # drafted nodes a round as asked for: a number, or "auto"
    budgets: list[int]  # drafted nodes of every round
    acceptance_lengths: list[int]  # one a round: accepted drafted nodes + 1, before a stop cut it
    num_drafted: int  # nodes over all rounds, roots not counted
    prefill_seconds: float
    decode_seconds: float
    stop_reason: str  # "stop" or "length"
    reused_length: int = 0  # prompt tokens that an earlier generation's state already had

    @property
    def rounds(self) -> int:
        return len(self.acceptance_lengths)

    @property
    def acceptance_length(self) -> float:
        """Mean over rounds; 1 for plain decoding."""
        return sum(self.acceptance_lengths) / self.rounds if self.rounds else 1.0

    @property
    def tokens_per_second(self) -> float:
        """Decoding alone: tokens after the first one (which prefill emits) over the seconds of all rounds."""
        return max(len(self.token_ids) - 1, 0) / self.decode_seconds if self.rounds else 0.0

    def as_dict(self) -> dict:
        """For JSON: every field and derived figure."""
        names = (
            "text", "token_ids", "prompt_length", "method", "budget", "budgets", "acceptance_lengths", "acceptance_length",
            "rounds", "num_drafted", "tokens_per_second", "prefill_seconds", "decode_seconds", "stop_reason",
            "reused_length",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}


class Pair:
    """A target and, if there is one, its drafter, with the tokenizer and the tokens that end a text."""

    def __init__(
        self,
        target: Target,
        tokenizer: PreTrainedTokenizerBase,
        drafter: Drafter | None = None,
        stop_ids: frozenset[int] = frozenset(),
        names: tuple[str, str | None] = ("target", None),
    ) -> None:
        self.target, self.tokenizer, self.drafter = target, tokenizer, drafter
        self.stop_ids = stop_ids
        self.names = names  # of target and drafter, as the user gave them
        self._experience: Experience | None = None
        self._transitions: dict[str, TransitionTable] = {}

    def experience(self) -> Experience:
        """What budget `auto` knows about this pair; measured for a few seconds, or read from the cache, on first use.

        Shared by all generations of the pair, and each teaches it. Raises OptionError without a drafter.
        """
        if self._experience is None:
            from deltatree.decode.auto import Experience
            from deltatree.decode.calibration import round_costs

            if self.drafter is None:
                raise OptionError("budget 'auto' needs a drafter; load one, or use method 'ar'")
            self._experience = Experience(round_costs(self.target, self.drafter, self.names))
        return self._experience

    def encode(
        self, prompt: Prompt, *, raw: bool = False, thinking: bool | None = None, tools: list[dict] | None = None
    ) -> list[int]:
        """Token ids of a text (one user message), of chat messages, or of token ids."""
        from deltatree.text import encode_prompt

        return encode_prompt(self.tokenizer, prompt, raw=raw, thinking=thinking, tools=tools)

    def transitions(self, options: GenerateOptions) -> TransitionTable | None:
        """The table that the options' tree needs, if any: read once, or written now. Raises CheckpointError, MismatchError."""
        if not options.uses_transitions:
            return None
        choice = options.transitions
        if choice not in self._transitions:
            from deltatree.transitions import table_for

            self._transitions[choice] = table_for(choice, self.names[0], self.target, self.tokenizer)
        return self._transitions[choice]

    def rounds(
        self, prompt_ids: list[int], options: GenerateOptions, conversation: Conversation | None = None
    ) -> Iterator[Round]:
        """The rounds of one generation, prefill first. Each call has its own state; closing it early is fine.

        conversation: continued if the prompt extends it exactly, and left for the next prompt
        """
        return self.start(prompt_ids, options, conversation).rounds

    def start(
        self,
        prompt_ids: list[int],
        options: GenerateOptions,
        conversation: Conversation | None = None,
        trace: Trace | None = None,
    ) -> Running:
        """One generation, to be iterated for its pieces of text. Raises OptionError, PromptError.

        trace: told of every round
        """
        from deltatree.decode import Ending, decode, sampler_for
        from deltatree.decode.methods import plan
        from deltatree.decode.stream import check_prompt
        from deltatree.text import TextStream

        check_prompt(prompt_ids, self.target)
        vocab_size = self.target.vocab_size
        is_auto = options.method == "ddtree" and options.budget == AUTO and self.drafter is not None
        experience = self.experience() if is_auto else None
        drafter, build_tree, budget = plan(options, self.drafter, vocab_size, experience, self.transitions(options))
        if trace is not None:
            build_tree = trace.follow(build_tree)
        most = max(getattr(self.target, "node_buckets", (budget + 1,)))
        if budget + 1 > most:
            raise OptionError(
                f"budget={budget} needs {budget + 1} nodes, captured for {most}; pass budget<={most - 1}, "
                "or load with backend='reference'"
            )
        stop_ids = (frozenset() if options.ignore_eos else self.stop_ids) | frozenset(options.stop_token_ids)
        bad_words = self._bad_words(options)
        for token in [*(options.logit_bias or ()), *options.stop_token_ids, *(t for word in bad_words for t in word)]:
            if token >= vocab_size:
                raise OptionError(f"token id {token} is outside the vocabulary of {vocab_size}; use this target's ids")
        grammar = None
        if options.is_structured:
            from deltatree.structured import grammar_for

            grammar = grammar_for(
                options, self.tokenizer, vocab_size=vocab_size, prompt_length=len(prompt_ids), stop_ids=stop_ids
            )
        text = TextStream(self.tokenizer, options.stop, options.min_new_tokens)

        def is_done(new_ids: list[int]) -> bool:
            return text.push(new_ids[text.num_tokens :])

        rounds = decode(
            self.target,
            drafter,
            prompt_ids,
            build_tree=build_tree,
            budget=budget,
            ending=Ending(options.max_new_tokens, stop_ids, is_done if options.stop else None),
            sampler=sampler_for(
                options,
                prompt_length=len(prompt_ids),
                stop_ids=stop_ids,
                bad_words=bad_words,
                constraint=grammar,
            ),
            conversation=conversation,
        )
        return Running(
            rounds,
            text,
            prompt_length=len(prompt_ids),
            method=options.method,
            budget=options.budget
            if options.method == "ddtree"
            else 0
            if options.method == "ar"
            else self.drafter.depth,
            conversation=conversation,
        )

    def generate(self, prompt: Prompt, *, raw: bool = False, thinking: bool | None = None, **options) -> Generation:
        """Decode to the end. Options are those of `GenerateOptions`."""
        chosen = _options(options)
        prompt_ids = self.encode(prompt, raw=raw, thinking=thinking)
        return self.collect(prompt_ids, chosen)

    def collect(
        self,
        prompt_ids: list[int],
        options: GenerateOptions,
        on_text: Callable[[str], object] | None = None,
        *,
        conversation: Conversation | None = None,
        trace: Trace | None = None,
    ) -> Generation:
        """Run all rounds of one generation and gather what they emitted; `on_text` gets the pieces as `stream` would."""
        running = self.start(prompt_ids, options, conversation, trace)
        for piece in running:
            if piece and on_text is not None:
                on_text(piece)
        return running.generation()

    def stream(self, prompt: Prompt, *, raw: bool = False, thinking: bool | None = None, **options) -> Iterator[str]:
        """Yield the text piece by piece: whole characters, nothing taken back. Options as in `generate`.

        Closing the iterator early frees what the generation holds.
        """
        chosen = _options(options)
        prompt_ids = self.encode(prompt, raw=raw, thinking=thinking)
        running = self.start(prompt_ids, chosen)

        def pieces() -> Iterator[str]:
            with closing(running):
                yield from (piece for piece in running if piece)

        return pieces()

    def _bad_words(self, options: GenerateOptions) -> list[list[int]]:
        """Token sequences of the words: a text both as it begins a line and as it follows a space."""
        sequences = []
        for word in options.bad_words:
            if isinstance(word, str):
                for text in dict.fromkeys((word, " " + word.lstrip())):
                    sequences.append(self.tokenizer.encode(text, add_special_tokens=False))
            else:
                sequences.append(list(word))
        return sequences


class Running:
    """A generation as it runs. Iterating it runs the rounds and yields one piece of text each, often an empty one."""

    def __init__(
        self,
        rounds: Iterator[Round],
        text: TextStream,
        *,
        prompt_length: int,
        method: str,
        budget: int | str,
        conversation: Conversation | None = None,
    ) -> None:
        self.rounds, self.text = rounds, text
        self.prompt_length, self.method, self.budget = prompt_length, method, budget
        self.conversation = conversation
        self.token_ids: list[int] = []  # all that the rounds emitted
        self.acceptance_lengths: list[int] = []
        self.budgets: list[int] = []  # drafted nodes of every round
        self.prefill_seconds = self.decode_seconds = 0.0
        self.reused_length = 0
        self.stop_reason: str | None = None

    def __iter__(self) -> Iterator[str]:
        started = time.perf_counter()
        for done in self.rounds:
            seconds = time.perf_counter() - started  # choosing tokens has waited for the device
            if done.num_nodes:
                self.decode_seconds += seconds
                self.acceptance_lengths.append(done.acceptance_length)
                self.budgets.append(done.num_nodes - 1)
            else:
                self.prefill_seconds = seconds
                self.reused_length = self.conversation.reused_length if self.conversation is not None else 0
            self.token_ids += done.token_ids
            self.stop_reason = done.ended
            self.text.push(self.token_ids[self.text.num_tokens :])
            yield self.text.take()
            started = time.perf_counter()
        yield self.text.finish()

    def close(self) -> None:
        """End early: no further round runs, and what the generation holds is freed."""
        self.rounds.close()

    @property
    def num_tokens(self) -> int:
        """Tokens so far that belong to the text."""
        return self.text.num_shown_tokens()

    def generation(self) -> Generation:
        """What has been generated. The ids end where the text ends."""
        from deltatree.text import detokenize

        token_ids = self.token_ids[: self.num_tokens]
        text = self.text.all if self.text.stopped else detokenize(self.text.tokenizer, token_ids)
        return Generation(
            text=text,
            token_ids=token_ids,
            prompt_length=self.prompt_length,
            method=self.method,
            budget=self.budget,
            budgets=self.budgets,
            acceptance_lengths=self.acceptance_lengths,
            num_drafted=sum(self.budgets),
            prefill_seconds=self.prefill_seconds,
            decode_seconds=self.decode_seconds,
            stop_reason=self.stop_reason or "length",
            reused_length=self.reused_length,
        )


def _options(given: dict) -> GenerateOptions:
    known = GenerateOptions.__dataclass_fields__
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise OptionError(f"unknown option {', '.join(unknown)}; possible are {', '.join(known)}")
    return GenerateOptions(**given)


def load(
    target: str = SHIPPED,
    drafter: str | None = None,
    *,
    device: str | None = None,
    dtype: str | torch.dtype | None = None,
    backend: str | None = None,
    context_length: int | None = None,
    prefill: str = "own",
) -> Pair:
    """Load a target and its drafter.

    target, drafter: hub ids or folders; "shipped" is the small pair inside this package, whose drafter comes by itself.
        Without a drafter only plain decoding (`method="ar"`) is possible.
    device: a torch device, by default a GPU if there is one    dtype: by default bfloat16 on a GPU, float32 on a CPU
    backend: "fast" (captured graphs and fused kernels; greedy rounds stay on the device as a whole; the default on a GPU),
        "fast-host" (the same, and every round passes through the host), or "reference" (the Transformers model, the default
        elsewhere and wherever the fast one does not cover a model, which a warning then says)
    context_length: tokens of prompt and answer that the fast backend keeps room for, by default 32,768 or the model's own
    prefill: what takes recurrent layers through a prompt: "own", or "fla" (flash-linear-attention's chunk kernels, which
        are tuned for minutes in every process and need a GPU); all methods of a pair start from the same numbers
    Configs are judged before weights are read. Raises CheckpointError, ArchitectureError, MismatchError, OptionError.
    """
    from deltatree.drafter.dialects import check_pair, read_drafter_config
    from deltatree.models.checkpoint import read_target_config

    if target == SHIPPED and drafter is None:
        drafter = SHIPPED
    names = (target, drafter)
    target_config = read_target_config(target)
    drafter_config = None
    if drafter is not None:
        drafter_config = read_drafter_config(drafter)
        check_pair(drafter_config, target_config)

    import torch
    from transformers import GenerationConfig

    from deltatree.drafter.dflash import load_drafter
    from deltatree.models.checkpoint import load_target
    from deltatree.text import end_tokens, load_tokenizer
    from deltatree.verify.chain import chain_rule

    check_backend(backend, context_length)
    device, torch_dtype = place(device, dtype)
    chain_rule(prefill, torch.device(device))  # refused before anything loads
    taps = drafter_config.taps if drafter_config else ()
    tokenizer = load_tokenizer(target_config.folder)
    loaded = load_target(target_config, taps=taps, device=device, dtype=torch_dtype, prefill=prefill)
    generation = loaded.model.generation_config or GenerationConfig()
    target, draft = choose_backend(
        loaded, load_drafter(drafter_config, loaded) if drafter_config else None, backend, context_length
    )
    return Pair(
        target,
        tokenizer,
        draft,
        end_tokens(tokenizer, loaded.config, loaded.model.config, generation),
        names,
    )


def place(device: str | None, dtype: str | torch.dtype | None) -> tuple[str, torch.dtype]:
    """Device and dtype, or their defaults. Raises OptionError."""
    import torch

    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise OptionError(f"device {device!r} is not known; try cpu, cuda or cuda:1") from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise OptionError(f"device {device!r} was asked for, but this PyTorch sees no GPU; use device='cpu'")
    if dtype is None:
        dtype = torch.bfloat16 if kind == "cuda" else torch.float32
    named = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if isinstance(dtype, str):
        if dtype not in named:
            raise OptionError(f"dtype {dtype!r} is not known; possible are {', '.join(named)}")
        dtype = named[dtype]
    return device, dtype


def check_backend(backend: str | None, context_length: int | None) -> None:
    """Raises OptionError before anything loads."""
    if backend not in (None, *BACKENDS):
        raise OptionError(f"backend {backend!r} is not known; possible are {', '.join(BACKENDS)}")
    whole = isinstance(context_length, int) and not isinstance(context_length, bool) and context_length >= 2
    if context_length is not None and not whole:
        raise OptionError(f"context_length={context_length!r} is not possible; give a whole number of tokens from 2 on")


def choose_backend(
    reference: ReferenceTarget, drafter: DFlashDrafter | None, backend: str | None, context_length: int | None
) -> tuple[Target, Drafter | None]:
    """The fast target and drafter where they are wanted and cover the model, else the ones given, with a warning.

    Raises ArchitectureError if the fast backend was named and does not cover the target.
    """
    from deltatree.drafter import FastDFlashDrafter
    from deltatree.models import FastTarget

    if backend == "reference" or (backend is None and reference.device.type != "cuda"):
        return reference, drafter
    try:
        target = FastTarget(reference, context_length=context_length, device_rounds=backend != "fast-host")
    except ArchitectureError as error:
        if backend is not None:
            raise
        warnings.warn(f"the reference backend runs, because {error}", RuntimeWarning, stacklevel=3)
        return reference, drafter
    if drafter is not None and FastDFlashDrafter.covers(drafter):
        return target, FastDFlashDrafter(drafter, context_length=target.context_length)
    return target, drafter
