"""Where a text ends: exactly where plain decoding ends it, whatever was drafted beyond."""

from __future__ import annotations

import weakref

import pytest
from markov import VOCAB, MarkovTarget

from deltatree import GenerateOptions, Pair
from deltatree.decode import Conversation
from deltatree.drafter.scripted import RightDrafter, WrongDrafter
from deltatree.text import TextStream, end_tokens, stream_text

PROMPT = [3, 7, 1]
METHODS = ("ar", "dflash", "ddtree")


class Syllables:
    """Token i is a text of one to three characters; tokens 10 and 11 are the halves of one character."""

    BYTES = (b"a", b"b", b"c", b"ab", b"ba", b"abc", b"d", b"de", b"ed", b" ", b"\xc3", b"\xa4")

    def decode(self, token_ids, **_):
        return b"".join(self.BYTES[i] for i in token_ids).decode("utf-8", errors="replace")


TOKENIZER = Syllables()


def pair_of(drafter=None, stop_ids=frozenset(), target=None) -> Pair:
    return Pair(target or MarkovTarget(), TOKENIZER, drafter, frozenset(stop_ids))


@pytest.fixture(scope="module")
def plain() -> list[int]:
    """Forty tokens of plain sampling at a seed, so that the text does not settle."""
    return pair_of().collect(PROMPT, sampled(max_new_tokens=40, method="ar")).token_ids


def sampled(**options) -> GenerateOptions:
    return GenerateOptions(**{"temperature": 1.0, "seed": 3, "budget": 12} | options)


def right(plain) -> RightDrafter:
    return RightDrafter(PROMPT + plain, VOCAB)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("cap", range(1, 11))
def test_B22_B23_the_cap_is_exact(plain, method, cap):
    for drafter in (right(plain), WrongDrafter(PROMPT + plain, VOCAB)):
        got = pair_of(drafter).collect(PROMPT, sampled(max_new_tokens=cap, method=method))
        assert got.token_ids == plain[:cap] and got.stop_reason == "length"
        assert got.text == TOKENIZER.decode(plain[:cap])


@pytest.mark.parametrize("method", METHODS)
def test_B20_an_end_token_anywhere_ends_the_text_there(plain, method):
    """First token, inside an accepted path, last of it, bonus token: each token of the text in turn."""
    for position, token in enumerate(plain[:20]):
        first = plain.index(token)
        got = pair_of(right(plain), {token}).collect(PROMPT, sampled(method=method))
        assert got.token_ids == plain[: first + 1], position
        assert got.stop_reason == "stop"


@pytest.mark.parametrize("method", METHODS)
def test_B26_users_end_tokens_add_to_the_checkpoints_own(plain, method):
    own, further = plain[9], plain[4]
    ends = min(plain.index(own), plain.index(further)) + 1
    got = pair_of(right(plain), {own}).collect(PROMPT, sampled(method=method, stop_token_ids=[further]))
    assert got.token_ids == plain[:ends]
    ignoring = sampled(method=method, stop_token_ids=[further], ignore_eos=True)
    assert pair_of(right(plain), {own}).collect(PROMPT, ignoring).token_ids == plain[: plain.index(further) + 1]


def expected_cut(plain: list[int], stops: tuple[str, ...], min_tokens: int = 0) -> tuple[str, int]:
    """By brute force: add tokens until a stop string is complete; its text, and the tokens that this text needs."""
    floor = len(TOKENIZER.decode(plain[: min_tokens - 1])) if min_tokens > 1 else 0
    for count in range(1, len(plain) + 1):
        text = TOKENIZER.decode(plain[:count]).rstrip("\N{REPLACEMENT CHARACTER}")
        found = [
            at for stop in stops for at in range(len(text)) if text.startswith(stop, at) and at + len(stop) > floor
        ]
        if found and count >= min_tokens:
            text = text[: min(found)]
            needed = next(n for n in range(count + 1) if TOKENIZER.decode(plain[:n]).rstrip("�").startswith(text))
            return text, needed
    return TOKENIZER.decode(plain), len(plain)


def substrings(text: str) -> list[str]:
    return sorted({text[i : i + n] for n in (1, 2, 3, 5) for i in range(0, len(text) - n)})


@pytest.mark.parametrize("method", METHODS)
def test_B25_stop_strings_end_before_themselves(plain, method):
    """Every short piece of the text as a stop string: across tokens, across rounds, in the middle of a token."""
    text = TOKENIZER.decode(plain)
    for stop in substrings(text)[:: 1 if method == "ddtree" else 3]:
        got = pair_of(right(plain)).collect(PROMPT, sampled(max_new_tokens=40, method=method, stop=[stop, "never"]))
        cut, needed = expected_cut(plain, (stop,))
        assert (got.text, got.token_ids) == (cut, plain[:needed]), stop
        assert got.stop_reason == "stop" and stop not in got.text
        assert got.tokens_per_second >= 0


def test_of_several_stop_strings_the_first_complete_one_counts(plain):
    pieces = substrings(TOKENIZER.decode(plain))
    for stops in zip(pieces, pieces[7:], pieces[11:], strict=False):
        got = pair_of(right(plain)).collect(PROMPT, sampled(max_new_tokens=40, stop=stops))
        cut, needed = expected_cut(plain, stops)
        assert (got.text, got.token_ids) == (cut, plain[:needed]), stops


def test_B25_a_stop_string_never_leaks_and_no_piece_is_taken_back(plain):
    for stop in substrings(TOKENIZER.decode(plain)):
        options = sampled(max_new_tokens=40, stop=[stop])
        running, streamed, cut = pair_of(right(plain)).start(PROMPT, options), "", expected_cut(plain, (stop,))[0]
        for piece in running:
            streamed += piece
            assert cut.startswith(streamed), stop
        assert streamed == cut == running.generation().text


def test_nothing_after_a_stop_string_is_committed(plain):
    conversation = Conversation()
    stop = TOKENIZER.decode(plain)[4:6]
    pair_of(right(plain)).collect(PROMPT, sampled(stop=[stop]), conversation=conversation)
    completed = next(n for n in range(41) if stop in TOKENIZER.decode(plain[:n]))
    assert conversation.token_ids == PROMPT + plain[: completed - 1]  # the last emitted token is never committed


def test_a_half_stop_string_at_the_end_is_text(plain):
    text = TOKENIZER.decode(plain[:6])
    got = pair_of(right(plain)).collect(PROMPT, sampled(max_new_tokens=6, stop=[text[-1] + "zz"]))
    assert got.text == text and got.token_ids == plain[:6] and got.stop_reason == "length"


def test_a_stop_string_at_the_very_beginning_leaves_nothing(plain):
    got = pair_of(right(plain)).collect(PROMPT, sampled(stop=[TOKENIZER.decode(plain[:1])]))
    assert (got.text, got.token_ids, got.stop_reason) == ("", [], "stop")


@pytest.mark.parametrize("method", METHODS)
def test_nothing_ends_the_text_before_the_minimum(plain, method):
    token = plain[2]
    got = pair_of(right(plain), {token}).collect(PROMPT, sampled(max_new_tokens=30, method=method, min_new_tokens=8))
    assert token not in got.token_ids[:8] and len(got.token_ids) >= 8
    text = TOKENIZER.decode(plain)
    for stop in substrings(text)[::5]:
        for least in (1, 6, 15):
            options = sampled(max_new_tokens=40, method=method, min_new_tokens=least, stop=[stop])
            got = pair_of(right(plain)).collect(PROMPT, options)
            assert (got.text, len(got.token_ids)) == expected_cut(plain, (stop,), least), (stop, least)


def test_B32_a_stop_inside_a_block_leaves_the_next_request_its_own_draws(plain):
    """What was verified behind the stop has drawn nothing for anyone."""
    first, second = sampled(max_new_tokens=40, stop_token_ids=[plain[5]]), sampled(max_new_tokens=20, seed=9)
    pair = pair_of(right(plain))
    alone = pair_of(right(plain)).collect(PROMPT, second).token_ids
    for _ in range(2):
        assert pair.collect(PROMPT, first).token_ids == plain[: plain.index(plain[5]) + 1]
        assert pair.collect(PROMPT, second).token_ids == alone


def test_B47_every_request_drafts_and_says_how(plain):
    pair = pair_of(right(plain))
    reports = [pair.collect(PROMPT, sampled(max_new_tokens=20, method=m)).as_dict() for m in (*METHODS, "ddtree")]
    assert [r["method"] for r in reports] == [*METHODS, "ddtree"]
    assert [r["num_drafted"] > 0 and r["acceptance_length"] > 1 for r in reports] == [False, True, True, True]
    assert reports[2]["num_drafted"] == reports[3]["num_drafted"]
    for report in reports:
        assert report["rounds"] == len(report["acceptance_lengths"]) > 0 and report["budget"] >= 0


def test_B23_every_count_is_the_same_number(plain):
    for cap in range(1, 10):
        for stop in ((), (TOKENIZER.decode(plain)[5:7],)):
            running = pair_of(right(plain)).start(PROMPT, sampled(max_new_tokens=cap, stop=stop))
            text = "".join(running)
            done = running.generation()
            assert text == done.text and running.num_tokens == len(done.token_ids) <= cap
            assert done.token_ids == plain[: len(done.token_ids)]
            assert TOKENIZER.decode(done.token_ids).startswith(text)  # the last token may reach into the stop string
            assert stop or sum(done.acceptance_lengths) + 1 >= cap == len(done.token_ids)


def test_closing_early_runs_no_further_round(plain):
    target = MarkovTarget()
    verify, calls = target.verify, []
    target.verify = lambda *arguments: calls.append(1) or verify(*arguments)
    pair = pair_of(right(plain), target=target)
    pair.encode = lambda prompt, **_: prompt
    pieces = pair.stream(PROMPT, max_new_tokens=40)
    next(pieces)
    made = len(calls)
    pieces.close()
    assert len(calls) == made and next(pieces, None) is None


def test_closing_early_frees_the_state(plain):
    target, states = MarkovTarget(), []
    make = target.new_state

    def watched():
        state = make()
        states.append(weakref.ref(state))
        return state

    target.new_state = watched
    pair = pair_of(right(plain), target=target)
    pair.encode = lambda prompt, **_: prompt
    pieces = pair.stream(PROMPT, max_new_tokens=40)
    next(pieces)
    assert states[0]() is not None
    pieces.close()
    assert states[0]() is None


def test_B53_pieces_are_whole_characters():
    """Half characters wait, whole ones do not; what really ends in half a character shows that at the end."""
    stream = TextStream(TOKENIZER)
    stream.push([0, 10])
    assert stream.take() == "a"  # sent without waiting for the rest of the next character
    stream.push([11, 1])
    assert stream.take() == "äb"
    stream.push([10])
    assert stream.take() == "" and stream.finish() == "\N{REPLACEMENT CHARACTER}"
    import random

    rng = random.Random(0)
    for _ in range(300):
        batches = [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, 9))] for _ in range(rng.randrange(1, 14))]
        every = [token for batch in batches for token in batch]
        assert "".join(stream_text(TOKENIZER, batches)) == TOKENIZER.decode(every)


def test_B26_end_tokens_are_the_union_of_all_sources():
    class Names:
        def __init__(self, value):
            self.eos_token_id = value

    assert end_tokens(Names(3), Names([4, 5]), Names(None), object()) == {3, 4, 5}
