"""Now: who is next, who is worked for, how long documents wait."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fastapi import APIRouter, Request
from markupsafe import Markup
from starlette.responses import Response

from fairturn.clock import SECOND_US
from fairturn.dashboard.charts import Note, Series, waits_chart
from fairturn.dashboard.comparison import Comparison
from fairturn.dashboard.customer_index import Directory
from fairturn.dashboard.documents import Place, place_of
from fairturn.dashboard.language import Tongue
from fairturn.dashboard.renderer import PageRoute, render, see_other
from fairturn.dashboard.samples import RECENT_US, Lately, Share, Trail, quantile
from fairturn.dashboard.visitors import Known, Visitor
from fairturn.errors import NotFound
from fairturn.explain.analysis import Explanation
from fairturn.explain.sentences import tell
from fairturn.model import Customer, Document, Filter, Lanes, State
from fairturn.priority import Count, Rule
from fairturn.queue import Queue
from fairturn.service.administration import workers_of
from fairturn.service.shapes import Worker
from fairturn.stores.contract import Store

CHIPS = 24
RUNNING_READ, RUNNING_SHOWN = 200, 8
WORKERS_SHOWN = 12
CUSTOMERS_SHOWN = 8
LATE_US = 600 * SECOND_US
EXAMPLE_US = SECOND_US

router = APIRouter(route_class=PageRoute, include_in_schema=False)


class Lane(NamedTuple):
    """One priority: how many wait, who is next, since when the oldest waits."""

    priority: int
    waiting: int
    chips: Sequence[Document]  # the next one first
    more: int
    since: int | None


class Row(NamedTuple):
    """A customer in a table."""

    customer: Customer
    next_priority: int
    share: Share | None
    wait_p50: int | None
    wait_p95: int | None
    resets_at: int | None


class Load(NamedTuple):
    """A worker: how many documents it runs, and how many it can run at the same time."""

    name: str
    busy: int
    slots: int


class Why(NamedTuple):
    """Why one document waits: what is before it, and sentences."""

    document: Document
    place: Place
    sentences: list[str]


class Example:
    """The document whose wait is explained: asked about once a second, however many look."""

    def __init__(self) -> None:
        self._at: int | None = None
        self._found: tuple[Document, Explanation] | None = None

    def found(
        self, queue: Queue, lanes: Sequence[Lane], now: int
    ) -> tuple[Document, Explanation] | None:
        """One that others slip past, in the last lane that has any."""
        chips = next((lane.chips for lane in reversed(lanes) if lane.chips), ())
        if not chips:
            return None
        if self._at is None or now - self._at >= EXAMPLE_US:
            document = chips[:6][-1]
            try:
                self._found = document, queue.explain(document.id)
            except NotFound:
                self._found = None  # it was deleted meanwhile
            self._at = now
        return self._found


@router.get("/")
def show_now(request: Request, visitor: Known) -> Response:
    """The page for operators; a customer goes to its own."""
    if not visitor.oversees:
        return see_other(request, "/mine")
    page = visitor.page
    return now_page(
        request, visitor, page.trail, page.directory, page.example, comparison=page.comparison
    )


def now_page(
    request: Request,
    visitor: Visitor,
    trail: Trail,
    directory: Directory,
    example: Example,
    *,
    comparison: Comparison | None,
    demo: bool = False,
) -> Response:
    """The page of a queue: the real one, or that of the demo."""
    service = visitor.service
    store, now = service.queue.store, service.clock.now()
    summary, lanes = store.summary(), store.lanes(size=CHIPS)
    running = store.find(Filter(states=(State.RUNNING,)), size=RUNNING_READ).documents
    workers = [worker for worker in workers_of(service) if worker.alive]
    loads, slots = _loads(workers, running), sum(worker.slots for worker in workers)
    unread = max(0, summary.running - len(running))
    lately, listed = trail.lately(), directory.listed()
    rule = service.queue.settings.rule
    if listed is None:
        paused = tuple(c.name for c in lately.customers.values() if c.settings.paused)
    else:
        paused = listed.paused
    # Of a demo it is known who is quiet; else it is who had little of the work.
    compared = None if comparison is None else comparison.with_measured(lately)
    quiet_p99 = quantile(lately.quiet_waits(), 0.99) if compared is None else compared.fair_us
    drawn = lately.drawn()
    foremost = _foremost(lately, store)
    oldest = lately.oldest if summary.waiting else {}
    shown = _lanes(lanes, summary.waiting_by_priority, oldest)
    empty = not (summary.waiting or summary.running or summary.delayed)
    if empty:
        empty = not store.find(Filter(), size=1).documents
    return render(
        request,
        visitor,
        "now.html",
        summary=summary,
        lanes=shown,
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
        why=None if empty else _why(visitor, example, shown),
        rows=[row_of(c, lately, rule, now) for c in foremost],
        minutes=5 if drawn[-1].at - drawn[0].at < RECENT_US else 30,
        chart=waits_drawn(lately, visitor.tongue),
        chart_rows=_chart_rows(lately),
        empty=empty,
        demo=demo,
        compared=compared,
        address=str(request.base_url).rstrip("/"),
    )


def _lanes(lanes: Lanes, waiting: Sequence[int], oldest: Mapping[int, int]) -> list[Lane]:
    return [
        Lane(
            priority,
            waiting[priority - 1],
            upcoming,
            max(0, waiting[priority - 1] - len(upcoming)),
            oldest.get(priority) if waiting[priority - 1] else None,
        )
        for priority, upcoming in enumerate(lanes.upcoming, 1)
    ]


def _loads(workers: Sequence[Worker], running: Sequence[Document]) -> list[Load]:
    """The workers that are alive, the busiest first. Documents that a worker has claimed ahead
    have the state `running` too; only those in a slot are counted."""
    claimed = Counter(document.worker for document in running)
    loads = [Load(w.name, min(w.slots, claimed[w.name]), w.slots) for w in workers]
    return sorted(loads, key=lambda load: (-load.busy, load.name))


def _why(visitor: Visitor, example: Example, lanes: Sequence[Lane]) -> Why | None:
    found = example.found(visitor.service.queue, lanes, visitor.service.clock.now())
    if found is None:
        return None
    document, explained = found
    place = place_of(explained)
    if place is None:
        return None
    return Why(document, place, tell(explained, visitor.tongue.told_in)[1:3])


def row_of(customer: Customer, lately: Lately, rule: Rule, now: int) -> Row:
    """A customer with what was seen of it lately."""
    waits = lately.waits.get(customer.name, ())
    return standing_of(customer, rule, now, waits=waits, share=lately.shares.get(customer.name))


def standing_of(
    customer: Customer, rule: Rule, now: int, *, waits: Sequence[int], share: Share | None = None
) -> Row:
    """A customer with its count as the next document would find it."""
    updated_at = customer.count_updated_at
    last = None if updated_at is None else Count(customer.count, updated_at)
    resets_at = None if last is None else rule.resets_at(last)
    return Row(
        customer=customer,
        next_priority=rule.priority(rule.check(last, now).value),
        share=share,
        wait_p50=quantile(waits, 0.5),
        wait_p95=quantile(waits, 0.95),
        resets_at=resets_at if resets_at is not None and resets_at >= now else None,
    )


def _foremost(lately: Lately, store: Store) -> list[Customer]:
    """Those with most waiting, then most work, as they are now."""

    def key(customer: Customer) -> tuple[int, float, str]:
        share = lately.shares.get(customer.name)
        return (-customer.waiting, -(share.share if share else 0.0), customer.name)

    names = [c.name for c in sorted(lately.customers.values(), key=key)[:CUSTOMERS_SHOWN]]
    return sorted(store.customers(names=names).customers, key=key) if names else []


def waits_drawn(lately: Lately, tongue: Tongue) -> Markup | None:
    """The chart of waits; None if there is nothing to draw yet."""
    buckets = lately.drawn()
    series = [
        Series("first-come", tongue.say("chart_first_come"), [b.first_come_us for b in buckets]),
        Series("oldest", tongue.say("chart_oldest"), [b.oldest_us for b in buckets]),
        Series("busy", tongue.say("chart_busy"), [quantile(b.busy, 0.99) for b in buckets]),
        Series("quiet", tongue.say("chart_quiet"), [quantile(b.quiet, 0.99) for b in buckets]),
    ]
    thin = [
        Series("busy thin", "", [quantile(b.busy, 0.5) for b in buckets]),
        Series("quiet thin", "", [quantile(b.quiet, 0.5) for b in buckets]),
    ]
    if not any(value is not None for line in series for value in line.values):
        return None
    notes = [
        Note(mark.at, tongue.say(mark.kind, customer=mark.who, n=mark.documents))
        for mark in lately.marks[-3:]
    ]
    return waits_chart([b.at for b in buckets], [*thin, *series], notes, tongue.number(0.5)[1])


def _chart_rows(lately: Lately) -> list[tuple[int, list[int | None]]]:
    """What the chart shows, and more: by half minute, the newest first."""
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
