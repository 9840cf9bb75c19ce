"""Records on disk: one JSON line per (sample, turn, arm), appended as it finishes, and the run they belong to.

OUT/records.jsonl          the records; OUT/records.rank1.jsonl, ... while several processes decode
OUT/run.json               command, versions, device, models, options: what a record needs to be understood
OUT/summary.json           what the records say; made from them alone
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path

from deltatree.bench.plan import Arm
from deltatree.errors import RecordError

VERDICTS = ("identical", "near_tie", "diverged", "sampled")

Key = tuple[str, str, int, str, int | str]


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where an arm's text first leaves plain decoding's."""

    position: int  # index into the new tokens
    token: int  # of the arm; -1 if its text ends here
    plain_token: int  # of plain decoding; -1 if its text ends here
    gap: float | None  # the plain forward's best logit minus that of `token`; None if one of the texts ends here


@dataclass(frozen=True, slots=True)
class Record:
    """One generation of a bench run. Speeds come from a pass without stage timing."""

    dataset: str
    sample: str
    turn: int
    method: str
    budget: int | str  # drafted nodes a round: 0 for ar, the drafter's depth for dflash; "auto" is chosen each round
    tree: str  # policy of ddtree
    thinking: bool
    prompt_length: int  # tokens
    token_ids: list[int]  # new tokens, none past the stop
    prefill_seconds: float
    decode_seconds: float
    acceptance_lengths: list[int]  # one a round: accepted drafted nodes + 1, before a stop cut it
    num_drafted: int  # nodes over all rounds, roots not counted
    stop_reason: str  # "stop" or "length"
    verdict: str  # one of VERDICTS
    divergence: Divergence | None = None
    stage_seconds: dict[str, float] | None = None  # of a second pass with stage timing, prefill excluded
    peak_bytes: int | None = None  # device memory, CUDA only
    budgets: list[int] | None = None  # drafted nodes of every round; None in records of earlier versions

    @property
    def key(self) -> Key:
        return self.dataset, self.sample, self.turn, self.method, self.budget

    @property
    def arm(self) -> Arm:
        return Arm(self.method, self.budget)

    @property
    def rounds(self) -> int:
        return len(self.acceptance_lengths)

    @property
    def decoded_tokens(self) -> int:
        """Tokens that the rounds emitted: all but the first, which prefill emits."""
        return max(len(self.token_ids) - 1, 0)

    @property
    def tokens_per_second(self) -> float | None:
        """Decoding alone; None if prefill already ended the text."""
        return self.decoded_tokens / self.decode_seconds if self.rounds else None

    @property
    def acceptance_length(self) -> float | None:
        return sum(self.acceptance_lengths) / self.rounds if self.rounds else None

    @property
    def accepted_by_depth(self) -> list[int]:
        """Rounds whose accepted path reached depth 1, 2, ..."""
        deepest = max(self.acceptance_lengths, default=1) - 1
        return [sum(length > depth for length in self.acceptance_lengths) for depth in range(1, deepest + 1)]

    def to_line(self) -> bytes:
        """With the figures that follow from the fields, for readers without this class."""
        derived = ("rounds", "tokens_per_second", "acceptance_length", "accepted_by_depth")
        row = asdict(self) | {"tokens": len(self.token_ids)} | {name: getattr(self, name) for name in derived}
        return json.dumps(row).encode() + b"\n"

    @classmethod
    def from_row(cls, row: dict) -> Record:
        known = {f.name: row[f.name] for f in fields(cls) if f.name in row or f.default is MISSING}
        if known.get("divergence") is not None:
            known["divergence"] = Divergence(**known["divergence"])
        return cls(**known)


def records_file(out: Path, rank: int = 0, size: int = 1) -> Path:
    return out / ("records.jsonl" if size == 1 else f"records.rank{rank}.jsonl")


def read_records(file: Path) -> list[Record]:
    """All whole records of a file. A torn last line, as a kill leaves it, is passed over. Raises RecordError."""
    return _read(file)[0]


def _read(file: Path) -> tuple[list[Record], int]:
    """Records, and the bytes that they take."""
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        return [], 0
    except OSError as error:
        raise RecordError(f"records {file} cannot be read ({error.strerror}); check the path") from error
    records: list[Record] = []
    size = 0
    lines = data.split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):
        try:
            records.append(Record.from_row(json.loads(line)))
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines) - 1 and not lines[-1]:
                break
            raise RecordError(
                f"{file}, line {number} is no bench record ({error}); remove that line or name another folder"
            ) from error
        size += len(line) + 1
    return records, size


class RecordWriter:
    """Appends whole lines to a records file, each handed to the operating system at once."""

    def __init__(self, file: Path) -> None:
        """Cuts off a torn last line. Raises RecordError."""
        self.file = file
        _, size = _read(file)
        with _writing(file):
            self._handle = open(file, "ab", buffering=0)  # noqa: SIM115
            self._handle.truncate(size)

    def append(self, record: Record) -> None:
        line = record.to_line()
        with _writing(self.file):
            while line:
                line = line[self._handle.write(line) :]

    def close(self) -> None:
        self._handle.close()


def merge_ranks(out: Path) -> list[Record]:
    """Gather the files that single processes left into records.jsonl, no record twice. Returns all records."""
    parts = sorted(out.glob("records.rank*.jsonl"))
    main = records_file(out)
    merged = {record.key: record for file in (main, *parts) for record in read_records(file)}
    if parts:
        write_atomically(main, b"".join(record.to_line() for record in merged.values()))
        for part in parts:
            part.unlink()
    return list(merged.values())


def write_json(file: Path, value: dict) -> None:
    write_atomically(file, json.dumps(value, indent=2).encode() + b"\n")


def write_atomically(file: Path, data: bytes) -> None:
    """All of it or nothing, whatever happens in between. Raises RecordError."""
    with _writing(file):
        part = file.with_name(file.name + ".part")
        part.write_bytes(data)
        os.replace(part, file)


def make_folder(out: Path) -> None:
    """Raises RecordError if it cannot be made or written."""
    with _writing(out):
        out.mkdir(parents=True, exist_ok=True)
        if not os.access(out, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


class _writing:
    """Turns what the operating system refuses into one sentence."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, error, trace) -> None:
        if isinstance(error, OSError):
            raise RecordError(
                f"cannot write {self.file} ({error.strerror}); records written before are whole: "
                "free some space or choose a folder you may write, and run the same command again to go on"
            ) from error


def read_run(out: Path) -> dict:
    """The run.json of a run's folder. Raises RecordError."""
    file = out / "run.json"
    try:
        run = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RecordError(f"{out} has no run.json; name the --out folder of a bench run") from error
    except (OSError, ValueError) as error:
        raise RecordError(f"{file} cannot be read ({error}); name the --out folder of a bench run") from error
    if not isinstance(run, dict) or "plan" not in run:
        raise RecordError(f"{file} is no bench run; name the --out folder of a bench run")
    return run


def refuse_other_run(out: Path, run: dict) -> bool:
    """Whether `out` already holds this run. run: its run.json, or those parts of it that are known yet.

    Raises RecordError, naming what differs, if the folder holds another run's records.
    """
    if not (out / "run.json").exists():
        if any(out.glob("records*.jsonl")):
            raise RecordError(f"{out} holds records without their run.json; choose an empty folder")
        return False
    held = _flat(ONCE_ALONE | read_run(out))
    differing = [
        f"{name} ({_short(held.get(name))} there, {_short(value)} now)"
        for name, value in _flat({part: run[part] for part in IDENTITY if part in run}).items()
        if held.get(name) != value
    ]
    if differing:
        raise RecordError(
            f"{out} holds another run's records: it differs in {'; '.join(differing[:4])}{'; ...' * (len(differing) > 4)}. "
            "Choose another folder, or repeat that run's command to go on with it"
        )
    return True


IDENTITY = ("plan", "samples", "target", "drafter", "device", "dtype", "backend", "prefill", "versions")
"""The parts of run.json that must agree for records to stand in one folder."""
ONCE_ALONE = {"backend": "reference", "prefill": "own"}
"""What runs had that do not say it: the only one, before there were others."""


def _flat(value: dict, prefix: str = "") -> dict:
    flat: dict = {}
    for name, entry in value.items():
        flat |= _flat(entry, f"{prefix}{name}.") if isinstance(entry, dict) else {prefix + name: entry}
    return flat


def _short(value) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


def index(records: Iterable[Record]) -> dict[Key, Record]:
    return {record.key: record for record in records}
