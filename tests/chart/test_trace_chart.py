"""A trace as a picture: one round's tree, budgets over time; refusals in one sentence."""

import json

import pytest
from typer.testing import CliRunner

from deltatree.chart.trace import MOST_NODES, _places, draw_trace, read_trace, trace_figure, visible
from deltatree.errors import DeltatreeError, RecordError

ABOUT = {"target": "shipped", "drafter": "shipped", "method": "ddtree", "budget": "auto", "tree": "best-first"}


def row(number, parents=(-1, 0, 0, 1), path=(0, 1), **more):
    tokens = list(range(len(parents)))
    return {
        "round": number, "context": 5 * number, "tokens": tokens, "parents": list(parents), "path": list(path),
        "scores": [-float(token) for token in tokens], "bonus": 9, "budget": len(parents) - 1, "drafted": True,
        "texts": [f" t{token}$\n" for token in tokens], "bonus_text": "中", **more,
    }  # fmt: skip


def write(file, rows):
    file.write_text("\n".join(json.dumps(one) for one in [ABOUT, *rows]) + "\n")
    return file


@pytest.fixture
def trace(tmp_path):
    auto = dict(probabilities=[1.0, 0.6, 0.3, 0.2], expected=2.1)
    plain = row(2, parents=(-1,), path=(0,))
    return write(
        tmp_path / "trace.jsonl", [row(1), plain, row(3, path=(0, 1, 3), **auto), row(4, (-1, 0, 1), (0, 1, 2))]
    )


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_a_picture_is_written(trace, tmp_path, suffix):
    (file,) = draw_trace(trace, tmp_path / f"tree{suffix}")
    assert file.stat().st_size > 5000


def test_the_round_that_accepted_most_of_a_branching_tree_is_shown_unless_one_is_named(trace):
    assert read_trace(trace).round(None)["round"] == 3
    tree, _ = trace_figure(read_trace(trace)).axes
    assert tree.get_title(loc="left") == "Round 3: 3 drafted, 2 accepted (1.1 expected)"
    tree, _ = trace_figure(read_trace(trace), 2).axes
    assert tree.get_title(loc="left") == "Round 2: 0 drafted, 0 accepted"


def test_of_a_large_tree_the_probable_nodes_and_the_accepted_path_are_drawn():
    parents = [-1, 0, *[0] * 200, 201, 202]
    places, hidden = _places(row(1, parents, path=(0, 201, 202, 203)))
    assert {0, 201, 202, 203} <= set(places) and hidden == len(parents) - len(places) > 0
    assert MOST_NODES <= len(places) <= MOST_NODES + 3
    lines = [y for x, y in places.values() if x == 1]
    assert len(set(lines)) == len(lines)  # no two siblings on one spot


def test_tokens_are_made_readable():
    assert visible(" a\n\t") == "␣a⏎⇥"
    assert visible("$x_1$") == "$x_1$" and visible("\x00") == "□"
    assert visible("extraordinarily") == "extraordi…"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--trace", "absent"], "absent cannot be read"),
        (["--trace", "torn"], "torn is no trace"),
        (["--trace", "empty"], "empty holds no whole round"),
        (["--trace", "bench"], "bench is no trace"),
        (["--trace", "trace.jsonl", "--round", "9"], "round 9 is not in the trace; it has rounds 1 to 4"),
        (["--trace", "trace.jsonl", "--out", "tree.txt"], "no kind of picture"),
        (["--trace", "trace.jsonl", "runs"], "either bench runs or a trace"),
        (["--round", "3", "runs"], "name its file with --trace"),
        ([], "no run to draw"),
    ],
)
def test_what_cannot_be_drawn_is_refused(trace, tmp_path, monkeypatch, arguments, sentence):
    from deltatree.cli import app

    monkeypatch.chdir(tmp_path)
    write(tmp_path / "empty", [])
    (tmp_path / "torn").write_text('{"method": "ddtree"}\n{"tok')
    (tmp_path / "bench").write_text('{"dataset": "gsm8k"}\n{"dataset": "gsm8k"}\n')
    refused = CliRunner().invoke(app, ["chart", *arguments])
    assert isinstance(refused.exception, DeltatreeError) and sentence in str(refused.exception)


def test_no_trace_is_a_record_error(tmp_path):
    with pytest.raises(RecordError):
        read_trace(tmp_path)
