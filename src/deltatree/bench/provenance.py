"""What run.json says of a run: models, machine, versions. No paths or names of the machine beyond its chip."""

from __future__ import annotations

import hashlib
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from deltatree.bench.plan import BenchPlan
from deltatree.bench.samples import Sample
from deltatree.files import SHIPPED, shipped_folder, weight_hashes


def describe_samples(samples: list[Sample]) -> dict:
    """How many samples of which sets, and a hash of their texts."""
    counts: dict[str, int] = {}
    digest = hashlib.sha256()
    for sample in samples:
        counts[sample.dataset] = counts.get(sample.dataset, 0) + 1
        digest.update(repr((sample.dataset, sample.id, sample.turns)).encode())
    return {"counts": counts, "sha256": digest.hexdigest()}


def describe_model(source: str | None, part: str) -> dict | None:
    """Name and weight hashes of a target or drafter. part: "target" or "drafter"."""
    if source is None:
        return None
    return {"id": source, "sha256": weight_hashes(_local_folder(source, part))}


def _local_folder(source: str, part: str) -> Path | None:
    if source == SHIPPED:
        return shipped_folder(part)
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(source, local_files_only=True))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError):
        return None


def describe_machine(device) -> dict:
    """The chip that decodes. device: torch.device"""
    import torch

    if device.type == "cuda":
        return {"type": "cuda", "name": torch.cuda.get_device_name(device)}
    return {"type": device.type, "name": _processor(), "threads": torch.get_num_threads()}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        named = next(line for line in lines if line.startswith("model name"))
        return named.partition(":")[2].strip()
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def describe_versions() -> dict:
    import torch

    import deltatree

    versions = {"deltatree": deltatree.__version__, "python": platform.python_version(), "torch": torch.__version__}
    for package in ("transformers", "triton"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return versions | {"cuda": torch.version.cuda}


def _backend(target) -> str:
    """As `deltatree.load` names it."""
    if not hasattr(target, "captured_verify"):
        return "reference"
    return "fast" if target.device_rounds else "fast-host"


def _prefill(target) -> str:
    """As `deltatree.load` names it."""
    from deltatree.verify.chain import fla_chain

    return "fla" if getattr(getattr(target, "reference", target), "chain_rule", None) is fla_chain else "own"


def describe_run(pair, samples: list[Sample], plan: BenchPlan, *, command: str, num_processes: int) -> dict:
    """Everything of run.json that is known before decoding."""
    import torch

    return {
        "command": command,
        "plan": plan.as_dict(),
        "samples": describe_samples(samples),
        "target": describe_model(pair.names[0], "target"),
        "drafter": describe_model(pair.names[1], "drafter"),
        "device": describe_machine(pair.target.device),
        "dtype": str(pair.target.embed(torch.zeros(1, dtype=torch.int64)).dtype).removeprefix("torch."),
        "backend": _backend(pair.target),
        "prefill": _prefill(pair.target),
        "versions": describe_versions(),
        "num_processes": num_processes,
        "num_cores": os.cpu_count(),
    }
