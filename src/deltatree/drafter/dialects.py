"""DFlash configs as published: three dialects, one meaning.

| | z-lab | speculators | Transformers-native |
|---|---|---|---|
| known by | `DFlashDraftModel` | `DFlashSpeculator`, or `transformer_layer_config` | model type `*_assistant` |
| body | flat | nested `transformer_layer_config` | flat |
| taps | `dflash_config.target_layer_ids`, id + 1 | `aux_hidden_state_layer_ids`, as they are | `target_layer_ids`, as they are |
| block size | on top or in `dflash_config` | on top | on top |
| mask token | `dflash_config.mask_token_id` (or on top) | on top | on top |

A *tap* is an index into the target's list of hidden states: 0 is the embedding, i the output of layer i - 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from deltatree.errors import ArchitectureError, CheckpointError, MismatchError
from deltatree.files import read_json, resolve_checkpoint
from deltatree.models.checkpoint import TargetConfig


@dataclass(frozen=True, slots=True)
class DFlashConfig:
    """A DFlash drafter, whatever the dialect it was published in."""

    source: str
    folder: Path
    dialect: str  # z-lab, speculators, transformers
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    attention_bias: bool
    block_size: int  # slots of a block: the bonus token and block_size - 1 drafts
    mask_token_id: int
    taps: tuple[int, ...]  # indices into the target's hidden states
    vocab_size: int | None
    context_length: int
    windows: tuple[int | None, ...]  # sliding window of each layer, None for full attention
    causal: tuple[bool, ...]  # whether a layer's block rows see only earlier rows of the block

    @property
    def depth(self) -> int:
        """Deepest node it can draft: slot 0 holds the bonus token."""
        return self.block_size - 1


def read_drafter_config(source: str) -> DFlashConfig:
    """Config of a local folder or a hub id. Raises CheckpointError, ArchitectureError."""
    folder = resolve_checkpoint(source, "drafter")
    config = read_json(folder / "config.json")
    dialect = _dialect(config, folder)
    body = config.get("transformer_layer_config", config)
    fields = _Fields(config, body, config.get("dflash_config") or {}, folder / "config.json")
    num_layers = fields.integer("num_hidden_layers")
    num_heads = fields.integer("num_attention_heads")
    hidden_size = fields.integer("hidden_size")
    windows = _windows(fields, num_layers)
    is_causal = fields.get("is_causal")
    # z-lab: a sliding layer is causal unless the config says otherwise; the other dialects are never causal
    by_layer = [window is not None and dialect == "z-lab" for window in windows]
    return DFlashConfig(
        source=source,
        folder=folder,
        dialect=dialect,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=fields.integer("head_dim", hidden_size // num_heads),
        rms_norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
        rope_theta=_rope_theta(fields),
        attention_bias=bool(fields.get("attention_bias", False)),
        block_size=fields.integer("block_size"),
        mask_token_id=fields.integer("mask_token_id"),
        taps=_taps(fields, dialect),
        vocab_size=fields.integer("vocab_size", 0) or None,
        context_length=fields.integer("max_position_embeddings"),
        windows=windows,
        causal=tuple(by_layer if is_causal is None else [bool(is_causal)] * num_layers),
    )


def check_pair(drafter: DFlashConfig, target: TargetConfig) -> None:
    """Raises MismatchError if the two configs cannot belong together; no weight is read."""
    pairs = [("hidden size", drafter.hidden_size, target.hidden_size)]
    if drafter.vocab_size is not None:
        pairs.append(("vocabulary", drafter.vocab_size, target.vocab_size))
    for what, ours, theirs in pairs:
        if ours != theirs:
            raise MismatchError(
                f"drafter {drafter.source} has {what} {ours}, target {target.source} has {theirs}; "
                "use the drafter that was trained for this target"
            )
    beyond = [tap for tap in drafter.taps if not 0 <= tap <= target.num_layers]
    if beyond:
        raise MismatchError(
            f"drafter {drafter.source} reads hidden states {list(drafter.taps)}, but target {target.source} has "
            f"0 .. {target.num_layers}; use the drafter that was trained for this target"
        )
    if not 0 <= drafter.mask_token_id < target.vocab_size:
        raise MismatchError(
            f"drafter {drafter.source} has mask token {drafter.mask_token_id}, outside the vocabulary of "
            f"{target.vocab_size} of target {target.source}"
        )


_ABSENT = object()


@dataclass(frozen=True, slots=True)
class _Fields:
    """Looks a key up in the places where the dialects put it, and says so if it is nowhere or contradicts itself."""

    top: dict
    body: dict
    section: dict  # dflash_config
    path: Path

    def get(self, key: str, default=None):
        found = [place[key] for place in (self.section, self.top, self.body) if place.get(key) is not None]
        if any(value != found[0] for value in found[1:]):
            raise CheckpointError(f"{self.path} gives `{key}` as {found[0]} and as {found[1]}; keep the right one")
        return found[0] if found else default

    def integer(self, key: str, default=_ABSENT) -> int:
        value = self.get(key, default)
        if value is _ABSENT:
            raise CheckpointError(f"{self.path} has no `{key}`; a DFlash drafter must state it, it is never guessed")
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise CheckpointError(f"{self.path} has `{key}` = {value!r}; a whole number is needed")
        return value


def _dialect(config: dict, folder: Path) -> str:
    names = config.get("architectures") or []
    if "DFlash2DraftModel" in names:
        raise ArchitectureError(
            f"drafter {folder} is a DFlash2DraftModel, whose candidate selector and convolutions are not supported; "
            "supported are DFlashDraftModel, DFlashSpeculator and Transformers' *_assistant drafters"
        )
    if "DFlashSpeculator" in names or "transformer_layer_config" in config:
        return "speculators"
    if "DFlashDraftModel" in names or "dflash_config" in config:
        return "z-lab"
    if str(config.get("model_type", "")).endswith("_assistant"):
        return "transformers"
    raise ArchitectureError(
        f"drafter {folder} is {', '.join(names) or config.get('model_type', 'of no named architecture')}; supported are "
        "DFlashDraftModel, DFlashSpeculator and Transformers' *_assistant drafters"
    )


def _taps(fields: _Fields, dialect: str) -> tuple[int, ...]:
    key = "aux_hidden_state_layer_ids" if dialect == "speculators" else "target_layer_ids"
    ids = fields.get(key)
    valid = isinstance(ids, list) and ids and all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
    if not valid:
        raise CheckpointError(f"{fields.path} has `{key}` = {ids!r}; a list of the target's layer ids is needed")
    return tuple(i + 1 for i in ids) if dialect == "z-lab" else tuple(ids)


def _rope_theta(fields: _Fields) -> float:
    """The rotary base; a DFlash drafter rotates whole heads, whatever else was copied from its target's config."""
    rope = fields.get("rope_parameters") or {}
    theta = fields.get("rope_theta", rope.get("rope_theta"))
    if theta is None:
        raise CheckpointError(f"{fields.path} has neither `rope_theta` nor `rope_parameters.rope_theta`")
    if "rope_theta" in rope and rope["rope_theta"] != theta:
        raise CheckpointError(
            f"{fields.path} gives `rope_theta` as {theta} and `rope_parameters.rope_theta` as {rope['rope_theta']}; "
            "keep the right one"
        )
    scaling = rope.get("rope_type", "default")
    if scaling != "default":
        raise ArchitectureError(
            f"{fields.path} asks for rotary scaling {scaling!r}; drafters with `default` are supported"
        )
    return float(theta)


def _windows(fields: _Fields, num_layers: int) -> tuple[int | None, ...]:
    kinds = fields.get("layer_types") or ["full_attention"] * num_layers
    if len(kinds) != num_layers:
        raise CheckpointError(f"{fields.path} names {len(kinds)} `layer_types` for {num_layers} layers")
    window = fields.get("sliding_window")
    if "sliding_attention" in kinds and not window:
        raise CheckpointError(f"{fields.path} has sliding_attention layers and no `sliding_window`")
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)
