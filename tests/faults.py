"""A small queue on PostgreSQL, every operation of the contract on it, and checks of what is left.

The suites of faults (`test_lost_reply`, `test_frozen`, `test_interleavings`) share this module.
Each case builds the same `World`, runs one operation through a `Wire`, and then checks the promises
that hold whatever happened: the recount finds no difference, and every waiting document is claimed
exactly once.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from fairturn.access.keys import AccessKey, Role
from fairturn.clock import SECOND_US, ManualClock
from fairturn.contents.local import Folder
from fairturn.errors import FairturnError
from fairturn.model import (
    INLINE_BYTES_MAX,
    Advanced,
    Completed,
    ContentRef,
    CustomerSettings,
    Failed,
    Fence,
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
from fairturn.queue import Queue
from fairturn.scheduling.flows import Mode
from fairturn.stores.conformance.steps import all_customers, find_all, prune_all
from fairturn.stores.postgres import PostgresStore
from tests import recount
from tests.attempt import CALL_S, Attempt
from tests.servers import postgres
from tests.servers.queues import Databases
from tests.servers.wire import Fault, Wire

START = 1_700_000_000 * SECOND_US
LEASE_S = 30
LEASE_US = LEASE_S * SECOND_US
KEY = 0xC0FFEE
SETTINGS = Settings(completed_kept_s=3_600, dead_kept_s=3_600, kinds=KindPolicy.OPEN)
ACCESS_KEY = AccessKey("0123456789ab", Role.READER, None, "reader", b"\1" * 32, START)
CONTENT = b"x" * (INLINE_BYTES_MAX + 1)
_AGE_S = 2 * 86_400  # between the documents that ended long ago and the others


# ── The queue ────────────────────────────────────────────────────────────────────────────────────


class Known:
    """A process's view of a queue: the time, and ids and fences by the labels of documents."""

    def __init__(self, ids: dict[str, str], fences: dict[str, Fence], age_s: float = 0) -> None:
        self.ids = ids
        self.fences = fences
        self.clock = ManualClock(START)
        self.clock.advance(age_s)

    def as_json(self) -> list[Any]:
        """Return it for another process, which reads it with `Known.from_json`."""
        return [self.ids, self.fences, self.clock.uptime().at / SECOND_US]

    @staticmethod
    def from_json(values: list[Any]) -> "Known":
        ids, fences, age_s = values
        return Known(ids, {label: Fence(*fence) for label, fence in fences.items()}, age_s)


class World(Known):
    """A queue with documents in every state, and a store on it that no fault touches."""

    def __init__(self, url: str, folder: Path) -> None:
        super().__init__({}, {})
        self.url = url
        self.folder = folder
        self.store = PostgresStore(url, settings=SETTINGS, clock=self.clock, key=KEY)
        self._build()

    def _build(self) -> None:
        self.submit("gone-old", "a-old", "a-dead")
        self.remember_claims(3)
        result = ContentRef("aa/result", 3, b"\1" * 32)
        ended: list[Outcome] = [
            Completed(self.fences["gone-old"]),
            Completed(self.fences["a-old"], '"done"', result),
            Failed(self.fences["a-dead"], "never again"),
        ]
        assert self.store.finish(ended) == []
        self.clock.advance(_AGE_S)
        self.store.adjust("l", CustomerSettings(limit=1))
        self.store.add_key(ACCESS_KEY)
        # Nothing of customer d waits in its first priority, and something in another one.
        self.submit("d-1", "d-2", "d-3")
        self.remember_claims(3)
        done = [Completed(self.fences[label]) for label in ("d-1", "d-2", "d-3")]
        assert self.store.finish(done) == []
        for labels in (("a-run", "b-run", "l-run"), ("o-run",), ("p-run",)):
            self.submit(*labels)
            self.remember_claims(len(labels))
        self.submit("a-1", "a-2", "a-3", "b-1", "b-2", "c-1", "d-4", "l-1", "l-2")
        self.submit("a-scan", "k-scan", kind="ocr")
        self.submit("b-later", due_at=self.clock.now() + 60 * SECOND_US)

    def submit(self, *labels: str, **fields: Any) -> None:
        self._remember(self.store.submit([new(label, **fields) for label in labels]), labels)

    def _remember(self, receipts: Sequence[Any], labels: Sequence[str]) -> None:
        self.ids.update(zip(labels, (receipt.id for receipt in receipts), strict=True))

    def remember_claims(self, n: int, kinds: Sequence[str] | None = None) -> None:
        claims = self.store.claim(n, worker="w", lease_us=LEASE_US, kinds=kinds).claims
        assert len(claims) == n
        self.fences.update((str(claim.document.name), claim.fence) for claim in claims)

    def another_store(self, url: str | None = None) -> PostgresStore:
        """Return a store that is another process, as far as the database can see."""
        return PostgresStore(url or self.url, clock=self.clock)


def new(label: str, **fields: Any) -> NewDocument:
    """Return a document whose customer is the part of its label before the hyphen."""
    return NewDocument(label.partition("-")[0], f'"{label}"', name=label, **fields)


def keyed(label: str, **fields: Any) -> NewDocument:
    return new(label, key=label, digest=label.encode(), **fields)


@contextmanager
def scene(folder: Path) -> Iterator[tuple[World, Wire, Queue]]:
    """Yield a new queue, and another process's `Queue` on it whose connections go through a
    `Wire`."""
    with ExitStack() as stack:
        url = stack.enter_context(Databases(recycled=True)).new()
        name = url.rpartition("/")[2].partition("?")[0]
        world = World(url, folder)
        stack.callback(world.store.close)
        wire = stack.enter_context(Wire(postgres.of_this_run().url(name, tcp=True)))
        actor = stack.enter_context(
            Queue(
                PostgresStore(wire.url, clock=world.clock),
                contents=Folder(folder, clock=world.clock),
                clock=world.clock,
            )
        )
        actor.summary()  # opens a connection
        stack.callback(wire.release)
        yield world, wire, actor


# ── The operations ───────────────────────────────────────────────────────────────────────────────

Call = Callable[[Known, Queue], Any]


class Operation(NamedTuple):
    """An operation of the contract, called on the queue of another process."""

    name: str
    call: Call
    prepare: Callable[[World, Queue], Any] = lambda world, actor: None
    # Whether two executions have the same effect as one. A claim returns other documents each time,
    # and a submission without a key stores another document.
    idempotent: bool = True
    refusal: type[Exception] | None = None  # of a repeated call after the first was executed
    settle: Callable[[World], Any] = lambda world: None  # the rest of a job done in batches


def _claim(
    n: int, *outcomes: Callable[[Known], Outcome], kinds: Sequence[str] | None = None
) -> Call:
    return lambda known, actor: actor.store.claim(
        n,
        worker="actor",
        lease_us=LEASE_US,
        kinds=kinds,
        outcomes=[outcome(known) for outcome in outcomes],
    )


def _finish(*outcomes: Callable[[Known], Outcome]) -> Call:
    return lambda known, actor: actor.store.finish([outcome(known) for outcome in outcomes])


def _completed(known: Known) -> Outcome:
    return Completed(
        known.fences["a-run"], '"done"', ContentRef("bb/result", 3, b"\2" * 32), 2_000_000
    )


def _dead(known: Known) -> Outcome:
    return Failed(known.fences["b-run"], "never again")


def _retried(known: Known) -> Outcome:
    return Failed(known.fences["l-run"], "busy", 5 * SECOND_US)


def _released(known: Known) -> Outcome:
    return Released(known.fences["b-run"])


def _advanced(known: Known) -> Outcome:
    content = ContentRef("cc/step", 3, b"\3" * 32)
    return Advanced(known.fences["a-run"], "next-kind", '"read"', content, real_cost=2_000_000)


def _snoozed(known: Known) -> Outcome:
    return Snoozed(known.fences["b-run"], 5 * SECOND_US)


def _stopped(known: Known) -> Outcome:
    return Stopped(known.fences["a-run"])


def _let_leases_expire(world: World, actor: Queue) -> None:
    """Expire all leases except those of two customers that no operation touches."""
    world.clock.advance(LEASE_S - 1)
    world.store.renew([world.fences["o-run"], world.fences["p-run"]], lease_us=LEASE_US)
    world.clock.advance(2)


def _renew(known: Known, actor: Queue) -> Any:
    fences = [known.fences["a-run"], known.fences["b-run"]]
    return actor.store.renew(
        fences,
        lease_us=LEASE_US,
        progress={fences[0]: Progress(1, 2)},
        checkpoints={fences[0]: '{"page":7}'},
    )


def _reported(label: str) -> Callable[[Known], Outcome]:
    return lambda known: OutageReport(known.fences[label], "no answer")


def _claim_pages(world: World, actor: Queue) -> None:
    """Claim two documents of a kind that no outage holds."""
    if world.store.resume("kind:page"):
        world.clock.advance(60)
    world.submit("a-page", "k-page", kind="page")
    world.remember_claims(2, kinds=["page"])


def _hold_pages(world: World, actor: Queue) -> None:
    """Hold that kind until a claim may probe it."""
    _claim_pages(world, actor)
    world.store.finish([_reported("a-page")(world), _reported("k-page")(world)])
    world.clock.advance(60)
    world.submit("k-more", kind="page")


def _submit_brief(world: World, actor: Queue) -> None:
    """Submit documents that expire before the operation, and let their time come."""
    expires_at = world.clock.now() + SECOND_US
    world.submit("a-brief", "c-brief", expires_at=expires_at)
    world.submit("d-brief", expires_at=expires_at, due_at=expires_at + SECOND_US)
    world.clock.advance(1)


def _expire_brief(world: World, actor: Queue) -> None:
    _submit_brief(world, actor)
    world.store.expire()


_LATER = START + (_AGE_S + 86_400) * SECOND_US


def _ids(known: Known, *labels: str) -> list[str]:
    return [known.ids[label] for label in labels]


_MANY = ("a-many", "b-many", "n-many", "a-many2")

OPERATIONS = (
    Operation("submit", lambda w, q: q.store.submit([new("a-new")]), idempotent=False),
    Operation("submit-key", lambda w, q: q.store.submit([keyed("a-new")])),
    Operation("submit-new-customer", lambda w, q: q.store.submit([keyed("n-new")])),
    Operation("submit-many", lambda w, q: q.store.submit([keyed(label) for label in _MANY])),
    Operation(
        "submit-delayed",
        lambda w, q: q.store.submit([keyed("b-new", due_at=START + (_AGE_S + 90) * SECOND_US)]),
    ),
    Operation(
        "submit-child",
        lambda w, q: q.store.submit([keyed("a-child", parent=w.ids["a-run"])]),
    ),
    Operation(
        "submit-expiring",
        lambda w, q: q.store.submit([keyed("a-new", expires_at=_LATER)]),
    ),
    Operation("submit-kind", lambda w, q: q.store.submit([keyed("a-new", kind="new-kind")])),
    Operation(
        "submit-content",
        lambda w, q: q.submit("a", content=CONTENT, key="content", name="a-content"),
    ),
    Operation("claim", _claim(2), idempotent=False),
    Operation(
        "claim-again",
        _claim(2),
        _claim(1),
        idempotent=False,
    ),
    Operation("claim-with-outcomes", _claim(2, _completed, _dead, _retried), idempotent=False),
    Operation(
        "claim-cancelled",
        _claim(2),
        lambda world, actor: world.store.cancel(_ids(world, "a-1", "b-later")),
        idempotent=False,
    ),
    Operation("claim-kind", _claim(2, kinds=["ocr"]), idempotent=False),
    Operation("claim-expiry", _claim(2), _submit_brief, idempotent=False),
    Operation("claim-probe", _claim(2, kinds=["page"]), _hold_pages, idempotent=False),
    Operation("claim-expired", _claim(2), _let_leases_expire, idempotent=False),
    Operation("renew", _renew),
    Operation("finish-completed", _finish(_completed)),
    Operation("finish-dead", _finish(_dead)),
    Operation("finish-retried", _finish(_retried)),
    Operation("finish-released", _finish(_released)),
    Operation(
        "finish-stopped",
        _finish(_stopped),
        lambda world, actor: world.store.cancel([world.ids["a-run"]]),
    ),
    Operation("finish-reported", _finish(_reported("a-page"), _reported("k-page")), _claim_pages),
    Operation("finish-many", _finish(_completed, _dead, _retried)),
    Operation("finish-step", _finish(_advanced, _snoozed)),
    Operation("claim-with-step", _claim(2, _advanced, _snoozed), idempotent=False),
    Operation("cancel", lambda w, q: q.store.cancel(_ids(w, "a-1", "b-run", "b-later", "a-dead"))),
    Operation("retry", lambda w, q: q.store.retry(_ids(w, "a-dead", "a-1"))),
    Operation(
        "retry-expired",
        lambda w, q: q.store.retry(_ids(w, "a-brief", "d-brief", "a-dead"), expires_at=_LATER),
        _expire_brief,
    ),
    Operation("expire", lambda w, q: q.store.expire(), _submit_brief),
    Operation("resume", lambda w, q: q.store.resume("kind:page"), _hold_pages),
    Operation("retry-one", lambda w, q: q.retry(w.ids["a-dead"])),
    Operation("configure", lambda w, q: q.configure(attempts_max=7)),
    Operation("configure-mode", lambda w, q: q.configure(mode=Mode.EQUAL)),
    Operation(
        "configure-mode-back",
        lambda w, q: q.configure(mode=Mode.FAIR),
        lambda w, q: w.store.configure(replace(SETTINGS, mode=Mode.EQUAL)),
    ),
    Operation("adjust-weight", lambda w, q: q.store.adjust("a", CustomerSettings(weight=2))),
    Operation("adjust-limit", lambda w, q: q.store.adjust("b", CustomerSettings(limit=2))),
    Operation("adjust-paused", lambda w, q: q.store.adjust("c", CustomerSettings(paused=True))),
    Operation("adjust-bytes", lambda w, q: q.store.adjust("a", CustomerSettings(bytes_max=9_999))),
    Operation(
        "configure-kind",
        lambda w, q: q.store.configure_kind("ocr", KindSettings(limit=1, attempts_max=3)),
    ),
    Operation(
        "configure-new-kind",
        lambda w, q: q.store.configure_kind("new-kind", KindSettings(paused=True)),
    ),
    Operation("probe", lambda w, q: q.store.probe()),
    Operation("prune", lambda w, q: q.store.prune(), settle=lambda w: prune_all(w.store)),
    Operation("purge", lambda w, q: q.store.purge("a")),
    Operation("sweep", lambda w, q: q.store.unreferenced(["aa/result", "cc/nothing"])),
    Operation(
        "add-key",
        lambda w, q: q.store.add_key(ACCESS_KEY._replace(id="ba9876543210")),
        refusal=ValueError,
    ),
    Operation("end-key", lambda w, q: q.store.end_key(ACCESS_KEY.id, START + 5)),
    Operation("sign-on", lambda w, q: q.store.sign_on("w", 4)),
    Operation("sign-on-kinds", lambda w, q: q.store.sign_on("w", 4, ["ocr", "new-kind"])),
    Operation(
        "sign-on-needs",
        lambda w, q: q.store.sign_on("w", 4, needs={"ocr": ["gpu"], "new-kind": ["gpu"]}),
    ),
    Operation("sign-off", lambda w, q: q.store.sign_off("gone")),
    Operation("begin-epoch", lambda w, q: q.store.begin_epoch(), idempotent=False),
    Operation("note-use", lambda w, q: q.store.note_use(ACCESS_KEY.id, START + 5)),
)
NAMED = {operation.name: operation for operation in OPERATIONS}


def exchanges_of(operation: Operation, folder: Path) -> list[str]:
    """Return the exchanges of an operation without a fault."""
    with scene(folder) as (world, wire, actor):
        operation.prepare(world, actor)
        wire.watch()
        operation.call(world, actor)
        return wire.exchanges


def held(wire: Wire, fault: Fault, call: Callable[[], Any]) -> tuple[Attempt, bool]:
    """Start a call with this fault; return it, and whether it is held: it may end before that
    exchange."""
    wire.watch(fault)
    attempt = Attempt(call, at_end=wire.reached)
    assert wire.reached.wait(CALL_S), f"neither held nor ended; it made {wire.exchanges}"
    return attempt, wire.happened


# ── What is left afterwards ──────────────────────────────────────────────────────────────────────


def portrait(world: World) -> dict[str, Any]:
    """Return the observable state of the store without ids and orders, which a repeated call may
    skip."""
    store = world.store
    documents = []
    for found in find_all(store):
        stored = store.read(found.id)
        assert stored is not None
        document = stored.document._replace(
            id="", order=None, content_name=None, parent="" if found.parent else None
        )
        attempts = store.attempts(found.id, values=True)
        documents.append((document, stored.body, stored.result, stored.result_content, attempts))
    return {
        "documents": sorted(documents, key=repr),
        "customers": all_customers(store),
        "summary": store.summary(),
        "kinds": store.kinds(),
        "outages": store.outages(),
        "settings": store.settings(),
        "keys": store.access_keys(),
    }


def changes(expected: dict[str, Any], shown: dict[str, Any]) -> Iterator[str]:
    """Return sentences about differences from what is expected."""
    for what, wanted in expected.items():
        if shown[what] == wanted:
            continue
        if isinstance(wanted, list):
            for each in wanted:
                if each not in shown[what]:
                    yield f"{what}: missing {each}"
            for each in shown[what]:
                if each not in wanted:
                    yield f"{what}: not expected {each}"
        else:
            yield f"{what}: expected {wanted}, found {shown[what]}"


def lasting_problems(world: World, actor: Queue) -> Iterator[str]:
    """Return violations of what must hold after any fault: contents can be read, the recount finds
    no difference, and the actor's store and another one claim every waiting document exactly
    once."""
    yield from _unreadable(world, actor)
    try:
        yield from recount.differences(world.store, world.url)
        yield from _drain(world, actor)
        yield from (
            f"after all is done: {each}" for each in recount.differences(world.store, world.url)
        )
    except Exception as error:
        yield f"the queue raised {type(error).__name__}: {error}"


def _unreadable(world: World, actor: Queue) -> Iterator[str]:
    for found in find_all(world.store):
        if found.content_name is None:
            continue
        try:
            if actor.read(found.id) != CONTENT:
                yield f"document {found.name} has another content"
        except FairturnError as error:
            yield f"the content of document {found.name} cannot be read: {error}"


def _drain(world: World, actor: Queue) -> Iterator[str]:
    """Let all leases expire and all delays end, then complete everything."""
    for outage in world.store.outages():
        world.store.resume(outage.service)
    world.clock.advance(LEASE_S + 120)
    for customer in all_customers(world.store):
        if customer.settings.paused:
            world.store.adjust(customer.name, replace(customer.settings, paused=False))
    # A document with a requested cancel ends with its lease.
    due = {
        found.id: found.name
        for found in find_all(world.store)
        if found.state in (State.WAITING, State.DELAYED)
        or (found.state is State.RUNNING and not found.cancel_requested)
    }
    completed = world.store.summary().completed
    claimed: Counter[str] = Counter()
    stores, idle = [actor.store, world.store], 0
    for turn in range(1_000):
        store = stores[turn % 2]
        claims = store.claim(3, worker="drain", lease_us=LEASE_US).claims
        claimed.update(claim.document.id for claim in claims)
        if lost := store.finish([Completed(claim.fence) for claim in claims]):
            yield f"the outcomes of {lost} were refused"
        idle = 0 if claims else idle + 1
        if idle == len(stores):
            break
    for id, n in claimed.items():
        if n > 1 or id not in due:
            yield f"document {due.get(id, id)} was claimed {n} times"
    for id in due.keys() - claimed.keys():
        yield f"document {due[id]} was never claimed"
    counted = world.store.summary().completed - completed
    if counted != len(claimed):
        yield f"{len(claimed)} documents were completed, and summary counted {counted}"
