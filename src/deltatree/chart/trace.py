"""The picture of one generation: one round's draft tree with its accepted path, and what was drafted and accepted over time."""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from deltatree.errors import RecordError

ACCEPTED, BONUS, DRAFTED, CHAIN = "#0072B2", "#D55E00", "#F0F0F0", "#8CC7EA"
INK, SOFT = "#222222", "#777777"
MOST_NODES = 96
"""Nodes that are drawn of one tree; of a larger one the most probable, and the accepted path."""

_VISIBLE = {" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"}


@dataclass(frozen=True, slots=True)
class TraceFile:
    """A generation's trace: a row about the whole, and one a round (see `decode.trace`)."""

    about: dict
    rounds: list[dict]

    def round(self, number: int | None) -> dict:
        """A round by its number, or the one that accepted most of a branching tree. Raises RecordError."""
        if number is None:
            return max(self.rounds, key=lambda row: (_branches(row), len(row["path"])))
        found = next((row for row in self.rounds if row["round"] == number), None)
        if found is None:
            raise RecordError(f"round {number} is not in the trace; it has rounds 1 to {len(self.rounds)}")
        return found


def _branches(row: dict) -> bool:
    return len(set(row["parents"])) < len(row["parents"])


def read_trace(file: Path) -> TraceFile:
    """Raises RecordError for a file that cannot be read, or is no trace."""
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
    except OSError as error:
        raise RecordError(f"trace {file} cannot be read ({error.strerror}); check the path") from error
    except ValueError as error:
        raise RecordError(f"{file} is no trace ({error}); write one with deltatree generate --trace FILE") from error
    if not rows or not all(isinstance(row, dict) for row in rows) or "method" not in rows[0]:
        raise RecordError(f"{file} is no trace; write one with deltatree generate --trace FILE")
    if len(rows) < 2 or not all({"tokens", "parents", "path", "budget"} <= set(row) for row in rows[1:]):
        raise RecordError(f"{file} holds no whole round; the text may have ended with the first token")
    return TraceFile(rows[0], rows[1:])


def draw_trace(file: Path, out: Path, number: int | None = None) -> list[Path]:
    """Draw a trace into `out`. number: the round whose tree is shown.

    Returns the file written. Raises RecordError for no trace, no such round, another kind of file, or no permission.
    """
    out = Path(out)
    if out.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise RecordError(f"{out} is no kind of picture that can be drawn; name a file ending in .png, .svg or .pdf")
    figure = trace_figure(read_trace(file), number)
    try:
        figure.savefig(out, dpi=150, metadata={"Date": None} if out.suffix.lower() != ".png" else None)
    except OSError as error:
        raise RecordError(f"cannot write {out} ({error.strerror}); choose a folder you may write") from error
    return [out]


def trace_figure(trace: TraceFile, number: int | None = None) -> Figure:
    """The figure of a trace."""
    row = trace.round(number)
    places, hidden = _places(row)
    levels = 1 + max((y for _, y in places.values()), default=0)
    depths = 2 + max(x for x, _ in places.values())
    heights = [max(1.2, 0.3 * levels + 0.7), 2.6]
    width = min(max(10.0, 1.15 * depths + 1), 22.0)
    figure = Figure(figsize=(width, sum(heights) + 1.5), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
    figure.suptitle(_title(trace.about, width), fontsize=13, fontweight="bold", color=INK)
    upper, lower = figure.subplots(2, 1, height_ratios=heights)
    _tree(upper, row, places, hidden)
    _budgets(lower, trace.rounds, row["round"])
    return figure


def _title(about: dict, width: float) -> str:
    method = {"ar": "plain decoding", "dflash": "DFlash"}.get(about["method"], f"DDTree, budget {about['budget']}")
    names = " + ".join(dict.fromkeys(str(about[name]) for name in ("target", "drafter") if about.get(name)))
    return "\n".join(textwrap.wrap(f"{names}: {method}", int(width * 10)))


def _places(row: dict) -> tuple[dict[int, tuple[int, float]], int]:
    """Depth and height of every node that is drawn, and how many are not. Leaves get a line each, the best on top."""
    parents, path = row["parents"], row["path"]
    weights = row.get("probabilities") or row.get("scores") or [0.0] * len(parents)
    order = sorted(range(len(parents)), key=lambda node: (node not in path, -weights[node], node))
    shown: set[int] = set()
    for node in order[:MOST_NODES]:
        while node >= 0 and node not in shown:  # a node is drawn with its ancestors
            shown.add(node)
            node = parents[node]
    children: dict[int, list[int]] = {}
    for node in sorted(shown):
        children.setdefault(parents[node], []).append(node)
    places: dict[int, tuple[int, float]] = {}
    next_line = 0.0

    def put(node: int, depth: int) -> float:
        nonlocal next_line
        lines = [put(child, depth + 1) for child in children.get(node, ())]
        if not lines:
            lines, next_line = [next_line], next_line + 1
        places[node] = (depth, lines[0])  # in line with its first child, so that a spine is straight
        return lines[0]

    put(0, 0)
    return places, len(parents) - len(shown)


def _tree(ax: Axes, row: dict, places: dict[int, tuple[int, float]], hidden: int) -> None:
    """Nodes as boxes with their tokens, the accepted path in blue, the target's own token after it in orange."""
    path, chances = set(row["path"]), row.get("probabilities")
    texts = row.get("texts") or [str(token) for token in row["tokens"]]
    for node, (x, y) in places.items():
        parent = row["parents"][node]
        if parent >= 0:
            on_path = node in path
            px, py = places[parent]
            width = 2.4 if on_path else 0.6 + 1.2 * (chances[node] if chances else 0.3)
            ax.plot([px, x - 0.5, x], [py, y, y], color=ACCEPTED if on_path else "#B5B5B5", linewidth=width,
                    solid_joinstyle="round", zorder=2 if on_path else 1)  # fmt: skip
    for node, (x, y) in places.items():
        note = f"{chances[node]:.2f}" if chances and node else ""
        _box(ax, x, y, texts[node], note, node in path)
    leaf = row["path"][-1]
    x, y = places[leaf]
    taken = [place for node, place in places.items() if row["parents"][node] == leaf]
    lines = {place[1] for place in places.values() if place[0] == x + 1}
    bonus = y if not taken and y not in lines else min(lines | {y}) - 1
    ax.plot([x, x + 0.5, x + 1], [y, bonus, bonus], color=BONUS, linewidth=2.4, linestyle=(0, (2, 1)), zorder=2)
    _box(ax, x + 1, bonus, row.get("bonus_text") or str(row["bonus"]), "", True, BONUS)
    lowest, deepest = max(place[1] for place in places.values()), max(x + 1, *(place[0] for place in places.values()))
    ax.set_xlim(-0.6, deepest + 0.75)
    ax.set_ylim(lowest + 0.7, min(0, bonus) - 0.7)
    ax.set_yticks([])
    ax.set_xticks(range(deepest + 1), ["root", *map(str, range(1, deepest + 1))], fontsize=8.5)
    ax.set_xlabel("depth", fontsize=9)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.set_title(_round_title(row, hidden), fontsize=11, loc="left", color=INK, fontweight="bold")
    keys = [
        Patch(facecolor=ACCEPTED, edgecolor=INK, label="accepted"),
        Patch(facecolor=BONUS, edgecolor=INK, label="the target's own token after it"),
        Patch(facecolor=DRAFTED, edgecolor="#999999", label="drafted, not accepted"),
    ]
    ax.legend(handles=keys, fontsize=8.5, ncols=3, frameon=False, loc="lower right", bbox_to_anchor=(1, 1.0))


def _round_title(row: dict, hidden: int) -> str:
    title = f"Round {row['round']}: {row['budget']} drafted, {len(row['path']) - 1} accepted"
    if "expected" in row:
        title += f" ({row['expected'] - 1:.1f} expected)"
    return title + (f"; {hidden} unlikely nodes not drawn" if hidden else "")


def _box(ax: Axes, x: float, y: float, text: str, note: str, strong: bool, colour: str = ACCEPTED) -> None:
    """note: small, beside the box."""
    face, ink = (colour, "white") if strong else (DRAFTED, INK)
    box = dict(boxstyle="round,pad=0.25", facecolor=face, edgecolor=INK if strong else "#999999", linewidth=0.7)
    label = ax.annotate(visible(text), (x, y), fontsize=8.5, color=ink, ha="center", va="center", bbox=box, zorder=3,
                        fontweight="bold" if strong else None, parse_math=False)  # fmt: skip
    if note:
        ax.annotate(note, (1, 0.5), (4, 0), xycoords=label, textcoords="offset points", fontsize=6.5, color=SOFT,
                    va="center", zorder=4, bbox=dict(boxstyle="square,pad=0.1", facecolor="white", edgecolor="none"))  # fmt: skip


def visible(text: str) -> str:
    """A token as it can be read: white space has signs, characters that the font lacks a square, long ones an end."""
    known = get_font(findfont(FontProperties())).get_charmap()
    shown = "".join(_VISIBLE.get(c, c if ord(c) in known and c.isprintable() else "□") for c in text)
    return shown if len(shown) <= 10 else shown[:9] + "…"


def _budgets(ax: Axes, rounds: list[dict], marked: int) -> None:
    """Bars of drafted nodes, hatched where they are a chain; above them what was accepted, and what was expected."""
    numbers = [row["round"] for row in rounds]
    is_chain = [row["budget"] > 0 and not _branches(row) for row in rounds]
    edges = dict(edgecolor=INK, linewidth=0.4) if len(rounds) <= 120 else dict(linewidth=0)
    for chain, colour, hatch in ((False, "#FCD8A6", ""), (True, CHAIN, "///")):
        chosen = [row for row, flag in zip(rounds, is_chain, strict=True) if flag == chain and row["budget"]]
        ax.bar(
            [r["round"] for r in chosen], [r["budget"] for r in chosen], width=0.9, color=colour, hatch=hatch, **edges
        )
    accepted = [len(row["path"]) - 1 for row in rounds]
    ax.plot(numbers, accepted, color=ACCEPTED, linewidth=1, marker="o", markersize=3.5, zorder=3)
    expected = [row["expected"] - 1 if "expected" in row else None for row in rounds]
    has_expected = any(value is not None for value in expected)
    if has_expected:
        gaps = [float("nan") if value is None else value for value in expected]
        ax.plot(numbers, gaps, color=BONUS, linewidth=1.2, linestyle="--", zorder=3)
    plain = [row["round"] for row in rounds if not row["budget"]]
    ax.plot(plain, [0] * len(plain), linestyle="none", marker="x", markersize=4, color=INK, zorder=4)
    top = max([*(row["budget"] for row in rounds), *accepted, 1])
    ax.set_ylim(-0.03 * top, 1.28 * top)
    ax.set_xlim(numbers[0] - 0.8, numbers[-1] + 0.8)
    ax.axvline(marked, color=INK, linewidth=1, linestyle=":", ymax=1 / 1.28)
    ax.annotate(
        f"round {marked}", (marked, top), (0, 2), textcoords="offset points", fontsize=8, ha="center", color=INK
    )
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    ax.set_xlabel("round", fontsize=9)
    ax.set_ylabel("nodes", fontsize=9)
    ax.grid(axis="y", color="#dddddd", linewidth=0.7)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    ax.set_title("Budget over time", fontsize=11, loc="left", color=INK, fontweight="bold")
    keys = [
        Patch(facecolor="#FCD8A6", edgecolor=INK, label="drafted (tree)"),
        *([Patch(facecolor=CHAIN, hatch="///", edgecolor=INK, label="drafted (chain)")] if any(is_chain) else []),
        *([Line2D([], [], color=INK, marker="x", linestyle="none", label="nothing drafted")] if plain else []),
        Line2D([], [], color=ACCEPTED, marker="o", markersize=4, label="accepted"),
        *([Line2D([], [], color=BONUS, linestyle="--", label="expected")] if has_expected else []),
    ]
    ax.legend(handles=keys, fontsize=8.5, ncols=len(keys), frameon=False, loc="upper right")
