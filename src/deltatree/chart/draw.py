"""The picture: speedups with acceptance lengths, acceptance over budget, what a round costs, how many tokens it accepts.

Colours are from Okabe and Ito's palette or one ramp of rising darkness, and every series has a hatch or a marker of its own,
so that the picture reads in grey and with any colour vision.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from deltatree.bench.plan import Arm
from deltatree.bench.stages import STAGES
from deltatree.chart.runs import ChartRun, arm_of, load_runs
from deltatree.decode.options import AUTO
from deltatree.errors import RecordError

TREE_RAMP = LinearSegmentedColormap.from_list("trees", ["#FCD8A6", "#E58A1F", "#9C4A0A"])
DFLASH_COLOUR = "#8CC7EA"
TREE_HATCHES = ("", "..", "xx", "--", "oo", "++")
MARKERS = "osD^vPX*"
LINES = ("-", "--", ":", "-.")
DATASET_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#56B4E9", "#E69F00")
STAGE_STYLES = {
    "draft": ("#56B4E9", "//"),
    "build": ("#F0E442", ""),
    "verify": ("#D55E00", ""),
    "accept": ("#FFFFFF", ".."),
    "commit": ("#009E73", "\\\\"),
    "other": ("#BBBBBB", ""),
}
INK, SOFT = "#222222", "#666666"
KINDS = ("png", "svg", "pdf")
GREATER_BAR = 1.0
"""Inches that one bar may at most be wide."""


def draw_chart(folders: list[Path], out: Path) -> list[Path]:
    """Draw bench runs, side by side, into `out`; a PNG gets its SVG beside it, and the other way round.

    Returns the files written. Raises RecordError for folders without records, another kind of file, or no permission.
    """
    out = Path(out)
    kind = out.suffix.removeprefix(".").lower()
    if kind not in KINDS:
        raise RecordError(f"{out} is no kind of picture that can be drawn; name a file ending in .png, .svg or .pdf")
    figure = chart_figure(load_runs(folders))
    twin = {"png": "svg", "svg": "png"}.get(kind)
    files = [out, *([out.with_suffix(f".{twin}")] if twin else [])]
    for file in files:
        try:
            figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix != ".png" else None)
        except OSError as error:
            raise RecordError(f"cannot write {file} ({error.strerror}); choose a folder you may write") from error
    return files


def chart_figure(runs: list[ChartRun]) -> Figure:
    """The figure of some runs."""
    arms = _drafting_arms(runs)
    num_bars = sum(len(run.drafted(name)) for run in runs for name in run.datasets)
    num_groups = sum(len(run.datasets) for run in runs)
    is_wide = num_bars + num_groups > 9
    width = max(13, 3 + 0.52 * (num_bars + num_groups)) if is_wide else 11.5
    caption = _caption(runs, width)
    stage_rows = sum(len(run.groups()) + (len(runs) > 1) for run in runs)
    heights = [4.2, max(3.4, 0.3 * stage_rows)]
    foot = 0.16 * (caption.count("\n") + 1) + 0.15
    height = sum(heights) + 1.6 + foot
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.get_layout_engine().set(rect=(0.005, foot / height, 0.99, 0.995 - foot / height), w_pad=0.12, h_pad=0.12)
    figure.suptitle(_title(runs), fontsize=14, fontweight="bold", color=INK)
    figure.text(0.012, 0.06 / height, caption, fontsize=8.5, color=SOFT, va="bottom", linespacing=1.35)

    if is_wide:
        grid = figure.add_gridspec(2, 3, height_ratios=heights)
        places = [grid[0, :], grid[1, 0], grid[1, 1], grid[1, 2]]
    else:
        grid = figure.add_gridspec(2, 2, height_ratios=heights)
        places = [grid[0, 0], grid[0, 1], grid[1, 0], grid[1, 1]]
    axes = [figure.add_subplot(place) for place in places]
    styles = {arm: _arm_style(arm, arms) for arm in arms}
    _speedups(axes[0], runs, styles, width * (0.9 if is_wide else 0.42), legend_columns=6 if is_wide else 2)
    _acceptance_over_budget(axes[1], runs)
    _stages(axes[2], runs)
    _histogram(axes[3], runs, styles)
    return figure


def _drafting_arms(runs: list[ChartRun]) -> list[Arm]:
    arms = {arm_of(group) for run in runs for group in run.drafted()}
    return sorted(arms, key=lambda arm: (arm.method != "dflash", isinstance(arm.budget, str), arm.budget))


def _arm_style(arm: Arm, arms: list[Arm]) -> tuple:
    """Colour and hatch: trees darken with their budget."""
    if arm.method == "dflash":
        return DFLASH_COLOUR, "//"
    trees = [other for other in arms if other.method == "ddtree"]
    place = trees.index(arm)
    return TREE_RAMP(place / max(len(trees) - 1, 1)), TREE_HATCHES[place % len(TREE_HATCHES)]


def _title(runs: list[ChartRun]) -> str:
    pairs = {(run.summary["target"], run.summary["drafter"]) for run in runs}
    if len(pairs) > 1:
        return "Speedup over plain decoding"
    target, drafter = next(iter(pairs))
    by = "" if drafter in (None, target) else f", drafted by {drafter}"
    return f"Speedup over plain decoding: {target}{by}"


def _caption(runs: list[ChartRun], width: float) -> str:
    """What the figures mean and where they were taken, one paragraph a run."""
    columns = int(width * 15.5)
    lines = [
        "Baseline (1×): plain decoding of the same target in the same runtime. Speeds are of decoding alone, prefill apart, "
        "token-weighted; stage timing comes from a pass of its own."
    ]
    for run in runs:
        names = dict.fromkeys(name for name in (run.summary["target"], run.summary["drafter"]) if name)
        pair = " + ".join(names) + " · " if len(runs) > 1 else ""
        lines.append(f"{run.tag}: {pair}{run.caption}")
    return "\n".join(part for line in lines for part in textwrap.wrap(line, columns, subsequent_indent="    "))


def _speedups(ax: Axes, runs: list[ChartRun], styles: dict, inches: float, legend_columns: int) -> None:
    """Groups of bars, one a data set and run; on each bar its speedup and acceptance length."""
    left, ticks, labels, top = 0.0, [], [], 1.0
    used: dict[Arm, Patch] = {}
    for name in dict.fromkeys(name for run in runs for name in run.datasets):
        for run in (run for run in runs if name in run.datasets):
            groups = run.drafted(name)
            for place, group in enumerate(groups):
                colour, hatch = styles[arm_of(group)]
                value = (group["speedup"] or {}).get("token_weighted")
                x = left + place
                top = max(top, value or 0)
                ax.bar(x, value or 0, width=0.86, color=colour, hatch=hatch, edgecolor=INK, linewidth=0.7)
                _on_bar(ax, x, value, group["acceptance_length"]["token_weighted"])
                used[arm_of(group)] = Patch(facecolor=colour, hatch=hatch, edgecolor=INK, label=_arm_label(group))
            ticks.append(left + (len(groups) - 1) / 2)
            plain = run.groups(name)[0]["tokens_per_second"]["token_weighted"]
            speed = f"plain: {plain:,.{0 if plain >= 100 else 1}f} tokens/s" if plain else "plain: nothing decoded"
            labels.append("\n".join([name, *([_short(run.tag, 24)] if len(runs) > 1 else []), speed]))
            left += len(groups) + 0.7
    ax.axhline(1, color=INK, linestyle="--", linewidth=1, zorder=1.5)
    spare = max(inches / GREATER_BAR - left, 0) / 2
    ax.set_xlim(-0.75 - spare, left - 0.95 + spare)
    ax.set_xticks(ticks, labels, fontsize=9)
    ax.tick_params(axis="x", length=0)
    ax.set_ylabel("speedup over plain decoding (= 1)")
    _dress(ax, "Speedup (bold), and acceptance length below it")
    keys = [used[arm] for arm in styles]
    ax.legend(handles=keys, fontsize=8.5, ncols=min(len(keys), legend_columns), loc="upper center", frameon=False)
    ax.set_ylim(0, (1.2 + 0.08 * (1 + (len(keys) - 1) // legend_columns)) * top)


def _on_bar(ax: Axes, x: float, speedup: float | None, acceptance: float | None) -> None:
    if speedup is None:
        ax.annotate("no figure", (x, 0), (0, 3), textcoords="offset points", ha="center", fontsize=7.5, color=SOFT)
        return
    paper = dict(boxstyle="square,pad=0.05", facecolor="white", edgecolor="none")  # hides the line at 1
    offset = dict(textcoords="offset points", ha="center", va="bottom", color=INK, bbox=paper)
    ax.annotate(f"{acceptance:.2f}", (x, speedup), (0, 3), fontsize=8, **offset)
    ax.annotate(f"{speedup:.2f}×", (x, speedup), (0, 13), fontsize=9.5, fontweight="bold", **offset)


def _arm_label(group: dict) -> str:
    if group["method"] == "dflash":
        return f"DFlash (chain of {group['budget']})"
    return "DDTree, auto" if group["budget"] == "auto" else f"DDTree, {group['budget']} nodes"


def _acceptance_over_budget(ax: Axes, runs: list[ChartRun]) -> None:
    """A line a data set and run over the tree budgets; DFlash's chain stands apart on the left."""
    arms = _drafting_arms(runs)
    budgets = [arm.budget for arm in arms if arm.method == "ddtree"]
    places = {budget: place for place, budget in enumerate(dict.fromkeys(budgets))}
    has_chain = any(arm.method == "dflash" for arm in arms)
    names = list(dict.fromkeys(name for run in runs for name in run.datasets))
    for run_place, run in enumerate(runs):
        for name in run.datasets:
            colour = DATASET_COLOURS[names.index(name) % len(DATASET_COLOURS)]
            look = dict(color=colour, marker=MARKERS[names.index(name) % len(MARKERS)], markersize=6, linewidth=1.6)
            hollow = dict(markerfacecolor="white") if run_place % 2 else {}
            figures = {arm_of(group): group["acceptance_length"]["token_weighted"] for group in run.drafted(name)}
            trees = {arm.budget: v for arm, v in figures.items() if arm.method == "ddtree" and v is not None}
            chosen = [trees.pop(AUTO)] if AUTO in trees else []  # no larger than the largest: it stands by itself
            xs, line = [places[budget] for budget in trees], LINES[run_place % len(LINES)]
            ax.plot(xs, list(trees.values()), linestyle=line, **look, **hollow)
            ax.plot([places[AUTO]] if chosen else [], chosen, linestyle="none", **look, **hollow)
            chain = [v for a, v in figures.items() if a.method == "dflash" and v is not None]
            ax.plot([-1] * len(chain), chain, linestyle="none", **look, **hollow)
    ticks = ([-1] if has_chain else []) + list(places.values())
    ax.set_xticks(ticks, (["DFlash\nchain"] if has_chain else []) + [str(budget) for budget in places])
    if has_chain and places:
        ax.axvline(-0.5, color="#cccccc", linewidth=0.8)
    ax.set_xlim(ticks[0] - 0.4 if ticks else -1, (ticks[-1] if ticks else 0) + 0.4)
    ax.set_xlabel("budget (drafted nodes a round)")
    ax.set_ylabel("acceptance length (tokens a round)")
    _dress(ax, "Acceptance length over budget")
    ax.margins(y=0.12)
    keys = [
        Line2D([], [], color=DATASET_COLOURS[i % len(DATASET_COLOURS)], marker=MARKERS[i % len(MARKERS)], label=name)
        for i, name in enumerate(names)
    ] + _run_keys(runs)
    low, high = min(ax.get_ylim()[0], 1), ax.get_ylim()[1]
    ax.set_ylim(low, high)
    if len(keys) > 1:
        columns = 1 + (len(keys) > 3)
        ax.set_ylim(low, high + 0.08 * (high - low) * (1 + (len(keys) - 1) // columns))
        ax.legend(handles=keys, fontsize=8.5, frameon=False, loc="upper left", ncols=columns)


def _run_keys(runs: list[ChartRun]) -> list[Line2D]:
    """Line styles of several runs."""
    if len(runs) < 2:
        return []
    return [
        Line2D([], [], color=INK, linestyle=LINES[i % len(LINES)], label=_short(run.tag, 30))
        for i, run in enumerate(runs)
    ]


def _stages(ax: Axes, runs: list[ChartRun]) -> None:
    """A bar an arm: shares of a round's stages, with its whole time at the end; the time alone without stage timing."""
    is_staged = any(group["stage_milliseconds_per_round"] for run in runs for group in run.groups())
    longest = max((group["milliseconds_per_round"] or 0 for run in runs for group in run.groups()), default=0) or 1
    labels: dict[float, str] = {}
    y = 0.0
    for run in runs:
        if len(runs) > 1:
            ax.text(1, y, _short(run.tag, 40), va="center", fontsize=8.5, fontweight="bold", color=INK)
            y += 0.85
        for group in run.groups():
            stages, whole = group["stage_milliseconds_per_round"], group["milliseconds_per_round"]
            if is_staged:
                end = _stage_bar(ax, y, stages) if stages else 0
            else:
                end = 100 * (whole or 0) / longest
                ax.barh(y, end, color="#BBBBBB", edgecolor=INK, linewidth=0.6, height=0.72)
            text = "no figure" if whole is None else f"{_milliseconds(whole)} ms"
            if is_staged and not stages:
                text += " (stages not timed)"
            ax.annotate(text, (end, y), (4, 0), textcoords="offset points", va="center", fontsize=8.5, color=INK)
            labels[y] = group["label"]
            y += 1
    ax.set_yticks(list(labels), list(labels.values()), fontsize=8.5)
    ax.set_ylim(y - 0.4, -0.6)
    ax.set_xlim(0, 124)
    ax.set_xticks(range(0, 101, 25) if is_staged else [])
    _dress(ax, "Stages of a round, and its time" if is_staged else "Time of a round", grid="x")
    if not is_staged:
        return
    ax.set_xlabel("share of a round (%)")
    keys = [Patch(facecolor=c, hatch=h, edgecolor=INK, label=stage) for stage, (c, h) in STAGE_STYLES.items()]
    ax.legend(handles=keys, fontsize=8, ncols=len(keys), frameon=False, loc="upper center", bbox_to_anchor=(0.46, -0.17),
              handlelength=1.3, columnspacing=0.9, handletextpad=0.4)  # fmt: skip


def _stage_bar(ax: Axes, y: float, stages: dict) -> float:
    """One stacked bar of shares. Returns its length."""
    whole, left = sum(stages.values()), 0.0
    for stage in STAGES:
        share = 100 * stages[stage] / whole
        colour, hatch = STAGE_STYLES[stage]
        ax.barh(y, share, left=left, color=colour, hatch=hatch, edgecolor=INK, linewidth=0.6, height=0.72)
        if share >= 9:
            box = dict(boxstyle="round,pad=0.15", facecolor="white", edgecolor="none", alpha=0.9)
            ax.text(left + share / 2, y, f"{share:.0f}", ha="center", va="center", fontsize=8, color=INK, bbox=box)
        left += share
    return left


def _histogram(ax: Axes, runs: list[ChartRun], styles: dict) -> None:
    """How often a round emits how many tokens: DFlash and the trees of the smallest and the largest budget."""
    arms = list(styles)
    trees = [arm for arm in arms if arm.method == "ddtree"]
    shown = [arm for arm in arms if arm.method == "dflash"] + list(dict.fromkeys([*trees[:1], *trees[-1:]]))
    longest = 1
    for run_place, run in enumerate(runs):
        for group in run.drafted():
            arm = arm_of(group)
            if arm not in shown or not group["num_rounds"]:
                continue
            counts = {int(length): count for length, count in group["acceptance_histogram"].items()}
            longest = max(longest, *counts)
            lengths = range(1, max(counts) + 1)
            ax.plot(
                lengths,
                [100 * counts.get(length, 0) / group["num_rounds"] for length in lengths],
                color=_darker(styles[arm][0]),
                marker=MARKERS[shown.index(arm)],
                markersize=5,
                markerfacecolor="white" if run_place % 2 else None,
                linestyle=LINES[run_place % len(LINES)],
                linewidth=1.6,
            )
    ax.set_xlabel("tokens a round (acceptance length)")
    ax.set_ylabel("share of rounds (%)")
    ax.set_xticks(range(1, longest + 1, 1 + longest // 12))
    ax.set_ylim(bottom=0)
    _dress(ax, "How many tokens a round emits")
    keys = [
        Line2D([], [], color=_darker(styles[arm][0]), marker=MARKERS[i], label=arm.label) for i, arm in enumerate(shown)
    ] + _run_keys(runs)
    if keys:
        ax.legend(handles=keys, fontsize=8.5, frameon=False, loc="best")


def _darker(colour) -> tuple:
    """A bar's colour, dark enough for a thin line."""
    from matplotlib.colors import to_rgb

    return tuple(0.72 * part for part in to_rgb(colour))


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _milliseconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _dress(ax: Axes, title: str, grid: str = "y") -> None:
    ax.set_title(title, fontsize=11, loc="left", color=INK, fontweight="bold")
    ax.grid(axis=grid, color="#dddddd", linewidth=0.7)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
