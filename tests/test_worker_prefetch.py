"""The worker's prefetch, backoff, and log of outages."""

import random
from collections import Counter
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairturn.model import CLAIM_DOCUMENTS_MAX, RETRY_US_MAX, Settings
from fairturn.worker.backoff import Backoff, Outage, check, delay_us
from fairturn.worker.messages import FRAME_BYTES_MAX, FrameDecoder, FrameError, pack
from fairturn.worker.output import DOCUMENT_BYTES_MAX, LINE_BYTES_MAX, LineSplitter
from fairturn.worker.prefetch import AHEAD_S, PrefetchPolicy

SECOND_US = 1_000_000


# ── Claiming ahead ───────────────────────────────────────────────────────────────────────────────


def test_an_unknown_handler_gets_only_what_can_start_at_once() -> None:
    pace = PrefetchPolicy()

    assert pace.wanted(free=4, unstarted=0) == 4
    pace.add(0.000_1, 1)
    assert pace.wanted(free=2, unstarted=0) == 2


def test_a_fast_handler_gets_50_ms_of_work_ahead() -> None:
    pace = PrefetchPolicy(refill=0.0)
    pace.add(0.1, 100)  # 1 ms each

    assert pace.ahead == 50
    assert pace.wanted(free=4, unstarted=0) == 54
    assert pace.wanted(free=0, unstarted=1) == 0


def test_one_half_of_the_work_ahead_is_fetched_while_the_other_is_worked_on() -> None:
    pace = PrefetchPolicy(refill=0.5)
    pace.add(0.1, 100)  # 1 ms each, so that 50 may wait

    assert pace.wanted(free=4, unstarted=0) == 29
    assert pace.wanted(free=4, unstarted=29) == 25  # four of them start at once
    assert pace.wanted(free=0, unstarted=25) == 25
    assert pace.wanted(free=0, unstarted=26) == 0


def test_a_slow_handler_gets_nothing_ahead() -> None:
    pace = PrefetchPolicy()
    pace.add(10, 100)  # 100 ms each

    assert pace.wanted(free=1, unstarted=0) == 1
    assert pace.wanted(free=0, unstarted=0) == 0


def test_one_document_of_50_ms_is_claimed_ahead() -> None:
    pace = PrefetchPolicy()
    pace.add(0.0503 * 10, 10)

    assert pace.ahead == 1


def test_after_one_slow_document_nothing_is_claimed_ahead_for_a_while() -> None:
    pace = PrefetchPolicy()
    pace.add(0.1, 1_000)
    pace.add(2.0)

    assert pace.ahead == 0
    for _ in range(200):
        pace.add(0.000_1)
    assert pace.ahead > 0


def test_a_handler_that_was_forgotten_is_unknown_again() -> None:
    pace = PrefetchPolicy()
    pace.add(0.1, 1_000)

    pace.forget()

    assert pace.ahead == 0


@given(
    st.lists(st.tuples(st.floats(0, 10), st.integers(1, 1_000)), max_size=30),
    st.integers(0, 100),
    st.integers(0, 2_000),
)
def test_work_ahead_is_never_more_than_measured(
    measured: list[tuple[float, int]], free: int, unstarted: int
) -> None:
    pace = PrefetchPolicy()
    for seconds, documents in measured:
        pace.add(seconds, documents)

    wanted = pace.wanted(free, unstarted)

    assert 0 <= wanted <= CLAIM_DOCUMENTS_MAX
    ahead = max(0, wanted - free)
    assert ahead * pace.mean_s <= AHEAD_S + pace.mean_s / 9


# ── Trying again ─────────────────────────────────────────────────────────────────────────────────


def test_delays_grow_up_to_a_limit() -> None:
    backoff = Backoff(first_s=5, factor=2, most_s=60)

    floors = [delay_us(backoff, attempt, lambda: 0.0) / SECOND_US for attempt in range(1, 8)]

    assert floors == [5, 10, 20, 40, 60, 60, 60]
    assert delay_us(backoff, 10_000, lambda: 0.0) == 60 * SECOND_US


@given(
    attempt=st.integers(1, 100),
    chance=st.floats(0, 1),
    after_s=st.none() | st.floats(allow_nan=True, allow_infinity=True),
)
def test_chance_is_added_above_the_floor_and_never_goes_below_it(
    attempt: int, chance: float, after_s: float | None
) -> None:
    floor = delay_us(Backoff(), attempt, lambda: 0.0, after_s)

    delay = delay_us(Backoff(), attempt, lambda: chance, after_s)

    assert 0 <= floor <= delay <= min(RETRY_US_MAX, 1.5 * floor + 1)


@given(
    attempt=st.integers(1, 100),
    chance=st.floats(0, 1),
    after_s=st.floats(allow_nan=True, allow_infinity=True),
)
def test_a_handlers_own_delay_never_shortens_the_backoff(
    attempt: int, chance: float, after_s: float
) -> None:
    own = delay_us(Backoff(), attempt, lambda: chance, after_s)

    assert own >= delay_us(Backoff(), attempt, lambda: chance)


def test_a_handlers_own_delay_is_kept_if_it_is_longer_than_the_backoff() -> None:
    assert delay_us(Backoff(), 1, lambda: 0.0, 100) == 100 * SECOND_US
    assert delay_us(Backoff(first_s=0), 1, lambda: 1.0, 10) == 15 * SECOND_US
    assert delay_us(Backoff(), 5, lambda: 1.0, 1e12) == RETRY_US_MAX


def test_the_default_attempts_outlast_an_outage_of_an_hour() -> None:
    delays = [delay_us(Backoff(), n, lambda: 0.0) for n in range(1, Settings().attempts_max)]

    assert [delay / SECOND_US for delay in delays] == [20, 140, 980, 3_600]
    assert sum(delays) > 75 * 60 * SECOND_US


def test_what_failed_together_comes_back_apart() -> None:
    chance = random.Random(7).random

    due = Counter(delay_us(Backoff(first_s=10), 1, chance) // SECOND_US for _ in range(10_000))

    assert set(due) == {10, 11, 12, 13, 14}
    assert max(due.values()) <= 2 * 10_000 / len(due)


@pytest.mark.parametrize(
    "backoff", [Backoff(first_s=-1), Backoff(factor=0.5), Backoff(most_s=inf), Backoff(first_s=inf)]
)
def test_delays_that_are_none_are_refused(backoff: Backoff) -> None:
    with pytest.raises(ValueError, match="must be a number of at least"):
        check(backoff)


# ── Messages ─────────────────────────────────────────────────────────────────────────────────────

messages = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(st.lists(messages, max_size=6), st.randoms(use_true_random=False))
def test_messages_come_out_as_they_went_in_however_they_are_cut(
    sent: list[object], chance: random.Random
) -> None:
    stream = b"".join(pack(message) for message in sent)
    frames = FrameDecoder()
    heard: list[object] = []

    while stream:
        cut = chance.randint(1, 12)
        heard += frames.feed(stream[:cut])
        stream = stream[cut:]

    assert heard == sent


@pytest.mark.parametrize(
    "nonsense",
    [
        b"\xff\xff\xff\xff",
        (FRAME_BYTES_MAX + 1).to_bytes(4, "big"),
        b"\0\0\0\x01{",
        b"\0\0\0\x02\xff\xfe",
        (100_000).to_bytes(4, "big") + b"[" * 100_000,
    ],
    ids=["no length", "too long", "no JSON", "no text", "too deep"],
)
def test_what_is_no_message_is_refused(nonsense: bytes) -> None:
    with pytest.raises(FrameError):
        FrameDecoder().feed(nonsense)


# ── What handlers print ──────────────────────────────────────────────────────────────────────────


def printed(pieces: list[bytes]) -> list[str]:
    heard: list[str] = []
    lines = LineSplitter(lambda document, line: heard.append(line))
    for piece in pieces:
        lines.feed("d", piece)
    lines.end("d")
    return heard


def test_lines_are_put_together_from_pieces() -> None:
    assert printed([b"one\ntw", b"o\nthr", b"ee"]) == ["one", "two", "three"]


def test_long_lines_are_cut() -> None:
    (line,) = printed([b"x" * 5_000 + b"\n"])

    assert line == "x" * LINE_BYTES_MAX + " … (3,000 more bytes)"


@given(st.lists(st.binary(max_size=5_000).map(lambda b: b * 20), max_size=20))
def test_a_document_prints_so_much_and_no_more(pieces: list[bytes]) -> None:
    heard = printed(pieces)

    assert sum(len(line.encode()) for line in heard) < 4 * DOCUMENT_BYTES_MAX
    assert not [line for line in heard if any(c < " " and c != "\t" for c in line)]


def test_after_one_document_the_next_may_print_again() -> None:
    heard: list[str] = []
    lines = LineSplitter(lambda document, line: heard.append(f"{document}: {line}"))
    lines.feed("a", b"x\n" * DOCUMENT_BYTES_MAX)
    lines.end("a")

    lines.feed("b", b"here\n")

    assert heard[-1] == "b: here"
    assert heard[-2].startswith("a: (")


# ── A store that does not answer ─────────────────────────────────────────────────────────────────


def test_a_store_that_does_not_answer_is_asked_more_and_more_rarely_until_it_does() -> None:
    outage = Outage(lambda: 0.0)

    pauses = [outage.go_on(now_s=100.0 + n) for n in range(10)]

    assert pauses[:3] == [0.05, 0.1, 0.2]
    assert pauses[-2:] == [5.0, 5.0]
    assert outage.until_s == 114.0
    assert outage.end(now_s=119.0, begun_s=108.0) is None  # it was answered before the last failure
    assert outage.end(now_s=120.0, begun_s=110.0) == 20.0
    assert outage.end(now_s=121.0, begun_s=120.0) is None
    assert outage.go_on(now_s=130.0) == 0.05
