"""What rounds cost: learned from rounds, steady against hiccups, and kept between runs."""

import json

import numpy as np
import pytest
from worlds import OftenRight, TextTarget

from deltatree.decode import calibration
from deltatree.decode.calibration import measure, round_costs
from deltatree.decode.costs import NODE_COUNTS, RoundCosts

SIZES = np.array([2, 8, 16, 32, 64, 128])


def true_seconds(nodes, context=0):
    return 0.010 + 0.0003 * nodes


def taught(rounds=600, noise=0.0, captured=False, seed=0):
    costs, draw = RoundCosts(captured=captured), np.random.default_rng(seed)
    for _ in range(rounds):
        nodes = int(draw.choice(SIZES))
        costs.learn_drafted(nodes, 0.004 + true_seconds(nodes) * (1 + noise * draw.exponential()), 100)
        if draw.random() < 0.2:
            costs.learn_plain(true_seconds(1) * (1 + noise * draw.exponential()), 100)
    return costs


@pytest.mark.parametrize("captured", [False, True])
def test_curves_are_learned_from_the_rounds(captured):
    costs = taught(captured=captured)
    assert costs.drafted(SIZES, 100) == pytest.approx(0.004 + true_seconds(SIZES), rel=0.08)
    assert costs.plain(100) == pytest.approx(true_seconds(1), rel=0.08)


def test_a_shared_slowdown_changes_the_pace_and_not_the_shape():
    costs = taught()
    before, pace = costs.drafted(SIZES, 100) / costs.plain(100), costs.pace_factor
    for _ in range(60):
        costs.learn_drafted(16, 3 * (0.004 + true_seconds(16)), 100)
    assert costs.pace_factor > 2 * pace
    assert costs.drafted(SIZES, 100)[-1] > 2 * (0.004 + true_seconds(128))  # a size that did not run is slower, too
    for _ in range(60):
        costs.learn_drafted(16, 0.004 + true_seconds(16), 100)
    assert costs.drafted(SIZES, 100) / costs.plain(100) == pytest.approx(before, rel=0.25)


def test_one_hiccup_moves_little():
    costs = taught()
    before = costs.drafted(SIZES, 100)
    costs.learn_drafted(16, 100.0, 100)
    assert costs.drafted(SIZES, 100) == pytest.approx(before, rel=0.06)


def test_costs_never_fall_with_the_nodes_and_captured_ones_are_steps():
    for captured in (False, True):
        costs = taught(60, noise=1.0, captured=captured)
        assert (np.diff(costs.drafted(np.arange(1, 400), 100)) >= -1e-12).all()
    steps = costs.drafted(np.array([17, 20, 24, 25, 32]), 100)
    assert steps[0] == steps[1] == steps[2] and steps[3] == steps[4]


def test_a_cliff_stays_a_cliff():
    costs = RoundCosts((1, 8, 16, 24, 32), captured=True)
    for _ in range(200):
        for nodes in (8, 16, 24, 32):
            costs.learn_drafted(nodes, 0.01 if nodes <= 16 else 0.03, 100)
    assert costs.drafted(np.array([16, 17]), 100) == pytest.approx([0.01, 0.03], rel=0.05)


def test_every_doubling_of_the_context_has_its_own_curves_and_starts_as_the_nearest():
    costs = taught()
    assert costs.drafted(SIZES, 5000) == pytest.approx(costs.drafted(SIZES, 100), rel=0.06)
    assert costs.num_plain(100) > 0 == costs.num_plain(5000)
    for _ in range(100):
        costs.learn_drafted(16, 0.06, 5000)
        costs.learn_drafted(16, 0.004 + true_seconds(16), 100)
    low, high = (float(costs.drafted(np.array(16), context)) for context in (100, 5000))
    assert high > 2 * low


@pytest.mark.parametrize("buckets", [None, (1, 8, 9, 16, 17)])
def test_measuring_decodes_at_several_sizes_and_the_cache_keeps_the_figures(tmp_path, monkeypatch, buckets):
    target = TextTarget(true_seconds)
    if buckets:
        target.node_buckets = buckets
    drafter = OftenRight(target, (0.5,) * 8, seconds=0.004)
    monkeypatch.setattr(calibration, "_clock", lambda _: target.clock)
    monkeypatch.setattr(calibration, "cache_folder", lambda: tmp_path / "costs")
    costs = round_costs(target, drafter, ("a", "b"))
    sizes = np.array([n for n in costs.node_counts if 1 < n <= (16 if buckets else 128)])
    known = [1, 8, 9, 16] if buckets else list(NODE_COUNTS)  # 9 is the chain, 17 for a budget that a user names
    assert costs.captured == bool(buckets) and costs.node_counts.tolist() == known
    assert costs.drafted(sizes, 0) == pytest.approx(0.004 + true_seconds(sizes), rel=0.02)
    assert costs.plain(0) == pytest.approx(true_seconds(1), rel=0.02)

    (file,) = (tmp_path / "costs").iterdir()
    assert json.loads(file.read_text())["what"]["names"] == ["a", "b"]
    started = target.now
    again = round_costs(target, drafter, ("a", "b"))
    assert target.now == started and again.drafted(sizes, 0) == pytest.approx(costs.drafted(sizes, 0))
    file.write_text("{")  # torn: measured again
    round_costs(target, drafter, ("a", "b"))
    assert target.now > started and json.loads(file.read_text())["plain_seconds"] > 0
    round_costs(target, drafter, ("a", "c"))
    assert len(list((tmp_path / "costs").iterdir())) == 2


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(calibration, "cache_folder", lambda: tmp_path / "file" / "costs")
    target = TextTarget(true_seconds)
    monkeypatch.setattr(calibration, "_clock", lambda _: target.clock)
    assert round_costs(target, OftenRight(target, (0.5,) * 4)).num_plain(0) > 0


def test_measuring_stops_when_its_time_is_up():
    target = TextTarget(lambda *at: 100 * true_seconds(*at))  # a machine a hundred times slower
    costs = RoundCosts(clock=target.clock)
    assert measure(target, OftenRight(target, (0.5,) * 4), costs, limit_seconds=4.0) is not None
    assert target.now < 8.0
