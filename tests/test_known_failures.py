"""Guards: the page of known failures names every entry and every test of it, and the seeded faults still fit the source."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mutations import MUTATIONS, PACKAGE

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "known-failures.md").read_text(encoding="utf-8")
IDS = [
    "B01",
    "B02",
    "B03",
    "B04",
    "B06",
    "B07",
    "B08",
    "B09",
    "B10",
    "B12",
    "B13",
    "B14",
    "B15",
    "B16",
    "B18",
    "B19",
    "B20",
    "B22",
    "B23",
    "B25",
    "B26",
    "B27",
    "B28",
    "B30",
    "B32",
    "B33",
    "B35",
    "B36",
    "B37",
    "B38",
    "B39",
    "B40",
    "B41",
    "B43",
    "B44",
    "B45",
    "B46",
    "B47",
    "B48",
    "B49",
    "B50",
    "B51",
    "B53",
    "B55",
    "B56",
    "B57",
    "B58",
    "B59",
    "B61",
]
ROWS = dict(re.findall(r"^\| (B\d\d) \|(.*)\|$", PAGE, flags=re.MULTILINE))


def test_names() -> dict[str, str]:
    """Every test function of the repository, with the text of its file."""
    names = {}
    for file in TESTS.rglob("test_*.py"):
        text = file.read_text(encoding="utf-8")
        names |= dict.fromkeys(re.findall(r"^def (test_\w+)", text, flags=re.MULTILINE), text)
    return names


test_names.__test__ = False


def test_every_entry_has_a_row_with_a_symptom_tests_and_a_status():
    assert list(ROWS) == IDS
    for name, row in ROWS.items():
        symptom, severity, tests, status = (cell.strip() for cell in row.split("|"))
        assert symptom and re.fullmatch(r"S[123](/S[123])?\??", severity), name
        assert "`test_" in tests and re.match(r"CPU|GPU", status), name


def test_every_named_test_is_there_and_none_is_left_out():
    names = test_names()
    for entry, row in ROWS.items():
        named = set(re.findall(r"`(test_\w+)`", row))
        assert named <= set(names), (entry, named - set(names))
        own = {name for name in names if entry in re.match(r"test_((?:B\d\d_)*)", name)[1].split("_")}
        assert own <= named, (entry, own - named)
        if "GPU" in row.split("|")[3]:
            assert any("pytest.mark.gpu" in names[name] for name in named), entry


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.fault)
def test_a_seeded_fault_still_has_its_place_and_its_test(mutation):
    assert (PACKAGE / mutation.file).read_text(encoding="utf-8").count(mutation.old) == 1
    assert mutation.new != mutation.old
    file, name = mutation.test.split("::")
    assert re.search(rf"^def {name}\(", (TESTS / file).read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert f"| {mutation.fault} | `{mutation.file}` | `{name}` in `{file}` |" in PAGE


def test_the_seeded_faults_cover_every_room():
    assert len({mutation.fault for mutation in MUTATIONS}) == len(MUTATIONS) >= 18
    assert {"tree", "kernels", "state", "verify", "models", "drafter", "decode"} <= {m.room for m in MUTATIONS}
