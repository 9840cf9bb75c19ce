"""How long a target of a published shape takes to write the table of its transitions, as JSON lines.

    python benchmarks/self_text.py --shape qwen3.6-35b-a3b --tokens 600000
    python benchmarks/self_text.py --shape qwen3.6-35b-a3b --tokens 1 --batch 512 256 --profile      # one batch of each size

`seconds` is all that `deltatree transitions` does once the target is loaded: compiling, capturing, writing, counting, saving. The
weights are random, so nearly every n-gram is a new one and the table is as large as it gets.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import transformers

from deltatree.models import FastTarget, lock_step
from deltatree.models.shapes import SHAPES, random_target
from deltatree.transitions import write_table
from deltatree.transitions.self_text import SEQUENCE_LENGTH


def measure(target: FastTarget, num_tokens: int, batch: int | None) -> dict:
    """One table, written to a file that is thrown away."""
    marks = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "table.safetensors"
        began = time.perf_counter()
        table = write_table(
            target,
            None,
            file,
            num_tokens=num_tokens,
            batch=batch,
            on_tokens=lambda n: marks.append((time.perf_counter(), n)),
        )
        seconds, size = time.perf_counter() - began, file.stat().st_size
    rows = marks[0][1]
    written = rows * SEQUENCE_LENGTH * (len(marks) // (SEQUENCE_LENGTH - 1))
    steps = [after - before for (before, _), (after, _) in itertools.pairwise(marks)]
    return {
        "written_by": "lock step" if target.device.type == "cuda" else "library",
        "batch": rows,
        "tokens": written,
        "seconds": round(seconds, 2),
        "tokens_per_second": round(written / seconds, 1),
        "seconds_to_first_step": round(marks[0][0] - began, 2),
        "seconds_after_last_step": round(began + seconds - marks[-1][0], 2),
        "step_ms": round(1e3 * statistics.median(steps), 3),
        "entries": table.num_entries,
        "table_bytes": table.num_bytes,
        "file_bytes": size,
    }


def profile_step(target: FastTarget, batch: int) -> dict:
    """The kernels of one step without the choice of tokens, and the memory that is held for it."""
    from latency import profile

    before = torch.cuda.memory_allocated()
    steps = target.lock_step(batch, SEQUENCE_LENGTH)
    tokens = torch.zeros(batch, 1, dtype=torch.int64, device=target.device)
    found = profile(lambda: steps.logits(tokens))
    return {"profile": found, "held_bytes": torch.cuda.memory_allocated() - before}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", required=True, choices=SHAPES)
    parser.add_argument("--tokens", type=int, default=600_000, help="at least so many; whole batches are written")
    parser.add_argument(
        "--batch", type=int, nargs="*", default=[None], help="sequences side by side [default: as shipped]"
    )
    parser.add_argument("--plain", action="store_true", help="the recurrence in plain PyTorch instead of the kernel")
    parser.add_argument("--profile", action="store_true", help="add the kernels of one step (a GPU's)")
    parser.add_argument("--out", type=Path, help="file of JSON lines to write; they are printed too")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if options.plain:
        lock_step.gated_delta_step = partial(lock_step.gated_delta_step, backend="reference")
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    target = FastTarget(random_target(options.shape, device=device, dtype=dtype))
    where = {
        "benchmark": "self-text", "shape": options.shape, "recurrence": "plain" if options.plain else "kernel",
        "device": torch.cuda.get_device_name() if on_gpu else platform.machine(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version()},
        "command": " ".join(["python benchmarks/self_text.py", *sys.argv[1:]]),
    }  # fmt: skip
    with open(options.out or "/dev/null", "w") as file:
        for batch in options.batch:
            line = measure(target, options.tokens, batch)
            if options.profile and on_gpu:
                line |= profile_step(target, line["batch"])
            file.write(json.dumps(where | line) + "\n")
            file.flush()
            print(json.dumps(where | line), flush=True)


if __name__ == "__main__":
    main()
