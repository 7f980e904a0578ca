"""Recent waits, shares of work and throughput, sampled once a second and held in memory.

A store has no history of waits. Each sample reads the newest documents, the running documents and
the counters of the queue: a bounded number of rows. The running documents at many times are an
unbiased sample of each customer's share of the work.
"""

import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fairturn.clock import SECOND_US, Clock
from fairturn.dashboard.failures import Failures, failures_of
from fairturn.explain.snapshot import ALIVE_US, waiting_since
from fairturn.model import PAGE_MAX, Customer, Document, Filter, Kind, Lanes, State, Summary
from fairturn.queue import kinds_of
from fairturn.stores.contract import QueryStore

BUCKET_US = 5 * SECOND_US
BUCKETS = 360  # half an hour
RECENT_US = 300 * SECOND_US  # window of shares of work and of a customer's waits
PACE_US = 60 * SECOND_US
WAITS_PER_BUCKET_MAX = 500
WAITS_PER_CUSTOMER_MAX = 200
CUSTOMERS_MAX = 1_000  # with waits and shares
SEEN_MAX = 20_000
RUNNING_MAX = 200
MARKS_MAX = 20
PAGES_MAX = 5  # of the newest documents, in one sample
DUMP = 200  # documents of one customer within a bucket that make a mark
_CUSTOMERS_EVERY_US = 3 * SECOND_US
_GAP_US_MAX = 5 * SECOND_US  # between samples; the rest of a longer gap does not count as work


@dataclass(slots=True)
class SampleBucket:
    """The waits of the documents started in a bucket of time, and the state of the queue."""

    at: int
    quiet: list[int] = field(default_factory=list)
    busy: list[int] = field(default_factory=list)
    oldest_us: int | None = None
    first_come_us: int | None = None
    submitted: Counter[str] = field(default_factory=Counter)

    @property
    def seen(self) -> bool:
        return bool(self.quiet or self.busy) or self.oldest_us is not None


_MERGED = 6  # buckets per point, in a chart of half an hour


def _merged(buckets: Sequence[SampleBucket]) -> SampleBucket:
    def most(values: Iterable[int | None]) -> int | None:
        return max((v for v in values if v is not None), default=None)

    return SampleBucket(
        buckets[0].at,
        [wait for b in buckets for wait in b.quiet],
        [wait for b in buckets for wait in b.busy],
        most(b.oldest_us for b in buckets),
        most(b.first_come_us for b in buckets),
    )


class ChartMark(NamedTuple):
    """A mark in a chart: a bulk upload, a paused customer or a lost worker."""

    at: int
    kind: str  # the key of a text
    name: str
    documents: int = 0


class WorkShare(NamedTuple):
    """A customer's share of the work in `RECENT_US`, and its fair share by weight."""

    share: float
    fair: float

    @property
    def quiet(self) -> bool:
        return self.share < self.fair


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentActivity:
    """The samples so far."""

    at: int
    buckets: Sequence[SampleBucket]
    completed_per_minute: float | None
    oldest: Mapping[int, int]  # by priority: when the oldest waiting document began to wait
    shares: Mapping[str, WorkShare]
    waits: Mapping[str, Sequence[int]]
    customers: Mapping[str, Customer]
    marks: Sequence[ChartMark]
    failures: Failures
    kinds: Sequence[Kind]

    @property
    def has_kinds(self) -> bool:
        """Whether the queue has more than the default kind of work."""
        return len(self.kinds) > 1

    @property
    def first_come_us(self) -> int | None:
        return self.buckets[-1].first_come_us

    def drawn(self) -> list[SampleBucket]:
        """Return the points of the chart: the last five minutes, or if there are older samples,
        half an hour in steps of 30 s."""
        few = len(self.buckets) // _MERGED
        if not any(b.seen for b in self.buckets[:-few]):
            return list(self.buckets[-few:])
        begin = len(self.buckets) % _MERGED
        return [
            _merged(self.buckets[n : n + _MERGED]) for n in range(begin, len(self.buckets), _MERGED)
        ]

    def quiet_waits(self) -> list[int]:
        """Return the waits of quiet customers in `RECENT_US`."""
        since = self.at - RECENT_US
        return [wait for bucket in self.buckets if bucket.at >= since for wait in bucket.quiet]


def quantile(values: Sequence[int], share: float) -> int | None:
    """Return a percentile; None if there are no values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


class ActivitySampler:
    """Samples a store.

    It has more than 15 attributes because each measurement has its own window of samples.
    """

    def __init__(self, store: QueryStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._lock = threading.Lock()
        self._buckets: deque[SampleBucket] = deque(maxlen=BUCKETS)
        self._seen: OrderedDict[tuple[str, int | None], None] = OrderedDict()
        self._submitted: OrderedDict[str, None] = OrderedDict()
        self._work: deque[tuple[int, dict[str, int]]] = deque()
        # Timestamps with the numbers of ended attempts and completed documents.
        self._pace: deque[tuple[int, int, int]] = deque()
        self._waits: dict[str, deque[tuple[int, int]]] = defaultdict(
            lambda: deque(maxlen=WAITS_PER_CUSTOMER_MAX)
        )
        self._customers: dict[str, Customer] = {}
        self._customers_at = 0
        self._paused: set[str] = set()
        self._alive: set[str] = set()
        self._marks: deque[ChartMark] = deque(maxlen=MARKS_MAX)
        self._last_at: int | None = None
        self._lately: RecentActivity | None = None

    def lately(self) -> RecentActivity:
        """Return the samples so far; take the first sample if there is none."""
        if self._lately is None:
            self.sample()
        assert self._lately is not None
        return self._lately

    def is_stale(self) -> bool:
        """Return whether the last sample is older than a bucket."""
        return self._last_at is None or self._clock.now() - self._last_at >= BUCKET_US

    def sample(self) -> None:
        """Take a sample. This is thread-safe."""
        store, now = self._store, self._clock.now()
        running = store.find(Filter(states=(State.RUNNING,)), size=RUNNING_MAX).documents
        newest = self._newest()
        summary, lanes = store.summary(), store.lanes(size=1)
        oldest = store.oldest_waiting()
        failures = failures_of(store, summary, newest, since=now - RECENT_US)
        kinds = kinds_of(store, now)
        workers = {seen.worker for seen in store.workers() if now - seen.seen_at <= ALIVE_US}
        with self._lock:
            is_first = self._last_at is None
            self._note_work(running, now)
            self._note_pace(summary, lanes, now)
            self._note_submitted(newest, now)
            self._note_customers(running, newest, now)
            self._note_changes(workers, now, is_first)
            shares = self._shares(now)
            for document in (*running, *newest):
                self._note_wait(document, shares, now)
            self._note_queue(summary, min(oldest.values(), default=None), now)
            self._lately = self._summary(now, shares, oldest, failures, kinds)

    def _newest(self) -> list[Document]:
        """Return the newest documents: a page, and more pages until one was sampled before."""
        documents, after = self._store.find(Filter(), size=PAGE_MAX)
        for _ in range(PAGES_MAX - 1):
            if after is None or self._last_at is None or documents[-1].id in self._submitted:
                break
            more, after = self._store.find(Filter(), after=after, size=PAGE_MAX)
            documents += more
        return documents

    def _note_work(self, running: Sequence[Document], now: int) -> None:
        last, self._last_at = self._last_at, now
        span = min(_GAP_US_MAX, max(0, now - (last or now)))
        worked = Counter(document.customer for document in running)
        if worked:
            self._work.append((now, {name: n * max(1, span) for name, n in worked.items()}))
        while self._work and self._work[0][0] < now - RECENT_US:
            self._work.popleft()

    def _note_pace(self, summary: Summary, lanes: Lanes, now: int) -> None:
        ended = lanes.started - summary.running
        if self._pace and ended < self._pace[-1][1]:
            self._pace.clear()  # the counters were reset
        self._pace.append((now, ended, summary.completed))
        while len(self._pace) > 2 and self._pace[1][0] <= now - PACE_US:
            self._pace.popleft()

    def _note_submitted(self, newest: Sequence[Document], now: int) -> None:
        for document in newest:
            if document.id in self._submitted:
                continue
            self._submitted[document.id] = None
            bucket = self._bucket(document.submitted_at_us, now)
            if bucket is not None:
                bucket.submitted[document.customer] += 1
        _evict(self._submitted, SEEN_MAX)

    def _note_customers(
        self, running: Sequence[Document], newest: Sequence[Document], now: int
    ) -> None:
        """Read the active customers, at most `CUSTOMERS_MAX`."""
        if self._customers and now - self._customers_at < _CUSTOMERS_EVERY_US:
            return
        self._customers_at = now
        lately = [d.customer for d in newest if d.submitted_at_us >= now - RECENT_US]
        names = dict.fromkeys([d.customer for d in running])
        names.update(dict.fromkeys(name for _, worked in self._work for name in worked))
        names.update(dict.fromkeys(lately))
        names.update(dict.fromkeys(n for n, c in self._customers.items() if c.waiting))
        active = list(names)[:CUSTOMERS_MAX]
        found = self._store.customers(names=active, size=CUSTOMERS_MAX).customers if active else []
        self._customers = {customer.name: customer for customer in found}
        for name in [name for name in self._waits if name not in self._customers]:
            del self._waits[name]

    def _note_changes(self, workers: set[str], now: int, is_first: bool) -> None:
        """Add chart marks for customers that were paused and workers that were lost since the
        previous sample."""
        paused = {name for name, c in self._customers.items() if c.settings.paused}
        if not is_first:
            self._marks += (
                ChartMark(now, "chart_paused", n) for n in sorted(paused - self._paused)
            )
            self._marks += (ChartMark(now, "chart_lost", n) for n in sorted(self._alive - workers))
        self._paused, self._alive = paused, workers

    def _shares(self, now: int) -> dict[str, WorkShare]:
        worked: Counter[str] = Counter()
        for _, by_customer in self._work:
            worked.update(by_customer)
        total = sum(worked.values())
        # Customers with work that are not read yet count too, with weight 1: without them the fair
        # shares of the others would be too large.
        weights = dict.fromkeys(worked, 1.0)
        weights.update((name, c.settings.weight) for name, c in self._customers.items())
        weights_sum = sum(weights.values())
        return {
            name: WorkShare(worked[name] / total if total else 0.0, weight / weights_sum)
            for name, weight in weights.items()
        }

    def _note_wait(self, document: Document, shares: Mapping[str, WorkShare], now: int) -> None:
        claimed_at = document.claimed_at_us
        key = (document.id, claimed_at)
        if claimed_at is None or key in self._seen:
            return
        self._seen[key] = None
        _evict(self._seen, SEEN_MAX)
        wait = max(0, claimed_at - waiting_since(document))
        if document.customer in self._customers:
            self._waits[document.customer].append((claimed_at, wait))
        bucket = self._bucket(claimed_at, now)
        if bucket is None:
            return
        share = shares.get(document.customer)
        waits = bucket.quiet if share is None or share.quiet else bucket.busy
        if len(waits) < WAITS_PER_BUCKET_MAX:
            waits.append(wait)

    def _note_queue(self, summary: Summary, oldest: int | None, now: int) -> None:
        bucket = self._bucket(now, now)
        assert bucket is not None
        if oldest is not None:
            bucket.oldest_us = max(bucket.oldest_us or 0, now - oldest)
        pace = self._pace_per_us()
        if pace is not None and pace[0]:
            bucket.first_come_us = round(summary.waiting / pace[0])

    def _bucket(self, at: int, now: int) -> SampleBucket | None:
        """Return the bucket of a timestamp; None if it is older than all buckets."""
        begin = at - at % BUCKET_US
        newest = now - now % BUCKET_US
        if not self._buckets:
            self._buckets.extend(
                SampleBucket(newest - n * BUCKET_US) for n in range(BUCKETS - 1, -1, -1)
            )
        while self._buckets[-1].at < newest:
            self._buckets.append(SampleBucket(self._buckets[-1].at + BUCKET_US))
        place = (begin - self._buckets[0].at) // BUCKET_US
        return self._buckets[place] if 0 <= place < len(self._buckets) else None

    def _pace_per_us(self) -> tuple[float, float] | None:
        """Return the throughput of attempts, including failed ones, since each frees a slot; and
        that of completed documents."""
        (first_at, *first), (last_at, *last) = self._pace[0], self._pace[-1]
        passed = last_at - first_at
        if passed < 2 * SECOND_US:
            return None
        return (last[0] - first[0]) / passed, (last[1] - first[1]) / passed

    def _summary(
        self,
        now: int,
        shares: dict[str, WorkShare],
        oldest: Mapping[int, int],
        failures: Failures,
        kinds: Sequence[Kind],
    ) -> RecentActivity:
        pace = self._pace_per_us()
        marks = [
            ChartMark(bucket.at, "chart_dump", customer, n)
            for bucket in self._buckets
            for customer, n in bucket.submitted.most_common(1)
            if n >= DUMP
        ]
        return RecentActivity(
            at=now,
            buckets=[
                SampleBucket(b.at, list(b.quiet), list(b.busy), b.oldest_us, b.first_come_us)
                for b in self._buckets
            ],
            completed_per_minute=None if pace is None else pace[1] * PACE_US,
            oldest=oldest,
            shares=shares,
            waits={
                name: [wait for at, wait in waits if at >= now - RECENT_US]
                for name, waits in self._waits.items()
            },
            customers=dict(self._customers),
            marks=sorted([*marks, *self._marks]),
            failures=failures,
            kinds=kinds,
        )


def _evict(entries: "OrderedDict[Any, None]", size_max: int) -> None:
    while len(entries) > size_max:
        entries.popitem(last=False)
