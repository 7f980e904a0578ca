"""Steps, attempts, expiry and outages in an SQLite file: the migration, releases before it, wrong
rows, and what stays cheap."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import apsw
import pytest

from fairturn.clock import SECOND_US, ManualClock
from fairturn.errors import StoreRefused
from fairturn.explain.snapshot import DocumentSnapshot
from fairturn.maintenance.sqlite_file import examined
from fairturn.maintenance.sqlite_transfer import unload
from fairturn.model import (
    EXPIRE_MAX,
    Advanced,
    AttemptOutcome,
    Claim,
    Completed,
    ContentRef,
    Failed,
    Filter,
    KindSettings,
    NewDocument,
    OutageReport,
    Outcome,
    Released,
    Settings,
    State,
)
from fairturn.scheduling.flows import Mode
from fairturn.stores import positions
from fairturn.stores.conformance import snapshot
from fairturn.stores.conformance.steps import (
    claim_one,
    complete,
    document,
    ids,
    state,
    submit,
    submit_each,
)
from fairturn.stores.inspection import Damages, describe
from fairturn.stores.memory import MemoryStore
from fairturn.stores.sqlite import SqliteStore, schema
from tests.downgrades import TO_SCHEMA_14

START = 1_700_000_000 * SECOND_US
LEASE_S = 3_600
LEASE_US = LEASE_S * SECOND_US
KEY = 7
FILE = ContentRef("aa/step", 12, b"\x05" * 32)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "queue.db"


@pytest.fixture
def store(file: Path, clock: ManualClock) -> Iterator[SqliteStore]:
    """A store with the kind ocr."""
    with closing(open_store(file, clock)) as opened:
        opened.configure_kind("ocr", KindSettings())
        yield opened


def open_store(file: Path, clock: ManualClock, **options: Any) -> SqliteStore:
    return SqliteStore(file, clock=clock, key=KEY, synchronous="NORMAL", **options)


def claim(store: SqliteStore | MemoryStore, n: int = 1, *kinds: str) -> list[Claim]:
    return store.claim(n, worker="w", lease_us=LEASE_US, kinds=kinds or None).claims


def advance(store: SqliteStore | MemoryStore, claimed: Claim, kind: str = "ocr") -> None:
    assert store.finish([Advanced(claimed.fence, kind, '"value"', FILE)]) == []


def execute(file: Path, statement: str) -> list[Any]:
    """Execute a statement in the file, as another process would, and let claims read again."""
    with closing(apsw.Connection(str(file))) as connection:
        connection.set_busy_timeout(10_000)
        rows = connection.execute(statement).fetchall()
        connection.execute("UPDATE queue SET scheduler_version = scheduler_version + 1")
        return rows


def damages(file: Path) -> list[str]:
    with examined(file) as queue:
        return [describe(damage) for damage in Damages(queue.recount(lambda *_: None)).shown]


# ── The migration ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("mode", list(Mode))
def test_a_queue_of_schema_14_goes_on_in_its_order(
    tmp_path: Path, clock: ManualClock, mode: Mode
) -> None:
    files = [tmp_path / "migrated.db", tmp_path / "other.db"]
    for path in files:
        its_clock = ManualClock(START)
        with closing(open_store(path, its_clock, settings=Settings(mode=mode))) as store:
            store.configure_kind("ocr", KindSettings(limit=2))
            submit_each(store, "aaabbc")
            submit_each(store, "abcc", kind="ocr")
            submit(store, "d", due_at=START + 60 * SECOND_US)
            claims = claim(store, 4)
            store.cancel([claims[0].document.id])
            store.finish([Completed(claims[1].fence), Failed(claims[2].fence, "x", SECOND_US)])
            its_clock.advance(5)
    with closing(apsw.Connection(str(files[0]))) as connection:
        connection.execute("DELETE FROM attempts").fetchall()
        connection.execute(TO_SCHEMA_14).fetchall()

    found = []
    for path in files:
        its_clock = ManualClock(START + 70 * SECOND_US)
        with closing(open_store(path, its_clock)) as store:
            before = snapshot(store)
            assert damages(path) == []
            order = []
            while claims := claim(store):
                order += ids(claims)
                complete(store, claims)
            found.append((before, store.kinds(), order))

    assert found[0] == found[1]
    assert len(found[0][-1]) == 7


def test_a_migrated_queue_can_have_steps_expiries_and_outages_at_once(
    file: Path, clock: ManualClock
) -> None:
    with closing(open_store(file, clock)) as store:
        first = submit(store, "a").id
    with closing(apsw.Connection(str(file))) as connection:
        connection.execute(TO_SCHEMA_14).fetchall()

    with closing(open_store(file, clock)) as store:
        store.configure_kind("ocr", KindSettings(expires_in_s=60))
        advance(store, claim_one(store))
        brief = submit(store, "b", kind="ocr").id
        clock.advance(60)

        (found,) = claim(store, 2)
        assert (found.document.id, found.previous) == (first, '"value"')
        assert state(store, brief) is State.EXPIRED
        store.finish([OutageReport(found.fence, "down")])
        assert [each.service for each in store.outages()] == ["kind:ocr"]
        assert damages(file) == []


# ── Releases before this one ─────────────────────────────────────────────────────────────────────

CLAIM_OF_SCHEMA_13 = "INSERT INTO leases (fence, until, running, documents) VALUES (?, 9, 0, '[]')"
PRUNE_OF_SCHEMA_14 = "UPDATE queue SET documents_pruned_to = 0, customers_pruned_to = 0"


def opened_by(version: int, file: Path, monkeypatch: pytest.MonkeyPatch) -> SqliteStore:
    """Open the file as a release with this schema does."""
    with monkeypatch.context() as patch:
        known = [each for each in schema.migrations() if each.number <= version]
        patch.setattr(schema, "migrations", lambda: known)
        return SqliteStore(file)


def use_a_step(store: SqliteStore) -> None:
    submit(store, "a")
    advance(store, claim_one(store), "default")


def use_an_expiry(store: SqliteStore) -> None:
    submit(store, "a", expires_at=START + SECOND_US)


def use_a_rule_of_expiry(store: SqliteStore) -> None:
    store.configure_kind("default", KindSettings(expires_in_s=60))


def use_an_outage(store: SqliteStore) -> None:
    submit(store, "a")
    store.finish([OutageReport(claim_one(store).fence, "down")])


USES = [use_a_step, use_an_expiry, use_a_rule_of_expiry, use_an_outage]


@pytest.mark.parametrize("use", USES)
def test_earlier_releases_work_on_the_file_until_it_has_what_they_do_not_support(
    file: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, use: Any
) -> None:
    with (
        closing(open_store(file, clock)) as store,
        closing(apsw.Connection(str(file))) as earlier,
    ):
        submit(store, "z")
        store.finish([Failed(claim_one(store).fence, "an attempt is stored")])
        opened_by(13, file, monkeypatch).close()
        earlier.execute(CLAIM_OF_SCHEMA_13, (7_001,))
        earlier.execute(PRUNE_OF_SCHEMA_14)
        earlier.execute("DELETE FROM leases WHERE fence = 7001")

        use(store)

        for version in (13, 14):
            with pytest.raises(StoreRefused, match=f"has schema 15.*reads schemas up to {version}"):
                opened_by(version, file, monkeypatch)
        for statement in (CLAIM_OF_SCHEMA_13, PRUNE_OF_SCHEMA_14):
            values = (7_002,) if "?" in statement else ()
            with pytest.raises(apsw.ConstraintError, match="does not support; restart"):
                earlier.execute(statement, values)
        assert store.prune() is not None
        assert damages(file) == []


def test_what_an_earlier_release_deletes_takes_its_attempts_along(
    store: SqliteStore, file: Path
) -> None:
    secret = "the customer's error"
    submit(store, "a", expires_at=START + SECOND_US)
    claimed = claim_one(store)
    store.renew([claimed.fence], lease_us=LEASE_US, checkpoints={claimed.fence: '"page 7"'})
    store.finish([Failed(claimed.fence, secret)])

    execute(file, "DELETE FROM documents")

    for table in ("attempts", "checkpoints", "expirations"):
        assert execute(file, f"SELECT * FROM {table}") == []


# ── Wrong rows ───────────────────────────────────────────────────────────────────────────────────

# Each concerns at most the document of customer a, which runs in its second step and has a
# checkpoint.
WRONG = {
    "steps without rows": "DELETE FROM attempts",
    "steps of another document": "UPDATE attempts SET document = 999",
    "a step of an unknown kind": "UPDATE attempts SET kind = 57",
    "a value that is no JSON": "UPDATE attempts SET value = '{', error = NULL",
    "a content without a size": "UPDATE attempts SET size_bytes = NULL, sha256 = NULL",
    "more steps than are allowed": "UPDATE documents SET step = 7000 WHERE step = 1",
    "a checkpoint of another document": "UPDATE checkpoints SET document = 999",
    "an expiry of a document in its second step": """
        UPDATE documents SET expires_at = 1 WHERE step = 1;
        INSERT INTO expirations SELECT 1, number FROM documents WHERE step = 1""",
    "an expiration of no document": "INSERT INTO expirations VALUES (1, 999)",
    "an expiration of a document that never expires": """
        INSERT INTO expirations SELECT 1, number FROM documents""",
    "an expiration at the wrong time": "UPDATE expirations SET expires_at = 1",
    "a service of an unknown kind": "INSERT INTO kind_services VALUES (57, 'gpu')",
    "an outage of an unknown service": """
        INSERT INTO outages VALUES ('kind:unknown', 1, 1, 1, 'x', 1, 1, 1, 1, 0, 1, 1, NULL)""",
    "an unknown kind": "UPDATE documents SET kind = 57, level = 571 WHERE step = 1",
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_row_stops_no_other_document(
    store: SqliteStore, file: Path, clock: ManualClock, name: str
) -> None:
    wrong = submit(store, "a").id
    advance(store, claim_one(store))
    claimed = claim_one(store)
    store.renew([claimed.fence], lease_us=LEASE_US, checkpoints={claimed.fence: "1"})
    brief = submit(store, "e", expires_at=clock.now() + 60 * SECOND_US).id
    others = ids(submit_each(store, "bcd"))

    execute(file, WRONG[name])

    found = {c.document.id: c for c in claim(store, 10)}
    assert {*others, brief} <= found.keys()
    outcomes: list[Outcome] = [Completed(found[id].fence) for id in others[:2]]
    outcomes += [Failed(found[others[2]].fence, "x"), Released(claimed.fence)]
    assert store.finish(outcomes) == []
    assert [state(store, id) for id in others] == [State.COMPLETED, State.COMPLETED, State.DEAD]
    store.attempts(wrong, values=True)
    store.outages()
    store.snapshot(wrong)
    assert store.expire() == 0
    clock.advance(LEASE_S + 1)
    claim(store, 10)
    assert len(store.find(Filter()).documents) == 5


def test_an_attempt_cannot_have_an_outcome_that_does_not_exist(
    store: SqliteStore, file: Path
) -> None:
    submit(store, "a")
    store.finish([Failed(claim_one(store).fence, "x")])

    with pytest.raises(apsw.ConstraintError):
        execute(file, "UPDATE attempts SET outcome = 3")


# ── A process that has cached its scheduler state ────────────────────────────────────────────────


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("prefetched", [0, 1, 3])
def test_an_older_document_joins_a_flow_whose_documents_were_prefetched(
    file: Path, clock: ManualClock, mode: Mode, prefetched: int
) -> None:
    """By a step from another kind, and by a retry after its expiry."""
    sqlite = open_store(file, clock, settings=Settings(mode=mode))
    memory = MemoryStore(settings=Settings(mode=mode), clock=clock, key=KEY)
    stores: tuple[MemoryStore | SqliteStore, ...] = (memory, sqlite)
    orders = []
    with closing(sqlite):
        for store in stores:
            store.configure_kind("ocr", KindSettings())
        made = []
        for store in stores:
            fields: list[dict[str, Any]] = [
                {"kind": "ocr"},
                {},
                {"kind": "ocr", "expires_at": clock.now() + SECOND_US},
                {"kind": "ocr"},
                {"kind": "ocr"},
                {"kind": "ocr"},
            ]
            made.append([submit(store, "a", **each).id for each in fields])
            submit_each(store, "bbb", kind="ocr")
        clock.advance(2)
        for store, own in zip(stores, made, strict=True):
            (moving,) = claim(store, 1, "default")
            first = claim(store, prefetched, "ocr")
            advance(store, moving)
            store.retry([own[2]], expires_at=clock.now() + 900 * SECOND_US)
            order = ids(first)
            while claims := claim(store, 1, "ocr"):
                order += ids(claims)
            orders.append(order)
        assert sqlite.summary().repairs == 0

    assert orders[0] == orders[1]
    assert len(orders[0]) == 9


def test_an_advanced_document_joins_a_flow_that_was_pruned(
    store: SqliteStore, file: Path, clock: ManualClock
) -> None:
    old = submit(store, "a").id
    moving = claim_one(store)
    submit(store, "a", kind="ocr")
    complete(store, claim(store, 1, "ocr"))
    execute(file, "DELETE FROM flows WHERE level > 10")

    advance(store, moving)
    new = submit(store, "a", kind="ocr").id

    assert damages(file) == []
    assert ids(claim(store, 5, "ocr")) == [old, new]
    assert damages(file) == []


# ── Expiry in steps ──────────────────────────────────────────────────────────────────────────────


def test_rows_of_documents_that_ended_are_removed_when_their_time_comes(
    store: SqliteStore, file: Path, clock: ManualClock
) -> None:
    n = EXPIRE_MAX + 20
    expires_at = clock.now() + 10 * SECOND_US
    store.submit([NewDocument("a", "1", expires_at=expires_at) for _ in range(n)])
    for _ in range(2):
        complete(store, claim(store, n // 2))
    last = submit(store, "b", expires_at=expires_at + 1).id
    clock.advance(11)

    assert store.expire(5) == 1

    assert state(store, last) is State.EXPIRED
    assert execute(file, "SELECT * FROM expirations") == []
    assert store.summary().completed == n


def test_a_claim_with_outcomes_records_each_of_them_once_beside_many_expiries(
    store: SqliteStore, file: Path, clock: ManualClock
) -> None:
    submit_each(store, "ab")
    first, second = claim(store, 2)
    n = 2 * EXPIRE_MAX + 3
    expires_at = clock.now() + SECOND_US
    store.submit([NewDocument(f"c{m % 7}", "1", expires_at=expires_at) for m in range(n)])
    waiting = submit(store, "d").id
    store.cancel([submit(store, "e").id])
    clock.advance(1)

    claimed = store.claim(
        3,
        worker="w",
        lease_us=LEASE_US,
        outcomes=[Completed(first.fence), Failed(second.fence, "x")],
    )

    assert (ids(claimed.claims), claimed.lost) == ([waiting], [])
    assert [each.customer for each in claimed.cancelled] == ["e"]
    summary = store.summary()
    assert (summary.expired, summary.completed, summary.dead) == (n, 1, 1)
    assert damages(file) == []


def explained(store: SqliteStore, id: str) -> DocumentSnapshot:
    found = store.snapshot(id)
    assert found is not None
    return found


def test_a_position_is_a_range_if_too_many_documents_have_expired_to_read_them(
    store: SqliteStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(6):
        submit(store, "a", expires_at=clock.now() + SECOND_US)
    own = submit(store, "a").id
    clock.advance(1)
    exact = explained(store, own).queue_view
    monkeypatch.setattr(positions, "LAPSED_MAX", 5)

    view = explained(store, own).queue_view

    assert exact is not None
    assert view is not None
    assert (exact.folded, exact.rank) == (True, (0, 0))
    assert (view.folded, view.rank.least) == (False, 0)


# ── Export ───────────────────────────────────────────────────────────────────────────────────────


def test_an_exported_queue_has_attempts_checkpoints_services_and_outages(
    store: SqliteStore, clock: ManualClock
) -> None:
    store.sign_on("w", 1, needs={"ocr": ["gpu"]})
    submit(store, "a")
    advance(store, claim_one(store))
    claimed = claim_one(store)
    store.renew([claimed.fence], lease_us=LEASE_US, checkpoints={claimed.fence: "7"})
    submit(store, "b", kind="ocr", expires_at=clock.now() + LEASE_US * 9)
    other = claim_one(store)
    store.finish([OutageReport(other.fence, "down", service="gpu")])
    clock.advance(LEASE_S + 1)

    with store.read_transaction() as connection:
        exported = unload(connection, clock.now(), clock.uptime())
        documents = list(exported.documents)
        attempts = list(exported.attempts)
        checkpoints = list(exported.checkpoints)

    assert [(d.step, d.snoozes, d.attempts) for d in documents] == [(1, 0, 1), (0, 1, 0)]
    # document, number, kind, step, attempt
    assert [row[:5] for row in attempts] == [(1, 1, 0, 0, 1), (1, 2, 1, 1, 1)]
    outcomes = [AttemptOutcome.ADVANCED, AttemptOutcome.LOST]
    assert [row[8] for row in attempts] == [list(AttemptOutcome).index(each) for each in outcomes]
    assert attempts[0][11:] == (*FILE, '"value"')
    assert checkpoints == [(1, "7")]
    assert exported.kind_services == [(1, "gpu")]
    assert [row[:2] for row in exported.outages] == [("gpu", START)]
    assert document(store, other.document.id).state is State.DELAYED


# ── What stays cheap ─────────────────────────────────────────────────────────────────────────────


def test_a_plain_document_writes_no_row_of_the_new_tables(store: SqliteStore, file: Path) -> None:
    submit_each(store, "abc")
    complete(store, claim(store, 3))

    for table in ("attempts", "checkpoints", "expirations", "kind_services", "outages"):
        assert execute(file, f"SELECT count(*) FROM {table}") == [(0,)]


@pytest.mark.parametrize("held", [False, True])
def test_a_claim_reads_services_only_while_one_was_unavailable(
    file: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, held: bool
) -> None:
    statements: list[str] = []

    def watch(connection: apsw.Connection) -> None:
        connection.trace_v2(
            apsw.SQLITE_TRACE_STMT, lambda each: statements.append(str(each["sql"]))
        )

    monkeypatch.setattr(apsw, "connection_hooks", [*apsw.connection_hooks, watch])
    with closing(open_store(file, clock)) as store:
        store.sign_on("w", 1, needs={"ocr": ["gpu"]})
        if held:
            submit(store, "a", kind="ocr")
            store.finish([OutageReport(claim_one(store).fence, "down")])
        submit(store, "b")
        statements.clear()

        assert len(claim(store)) == 1

    read = " ".join(statements)
    assert ("FROM kind_services" in read) is held
    assert "FROM attempts" not in read
    assert read.count("FROM expirations") == 1
