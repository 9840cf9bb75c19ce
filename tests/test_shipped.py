"""The shipped pair: small enough, lossless, and a drafter that really drafts."""

from pathlib import Path

import pytest
import torch
from tiny import plain_greedy

import deltatree
from deltatree.files import shipped_folder

QUESTIONS = (
    "A box holds 12 pencils. Mia buys 4 boxes and gives 7 pencils away. How many pencils does she have left?",
    "Sam reads 15 pages a day for 6 days. The book has 120 pages. How many pages are left to read?",
)


@pytest.fixture(scope="module")
def pair():
    return deltatree.load("shipped", device="cpu")


def test_the_pair_fits_into_24_megabytes():
    assert sum(file.stat().st_size for file in shipped_folder("target").parent.rglob("*") if file.is_file()) <= 24e6


def test_every_method_writes_what_transformers_writes(pair):
    for question in QUESTIONS:
        prompt = pair.encode(question)
        truth = plain_greedy(pair.target.model, prompt, 64)
        for options in (
            {"method": "ar"},
            {"method": "dflash"},
            *({"budget": budget} for budget in (1, 8, 64, 200)),
            {"tree": "chain", "budget": 5},
            {"tree": "calibrated", "budget": 16},
        ):
            out = pair.generate(prompt, max_new_tokens=64, ignore_eos=True, **options)
            assert out.token_ids == truth, options


def test_the_drafter_drafts_and_the_tree_is_above_the_chain(pair):
    def pooled(**options):
        outs = [pair.generate(question, max_new_tokens=96, **options) for question in QUESTIONS]
        return sum(sum(o.acceptance_lengths) for o in outs) / sum(o.rounds for o in outs)

    chain = pooled(method="dflash")
    assert chain >= 2.5
    assert pooled(budget=64) >= max(3.3, chain)
    assert pooled(budget=16) > chain


def test_streamed_text_is_the_text(pair):
    pieces = list(pair.stream(QUESTIONS[0], max_new_tokens=40))
    assert len(pieces) > 2 and "".join(pieces) == pair.generate(QUESTIONS[0], max_new_tokens=40).text


def test_it_stops_at_its_end_token_and_says_so(pair):
    out = pair.generate(QUESTIONS[0], max_new_tokens=400)
    assert out.stop_reason == "stop" and out.token_ids[-1] in pair.stop_ids
    assert not set(out.token_ids[:-1]) & pair.stop_ids


def test_it_loads_without_a_network_and_credits_its_sources(pair):
    card = Path(shipped_folder("target").parent, "README.md").read_text()
    assert "GSM8K" in card and "CC BY 4.0" in card and "PSF-2.0" in card
    assert pair.target.dtype == torch.float32
