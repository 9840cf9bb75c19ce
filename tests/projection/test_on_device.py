"""A projection over the fast target keeps its rounds on the device, and accepts what the host's rounds accept."""

import pytest

from deltatree.projection.profiles import PROFILES
from deltatree.projection.run import ProjectionPlan, project
from deltatree.projection.shapes import target_and_drafter


@pytest.mark.parametrize("name", ["chat"])
def test_the_device_accepts_what_the_host_accepts(name):
    profile = PROFILES[name]
    plan = ProjectionPlan(budgets=(8, 16), max_new_tokens=24, repeats=1, context_length=12)
    rows = []
    for backend in ("reference", "fast"):
        target, timed = target_and_drafter("tiny", profile.depth + 1, device="cpu", backend=backend)
        rows.append(project(target, profile, plan, timed=timed))
    for host, device in zip(*rows, strict=True):
        assert device["departures"] == host["departures"] == 0
        assert device["label"] == host["label"]
        assert device["acceptance_length"] == pytest.approx(host["acceptance_length"], rel=0.15)
    assert rows[1][1]["acceptance_length"] > 1.5
