"""Bench runs as the chart needs them: their summaries, recomputed from the records."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from deltatree.bench.plan import Arm
from deltatree.bench.records import read_records, read_run, records_file
from deltatree.bench.summary import ALL, summarise
from deltatree.errors import RecordError


@dataclass(frozen=True, slots=True)
class ChartRun:
    """A run with the name under which the picture shows it."""

    tag: str
    summary: dict

    @property
    def datasets(self) -> list[str]:
        return [name for name in dict.fromkeys(g["dataset"] for g in self.summary["groups"]) if name != ALL]

    def groups(self, dataset: str | None = None) -> list[dict]:
        """The arms' figures on one data set; without a name, over all of them."""
        wanted = dataset or (ALL if len(self.datasets) > 1 else self.datasets[0])
        return [group for group in self.summary["groups"] if group["dataset"] == wanted]

    def drafted(self, dataset: str | None = None) -> list[dict]:
        return [group for group in self.groups(dataset) if group["method"] != "ar"]

    @property
    def caption(self) -> str:
        """Device, dtype, samples and baseline in one line."""
        s = self.summary
        device, threads = s["device"]["name"], s["device"].get("threads")
        device += f", {threads} thread{'s' * (threads != 1)}" if threads else ""
        choice = f"temperature {s['temperature']:g}" + (" (greedy)" if s["temperature"] < 1e-4 else "")
        choice += ", thinking on" if s["thinking"] else ""
        num = s["num_samples"]
        verdicts = ", ".join(f"{n} {name.replace('_', ' ')}" for name, n in s["verdicts"].items() if n)
        return (
            f"{device} · {s['dtype']} · {num} sample{'s' * (num != 1)}, up to {s['max_new_tokens']} tokens a turn · {choice} · "
            f"texts against plain decoding: {verdicts or 'nothing drafted'}"
        )


def arm_of(group: dict) -> Arm:
    return Arm(group["method"], group["budget"])


def load_runs(folders: list[Path]) -> list[ChartRun]:
    """Raises RecordError for a folder without a run or without records."""
    folders = [Path(folder) for folder in folders]
    if not folders:
        raise RecordError("no run to draw; name the --out folder of at least one bench run")
    runs = []
    for folder in folders:
        info, records = read_run(folder), read_records(records_file(folder))
        if not records:
            raise RecordError(f"{folder} holds no records yet; run its bench command again")
        runs.append(ChartRun(_tag(folder, folders), summarise(info, records)))
    return runs


def _tag(folder: Path, folders: list[Path]) -> str:
    """The folder's name, with its parent's where two folders share one."""
    path = folder.resolve()
    shared = sum(other.resolve().name == path.name for other in folders) > 1
    return f"{path.parent.name}/{path.name}" if shared else path.name
