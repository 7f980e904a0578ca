"""Any sequence of operations has the same results on every store.

A program is a list of plain values, so that a failing one can be printed and shrunk. The stores run
it side by side on one clock and with one key for ids. After every step they must return the same
results and have the same observable state: receipts, claims, fences, lost attempts, documents,
customers, counters.

`make test` runs a sample of the random programs, `make test-long` all of them.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, Generic, NamedTuple, Protocol, TypeVar
from unittest import TestCase

import pytest
from hypothesis import HealthCheck, Phase, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from fairturn.clock import SECOND_US, ManualClock
from fairturn.errors import FairturnError
from fairturn.maintenance.sqlite_transfer import unload
from fairturn.model import (
    DEFAULT_KIND_NAME,
    Advanced,
    Claimed,
    Completed,
    ContentRef,
    CustomerSettings,
    Failed,
    Fence,
    Filter,
    KindPolicy,
    KindSettings,
    NewDocument,
    OutageReport,
    Outcome,
    Progress,
    Released,
    Settings,
    Snoozed,
    State,
    Stopped,
)
from fairturn.priority import Reset
from fairturn.scheduling.flows import Costs, Mode
from fairturn.scheduling.position import position
from fairturn.stores.conformance import snapshot
from fairturn.stores.contract import QueueStore as Store
from fairturn.stores.memory import MemoryStore
from fairturn.stores.postgres import PostgresStore
from fairturn.stores.sqlite import SqliteStore
from tests.servers.queues import Databases

START = 1_700_000_000 * SECOND_US
LEASE_S, PATIENCE_S, RESET_S = 30, 120, 1_500
KEY = 0x5EED

# ── The operations ───────────────────────────────────────────────────────────────────────────────


class Doc(NamedTuple):
    """A document to submit. `parent` refers to an earlier one."""

    customer: str
    key: int | None = None
    digest: int = 0
    cost: int | None = None
    due_in_s: int | None = None
    parent: int | None = None
    content: bool = False
    work: str = DEFAULT_KIND_NAME
    expires_in_s: int | None = None


class Submit(NamedTuple):
    documents: tuple[Doc, ...]


class End(NamedTuple):
    """The end of an attempt. `attempt` refers to an earlier claim."""

    attempt: int
    kind: str
    value: int


class Claim(NamedTuple):
    n: int
    lease_s: int = LEASE_S
    ends: tuple[End, ...] = ()
    kinds: tuple[str, ...] | None = None
    at_most: tuple[tuple[str, int], ...] = ()


class Finish(NamedTuple):
    ends: tuple[End, ...]


class Renew(NamedTuple):
    attempts: tuple[int, ...]
    lease_s: int
    done: float | None = None  # the progress and the checkpoint of every second attempt


class Cancel(NamedTuple):
    documents: tuple[int, ...]


class Retry(NamedTuple):
    documents: tuple[int, ...]
    expires_in_s: int | None = None


class Expire(NamedTuple):
    limit: int


class Need(NamedTuple):
    """A worker signs on whose handler of a kind needs these services."""

    kind: str
    services: tuple[str, ...]


class Resume(NamedTuple):
    service: str


class Adjust(NamedTuple):
    customer: str
    weight: float
    limit: int | None
    paused: bool


class AdjustKind(NamedTuple):
    kind: str
    limit: int | None
    paused: bool
    attempts_max: int | None
    expires_in_s: int | None = None


class Configure(NamedTuple):
    changes: tuple[tuple[str, Any], ...]


class Advance(NamedTuple):
    seconds: float


class Step(NamedTuple):
    seconds: int


class Prune(NamedTuple):
    documents_max: int


class Purge(NamedTuple):
    customer: str


class Switch(NamedTuple):
    """Run the following steps in the other process."""


class Restart(NamedTuple):
    """End the process and open the file in another one."""


Operation = (
    Submit
    | Claim
    | Finish
    | Renew
    | Cancel
    | Retry
    | Expire
    | Need
    | Resume
    | Adjust
    | AdjustKind
    | Configure
    | Advance
    | Step
    | Prune
    | Purge
    | Switch
    | Restart
)

customers = st.sampled_from("abc")
pointers = st.integers(0, 30)
works = st.sampled_from([DEFAULT_KIND_NAME] * 3 + ["ocr", "ocr", "text"])
served = st.none() | st.none() | st.lists(works, max_size=3).map(tuple)
caps = st.just(()) | st.lists(st.tuples(works, st.integers(0, 3)), max_size=2).map(tuple)
documents = st.builds(
    Doc,
    customer=customers,
    key=st.sampled_from([None] * 6 + [0, 1, 2]),
    digest=st.sampled_from([0, 0, 0, 1]),
    cost=st.none() | st.sampled_from([0, 1, 500_000, 3_000_000]),
    due_in_s=st.sampled_from([None] * 8 + [-1, 0, 1, 5, 60]),
    parent=st.sampled_from([None] * 16 + [0, 1, 5]),
    content=st.booleans(),
    work=works,
    expires_in_s=st.sampled_from([None] * 6 + [-1, 0, 1, 6, 40, 90]),
)
ENDINGS = (
    "completed",
    "failed",
    "delayed",
    "released",
    "stopped",
    "advanced",
    "advanced",
    "snoozed",
    "unavailable",
    "unavailable",
)
ends = st.builds(End, attempt=pointers, kind=st.sampled_from(ENDINGS), value=st.integers(0, 3))
services = st.sampled_from(["azure", "gpu"])
some_ends = st.lists(ends, max_size=4).map(tuple)
leases = st.sampled_from([1, LEASE_S, LEASE_S, 600])
changes = st.one_of(
    st.tuples(st.just("mode"), st.sampled_from(Mode)),
    st.tuples(st.just("mode"), st.sampled_from(Mode)),
    st.tuples(st.just("costs"), st.sampled_from(Costs)),
    st.tuples(st.just("patience_s"), st.sampled_from([0, PATIENCE_S])),
    st.tuples(st.just("reset"), st.sampled_from(Reset)),
    st.tuples(st.just("attempts_max"), st.integers(1, 3)),
    st.tuples(st.just("kinds"), st.sampled_from(KindPolicy)),
    st.tuples(st.just("waiting_max"), st.sampled_from([20, 1_000])),
    st.tuples(st.just("waiting_per_customer_max"), st.sampled_from([10, 1_000])),
    st.tuples(st.just("bounds"), st.just((0, -1, -2, -3, -4, -5, -6, -7))),
)
first_settings = st.builds(
    Settings,
    mode=st.sampled_from(Mode),
    costs=st.sampled_from(Costs),
    reset=st.sampled_from(Reset),
    kinds=st.sampled_from([KindPolicy.OPEN] * 3 + [KindPolicy.KNOWN]),
    patience_s=st.sampled_from([0, PATIENCE_S]),
    attempts_max=st.integers(1, 5),
    completed_kept_s=st.sampled_from([0, 60]),
    cancelled_kept_s=st.sampled_from([0, 2_000]),
    dead_kept_s=st.sampled_from([0, 5_000]),
    expired_kept_s=st.sampled_from([0, 5_000]),
)

# ── The machine ──────────────────────────────────────────────────────────────────────────────────


class Opened(Protocol):
    """A store in a process."""

    def close(self) -> None: ...


S = TypeVar("S", bound=Opened)


class Processes(Generic[S]):
    """A database that two processes have open."""

    def __init__(self, first: S, open_again: Callable[[], S]) -> None:
        self.store = first
        self._open = open_again
        self._other = open_again()

    def switch(self) -> None:
        self.store, self._other = self._other, self.store

    def restart(self) -> None:
        self.store.close()
        self.store = self._open()

    def close(self) -> None:
        self.store.close()
        self._other.close()


def on_sqlite(folder: Path, first: Settings, clock: ManualClock) -> Processes[SqliteStore]:
    file = folder / "queue.db"
    return Processes(
        SqliteStore(file, settings=first, clock=clock, key=KEY, synchronous="NORMAL"),
        lambda: SqliteStore(file, clock=clock, synchronous="NORMAL"),
    )


def on_postgres(url: str, first: Settings, clock: ManualClock) -> Processes[PostgresStore]:
    return Processes(
        PostgresStore(url, settings=first, clock=clock, key=KEY),
        lambda: PostgresStore(url, clock=clock),
    )


@dataclass
class Machine:
    """Runs the operations on several stores side by side."""

    memory: Store
    sqlite: Processes[SqliteStore]
    postgres: Processes[PostgresStore] | None
    clock: ManualClock
    documents: list[str] = field(default_factory=list)
    attempts: list[Fence] = field(default_factory=list)
    contents: int = 0
    # Steps look at documents of different ages in turns: their snapshots take most of the time.
    ages: Iterator[int] = field(default_factory=lambda: cycle((0, 7, 20)))

    @property
    def has_retries(self) -> bool:
        """Whether a document waits for a retry, also one that was snoozed or returned."""
        delayed = self.memory.find(Filter(states=(State.DELAYED,)), size=1_000).documents
        return any(document.claimed_at_us is not None for document in delayed)

    def run(self, operation: Operation) -> None:
        match operation:
            case Advance():
                self.clock.advance(operation.seconds)
            case Step():
                self.clock.step(operation.seconds)
            case Switch():
                self.sqlite.switch()
                if self.postgres is not None:
                    self.postgres.switch()
            case Restart():
                self.sqlite.restart()
                if self.postgres is not None:
                    self.postgres.restart()
            case _:
                self._call(operation)
                self._look(operation)

    def _call(self, operation: Operation) -> None:  # noqa: PLR0912
        match operation:
            case Submit():
                submitted = [self._new(doc) for doc in operation.documents]
                receipts = self._same(operation, lambda store: store.submit(submitted))
                if isinstance(receipts, list):
                    self.documents += [receipt.id for receipt in receipts if not receipt.replayed]
            case Claim():
                claimed = self._same(operation, self._claiming(operation))
                self.attempts += [claim.fence for claim in claimed.claims]
            case Finish():
                outcomes = self._outcomes(operation.ends)
                self._same(operation, lambda store: store.finish(outcomes))
            case Renew():
                fences = [self._at(self.attempts, pointer) for pointer in operation.attempts]
                held = [fence for fence in fences if fence is not None]
                lease_us = operation.lease_s * SECOND_US
                progress, checkpoints = {}, {}
                if operation.done is not None:
                    said = Progress(operation.done, 10 if operation.done > 2 else None)
                    progress = dict.fromkeys(held[::2], said)
                    checkpoints = dict.fromkeys(held[::2], f"{operation.done}")
                self._same(
                    operation,
                    lambda store: store.renew(
                        held, lease_us=lease_us, progress=progress, checkpoints=checkpoints
                    ),
                )
            case Cancel():
                ids = self._ids(operation.documents)
                self._same(operation, lambda store: store.cancel(ids))
            case Retry():
                ids = self._ids(operation.documents)
                at = self._after(operation.expires_in_s)
                self._same(operation, lambda store: store.retry(ids, expires_at=at))
            case Expire():
                self._same(operation, lambda store: store.expire(operation.limit))
            case Need():
                needs = {operation.kind: operation.services}
                self._same(operation, lambda store: store.sign_on("w", 1, needs=needs))
            case Resume():
                self._same(operation, lambda store: store.resume(operation.service))
            case Adjust():
                customer = CustomerSettings(
                    weight=operation.weight, limit=operation.limit, paused=operation.paused
                )
                self._same(operation, lambda store: store.adjust(operation.customer, customer))
            case AdjustKind():
                kind = KindSettings(
                    limit=operation.limit,
                    paused=operation.paused,
                    attempts_max=operation.attempts_max,
                    expires_in_s=operation.expires_in_s,
                )
                self._same(operation, lambda store: store.configure_kind(operation.kind, kind))
            case Configure():
                self._configure(operation)
            case Prune():
                self._same(operation, lambda store: self._prune(store, operation.documents_max))
            case Purge():
                self._same(operation, lambda store: sorted(store.purge(operation.customer)))

    @property
    def stores(self) -> dict[str, Store]:
        stores: dict[str, Store] = {"memory": self.memory, "sqlite": self.sqlite.store}
        if self.postgres is not None:
            stores["postgres"] = self.postgres.store
        return stores

    def _same(self, operation: Operation, call: Callable[[Store], Any]) -> Any:
        """Return the result that all stores return, or the error that all raise."""
        answers = {}
        for name, store in self.stores.items():
            try:
                answers[name] = call(store)
            except FairturnError as error:
                answers[name] = (type(error).__name__, str(error))
        return self._one_of(operation, answers)

    def _look(self, operation: Operation) -> None:
        """Compare the observable state of all stores."""
        self._same(operation, lambda store: store.summary())
        self._same(operation, lambda store: store.customers())
        self._same(operation, lambda store: store.kinds())
        self._same(operation, lambda store: store.outages())
        self._same(operation, lambda store: store.find(Filter(), size=1_000))
        id = self._at(self.documents, next(self.ages))
        if id is not None:
            self._same(operation, lambda store: _document_snapshot(store, id))
            self._same(operation, lambda store: store.attempts(id, values=True))

    def end(self) -> None:
        """Claim everything that is left in order, through all attempts."""
        self._same(Claim(0), lambda store: store.lanes())
        for _ in range(3):
            self.run(Advance(LEASE_S + 1))
            self.run(Claim(100))
        self._same(Claim(100), snapshot)

    def _one_of(self, operation: Operation, answers: dict[str, Any]) -> Any:
        first, *others = answers
        for other in others:
            assert answers[other] == answers[first], f"after {operation}: {other} against {first}"
        return answers[first]

    # ── From pointers to what they point at ──────────────────────────────────────────────────────

    def _at(self, things: list[Any], pointer: int) -> Any:
        """Index from the newest, because those are most likely to be active."""
        return things[-1 - pointer % len(things)] if things else None

    def _ids(self, pointers: tuple[int, ...]) -> list[str]:
        return [self._at(self.documents, pointer) or "unknown" for pointer in pointers]

    def _new(self, doc: Doc) -> NewDocument:
        self.contents += doc.content
        parent = None if doc.parent is None else self._at(self.documents, doc.parent)
        return NewDocument(
            doc.customer,
            None if doc.content else "1",
            content_name=f"content {self.contents}" if doc.content else None,
            cost=doc.cost,
            due_at=self._after(doc.due_in_s),
            key=None if doc.key is None else f"key {doc.key}",
            digest=None if doc.key is None else bytes([doc.digest]),
            parent=parent,
            kind=doc.work,
            expires_at=self._after(doc.expires_in_s),
        )

    def _after(self, seconds: int | None) -> int | None:
        return None if seconds is None else self.clock.now() + seconds * SECOND_US

    def _claiming(self, operation: Claim) -> Callable[[Store], Claimed]:
        outcomes = self._outcomes(operation.ends)
        return lambda store: store.claim(
            operation.n,
            worker=f"worker {operation.lease_s}",
            lease_us=operation.lease_s * SECOND_US,
            kinds=operation.kinds,
            at_most=dict(operation.at_most),
            outcomes=outcomes,
        )

    def _outcomes(self, wanted: tuple[End, ...]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for end in wanted:
            fence = self._at(self.attempts, end.attempt)
            if fence is None:
                continue
            match end.kind:
                case "completed":
                    content = ContentRef(f"result {fence}", 1, b"") if end.value == 3 else None
                    real_cost = [None, 0, 1_000_000, 5_000_000][end.value]
                    outcomes.append(Completed(fence, f"{end.value}", content, real_cost))
                case "failed":
                    outcomes.append(Failed(fence, f"error {end.value}"))
                case "delayed":
                    outcomes.append(Failed(fence, f"error {end.value}", end.value * SECOND_US))
                case "released":
                    outcomes.append(Released(fence))
                case "stopped":
                    outcomes.append(Stopped(fence))
                case "advanced":
                    outcomes.append(_step(fence, end.value))
                case "snoozed":
                    outcomes.append(Snoozed(fence, end.value * SECOND_US))
                case "unavailable":
                    service = (None, "azure", "gpu", "azure")[end.value]
                    retry_after_us = (end.value + 1) * SECOND_US
                    outcomes.append(OutageReport(fence, "no answer", retry_after_us, service))
        return outcomes

    def _configure(self, operation: Configure) -> None:
        before = self._same(operation, lambda store: store.settings())
        values = {name: getattr(before, name) for name in before.__slots__ if name != "rule"}
        after = Settings(**values | dict(operation.changes))
        self._same(operation, lambda store: store.configure(after))
        assert self._same(operation, lambda store: store.settings()) == after

    def _prune(self, store: Store, documents_max: int) -> list[str]:
        """Prune everything; which batch deletes which documents may differ between stores."""
        contents: list[str] = []
        for _ in range(1_000):
            batch = store.prune(documents_max=documents_max)
            if batch is None:
                return sorted(contents)
            contents += batch
        raise AssertionError("pruned 1,000 times, and still something is left to forget")


def _step(fence: Fence, value: int) -> Advanced:
    return Advanced(
        fence,
        (DEFAULT_KIND_NAME, "ocr", "text", "audio")[value],
        value=None if value == 0 else f"{value}",
        content=ContentRef(f"step {fence}", 1, b"") if value == 1 else None,
        cost=3_000_000 if value == 2 else None,
        real_cost=None if value == 0 else value * 1_000_000,
    )


def _document_snapshot(store: Store, id: str) -> Any:
    """Return a document's snapshot and explanation, without what may differ between stores: the
    numbers of customers, which lines are read one by one, which attempts are sampled."""
    found = store.snapshot(id)
    if found is None:
        return None
    place = None
    if found.queue_view is not None:
        line, settings = found.queue_view, found.settings
        answer = position(line, mode=settings.mode, costs=settings.costs)
        place = (
            (line.rank, line.number, line.clock),
            [(front.since, front.order, front.level) for front in line.overdue],
            answer and replace(answer, turns={}),
            answer and {found.names[customer]: n for customer, n in answer.turns.items()},
        )
    return (
        (found.document, found.parent_count, found.customer_settings, found.count),
        (found.waiting, found.running, found.delayed, found.leased),
        (found.kind_settings, found.kind_running, found.outages, found.service.other_workers),
        found.served and {found.names[c]: n for c, n in found.served.by_customer.items()},
        found.served and found.served.complete,
        sorted((work.worker, work.claimed_at, work.alive) for work in found.service.running),
        [(arrival.at, arrival.level) for arrival in found.service.arrivals],
        place,
    )


@contextmanager
def machine(first: Settings, *, with_server: bool = True) -> Iterator[Machine]:
    clock = ManualClock(START)
    with TemporaryDirectory() as folder, ExitStack() as stack:
        sqlite = on_sqlite(Path(folder), first, clock)
        stack.callback(sqlite.close)
        postgres = None
        if with_server:
            databases = stack.enter_context(Databases(recycled=True))
            postgres = on_postgres(databases.new(), first, clock)
            stack.callback(postgres.close)
        memory = MemoryStore(settings=first, clock=clock, key=KEY)
        yield Machine(memory, sqlite, postgres, clock)


# ── The promise ──────────────────────────────────────────────────────────────────────────────────


def submit(names: str) -> Submit:
    return Submit(tuple(Doc(name) for name in names))


# Shrunk programs on which stores have disagreed before.
PROGRAMS: dict[str, tuple[Settings, list[Operation]]] = {
    "a claim of whole parts, and one that finds nothing after them": (
        Settings(),
        [submit("ab" * 125), Claim(125), submit("ab" * 62), Claim(251)],
    ),
    "a document that ended before it was submitted, because the clock stepped back": (
        Settings(cancelled_kept_s=0),
        [submit("a"), Step(-3_600), Cancel((0,)), Advance(1), Prune(1)],
    ),
    "more customers than a batch of pruning looks at": (
        Settings(),
        [submit("aaaabbbbbbc"), Prune(1), Prune(3)],
    ),
    "a key of a customer that is idle": (
        Settings(completed_kept_s=0),
        [
            Submit((Doc("a", key=1),)),
            Claim(1),
            Claim(1, ends=(End(0, "completed", 0),)),
            Advance(RESET_S + 1),
            Prune(1_000),
            Submit((Doc("a", key=1),)),
        ],
    ),
    "a lease that ended when mode and attempts changed": (
        Settings(attempts_max=1),
        [
            submit("a"),
            Claim(1),
            Advance(LEASE_S),
            Configure((("mode", Mode.EQUAL), ("attempts_max", 2))),
        ],
    ),
    "a limit that came and went between two claims": (
        Settings(),
        [
            submit("aaccc"),
            Claim(4),
            Adjust("c", 1.0, 1, paused=False),
            submit("a"),
            Advance(LEASE_S),
            Adjust("c", 1.0, None, paused=False),
            Claim(1, ends=(End(0, "completed", 0),)),
        ],
    ),
    "real costs above the estimate": (
        Settings(mode=Mode.EQUAL, costs=Costs.LEARNED),
        [
            submit("aaaabbbb"),
            *(Claim(1, ends=(End(0, "completed", 3 if n % 3 else 1),)) for n in range(8)),
        ],
    ),
    "an error of an earlier attempt on a document that is cancelled": (
        Settings(),
        [
            submit("a"),
            Claim(1),
            Finish((End(0, "delayed", 0),)),
            Claim(1),
            Cancel((0,)),
            Finish((End(0, "stopped", 0),)),
        ],
    ),
    "an error of an earlier attempt on a document that is cancelled by its lease": (
        Settings(),
        [
            submit("a"),
            Claim(1),
            Finish((End(0, "delayed", 0),)),
            Claim(1),
            Cancel((0,)),
            Advance(LEASE_S),
            Claim(1),
        ],
    ),
    "a limit below what runs, and outcomes of several customers in one call": (
        Settings(mode=Mode.EQUAL),
        [
            submit("aaaaaabbbbbb"),
            Claim(8),
            Adjust("a", 1.0, 3, paused=False),
            Adjust("b", 1.0, 4, paused=False),
            Claim(1),
            Finish((End(1, "completed", 0), End(0, "completed", 0), End(3, "completed", 0))),
            Claim(1),
        ],
    ),
    "an idle customer whose last outcome no claim has folded in": (
        Settings(dead_kept_s=5_000),
        [submit("a"), Claim(1), Finish((End(0, "failed", 0),)), Advance(90_000), Prune(1_000)],
    ),
    "a customer with a weight that is purged while its documents wait": (
        Settings(patience_s=0),
        [
            submit("aabbc"),
            Adjust("a", 2.0, None, paused=False),
            Claim(0),
            Purge("a"),
            *(Claim(1) for _ in range(4)),
        ],
    ),
    "a lease that ends at the moment of a claim": (
        Settings(),
        [submit("a"), Claim(1), Advance(LEASE_S), Claim(1)],
    ),
    "a lease that became shorter": (
        Settings(),
        [submit("aa"), Claim(2, 600), Renew((0,), 1), Advance(1), Claim(2)],
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_was_answered_differently_once_is_answered_alike(name: str) -> None:
    first, program = PROGRAMS[name]

    with machine(first) as stores:
        for operation in program:
            stores.run(operation)
        stores.end()


def large_claims(seed: int) -> Iterator[Operation]:
    """Two processes that make large claims in turns, while documents arrive, are requeued and are
    cancelled: at the head of a line, in its middle and at its end."""
    chance = Random(seed)
    yield submit("abc" * 300)
    for _ in range(14):
        if chance.random() < 0.3:
            yield submit("".join(chance.choices("abcd", k=chance.randint(1, 90))))
        if chance.random() < 0.3:
            kinds = chance.choices(["released", "failed", "delayed", "completed"], k=3)
            yield Finish(tuple(End(chance.randint(0, 150), kind, 1) for kind in kinds))
        if chance.random() < 0.3:
            yield Cancel(tuple(chance.randint(0, 250) for _ in range(3)))
        if chance.random() < 0.2:
            yield Advance(chance.choice([1, LEASE_S + 1]))
        if chance.random() < 0.5:
            yield Switch()
        yield Claim(chance.choice([1, 7, 51, 51, 60, 130]))


def many_customers(seed: int) -> Iterator[Operation]:
    """More customers than a process prefetches, some of which change before their turn, also by
    another process that claims now and then."""
    chance = Random(seed)
    names = [f"customer {n}" for n in range(260)]
    yield Submit(tuple(Doc(name) for name in names for _ in range(chance.randint(1, 3))))
    yield from (Claim(2), Switch())
    for _ in range(9):
        who, kind = chance.choice(names), chance.randrange(8)
        if kind == 0:
            yield Submit((Doc(who), Doc(chance.choice(names))))
        elif kind == 1:
            yield Cancel(tuple(chance.randint(0, 400) for _ in range(4)))
        elif kind == 2:
            yield Adjust(who, chance.choice([1.0, 3.0]), chance.choice([None, 1]), paused=False)
        elif kind == 3:
            yield Adjust(who, 1.0, None, paused=True)
        elif kind == 4:
            yield Finish((End(chance.randint(0, 50), "released", 0),))
        elif kind == 5:
            yield Advance(LEASE_S + 1)
        elif kind == 6:
            yield from (Switch(), Claim(chance.choice([5, 30])), Switch())
        yield Claim(chance.choice([20, 30, 30, 40]))


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in (0, *range(2, 6)))]
)
@pytest.mark.parametrize("program", [large_claims, many_customers])
def test_large_claims_of_two_processes_give_what_those_of_one_do(
    program: Callable[[int], Iterator[Operation]], seed: int
) -> None:
    with machine(Settings(attempts_max=5)) as stores:
        for operation in program(seed):
            stores.run(operation)
        stores.end()


class Agreement(RuleBasedStateMachine):
    """Each rule is one kind of operation; references resolve to whatever exists."""

    with_server = True

    @initialize(first=first_settings, names=st.text("abc", min_size=5, max_size=30))
    def open(self, first: Settings, names: str) -> None:
        self.stores = ExitStack()
        self.machine = self.stores.enter_context(machine(first, with_server=self.with_server))
        self.machine.run(Submit(tuple(Doc(name) for name in names)))

    @rule(documents=st.lists(documents, min_size=1, max_size=8).map(tuple))
    def submit(self, documents: tuple[Doc, ...]) -> None:
        self.machine.run(Submit(documents))

    @rule(document=documents, n=st.integers(5, 30))
    def submit_many(self, document: Doc, n: int) -> None:
        self.machine.run(Submit((document,) * n))

    @rule(n=st.integers(0, 12), lease_s=leases, kinds=served, at_most=caps)
    def claim(
        self,
        n: int,
        lease_s: int,
        kinds: tuple[str, ...] | None,
        at_most: tuple[tuple[str, int], ...],
    ) -> None:
        self.machine.run(Claim(n, lease_s, kinds=kinds, at_most=at_most))

    @rule(n=st.integers(0, 12), lease_s=leases, ends=some_ends, kinds=served)
    def claim_with_outcomes(
        self, n: int, lease_s: int, ends: tuple[End, ...], kinds: tuple[str, ...] | None
    ) -> None:
        self.machine.run(Claim(n, lease_s, ends, kinds))

    @rule(ends=some_ends)
    def finish(self, ends: tuple[End, ...]) -> None:
        self.machine.run(Finish(ends))

    @rule(
        attempts=st.lists(pointers, max_size=4).map(tuple),
        lease_s=leases,
        done=st.sampled_from([None, 0, 2.5, 7]),
    )
    def renew(self, attempts: tuple[int, ...], lease_s: int, done: float | None) -> None:
        self.machine.run(Renew(attempts, lease_s, done))

    @rule(documents=st.lists(pointers, max_size=6).map(tuple))
    def cancel(self, documents: tuple[int, ...]) -> None:
        self.machine.run(Cancel(documents))

    @rule(
        documents=st.lists(pointers, max_size=6).map(tuple),
        expires_in_s=st.sampled_from([None, None, -1, 0, 20]),
    )
    def retry(self, documents: tuple[int, ...], expires_in_s: int | None) -> None:
        self.machine.run(Retry(documents, expires_in_s))

    @rule(limit=st.sampled_from([1, 3, 1_000]))
    def expire(self, limit: int) -> None:
        self.machine.run(Expire(limit))

    @rule(kind=works, services=st.lists(services, max_size=2, unique=True).map(tuple))
    def need(self, kind: str, services: tuple[str, ...]) -> None:
        self.machine.run(Need(kind, services))

    @rule(service=services | st.sampled_from(["kind:ocr", "kind:default"]))
    def resume(self, service: str) -> None:
        self.machine.run(Resume(service))

    @rule(
        customer=customers,
        weight=st.sampled_from([0.01, 0.3, 1.0, 1.0, 2.0, 100.0]),
        limit=st.none() | st.integers(1, 4),
        paused=st.sampled_from([False, False, True]),
    )
    def adjust(self, customer: str, weight: float, limit: int | None, paused: bool) -> None:
        self.machine.run(Adjust(customer, weight, limit, paused))

    @rule(
        kind=works,
        limit=st.none() | st.integers(1, 4),
        paused=st.sampled_from([False, False, True]),
        attempts_max=st.none() | st.integers(1, 3),
        expires_in_s=st.sampled_from([None, None, 5, 60]),
    )
    def adjust_kind(
        self,
        kind: str,
        limit: int | None,
        paused: bool,
        attempts_max: int | None,
        expires_in_s: int | None,
    ) -> None:
        self.machine.run(AdjustKind(kind, limit, paused, attempts_max, expires_in_s))

    @rule(changes=st.lists(changes, min_size=1, max_size=2).map(tuple))
    def configure(self, changes: tuple[tuple[str, Any], ...]) -> None:
        self.machine.run(Configure(changes))

    @rule(
        seconds=st.sampled_from(
            [0.000001, 0.5, 1, 5, LEASE_S, LEASE_S + 1, PATIENCE_S, PATIENCE_S + 1]
        )
    )
    def advance(self, seconds: float) -> None:
        self.machine.run(Advance(seconds))

    @rule(seconds=st.sampled_from([RESET_S, RESET_S + 1, 90_000]))
    def advance_far(self, seconds: float) -> None:
        self.machine.run(Advance(seconds))

    # Delays differ between stores: on PostgreSQL they follow the server's clock.
    @precondition(lambda self: self.machine.postgres is None or not self.machine.has_retries)
    @rule(seconds=st.sampled_from([1, -1, 3_600, -3_600, RESET_S + 1]))
    def step_the_wall_clock(self, seconds: int) -> None:
        self.machine.run(Step(seconds))

    @rule(documents_max=st.sampled_from([1, 3, 1_000]))
    def prune(self, documents_max: int) -> None:
        self.machine.run(Prune(documents_max))

    @rule(customer=customers)
    def purge(self, customer: str) -> None:
        self.machine.run(Purge(customer))

    @rule()
    def switch(self) -> None:
        self.machine.run(Switch())

    @rule()
    def restart(self) -> None:
        self.machine.run(Restart())

    def teardown(self) -> None:
        if not hasattr(self, "machine"):
            return
        try:
            self.machine.end()
            event(f"documents: {min(len(self.machine.documents) // 10 * 10, 50)} and more")
            event(f"attempts: {min(len(self.machine.attempts) // 10 * 10, 50)} and more")
        finally:
            self.stores.close()


class AgreementWithoutServer(Agreement):
    """The same without a database server, which takes most of the time."""

    with_server = False


class AgreementAfterCopying(Agreement):
    """The embedded stores continue beside a copy of the file in PostgreSQL: each must return what
    it would have returned from the beginning."""

    with_server = False

    @precondition(lambda self: self.machine.postgres is None)
    @rule()
    def copy(self) -> None:
        machine = self.machine
        held = range(len(machine.attempts))
        machine.run(Finish(tuple(End(attempt, "released", 0) for attempt in held)))
        url = self.stores.enter_context(Databases(recycled=True)).new()
        copy = PostgresStore(url, clock=machine.clock)
        with machine.sqlite.store.read_transaction() as snapshot:
            exported = unload(snapshot, machine.clock.now(), machine.clock.uptime())
            copy.load(exported, lambda done, total: None)
        machine.postgres = Processes(copy, lambda: PostgresStore(url, clock=machine.clock))
        self.stores.callback(machine.postgres.close)
        machine._look(Restart())


def many(examples: int) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=50,
        deadline=None,
        phases=[phase for phase in Phase if phase is not Phase.explain],  # it takes minutes here
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


class AllAgreement(Agreement):
    """The programs of `make test-long`."""


class AllAgreementWithoutServer(AgreementWithoutServer):
    """The same without a database server."""


class AllAgreementAfterCopying(AgreementAfterCopying):
    """The same with a copy."""


def suite(of: type[Agreement], examples: float) -> type[TestCase]:
    """Return the test of a machine; `examples` is a multiple of those of the profile."""
    case: type[TestCase] = of.TestCase
    case.settings = many(max(1, int(examples * settings().max_examples)))  # type: ignore[attr-defined]
    return case


TestEveryStoreGivesTheSameAnswers = suite(Agreement, 0.1)
TestEveryEmbeddedStoreGivesTheSameAnswers = suite(AgreementWithoutServer, 0.6)
TestACopiedQueueGivesTheSameAnswers = suite(AgreementAfterCopying, 0.08)

TestEveryStoreGivesTheSameAnswersToAll = pytest.mark.long(suite(AllAgreement, 0.25))
TestEveryEmbeddedStoreGivesTheSameAnswersToAll = pytest.mark.long(
    suite(AllAgreementWithoutServer, 3)
)
TestACopiedQueueGivesTheSameAnswersToAll = pytest.mark.long(suite(AllAgreementAfterCopying, 0.2))
