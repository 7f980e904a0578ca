"""The page Now: next documents, running documents, waits."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple

from fastapi import APIRouter, Query, Request
from markupsafe import Markup
from starlette.responses import Response

from fairturn.clock import SECOND_US
from fairturn.dashboard.documents import DocumentPosition, place_of
from fairturn.dashboard.language import PageLanguage
from fairturn.dashboard.outages import BANNERS_MAX, banners_of
from fairturn.dashboard.renderer import PageRoute, render, see_other
from fairturn.dashboard.samples import (
    RECENT_US,
    RecentActivity,
    WorkShare,
    quantile,
)
from fairturn.dashboard.visitors import Known, Visitor
from fairturn.errors import NotFound
from fairturn.explain.analysis import Explanation
from fairturn.explain.sentences import tell
from fairturn.explain.snapshot import waiting_since
from fairturn.model import (
    KIND_BYTES_MAX,
    Customer,
    CustomerSummary,
    Document,
    Filter,
    Kind,
    State,
    Summary,
)
from fairturn.priority import Rule
from fairturn.queue import Queue
from fairturn.service.administration import workers_of
from fairturn.service.problems import refusing_misuse
from fairturn.service.shapes import WorkerJson
from fairturn.simulator.charts.series import Note, Series, waits_chart
from fairturn.stores.contract import QueryStore

CHIPS = 24
RUNNING_READ, RUNNING_SHOWN = 200, 8
WORKERS_SHOWN = 12
CUSTOMERS_SHOWN = 8
LATE_US = 600 * SECOND_US
EXAMPLE_US = SECOND_US

router = APIRouter(route_class=PageRoute, include_in_schema=False)


class LaneRow(NamedTuple):
    """One priority."""

    priority: int
    waiting: int
    chips: Sequence[Document]  # the next documents, in order
    more: int
    since: int | None  # when the oldest began to wait
    is_exact: bool = True  # whether no more documents than `waiting` wait


class CustomerRow(NamedTuple):
    customer: Customer
    next_priority: int
    share: WorkShare | None
    wait_p50: int | None
    wait_p95: int | None
    resets_at: int | None


class WorkerLoad(NamedTuple):
    name: str
    busy: int
    slots: int
    kinds: Sequence[str] | None  # None: every kind


class WaitExplanation(NamedTuple):
    document: Document
    place: DocumentPosition
    sentences: list[str]


class ExampleCache:
    """Caches the explained document of each kind, and of all, for a second, for all visitors."""

    def __init__(self) -> None:
        self._found: dict[str | None, tuple[int, tuple[Document, Explanation] | None]] = {}

    def found(
        self, queue: Queue, lanes: Sequence[LaneRow], kind: str | None, now: int
    ) -> tuple[Document, Explanation] | None:
        """Return the sixth document (or the last) of the lowest priority that has any."""
        chips = next((lane.chips for lane in reversed(lanes) if lane.chips), ())
        if not chips:
            return None
        at, found = self._found.get(kind, (None, None))
        if at is None or now - at >= EXAMPLE_US:
            document = chips[:6][-1]
            try:
                found = document, queue.explain(document.id)
            except NotFound:
                found = None  # deleted since the lanes were read
            self._found[kind] = now, found
        return found


@router.get("/")
def show_now(
    request: Request,
    visitor: Known,
    kind: Annotated[str, Query(max_length=KIND_BYTES_MAX)] = "",
) -> Response:
    if not visitor.oversees:
        return see_other(request, "/mine")
    return now_page(request, visitor, kind=kind)


def now_page(request: Request, visitor: Visitor, *, kind: str = "", demo: bool = False) -> Response:
    """Render the page for the queue of the visitor: the real one or that of the demo. With `kind`,
    the lanes are those of one kind of work."""
    service, page = visitor.service, visitor.page
    store, now = service.queue.queries, service.clock.now()
    with refusing_misuse():
        chosen = service.queue.kind(kind) if kind else None
    summary = store.summary()
    running = store.find(Filter(states=(State.RUNNING,)), size=RUNNING_READ).documents
    workers = [worker for worker in workers_of(service) if worker.alive]
    loads, slots = _loads(workers, running), sum(worker.slots for worker in workers)
    unread = max(0, summary.running - len(running))
    lately, listed = page.trail.lately(), page.directory.listed()
    rule = service.queue.settings.rule
    if listed is None:
        paused = tuple(c.name for c in lately.customers.values() if c.settings.paused)
    else:
        paused = listed.paused
    # The quiet customers of a demo are known; otherwise they are those below their fair share.
    compared = None if page.comparison is None else page.comparison.with_measured(lately)
    quiet_p99 = quantile(lately.quiet_waits(), 0.99) if compared is None else compared.fair_us
    drawn = lately.drawn()
    foremost = _foremost(lately, store)
    oldest = lately.oldest if summary.waiting else {}
    shown = _lanes(store, summary, oldest) if chosen is None else _lanes_of_kind(store, chosen)
    empty = not (summary.waiting or summary.running or summary.delayed)
    if empty:
        empty = not store.find(Filter(), size=1).documents
    return render(
        request,
        visitor,
        "now.html",
        summary=summary,
        lanes=shown,
        kind=chosen,
        kinds=lately.kinds,
        chips_max=CHIPS,
        unserved=[each for each in lately.kinds if each.is_unserved and not each.settings.paused],
        held=[each for each in lately.kinds if each.settings.paused],
        outages=banners_of(store.outages()),
        outages_max=BANNERS_MAX,
        running=running[:RUNNING_SHOWN],
        loads=loads[:WORKERS_SHOWN],
        workers=workers,
        busy=min(slots, sum(load.busy for load in loads) + unread) if slots else summary.running,
        slots=slots,
        lately=lately,
        quiet_p99=quiet_p99,
        oldest=min(oldest.values(), default=None),
        oldest_level=min(oldest, key=lambda level: oldest[level], default=None),
        late_us=LATE_US,
        most=foremost[0] if foremost else None,
        served=sum(bool(waits) for waits in lately.waits.values()),
        paused=paused,
        why=None if empty else _why(visitor, shown, chosen),
        rows=[row_of(c, lately, rule, now) for c in foremost],
        minutes=5 if drawn[-1].at - drawn[0].at < RECENT_US else 30,
        chart=waits_drawn(lately, visitor.tongue),
        chart_rows=_chart_rows(lately),
        empty=empty,
        demo=demo,
        compared=compared,
        address=str(request.base_url).rstrip("/"),
    )


def _lanes(store: QueryStore, summary: Summary, oldest: Mapping[int, int]) -> list[LaneRow]:
    waiting = summary.waiting_by_priority
    return [
        LaneRow(
            priority,
            waiting[priority - 1],
            upcoming,
            max(0, waiting[priority - 1] - len(upcoming)),
            oldest.get(priority) if waiting[priority - 1] else None,
        )
        for priority, upcoming in enumerate(store.lanes(size=CHIPS).upcoming, 1)
    ]


def _lanes_of_kind(store: QueryStore, kind: Kind) -> list[LaneRow]:
    """Return the lanes of one kind. A store has no counters by kind and priority, so a lane has the
    documents that are next, and their age if there are no more of them."""
    rows = []
    lanes = store.lanes(size=CHIPS + 1, kind=kind.name)
    for priority, upcoming in enumerate(lanes.upcoming, 1):
        is_exact, chips = len(upcoming) <= CHIPS, upcoming[:CHIPS]
        since = min(map(waiting_since, chips), default=None) if is_exact else None
        rows.append(LaneRow(priority, len(chips), chips, 0, since, is_exact))
    return rows


def _loads(workers: Sequence[WorkerJson], running: Sequence[Document]) -> list[WorkerLoad]:
    """Return the workers, the busiest first. Prefetched documents are `running` too, so that the
    number per worker is capped at its slots."""
    claimed = Counter(document.worker for document in running)
    loads = [WorkerLoad(w.name, min(w.slots, claimed[w.name]), w.slots, w.kinds) for w in workers]
    return sorted(loads, key=lambda load: (-load.busy, load.name))


def _why(visitor: Visitor, lanes: Sequence[LaneRow], kind: Kind | None) -> WaitExplanation | None:
    service = visitor.service
    name = None if kind is None else kind.name
    found = visitor.page.example.found(service.queue, lanes, name, service.clock.now())
    if found is None:
        return None
    document, explained = found
    place = place_of(explained)
    if place is None:
        return None
    return WaitExplanation(document, place, tell(explained, visitor.tongue.name)[1:3])


def row_of(customer: Customer, lately: RecentActivity, rule: Rule, now: int) -> CustomerRow:
    waits = lately.waits.get(customer.name, ())
    return customer_row(customer, rule, now, waits=waits, share=lately.shares.get(customer.name))


def customer_row(
    customer: Customer,
    rule: Rule,
    now: int,
    *,
    waits: Sequence[int],
    share: WorkShare | None = None,
) -> CustomerRow:
    summary = CustomerSummary.of(customer, rule, now)
    return CustomerRow(
        customer=customer,
        next_priority=summary.priority_of_next,
        share=share,
        wait_p50=quantile(waits, 0.5),
        wait_p95=quantile(waits, 0.95),
        resets_at=summary.resets_at_us,
    )


def _foremost(lately: RecentActivity, store: QueryStore) -> list[Customer]:
    """Return the customers with most waiting documents, then with the largest share."""

    def key(customer: Customer) -> tuple[int, float, str]:
        share = lately.shares.get(customer.name)
        return (-customer.waiting, -(share.share if share else 0.0), customer.name)

    names = [c.name for c in sorted(lately.customers.values(), key=key)[:CUSTOMERS_SHOWN]]
    return sorted(store.customers(names=names).customers, key=key) if names else []


def waits_drawn(lately: RecentActivity, tongue: PageLanguage) -> Markup | None:
    """Return the chart of waits; None if there are no samples yet."""
    buckets = lately.drawn()
    series = [
        Series("first-come", tongue.say("first come"), [b.first_come_us for b in buckets]),
        Series("oldest", tongue.say("oldest"), [b.oldest_us for b in buckets]),
        Series("busy", tongue.say("busy p99"), [quantile(b.busy, 0.99) for b in buckets]),
        Series("quiet", tongue.say("quiet p99"), [quantile(b.quiet, 0.99) for b in buckets]),
    ]
    thin = [
        Series("busy thin", "", [quantile(b.busy, 0.5) for b in buckets]),
        Series("quiet thin", "", [quantile(b.quiet, 0.5) for b in buckets]),
    ]
    if not any(value is not None for line in series for value in line.values):
        return None
    notes = [
        Note(mark.at, tongue.label(mark.kind, customer=mark.name, n=mark.documents))
        for mark in lately.marks[-3:]
    ]
    timestamps = [b.at for b in buckets]
    return Markup(waits_chart(timestamps, [*thin, *series], notes, tongue.number(0.5)[1]))


def _chart_rows(lately: RecentActivity) -> list[tuple[int, list[int | None]]]:
    """Return the values of the chart and more percentiles, the newest first."""
    rows = []
    for bucket in reversed(lately.drawn()):
        values = [
            quantile(waits, share)
            for waits in (bucket.quiet, bucket.busy)
            for share in (0.5, 0.95, 0.99)
        ] + [bucket.oldest_us, bucket.first_come_us]
        if any(value is not None for value in values):
            rows.append((bucket.at, values))
    return rows
