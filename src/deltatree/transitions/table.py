"""Low-order transitions of one target: how much more probable a token is after the two before it than by itself.

Counts of trigrams and bigrams lie in one hashed table of fixed size, in buckets of eight, so that a lookup is two gathers and
a comparison, on any device. Keys are exact (three token ids in one 64-bit number): nothing collides, at most the rarest
n-grams of a full bucket are missing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from deltatree.errors import CheckpointError

WAYS = 8
MAX_BUCKETS = 1 << 18
"""Two million slots in 25 MB: room for a million n-grams, whatever the vocabulary."""
TRIGRAM_BACKOFF, BIGRAM_BACKOFF = 4.0, 20.0
"""Pseudo-counts: how many observations the shorter context is worth."""
NOTHING = -1
"""In place of a token: there is none before."""

Array = Tensor | np.ndarray

_EMPTY = -(1 << 62)
_MIX = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 / golden ratio, as a signed number
_FORMAT = "deltatree-transitions-1"
_TENSORS = ("keys", "counts", "single", "followed")


@dataclass(eq=False)
class TransitionTable:
    """N-gram counts. `empty` and `count` make one, `add` writes, `scores` reads.

    keys: [buckets, WAYS] int64    counts: [buckets, WAYS] float32
    single: [vocab] float32, p(token)    followed: [vocab] float32, how often some token came after it
    """

    keys: Tensor
    counts: Tensor
    single: Tensor
    followed: Tensor
    _copies: dict[torch.device, TransitionTable] = field(default_factory=dict, repr=False)

    @classmethod
    def empty(
        cls, vocab_size: int, *, num_buckets: int = MAX_BUCKETS, device: str | torch.device = "cpu"
    ) -> TransitionTable:
        """A table without counts: every score is 0. num_buckets: a power of two"""
        if num_buckets < 2 or num_buckets & (num_buckets - 1):
            raise ValueError(f"num_buckets={num_buckets} is no power of two of at least 2")
        shape = (num_buckets, WAYS)
        return cls(
            torch.full(shape, _EMPTY, dtype=torch.int64, device=device),
            torch.zeros(shape, device=device),
            torch.full((vocab_size,), 1 / vocab_size, device=device),
            torch.zeros(vocab_size, device=device),
        )

    @classmethod
    def count(cls, sequences: Tensor, vocab_size: int, *, num_buckets: int | None = None) -> TransitionTable:
        """Count sequences. [R, L] int64, -1 after the end of a row; a row's first token is context only.

        num_buckets: by default two slots a token, and never more than MAX_BUCKETS
        """
        num_buckets = num_buckets or min(MAX_BUCKETS, 1 << (sequences.numel() // 4).bit_length())
        table = cls.empty(vocab_size, num_buckets=max(num_buckets, 2), device=sequences.device)
        padded = torch.cat([sequences.new_full((len(sequences), 1), NOTHING), sequences], dim=1)
        grams = padded.unfold(1, 3, 1).reshape(-1, 3)
        before, last, token = grams[(grams[:, 2] >= 0) & (grams[:, 1] >= 0)].T
        written = token.bincount(minlength=vocab_size) + 0.5  # no token is impossible
        table.single = (written / written.sum()).float()
        table.add(before, last, token)
        return table

    @property
    def vocab_size(self) -> int:
        return self.single.shape[0]

    @property
    def num_buckets(self) -> int:
        return self.keys.shape[0]

    @property
    def num_entries(self) -> int:
        return int((self.keys != _EMPTY).sum())

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors())

    def clone(self) -> TransitionTable:
        """A copy to write into."""
        return TransitionTable(*(tensor.clone() for tensor in self.tensors()))

    def to(self, device: str | torch.device) -> TransitionTable:
        return TransitionTable(*(tensor.to(device) for tensor in self.tensors()))

    def on(self, device: torch.device) -> TransitionTable:
        """This table there, copied once: of a table that nobody writes any more, and to be read only."""
        if device == self.keys.device:
            return self
        if device not in self._copies:
            self._copies[device] = self.to(device)
        return self._copies[device]

    def view(self) -> TransitionTable:
        """The same memory as NumPy arrays, for `scores` alone: its small operations cost a host a third there."""
        return TransitionTable(*(tensor.numpy() for tensor in self.tensors()))

    def tensors(self) -> list[Tensor]:
        """Keys, counts, single and followed."""
        return [getattr(self, name) for name in _TENSORS]

    def add(self, before: Tensor, last: Tensor, token: Tensor, weight: Tensor | None = None) -> None:
        """Count that `token` followed `last`, which followed `before` (NOTHING if unknown). [n] int64 each.

        weight: [n] float32, what each of them counts, by default 1
        p(token) stays as it is: what is counted while running tells of contexts, not of the language.
        """
        if not len(token):
            return
        weight = torch.ones(len(token), device=token.device) if weight is None else weight
        self.followed.index_add_(0, last, weight)
        known = before >= 0
        keys = torch.cat([self._key(self.vocab_size, last, token), self._key(before, last, token)[known]])
        keys, place = keys.unique(return_inverse=True)
        self._insert(
            keys, torch.zeros(len(keys), device=keys.device).index_add_(0, place, torch.cat([weight, weight[known]]))
        )

    def scores(self, before: Array, last: Array, candidates: Array) -> Array:
        """log(p(token | before, last) / p(token)): [F, C] float32; 0 where nothing is known of the context.

        before, last: [F] int64, the two tokens on the way to the candidates (`before` NOTHING if there is none)
        candidates: [C] or [F, C] int64. Tensors, or arrays for a `view`.
        """
        xp = torch if isinstance(self.keys, Tensor) else np
        size = self.vocab_size + 1
        contexts = xp.stack([before * size + last, last + self.vocab_size * size])[..., None]  # [2, F, 1]
        trigrams, bigrams = self._lookup(contexts * size + candidates)  # [F, C] each
        seen = self._lookup(self._key(self.vocab_size, before, last))[:, None]
        single = self.single[candidates]
        double = (bigrams + BIGRAM_BACKOFF * single) / (self.followed[last] + BIGRAM_BACKOFF)[:, None]
        # A bigram that found no room has lost its count, not its trigrams.
        triple = (trigrams + TRIGRAM_BACKOFF * double) / (xp.maximum(seen, trigrams) + TRIGRAM_BACKOFF)
        return xp.log(triple / single)

    def _key(self, before: Array | int, last: Array, token: Array) -> Array:
        """One number for three tokens; the vocabulary's size as `before` stands for any token: a bigram."""
        size = self.vocab_size + 1
        return (before * size + last) * size + token

    def _bucket(self, keys: Array) -> Array:
        bits = self.keys.shape[0].bit_length() - 1
        return (keys * _MIX >> 64 - bits) & (self.keys.shape[0] - 1)

    def _lookup(self, keys: Array) -> Array:
        """[...] int64 -> [...] float32."""
        bucket = self._bucket(keys)
        return (self.counts[bucket] * (self.keys[bucket] == keys[..., None])).sum(-1)

    def _insert(self, keys: Tensor, counts: Tensor) -> None:
        """Add counts to distinct keys; of those that find their bucket full the rarest are left out."""
        bucket = self._bucket(keys)
        hit = self.keys[bucket] == keys[:, None]
        known = hit.any(-1)
        self.counts[bucket[known], hit[known].int().argmax(-1)] += counts[known]
        keys, counts, bucket = keys[~known], counts[~known], bucket[~known]
        order = counts.argsort(descending=True, stable=True)
        order = order[bucket[order].argsort(stable=True)]  # by bucket, the most frequent first
        keys, counts, bucket = keys[order], counts[order], bucket[order]
        rank = torch.arange(len(bucket), device=bucket.device) - torch.searchsorted(bucket, bucket)
        place = rank + (self.keys[bucket] != _EMPTY).sum(-1)
        fits = place < WAYS
        self.keys[bucket[fits], place[fits]] = keys[fits]
        self.counts[bucket[fits], place[fits]] = counts[fits]

    def save(self, file: Path, about: dict[str, str]) -> None:
        """Write the occupied slots as safetensors; `about` goes into its header."""
        from safetensors.torch import save_file

        used = self.keys != _EMPTY
        keys, order = self.keys[used].sort()
        held = {"keys": keys, "counts": self.counts[used][order], "single": self.single, "followed": self.followed}
        header = {"format": _FORMAT, "num_buckets": str(self.keys.shape[0]), **about}
        save_file({name: tensor.cpu() for name, tensor in held.items()}, file, metadata=header)

    @classmethod
    def load(cls, file: Path) -> TransitionTable:
        """Read what `save` wrote. Raises CheckpointError if the file is absent, corrupt or something else."""
        from safetensors import SafetensorError, safe_open

        way_out = "write one with `deltatree transitions TARGET`"
        if not Path(file).is_file():
            raise CheckpointError(f"transitions file {file} does not exist; {way_out}")
        try:
            with safe_open(file, "pt") as opened:
                header = opened.metadata() or {}
                if header.get("format") != _FORMAT:
                    raise CheckpointError(f"{file} is no table of transitions; {way_out}")
                held = {name: opened.get_tensor(name) for name in _TENSORS}
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"transitions file {file} cannot be read ({error}); {way_out}") from error
        table = cls.empty(len(held["single"]), num_buckets=int(header["num_buckets"]))
        table.single, table.followed = held["single"], held["followed"]
        table._insert(held["keys"], held["counts"])
        return table
