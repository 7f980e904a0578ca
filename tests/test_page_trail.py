"""The page's history and charts: waits, shares, the pace, lists."""

from collections.abc import Callable
from xml.etree import ElementTree

import pytest

from fairturn import Queue, Submission
from fairturn.clock import SECOND_US, ManualClock, to_datetime
from fairturn.dashboard.customer_index import KEPT_US, CustomerIndex
from fairturn.dashboard.samples import BUCKETS, DUMP, RECENT_US, ActivitySampler, quantile
from fairturn.dashboard.whatif import WhatIfMode, WhatIfRuns, WhatIfSettings
from fairturn.model import PAGE_MAX, Completed, Failed, Outcome
from fairturn.priority import BOUNDS, Reset
from fairturn.simulator.charts.series import Note, Series, count_chart, waits_chart
from tests.wait import wait_until

START = 1_800_000_000 * SECOND_US
LEASE_US = 3_600 * SECOND_US


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START)


@pytest.fixture
def queue(clock: ManualClock) -> Queue:
    return Queue(":memory:", clock=clock)


@pytest.fixture
def trail(queue: Queue, clock: ManualClock) -> ActivitySampler:
    return ActivitySampler(queue.store, clock)


def send(queue: Queue, customer: str, n: int = 1) -> None:
    queue.submit_many([Submission(customer=customer, payload=1) for _ in range(n)])


def work_through(
    queue: Queue,
    clock: ManualClock,
    trail: ActivitySampler,
    seconds: int,
    each: Callable[[int], None],
) -> None:
    """Process one document a second, and record each state."""
    outcomes: list[Outcome] = []
    for second in range(seconds):
        each(second)
        claimed = queue.store.claim(1, worker="w", lease_us=LEASE_US, outcomes=outcomes).claims
        trail.sample()
        outcomes = [Completed(claim.fence) for claim in claimed]
        clock.advance(1)


def test_quiet_customers_are_told_from_busy_ones_by_their_share_of_the_work(
    queue: Queue, clock: ManualClock, trail: ActivitySampler
) -> None:
    send(queue, "busy", 300)

    def now_and_then(second: int) -> None:
        if second % 20 == 10:
            send(queue, "quiet")

    work_through(queue, clock, trail, 120, now_and_then)

    lately = trail.lately()
    assert lately.shares["busy"].share > 0.9
    assert lately.shares["quiet"].quiet
    assert not lately.shares["busy"].quiet
    assert lately.shares["busy"].fair == 0.5
    longest_quiet = quantile(lately.quiet_waits(), 1.0)
    assert longest_quiet is not None
    assert longest_quiet <= 2 * SECOND_US
    assert max(lately.waits["busy"]) > 60 * SECOND_US


def test_weights_say_what_is_fair(queue: Queue, clock: ManualClock, trail: ActivitySampler) -> None:
    queue.set_customer("heavy", weight=3)
    send(queue, "heavy", 2)
    send(queue, "light", 2)

    work_through(queue, clock, trail, 4, lambda second: None)

    assert trail.lately().shares["heavy"].fair == 0.75


def test_the_pace_counts_what_ended_and_first_come_is_what_waits_at_that_pace(
    queue: Queue, clock: ManualClock, trail: ActivitySampler
) -> None:
    send(queue, "acme", 200)

    work_through(queue, clock, trail, 90, lambda second: None)

    lately = trail.lately()
    assert lately.completed_per_minute == pytest.approx(60, abs=1)
    assert lately.first_come_us == pytest.approx(111 * SECOND_US, rel=0.05)


def fail(queue: Queue, n: int, retry_in_us: int | None = None) -> None:
    claims = queue.store.claim(n, worker="w", lease_us=LEASE_US).claims
    queue.store.finish([Failed(claim.fence, "torn", retry_in_us) for claim in claims])


def test_attempts_that_fail_free_slots_and_are_not_counted_as_completed(
    queue: Queue, clock: ManualClock, trail: ActivitySampler
) -> None:
    send(queue, "acme", 200)
    for _ in range(90):
        fail(queue, 1)
        trail.sample()
        clock.advance(1)

    assert trail.lately().completed_per_minute == 0
    assert trail.lately().first_come_us == pytest.approx(110 * SECOND_US, rel=0.05)


def test_failures_are_dead_and_retrying_documents_until_they_are_no_more(
    queue: Queue, clock: ManualClock, trail: ActivitySampler
) -> None:
    queue.submit("later", payload=1, due_at=to_datetime(START + 7_200 * SECOND_US))
    send(queue, "acme", 5)
    fail(queue, 2)
    fail(queue, 3, retry_in_us=3_600 * SECOND_US)
    trail.sample()

    seen = trail.lately().failures
    assert seen[:-1] == (2, 2, 3, True, True)
    assert seen.last is not None
    assert seen.last.error == "torn"

    clock.advance(RECENT_US / SECOND_US + 1)
    trail.sample()
    assert trail.lately().failures[:3] == (2, 0, 3), "they are dead and died longer ago"
    for document in queue.iterate(states=["dead", "delayed"]):
        if document.state == "dead":
            queue.retry(document.id)
        else:
            queue.cancel(document.id)
    trail.sample()
    assert trail.lately().failures == (0, 0, 0, True, True, None)


def test_documents_that_died_before_a_new_epoch_are_counted(
    queue: Queue, trail: ActivitySampler
) -> None:
    send(queue, "acme", 2)
    fail(queue, 1)
    queue.store.begin_epoch()
    send(queue, "acme", 1)
    trail.sample()

    assert trail.lately().failures[:2] == (1, 1)


def test_more_failures_than_a_page_are_a_lower_bound(queue: Queue, trail: ActivitySampler) -> None:
    for retry_in_us in (None, 3_600 * SECOND_US):
        send(queue, "acme", PAGE_MAX + 1)
        fail(queue, PAGE_MAX, retry_in_us)
        fail(queue, 1, retry_in_us)
    trail.sample()

    assert trail.lately().failures[:5] == (PAGE_MAX, PAGE_MAX, PAGE_MAX, False, False)


def test_a_dump_is_marked_with_how_many_documents_it_was(
    queue: Queue, clock: ManualClock, trail: ActivitySampler
) -> None:
    send(queue, "quiet")
    trail.sample()
    clock.advance(1)
    send(queue, "dumper", 2_500)
    trail.sample()

    (mark,) = trail.lately().marks

    assert (mark.kind, mark.name, mark.documents) == ("chart_dump", "dumper", 2_500)
    assert DUMP <= 2_500


def test_a_pause_and_a_worker_that_is_gone_are_marked(
    queue: Queue, clock: ManualClock, trail: ActivitySampler
) -> None:
    send(queue, "acme", 2)
    queue.store.sign_on("w", 4)
    trail.sample()
    queue.set_customer("acme", paused=True)
    clock.advance(10)
    trail.sample()
    clock.advance(10)
    trail.sample()

    marks = trail.lately().marks

    assert [(mark.kind, mark.name) for mark in marks] == [
        ("chart_paused", "acme"),
        ("chart_lost", "w"),
    ]


def test_half_an_hour_is_remembered_and_no_more(
    queue: Queue, clock: ManualClock, trail: ActivitySampler
) -> None:
    send(queue, "acme", 3)
    work_through(queue, clock, trail, 5, lambda second: None)
    assert len(trail.lately().drawn()) == 60
    clock.advance(1_000)
    trail.sample()
    assert any(bucket.seen for bucket in trail.lately().drawn())
    assert len(trail.lately().drawn()) == 60
    clock.advance(1_000)
    trail.sample()

    lately = trail.lately()
    assert len(lately.buckets) == BUCKETS
    assert not any(bucket.quiet or bucket.busy for bucket in lately.buckets)
    assert all(not waits for waits in lately.waits.values())
    assert RECENT_US < 1_000 * SECOND_US


def test_a_queue_that_is_empty_can_be_looked_at_again(
    queue: Queue, clock: ManualClock, trail: ActivitySampler
) -> None:
    for _ in range(3):
        trail.sample()
        clock.advance(1)

    assert trail.lately().shares == {}


def test_a_document_is_counted_once_however_often_it_is_seen(
    queue: Queue, clock: ManualClock, trail: ActivitySampler
) -> None:
    send(queue, "acme")
    queue.store.claim(1, worker="w", lease_us=LEASE_US)
    for _ in range(5):
        clock.advance(1)
        trail.sample()

    assert list(trail.lately().waits["acme"]) == [0]


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [([], 0.5, None), ([7], 0.99, 7), ([1, 2, 3, 4], 0.5, 3), (list(range(100)), 0.95, 95)],
)
def test_quantiles_are_values_that_there_are(
    values: list[int], share: float, expected: int | None
) -> None:
    assert quantile(values, share) == expected


# ── All customers ────────────────────────────────────────────────────────────────────────────────


def test_few_customers_are_read_anew_and_many_in_the_background(
    queue: Queue, clock: ManualClock
) -> None:
    directory = CustomerIndex(queue.store, clock)
    send(queue, "a")
    listed = directory.listed()
    assert listed is not None
    assert [c.name for c in listed.customers] == ["a"]
    queue.submit_many([Submission(customer=f"c{n:04}", payload=1) for n in range(1_500)])
    clock.advance(2)

    assert directory.listed() is listed
    wait_until(lambda: directory.listed() is not listed, "all customers are read")

    many = directory.listed()
    assert many is not None
    assert len(many.customers) == 1_501
    clock.advance(KEPT_US / SECOND_US - 3)
    assert directory.listed() is many


# ── Charts ───────────────────────────────────────────────────────────────────────────────────────

MOMENTS = [START + n * 30 * SECOND_US for n in range(60)]


def parsed(drawing: str) -> ElementTree.Element:
    return ElementTree.fromstring(drawing.replace("<svg", "<svg xmlns:x='x'", 1))


def test_a_chart_is_well_formed_whatever_a_name_has_in_it() -> None:
    nasty = "<script>alert(1)</script> & \"'"
    series = [Series("quiet", nasty, [None, SECOND_US, None] * 20)]

    drawing = waits_chart(MOMENTS, series, [Note(MOMENTS[5], nasty)], ",")

    found = parsed(drawing)
    assert [text.text for text in found.iter("text")].count(nasty) == 2
    assert "<script" not in drawing


def test_a_longer_wait_is_drawn_higher_and_names_do_not_overlap() -> None:
    series = [
        Series(kind, kind, [wait] * 60)
        for kind, wait in (("a", 10**6), ("b", 10**6 + 1), ("c", 3_600 * 10**6))
    ]

    found = parsed(waits_chart(MOMENTS, series, [], "."))

    heights = {
        text.text: float(text.get("y") or 0)
        for text in found.iter("text")
        if "name" in (text.get("class") or "")
    }
    assert heights["c"] < heights["a"]
    assert abs(heights["a"] - heights["b"]) >= 14


def test_the_count_is_a_stair_with_a_line_at_each_reset() -> None:
    points = [(START + n * SECOND_US, -(n % 10)) for n in range(30)]

    found = parsed(count_chart(points, BOUNDS, START + 40 * SECOND_US))

    assert sum(path.get("class") == "note" for path in found.iter("path")) == 2


# ── What if ──────────────────────────────────────────────────────────────────────────────────────


def test_a_simulation_without_history_says_so_and_changes_nothing(queue: Queue) -> None:
    runs = WhatIfRuns()
    wish = WhatIfSettings(WhatIfMode.FIFO, 2, Reset.IDLE, 1_500.0)

    run = runs.get(runs.begin(queue, wish, wish))

    assert run is not None
    assert run.ended.wait(30)
    assert run.nothing


def test_a_simulation_serves_the_history_both_ways(
    queue: Queue, clock: ManualClock, trail: ActivitySampler
) -> None:
    send(queue, "dumper", 40)
    work_through(queue, clock, trail, 60, lambda s: send(queue, "quiet") if s % 10 == 5 else None)
    fair = WhatIfSettings(WhatIfMode.FAIR, 1, Reset.IDLE, 1_500.0)
    runs = WhatIfRuns()

    run = runs.get(runs.begin(queue, fair, fair._replace(mode=WhatIfMode.FIFO)))

    assert run is not None
    assert run.ended.wait(30)
    assert run.outcome is not None
    quiet = next(group for group in run.outcome.groups if group.name == "quiet")
    assert quiet.after.p99_us > quiet.before.p99_us
    assert run.share == 1.0
