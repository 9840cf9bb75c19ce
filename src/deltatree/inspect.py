"""What a target and a drafter need, worked out from their configs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from deltatree.drafter.dialects import DFlashConfig, check_pair, read_drafter_config
from deltatree.errors import MismatchError
from deltatree.models.checkpoint import TargetConfig, read_target_config


@dataclass(frozen=True, slots=True)
class StateSizes:
    """Bytes that one generation needs beside the weights; state and stash in float32, keys and values in bfloat16."""

    state_bytes: int  # recurrent matrices and convolution windows of all layers, whatever the context
    stash_bytes_per_node: int  # what a drafted node leaves behind
    copied_state_bytes_per_node: int  # what an engine that copies a state per node would need instead
    kv_bytes_per_token: int

    @classmethod
    def of(cls, text: dict) -> StateSizes:
        kinds = layer_counts(text)
        recurrent = kinds["linear_attention"]
        heads_k, heads_v = text.get("linear_num_key_heads", 0), text.get("linear_num_value_heads", 0)
        dim_k, dim_v = text.get("linear_key_head_dim", 0), text.get("linear_value_head_dim", 0)
        channels = 2 * heads_k * dim_k + heads_v * dim_v
        matrix = heads_v * dim_k * dim_v * 4
        window = channels * (text.get("linear_conv_kernel_dim", 1) - 1) * 2
        stash = (heads_k * dim_k + heads_v * dim_v + heads_v) * 4 + channels * 2
        heads = text["num_attention_heads"]
        head_dim = text.get("head_dim") or text["hidden_size"] // heads
        attention = sum(kinds.values()) - recurrent
        return cls(
            state_bytes=recurrent * (matrix + window),
            stash_bytes_per_node=recurrent * stash,
            copied_state_bytes_per_node=recurrent * matrix,
            kv_bytes_per_token=attention * 2 * (text.get("num_key_value_heads") or heads) * head_dim * 2,
        )


def layer_counts(text: dict) -> Counter[str]:
    """How many layers of each kind; configs without `layer_types` place a full-attention layer at an interval."""
    kinds = text.get("layer_types")
    if kinds is None:
        interval = text.get("full_attention_interval", 4) if "linear_num_value_heads" in text else 1
        kinds = [
            "full_attention" if (i + 1) % interval == 0 else "linear_attention"
            for i in range(text["num_hidden_layers"])
        ]
    return Counter(kinds)


@dataclass(frozen=True, slots=True)
class Report:
    """What `inspect` shows."""

    target: TargetConfig
    sizes: StateSizes
    drafter: DFlashConfig | None
    refusal: str | None  # why target and drafter do not belong together

    def as_dict(self) -> dict:
        sizes = {name: getattr(self.sizes, name) for name in StateSizes.__dataclass_fields__}
        described: dict = {
            "target": {
                "source": self.target.source,
                "model_type": self.target.model_type,
                "layers": dict(layer_counts(self.target.text)),
                "hidden_size": self.target.hidden_size,
                "vocab_size": self.target.vocab_size,
                "context_length": self.target.context_length,
                "weight_bytes": weight_bytes(self.target.folder),
                **sizes,
            },
            "refusal": self.refusal,
        }
        if self.drafter:
            names = (
                "source", "dialect", "num_layers", "hidden_size", "block_size", "mask_token_id", "taps", "rope_theta",
                "head_dim", "windows", "context_length",
            )  # fmt: skip
            described["drafter"] = {name: getattr(self.drafter, name) for name in names}
            described["drafter"]["weight_bytes"] = weight_bytes(self.drafter.folder)
        return described

    def sections(self) -> dict[str, dict[str, str]]:
        """Titles, and rows of text under each."""
        t, s = self.target, self.sizes
        counts = ", ".join(f"{n} {kind.replace('_', ' ')}" for kind, n in layer_counts(t.text).items())
        experts = t.text.get("num_experts") or 0
        target = {
            "architecture": t.model_type,
            "layers": f"{t.num_layers}: {counts}",
            "experts": f"{experts}, top {t.text.get('num_experts_per_tok')}" if experts else "none (dense)",
            "hidden size, vocabulary": f"{t.hidden_size}, {t.vocab_size}",
            "context": f"{t.context_length} tokens",
            "weights on disk": human(weight_bytes(t.folder)),
        }
        memory = {
            "recurrent state": f"{human(s.state_bytes)} for any context",
            "keys and values": f"{human(s.kv_bytes_per_token)} a token, {human(s.kv_bytes_per_token * t.context_length)} "
            "at full context (2 bytes a number)",
            "stash": f"{human(s.stash_bytes_per_node)} a node; 64 nodes {human(64 * s.stash_bytes_per_node)}, "
            f"256 nodes {human(256 * s.stash_bytes_per_node)}",
        }
        if s.stash_bytes_per_node:
            ratio = s.copied_state_bytes_per_node / s.stash_bytes_per_node
            memory["instead of a state per node"] = (
                f"{human(s.copied_state_bytes_per_node)} a node, {ratio:.0f} times as much"
            )
        memory["memory here"] = memory_here()
        sections = {f"Target {t.source}": target, "Memory of one generation": memory}
        if self.drafter:
            d = self.drafter
            sections[f"Drafter {d.source}"] = {
                "dialect": d.dialect,
                "layers": f"{d.num_layers} of hidden size {d.hidden_size}",
                "block size": f"{d.block_size}: the bonus token and {d.depth} drafts",
                "mask token": str(d.mask_token_id),
                "reads hidden states": f"{', '.join(map(str, d.taps))} (0 is the embedding)",
                "rotary": f"whole heads of {d.head_dim}, base {d.rope_theta:g}",
                "sliding windows": ", ".join(str(w or "full") for w in d.windows),
                "context": f"{d.context_length} tokens",
                "weights on disk": human(weight_bytes(d.folder)),
                "fits the target": "no" if self.refusal else "yes",
            }
        return sections


def inspect_pair(target: str, drafter: str | None = None) -> Report:
    """Read both configs. Raises CheckpointError, ArchitectureError; a mismatch is reported, not raised."""
    target_config = read_target_config(target)
    drafter_config = read_drafter_config(drafter) if drafter else None
    refusal = None
    if drafter_config:
        try:
            check_pair(drafter_config, target_config)
        except MismatchError as error:
            refusal = str(error)
    return Report(target_config, StateSizes.of(target_config.text), drafter_config, refusal)


def weight_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def memory_here() -> str:
    """Memory that a load can use. On chips that share memory with the CPU the system's figure is the right one."""
    import torch

    if torch.cuda.is_available() and not torch.cuda.get_device_properties(0).is_integrated:
        free, total = torch.cuda.mem_get_info()
        return f"{human(free)} free of {human(total)} on {torch.cuda.get_device_name()}"
    available = available_system_bytes()
    return f"{human(available)} of system memory available" if available else "unknown"


def available_system_bytes() -> int | None:
    """MemAvailable, which counts the page cache that the system would give back; None where it is not told."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    kilobytes = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return int(kilobytes) * 1024 if kilobytes else None


def human(num_bytes: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
