"""Loading a target: read and judge the config first, then the weights."""

from __future__ import annotations

import importlib.util
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from deltatree.errors import CheckpointError
from deltatree.files import read_json, resolve_checkpoint
from deltatree.models.architectures import ARCHITECTURES, architecture_of
from deltatree.models.reference import ReferenceTarget


@dataclass(frozen=True, slots=True)
class TargetConfig:
    """What a target's config says, before any weight is read."""

    source: str  # what the user named
    folder: Path
    model_type: str
    hidden_size: int
    vocab_size: int
    num_layers: int
    context_length: int
    text: dict  # the text model's settings, as in config.json


def read_target_config(source: str) -> TargetConfig:
    """Config of a local folder or a hub id. Raises CheckpointError, ArchitectureError."""
    folder = resolve_checkpoint(source, "target")
    config = read_json(folder / "config.json")
    model_type = config.get("model_type")
    if model_type is None:
        raise CheckpointError(f"{folder / 'config.json'} has no `model_type`; supported are {', '.join(ARCHITECTURES)}")
    text = config.get("text_config", config)
    architecture_of(model_type)
    needed = ("hidden_size", "vocab_size", "num_hidden_layers", "max_position_embeddings")
    missing = [key for key in needed if key not in text]
    if missing:
        raise CheckpointError(f"{folder / 'config.json'} lacks {', '.join(missing)}; is this a complete checkpoint?")
    return TargetConfig(source, folder, model_type, *(int(text[key]) for key in needed), text=text)


def load_target(
    config: TargetConfig,
    *,
    taps: tuple[int, ...] = (),
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    prefill: str = "own",
) -> ReferenceTarget:
    """Load the weights and open the model to trees.

    One expert implementation is fixed, because the library would switch between two of them by the number of tokens and
    plain decoding and verify must compute alike. Raises CheckpointError if weights are absent, corrupt or incomplete.
    """
    from transformers import AutoModelForCausalLM

    with _one_sentence(config):
        model, info = AutoModelForCausalLM.from_pretrained(
            config.folder, dtype=dtype, attn_implementation="sdpa", output_loading_info=True, **straight_to(device)
        )
    missing = sorted(info["missing_keys"])
    if missing:
        raise CheckpointError(
            f"{config.folder} lacks {len(missing)} weights of its model ({', '.join(missing[:3])}, ...); "
            "is every shard there?"
        )
    model.to(device).eval()
    if "num_experts" in config.text:
        model.set_experts_implementation("grouped_mm" if torch.device(device).type == "cuda" else "eager")
    return ReferenceTarget(model, taps, prefill=prefill)


def straight_to(device: str) -> dict:
    """Options with which the library reads weights straight to a device, one tensor after another; it needs accelerate for
    that. Without, and for a CPU, there are none: the whole model goes through the host's memory."""
    place = torch.device(device)
    if place.type == "cpu" or importlib.util.find_spec("accelerate") is None:
        return {}
    if place.type == "cuda" and place.index is None:
        place = torch.device("cuda", torch.cuda.current_device())
    return {"device_map": {"": place}}


@contextmanager
def _one_sentence(config: TargetConfig):
    """Turn what the library and safetensors raise for unusable weights into one sentence."""
    from safetensors import SafetensorError

    if not any(config.folder.glob("*.safetensors")) and not any(config.folder.glob("*.bin")):
        raise CheckpointError(f"{config.folder} holds a config but no weights; expected *.safetensors beside it")
    try:
        yield
    except SafetensorError as error:
        raise CheckpointError(f"a weight file in {config.folder} is corrupt ({error}); download it again") from error
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{config.folder} cannot be loaded: {str(error).splitlines()[0]}") from error
