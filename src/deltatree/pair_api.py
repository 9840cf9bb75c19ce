"""What users touch: load a target with its drafter, generate, stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deltatree.decode.options import GenerateOptions
from deltatree.errors import OptionError
from deltatree.files import SHIPPED

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from deltatree.decode.round import Round
    from deltatree.drafter.protocol import Drafter
    from deltatree.models.protocol import Target
    from deltatree.text import Prompt


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished generation."""

    text: str
    token_ids: list[int]  # new tokens, the end token included if one stopped it
    prompt_length: int  # tokens
    method: str
    budget: int
    acceptance_lengths: list[int]  # one a round: accepted drafted nodes + 1, before a stop cut it
    num_drafted: int  # nodes over all rounds, roots not counted
    prefill_seconds: float
    decode_seconds: float
    stop_reason: str  # "stop" or "length"

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
        return (len(self.token_ids) - 1) / self.decode_seconds if self.rounds else 0.0

    def as_dict(self) -> dict:
        """For JSON: every field and derived figure."""
        names = (
            "text", "token_ids", "prompt_length", "method", "budget", "acceptance_lengths", "acceptance_length",
            "rounds", "num_drafted", "tokens_per_second", "prefill_seconds", "decode_seconds", "stop_reason",
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

    def encode(self, prompt: Prompt, *, raw: bool = False, thinking: bool | None = None) -> list[int]:
        """Token ids of a text (one user message), of chat messages, or of token ids."""
        from deltatree.text import encode_prompt

        return encode_prompt(self.tokenizer, prompt, raw=raw, thinking=thinking)

    def rounds(self, prompt_ids: list[int], options: GenerateOptions) -> Iterator[Round]:
        """The rounds of one generation, prefill first. Each call has its own state; closing it early is fine."""
        from deltatree.decode import Ending, decode, sampler_for
        from deltatree.decode.methods import plan

        drafter, build_tree, budget = plan(options, self.drafter, self.target.vocab_size)
        stop_ids = frozenset() if options.ignore_eos else self.stop_ids
        return decode(
            self.target,
            drafter,
            prompt_ids,
            build_tree=build_tree,
            budget=budget,
            ending=Ending(options.max_new_tokens, stop_ids),
            sampler=sampler_for(options),
        )

    def generate(self, prompt: Prompt, *, raw: bool = False, thinking: bool | None = None, **options) -> Generation:
        """Decode to the end. Options are those of `GenerateOptions`."""
        chosen = _options(options)
        prompt_ids = self.encode(prompt, raw=raw, thinking=thinking)
        return self.collect(prompt_ids, chosen)

    def collect(
        self, prompt_ids: list[int], options: GenerateOptions, on_text: Callable[[str], object] | None = None
    ) -> Generation:
        """Run all rounds of one generation and gather what they emitted; `on_text` gets the pieces as `stream` would."""
        from deltatree.text import detokenize, stream_text

        done: list[Round] = []
        clock = [time.perf_counter()]

        def watched() -> Iterator[list[int]]:
            for r in self.rounds(prompt_ids, options):
                if not done:
                    clock.append(time.perf_counter())  # prefill is over: choosing its token has waited for the device
                done.append(r)
                yield r.token_ids
            clock.append(time.perf_counter())

        if on_text is None:
            for _ in watched():
                pass
        else:
            for piece in stream_text(self.tokenizer, watched()):
                on_text(piece)
        started, ended = clock[0], clock[-1]
        decoding = clock[1] if done else ended
        rest = done[1:]
        token_ids = [token for r in done for token in r.token_ids]
        return Generation(
            text=detokenize(self.tokenizer, token_ids),
            token_ids=token_ids,
            prompt_length=len(prompt_ids),
            method=options.method,
            budget=options.budget
            if options.method == "ddtree"
            else 0
            if options.method == "ar"
            else self.drafter.depth,
            acceptance_lengths=[r.acceptance_length for r in rest],
            num_drafted=sum(r.num_nodes - 1 for r in rest),
            prefill_seconds=decoding - started,
            decode_seconds=ended - decoding,
            stop_reason=done[-1].ended if done else "length",
        )

    def stream(self, prompt: Prompt, *, raw: bool = False, thinking: bool | None = None, **options) -> Iterator[str]:
        """Yield the text piece by piece: whole characters, nothing taken back. Options as in `generate`."""
        from deltatree.text import stream_text

        chosen = _options(options)
        prompt_ids = self.encode(prompt, raw=raw, thinking=thinking)
        return stream_text(self.tokenizer, (r.token_ids for r in self.rounds(prompt_ids, chosen)))


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
) -> Pair:
    """Load a target and its drafter.

    target, drafter: hub ids or folders; "shipped" is the small pair inside this package, whose drafter comes by itself.
        Without a drafter only plain decoding (`method="ar"`) is possible.
    device: a torch device, by default a GPU if there is one    dtype: by default bfloat16 on a GPU, float32 on a CPU
    Configs are judged before weights are read. Raises CheckpointError, ArchitectureError, MismatchError, OptionError.
    """
    from deltatree.drafter.dialects import check_pair, read_drafter_config
    from deltatree.models.checkpoint import read_target_config

    if target == SHIPPED and drafter is None:
        drafter = SHIPPED
    target_config = read_target_config(target)
    drafter_config = None
    if drafter is not None:
        drafter_config = read_drafter_config(drafter)
        check_pair(drafter_config, target_config)

    from transformers import GenerationConfig

    from deltatree.drafter.dflash import load_drafter
    from deltatree.models.checkpoint import load_target
    from deltatree.text import end_tokens, load_tokenizer

    device, torch_dtype = place(device, dtype)
    taps = drafter_config.taps if drafter_config else ()
    tokenizer = load_tokenizer(target_config.folder)
    loaded = load_target(target_config, taps=taps, device=device, dtype=torch_dtype)
    generation = loaded.model.generation_config or GenerationConfig()
    return Pair(
        loaded,
        tokenizer,
        load_drafter(drafter_config, loaded) if drafter_config else None,
        end_tokens(tokenizer, loaded.config, loaded.model.config, generation),
        (target, drafter),
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
