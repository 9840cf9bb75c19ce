"""The chart: reads records, survives every shape of run, and says what it shows."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from deltatree.bench.records import Record, RecordWriter, records_file
from deltatree.bench.stages import STAGES
from deltatree.chart import draw_chart
from deltatree.chart.draw import chart_figure
from deltatree.chart.runs import load_runs
from deltatree.errors import RecordError

BASE = Record(
    dataset="gsm8k", sample="0", turn=0, method="ar", budget=0, tree="best-first", thinking=False, prompt_length=9,
    token_ids=[1] * 31, prefill_seconds=0.1, decode_seconds=1.0, acceptance_lengths=[1] * 30, num_drafted=0,
    stop_reason="length", verdict="identical", stage_seconds=dict.fromkeys(STAGES, 0.1),
)  # fmt: skip


def run_folder(out: Path, datasets=("gsm8k",), budgets=(8, 64), staged=True, target="tiny") -> Path:
    out.mkdir()
    info = {
        "plan": {"temperature": 0.0, "max_new_tokens": 31, "thinking": False}, "target": {"id": target},
        "drafter": None, "device": {"type": "cpu", "name": "A processor", "threads": 2}, "dtype": "float32",
        "noise": {"measured": 0.0, "bound": 0.0, "positions": 30},
    }  # fmt: skip
    (out / "run.json").write_text(json.dumps(info))
    draw = random.Random(0)
    writer = RecordWriter(records_file(out))
    for dataset in datasets:
        for method, budget in [("ar", 0), ("dflash", 15), *(("ddtree", budget) for budget in budgets)]:
            lengths = [1] * 30 if method == "ar" else [draw.randint(1, 5) for _ in range(10)]
            stages = BASE.stage_seconds if staged else None
            writer.append(
                replace(BASE, dataset=dataset, method=method, budget=budget, acceptance_lengths=lengths, stage_seconds=stages,
                        decode_seconds=len(lengths) / 30)
            )  # fmt: skip
    writer.close()
    return out


def texts(figure) -> str:
    return "\n".join(text.get_text() for text in figure.findobj(lambda artist: hasattr(artist, "get_text")))


SHAPES = {
    "one": [dict()],
    "three sets": [dict(datasets=("gsm8k", "humaneval", "mt-bench"))],
    "two runs": [dict(), dict(staged=False, budgets=(16, 64, 256), target="Qwen/Qwen3.6-35B-A3B")],
    "dflash alone": [dict(budgets=(), staged=False)],
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_of_run_is_drawn_with_nothing_clipped(tmp_path, shape):
    folders = [run_folder(tmp_path / f"run{i}", **options) for i, options in enumerate(SHAPES[shape])]
    figure = chart_figure(load_runs(folders))
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    width, height = canvas.get_width_height()
    renderer = canvas.get_renderer()
    for ax in figure.axes:
        boxes = [text.get_window_extent(renderer) for text in (ax.title, *ax.texts, *ax.get_xticklabels())]
        boxes += [ax.get_legend().get_window_extent(renderer)] if ax.get_legend() else []
        for box in boxes:
            assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width + 1 and box.y1 <= height + 1
    titles = sorted((ax.title.get_window_extent(renderer) for ax in figure.axes), key=lambda box: (box.y0, box.x0))
    assert not any(a.overlaps(b) for a, b in pairwise(titles))


def test_bars_carry_speedup_and_acceptance_length_and_the_foot_says_where(tmp_path):
    folder = run_folder(tmp_path / "run")
    run = load_runs([folder])[0]
    shown = texts(chart_figure([run]))
    for group in run.drafted():
        assert f"{group['speedup']['token_weighted']:.2f}×" in shown
        assert f"{group['acceptance_length']['token_weighted']:.2f}" in shown
    for expected in (
        "A processor, 2 threads",
        "float32",
        "1 sample, up to 31 tokens a turn",
        "Baseline (1×): plain decoding",
        "3 identical",
    ):
        assert expected in shown


def test_several_runs_are_told_apart_by_their_folders(tmp_path):
    shown = texts(chart_figure(load_runs([run_folder(tmp_path / "mine"), run_folder(tmp_path / "theirs")])))
    assert "gsm8k\nmine" in shown and "gsm8k\ntheirs" in shown


def test_png_and_svg_come_together(tmp_path):
    files = draw_chart([run_folder(tmp_path / "run")], tmp_path / "chart.png")
    assert [file.name for file in files] == ["chart.png", "chart.svg"]
    assert files[0].read_bytes().startswith(b"\x89PNG") and b"<svg" in files[1].read_bytes()[:1000]


def test_what_is_no_run_or_no_picture_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(RecordError, match=r"has no run\.json"):
        draw_chart([tmp_path / "empty"], tmp_path / "chart.png")
    folder = run_folder(tmp_path / "run")
    with pytest.raises(RecordError, match=r"\.png, \.svg or \.pdf"):
        draw_chart([folder], tmp_path / "chart.xls")
    with pytest.raises(RecordError, match="cannot write"):
        draw_chart([folder], tmp_path / "absent" / "chart.png")
    records_file(folder).unlink()
    with pytest.raises(RecordError, match="holds no records yet"):
        draw_chart([folder], tmp_path / "chart.png")
    with pytest.raises(RecordError, match="no run to draw"):
        draw_chart([], tmp_path / "chart.png")
