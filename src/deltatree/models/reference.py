"""The reference target: the Transformers model itself, layer by layer.

It calls the loaded layers and never changes them beyond opening GatedDeltaNet instances to trees, so any checkpoint that
Transformers can load (quantised ones included) verifies here, on any device and in any dtype.
"""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

from deltatree.errors import ArchitectureError, MismatchError
from deltatree.kernels.attention import tree_attention_mask, tree_positions
from deltatree.kernels.conv import conv_rows
from deltatree.models.architectures import architecture_of
from deltatree.models.protocol import Verified
from deltatree.progress import telling
from deltatree.state import TreeState
from deltatree.tree import DraftTree, ancestors, chain_tree
from deltatree.verify import ChainPass, TreePass, open_to_trees
from deltatree.verify.chain import chain_rule

PREFILL_CHUNK = 4096
"""Tokens per prefill forward, through all layers: what bounds the memory of a long prompt. Plain decoding and drafting share
it, so that both start from the same numbers."""


def text_model_of(model: nn.Module) -> nn.Module:
    """The stack of text layers inside a `...ForCausalLM` or a multimodal `...ForConditionalGeneration`."""
    inner = getattr(model, "model", model)
    return getattr(inner, "language_model", inner)


def layer_kinds_of(config) -> tuple[str, ...]:
    """One of full_attention, sliding_attention, linear_attention per layer."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None:  # the families without the key window all layers or none
        windowed = getattr(config, "use_sliding_window", False) and getattr(config, "sliding_window", None)
        kinds = ["sliding_attention" if windowed else "full_attention"] * config.num_hidden_layers
    return tuple(kinds[: config.num_hidden_layers])


class ReferenceTarget:
    """A Transformers model as a target.

    model: a loaded model of a supported family, in eval mode
    taps: which hidden states the drafter reads, as indices into the library's `hidden_states` list (0 is the embedding,
        i the output of layer i-1, and the last one stands after the final norm)
    prefill: rule of the recurrent layers over a prompt, see `verify.chain.chain_rule`
    Raises ArchitectureError for another family, or an attention backend that cannot honour a tree mask; MismatchError
    for a tap that the model does not have; OptionError for a rule that cannot run.
    """

    def __init__(self, model: nn.Module, taps: tuple[int, ...] = (), *, prefill: str = "own") -> None:
        self.model = model
        self.text = text_model_of(model)
        self.config = self.text.config
        self.architecture = architecture_of(self.config.model_type)
        self.layer_kinds = layer_kinds_of(self.config)
        self.vocab_size = self.config.vocab_size
        self.context_length = self.config.max_position_embeddings
        self.taps = taps
        self._check(taps)
        self.chain_rule = chain_rule(prefill, self.device)
        self._has_prefilled = False
        for layer, kind in zip(self.text.layers, self.layer_kinds, strict=False):
            if kind == "linear_attention":
                open_to_trees(layer.linear_attn, self.architecture.project)
        parameters = inspect.signature(type(self.text.layers[0]).forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"

    @property
    def device(self) -> torch.device:
        return self.text.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.text.embed_tokens.weight.dtype

    @property
    def feature_size(self) -> int:
        return len(self.taps) * self.config.hidden_size

    def new_state(self) -> TreeState:
        return TreeState(self.layer_kinds)

    @torch.inference_mode()
    def prefill(self, token_ids: list[int], state: TreeState) -> Verified:
        count = len(token_ids)
        features = torch.empty(count, self.feature_size, dtype=self.dtype, device=self.device)
        compiles = self.device.type == "cuda" and not self._has_prefilled
        what = f"prefill of {count:,} tokens" + " (first use compiles kernels)" * compiles
        with telling(what, when=compiles or count > PREFILL_CHUNK) as tell:
            for start in range(0, count, PREFILL_CHUNK):
                chain = chain_tree(token_ids[start : start + PREFILL_CHUNK])
                rows = conv_rows(chain.parents, self._kernel).to(self.device)
                masks = {kind: self._chain_mask(kind, len(chain), state.length) for kind in set(self.layer_kinds)}
                hidden, tapped = self._forward(chain, masks, state, ChainPass(state, rows, self.chain_rule))
                state.advance(len(chain))
                features[start : start + len(chain)] = tapped
                tell(f"{start + len(chain):,} done")
        self._has_prefilled = True
        return Verified(self._logits(hidden[-1:]), features)

    @torch.inference_mode()
    def verify(self, tree: DraftTree, state: TreeState) -> Verified:
        state.begin(tree)
        rows = conv_rows(tree.parents, self._kernel).to(self.device)
        seen = ancestors(tree)
        masks = {kind: self._mask(kind, tree, seen, state.length) for kind in set(self.layer_kinds)}
        hidden, tapped = self._forward(tree, masks, state, TreePass(state, seen.to(self.device), rows))
        logits = self._logits(hidden)
        state.finish(tree)
        return Verified(logits, tapped)

    @torch.inference_mode()
    def commit(self, path: list[int], state: TreeState) -> None:
        state.commit(path)

    def embed(self, token_ids: Tensor) -> Tensor:
        return self.text.embed_tokens(token_ids.to(self.device))

    def head(self, hidden: Tensor) -> Tensor:
        return self.model.get_output_embeddings()(hidden)

    @property
    def _kernel(self) -> int:
        return getattr(self.config, "linear_conv_kernel_dim", 1)

    def _forward(
        self, tree: DraftTree, masks: dict[str, Tensor | None], state: TreeState, tree_pass: TreePass | ChainPass
    ) -> tuple[Tensor, Tensor]:
        """Hidden states [N, hidden] after the final norm, and tapped features [N, F]. masks: one for each kind of layer."""
        hidden = self.embed(tree.token_ids)[None]
        positions = tree_positions(tree.depths, state.length).to(self.device)[None]  # [1, N]
        axes = self.architecture.position_axes
        rotary = self.text.rotary_emb(hidden, positions if axes == 1 else positions.expand(axes, 1, -1))
        tapped = {0: hidden}
        for index, kind in enumerate(self.layer_kinds):
            extra = {"tree": tree_pass} if kind == "linear_attention" else {self._cache_name: state}
            hidden = self.text.layers[index](
                hidden, position_embeddings=rotary, attention_mask=masks[kind], position_ids=positions, **extra
            )
            if index + 1 in self.taps:
                tapped[index + 1] = hidden
        hidden = self.text.norm(hidden)
        tapped[len(self.layer_kinds)] = hidden
        features = [tapped[tap][0] for tap in self.taps]
        return hidden[0], torch.cat(features, dim=-1) if features else hidden.new_empty(hidden.shape[1], 0)

    def _mask(self, kind: str, tree: DraftTree, seen: Tensor, length: int) -> Tensor | None:
        """What one kind of layer may look at: [1, 1, N, length + N], or None where everything is visible."""
        if kind == "linear_attention" or (kind == "full_attention" and len(tree) == 1):
            return None  # a recurrent layer must never see a tree mask: it would take it for padding
        window = self.config.sliding_window if kind == "sliding_attention" else None
        return self._as_added(tree_attention_mask(seen, tree.depths, length, window).to(self.device)[None, None])

    def _chain_mask(self, kind: str, count: int, length: int) -> Tensor | None:
        """The same for a chain of `count` tokens, and where the attention backend can do without: no mask is made."""
        if kind == "linear_attention" or (kind == "full_attention" and count == 1):
            return None
        is_sdpa = self.config._attn_implementation == "sdpa"
        if kind == "full_attention" and is_sdpa:
            if length == 0:
                return None  # the library takes a block without a mask for a causal one
            if self.device.type == "cuda" and torch.version.hip is None and self.dtype != torch.float64:
                return causal_lower_right(count, length + count)  # a name for the pattern, not the [count, length] mask
        queries = torch.arange(length, length + count, device=self.device)[:, None]
        keys = torch.arange(length + count, device=self.device)
        mask = keys <= queries
        if kind == "sliding_attention":
            mask &= keys > queries - self.config.sliding_window
        return self._as_added(mask[None, None])

    def _as_added(self, mask: Tensor) -> Tensor:
        if self.config._attn_implementation == "eager":  # adds its mask instead of selecting by it
            return torch.zeros((), dtype=self.dtype, device=self.device).masked_fill(~mask, torch.finfo(self.dtype).min)
        return mask

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden).float()

    def _check(self, taps: tuple[int, ...]) -> None:
        backend = self.config._attn_implementation
        if backend not in ("sdpa", "eager"):
            raise ArchitectureError(
                f"attention backend {backend!r} cannot honour a tree mask; load the model with "
                "attn_implementation='sdpa' (or 'eager')"
            )
        beyond = [tap for tap in taps if not 0 <= tap <= len(self.layer_kinds)]
        if beyond:
            raise MismatchError(
                f"the drafter reads hidden states {list(taps)}, but {beyond} are not among the target's "
                f"0 .. {len(self.layer_kinds)}; use the drafter that was trained for this target"
            )
