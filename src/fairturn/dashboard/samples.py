"""What happened lately, as a process sees it by looking once a second: waits, shares of work, the
pace. A store keeps no history of its waits; this is a sample, kept in memory, and it says so.

Every look reads the newest documents, what runs, and the numbers of the queue: a bounded number of
rows, whatever the queue holds. What runs at many moments is a fair sample of who is worked for.
"""

import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fairturn.clock import SECOND_US, Clock
from fairturn.dashboard.failures import Failures, failures_of
from fairturn.explain.snapshot import ALIVE_US, waiting_since
from fairturn.model import PAGE_MAX, Customer, Document, Filter, Lanes, State, Summary
from fairturn.stores.contract import Store

BUCKET_US = 5 * SECOND_US
BUCKETS = 360  # half an hour
RECENT_US = 300 * SECOND_US  # shares of work, and waits of a customer, are of so long
PACE_US = 60 * SECOND_US
WAITS_PER_BUCKET_MAX = 500
WAITS_PER_CUSTOMER_MAX = 200
CUSTOMERS_MAX = 1_000  # whose waits and shares are kept
SEEN_MAX = 20_000
RUNNING_MAX = 200
MARKS_MAX = 20
PAGES_MAX = 5  # of the newest documents, in one look
DUMP = 200  # documents of one customer within a bucket: worth a mark
_CUSTOMERS_EVERY_US = 3 * SECOND_US
_GAP_US_MAX = 5 * SECOND_US  # between looks; what was not looked at does not count


@dataclass(slots=True)
class Bucket:
    """Some seconds: waits of what was started in it, and how the queue stood."""

    at: int
    quiet: list[int] = field(default_factory=list)
    busy: list[int] = field(default_factory=list)
    oldest_us: int | None = None
    first_come_us: int | None = None
    submitted: Counter[str] = field(default_factory=Counter)

    @property
    def seen(self) -> bool:
        """Whether there is anything to show."""
        return bool(self.quiet or self.busy) or self.oldest_us is not None


_MERGED = 6


def _merged(buckets: Sequence[Bucket]) -> Bucket:
    def most(values: Iterable[int | None]) -> int | None:
        return max((v for v in values if v is not None), default=None)

    return Bucket(
        buckets[0].at,
        [wait for b in buckets for wait in b.quiet],
        [wait for b in buckets for wait in b.busy],
        most(b.oldest_us for b in buckets),
        most(b.first_come_us for b in buckets),
    )


class Mark(NamedTuple):
    """Something to draw into a chart: a customer who submitted much at once or was paused, or a
    worker that is gone; its kind is the key of a text."""

    at: int
    kind: str
    who: str
    documents: int = 0


class Share(NamedTuple):
    """A customer's share of the work of the last minutes, and what would be fair."""

    share: float
    fair: float

    @property
    def quiet(self) -> bool:
        return self.share < self.fair


@dataclass(frozen=True, slots=True, kw_only=True)
class Lately:
    """What was seen so far, at one moment."""

    at: int
    buckets: Sequence[Bucket]
    completed_per_minute: float | None
    first_come_us: int | None
    oldest: Mapping[int, int]  # by priority: since when the longest waiting document waits
    shares: Mapping[str, Share]
    waits: Mapping[str, Sequence[int]]
    customers: Mapping[str, Customer]
    marks: Sequence[Mark]
    failures: Failures

    def drawn(self) -> list[Bucket]:
        """The buckets as they are drawn: the last five minutes, or when more is known, half an
        hour in pieces of half a minute."""
        few = len(self.buckets) // _MERGED
        if not any(b.seen for b in self.buckets[:-few]):
            return list(self.buckets[-few:])
        begin = len(self.buckets) % _MERGED
        return [
            _merged(self.buckets[n : n + _MERGED]) for n in range(begin, len(self.buckets), _MERGED)
        ]

    def quiet_waits(self) -> list[int]:
        """Waits of quiet customers within the last minutes."""
        since = self.at - RECENT_US
        return [wait for bucket in self.buckets if bucket.at >= since for wait in bucket.quiet]


def quantile(values: Sequence[int], share: float) -> int | None:
    """The value below which this share of them lies; the nearest that there is."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


class Trail:
    """Looks at a store, and remembers."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._lock = threading.Lock()
        self._buckets: deque[Bucket] = deque(maxlen=BUCKETS)
        self._seen: OrderedDict[tuple[str, int | None], None] = OrderedDict()
        self._submitted: OrderedDict[str, None] = OrderedDict()
        self._work: deque[tuple[int, dict[str, int]]] = deque()
        # When, and how many attempts had ended and documents were completed by then.
        self._pace: deque[tuple[int, int, int]] = deque()
        self._waits: dict[str, deque[tuple[int, int]]] = defaultdict(
            lambda: deque(maxlen=WAITS_PER_CUSTOMER_MAX)
        )
        self._customers: dict[str, Customer] = {}
        self._customers_at = 0
        self._paused: set[str] = set()
        self._alive: set[str] = set()
        self._marks: deque[Mark] = deque(maxlen=MARKS_MAX)
        self._last_at: int | None = None
        self._lately: Lately | None = None

    def lately(self) -> Lately:
        """What was seen so far; the first time, after a look."""
        if self._lately is None:
            self.look()
        assert self._lately is not None
        return self._lately

    def is_stale(self) -> bool:
        """Whether some seconds have gone by without a look: then there is a new piece to fill."""
        return self._last_at is None or self._clock.now() - self._last_at >= BUCKET_US

    def look(self) -> None:
        """Look once. Two threads that look at once look one after the other."""
        store, now = self._store, self._clock.now()
        running = store.find(Filter(states=(State.RUNNING,)), size=RUNNING_MAX).documents
        newest = self._newest()
        summary, lanes = store.summary(), store.lanes(size=1)
        oldest = store.oldest_waiting()
        failures = failures_of(store, summary, newest, since=now - RECENT_US)
        workers = {seen.worker for seen in store.workers() if now - seen.seen_at <= ALIVE_US}
        with self._lock:
            began = self._last_at is None
            self._note_work(running, now)
            self._note_pace(summary, lanes, now)
            self._note_submitted(newest, now)
            self._note_customers(running, newest, now)
            self._note_changes(workers, now, began)
            shares = self._shares(now)
            for document in (*running, *newest):
                self._note_wait(document, shares, now)
            self._note_queue(summary, min(oldest.values(), default=None), now)
            self._lately = self._summed_up(now, shares, oldest, failures)

    def _newest(self) -> list[Document]:
        """The newest documents: a page, and more as long as all of them are new."""
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
            self._pace.clear()  # a queue that begins anew
        self._pace.append((now, ended, summary.completed))
        while len(self._pace) > 2 and self._pace[1][0] <= now - PACE_US:
            self._pace.popleft()

    def _note_submitted(self, newest: Sequence[Document], now: int) -> None:
        for document in newest:
            if document.id in self._submitted:
                continue
            self._submitted[document.id] = None
            bucket = self._bucket(document.submitted_at, now)
            if bucket is not None:
                bucket.submitted[document.customer] += 1
        _shorten(self._submitted, SEEN_MAX)

    def _note_customers(
        self, running: Sequence[Document], newest: Sequence[Document], now: int
    ) -> None:
        """Who is there, with weights and numbers; of no more than so many."""
        if self._customers and now - self._customers_at < _CUSTOMERS_EVERY_US:
            return
        self._customers_at = now
        lately = [d.customer for d in newest if d.submitted_at >= now - RECENT_US]
        names = dict.fromkeys([d.customer for d in running])
        names.update(dict.fromkeys(name for _, worked in self._work for name in worked))
        names.update(dict.fromkeys(lately))
        names.update(dict.fromkeys(n for n, c in self._customers.items() if c.waiting))
        wanted = list(names)[:CUSTOMERS_MAX]
        found = self._store.customers(names=wanted, size=CUSTOMERS_MAX).customers if wanted else []
        self._customers = {customer.name: customer for customer in found}
        for name in [name for name in self._waits if name not in self._customers]:
            del self._waits[name]

    def _note_changes(self, workers: set[str], now: int, began: bool) -> None:
        """Who was paused, and which worker is gone, since the look before."""
        paused = {name for name, c in self._customers.items() if c.settings.paused}
        if not began:
            self._marks += (Mark(now, "chart_paused", n) for n in sorted(paused - self._paused))
            self._marks += (Mark(now, "chart_lost", n) for n in sorted(self._alive - workers))
        self._paused, self._alive = paused, workers

    def _shares(self, now: int) -> dict[str, Share]:
        worked: Counter[str] = Counter()
        for _, by_customer in self._work:
            worked.update(by_customer)
        total = sum(worked.values())
        # Who was worked for and is not read yet counts too, or a share of all would seem small.
        weights = dict.fromkeys(worked, 1.0)
        weights.update((name, c.settings.weight) for name, c in self._customers.items())
        together = sum(weights.values())
        return {
            name: Share(worked[name] / total if total else 0.0, weight / together)
            for name, weight in weights.items()
        }

    def _note_wait(self, document: Document, shares: Mapping[str, Share], now: int) -> None:
        claimed_at = document.claimed_at
        key = (document.id, claimed_at)
        if claimed_at is None or key in self._seen:
            return
        self._seen[key] = None
        _shorten(self._seen, SEEN_MAX)
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
        pace = self._ended_per_us()
        if pace:
            bucket.first_come_us = round(summary.waiting / pace)

    def _bucket(self, at: int, now: int) -> Bucket | None:
        """The half minute of a moment; None if it is too long ago."""
        begin = at - at % BUCKET_US
        newest = now - now % BUCKET_US
        if not self._buckets:
            self._buckets.extend(Bucket(newest - n * BUCKET_US) for n in range(BUCKETS - 1, -1, -1))
        while self._buckets[-1].at < newest:
            self._buckets.append(Bucket(self._buckets[-1].at + BUCKET_US))
        place = (begin - self._buckets[0].at) // BUCKET_US
        return self._buckets[place] if 0 <= place < len(self._buckets) else None

    def _ended_per_us(self) -> float | None:
        """The pace of attempts, also of those that failed: each frees a slot."""
        return self._pace_of(1)

    def _completed_per_us(self) -> float | None:
        return self._pace_of(2)

    def _pace_of(self, column: int) -> float | None:
        first, last = self._pace[0], self._pace[-1]
        if last[0] - first[0] < 2 * SECOND_US:
            return None
        return (last[column] - first[column]) / (last[0] - first[0])

    def _summed_up(
        self,
        now: int,
        shares: dict[str, Share],
        oldest: Mapping[int, int],
        failures: Failures,
    ) -> Lately:
        completed = self._completed_per_us()
        marks = [
            Mark(bucket.at, "chart_dump", customer, n)
            for bucket in self._buckets
            for customer, n in bucket.submitted.most_common(1)
            if n >= DUMP
        ]
        return Lately(
            at=now,
            buckets=[
                Bucket(b.at, list(b.quiet), list(b.busy), b.oldest_us, b.first_come_us)
                for b in self._buckets
            ],
            completed_per_minute=None if completed is None else completed * PACE_US,
            first_come_us=self._buckets[-1].first_come_us,
            oldest=oldest,
            shares=shares,
            waits={
                name: [wait for at, wait in waits if at >= now - RECENT_US]
                for name, waits in self._waits.items()
            },
            customers=dict(self._customers),
            marks=sorted([*marks, *self._marks]),
            failures=failures,
        )


def _shorten(kept: "OrderedDict[Any, None]", most: int) -> None:
    while len(kept) > most:
        kept.popitem(last=False)
