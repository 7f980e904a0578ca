"""Kinds of work in an SQLite file: the migration, releases before it, repairs, and what a claim of
one kind reads and writes."""

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import apsw
import pytest

from fairturn.clock import SECOND_US, ManualClock
from fairturn.errors import StoreError, StoreRefused
from fairturn.maintenance.sqlite_file import examined
from fairturn.maintenance.sqlite_transfer import unload
from fairturn.model import (
    Claim,
    Completed,
    CustomerSettings,
    Failed,
    Filter,
    KindSettings,
    NewDocument,
    Released,
    Settings,
    State,
)
from fairturn.scheduling.flows import Costs, Mode, band_of
from fairturn.stores.conformance import snapshot
from fairturn.stores.conformance.steps import ids, submit_each
from fairturn.stores.inspection import Damages, describe
from fairturn.stores.memory import MemoryStore
from fairturn.stores.sqlite import SqliteStore, repair, schema
from fairturn.stores.sqlite.flows import CLOCK_MAX
from tests.downgrades import TO_SCHEMA_14

START = 1_700_000_000 * SECOND_US
LEASE_S = 3_600
LEASE_US = LEASE_S * SECOND_US
KEY = 7


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "queue.db"


@pytest.fixture
def store(file: Path, clock: ManualClock) -> Iterator[SqliteStore]:
    """A store with the kinds ocr, number 1, and text, number 2."""
    with closing(open_store(file, clock)) as opened:
        for kind in ("ocr", "text"):
            opened.configure_kind(kind, KindSettings())
        yield opened


def open_store(file: Path, clock: ManualClock, **options: Any) -> SqliteStore:
    return SqliteStore(file, clock=clock, key=KEY, synchronous="NORMAL", **options)


def new(customer: str = "acme", **fields: Any) -> NewDocument:
    return NewDocument(customer, "1", **fields)


def claim(store: SqliteStore | MemoryStore, n: int = 1, *kinds: str) -> list[Claim]:
    return store.claim(n, worker="w", lease_us=LEASE_US, kinds=kinds or None).claims


def claimed_in_order(store: SqliteStore | MemoryStore) -> list[str]:
    """Claim everything one by one, and complete it."""
    order = []
    while claims := claim(store):
        order += ids(claims)
        store.finish([Completed(claims[0].fence)])
    return order


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


def repair_all(file: Path) -> None:
    with examined(file) as queue:
        found = Damages(queue.recount(lambda *_: None))
    repair.repair(file, found, lambda *_: None, START)


# ── The migration ────────────────────────────────────────────────────────────────────────────────

TO_SCHEMA_13 = f"""{TO_SCHEMA_14}
    DROP TRIGGER claim_of_schema_13;
    DROP TRIGGER level_of_schema_13;
    DROP TABLE kinds;
    ALTER TABLE levels DROP COLUMN kind_time;
    ALTER TABLE levels DROP COLUMN last_claim;
    ALTER TABLE levels DROP COLUMN level_time;
    ALTER TABLE customer_states DROP COLUMN costs_by_kind;
    ALTER TABLE workers DROP COLUMN kinds;
    ALTER TABLE leases DROP COLUMN supports_kinds;
    CREATE TABLE flows_13 (
        customer INTEGER NOT NULL, level INTEGER NOT NULL CHECK (level BETWEEN 0 AND 9),
        kind INTEGER NOT NULL DEFAULT 0, waiting INTEGER NOT NULL DEFAULT 0,
        claimed_to INTEGER NOT NULL, folded INTEGER NOT NULL DEFAULT 0,
        running INTEGER NOT NULL DEFAULT 0, place INTEGER NOT NULL DEFAULT 0,
        tick INTEGER NOT NULL DEFAULT 0, head_order INTEGER, head_since INTEGER,
        head_bound INTEGER, held INTEGER NOT NULL DEFAULT 0,
        PRIMARY KEY (customer, level, kind)
    ) STRICT, WITHOUT ROWID;
    INSERT INTO flows_13 SELECT * FROM flows;
    DROP TABLE flows;
    ALTER TABLE flows_13 RENAME TO flows;
    CREATE INDEX flows_turn ON flows (level, place, tick) WHERE folded > 0 AND held = 0;
    CREATE INDEX flows_head ON flows (head_bound, customer)
        WHERE head_bound IS NOT NULL AND held = 0;
    DELETE FROM migrations WHERE number > 13;
    PRAGMA user_version = 13"""


def fill(store: SqliteStore, clock: ManualClock) -> None:
    """Leave documents in every state, unfolded events, learned costs, limits and leases."""
    store.adjust("b", CustomerSettings(limit=2))
    store.adjust("c", CustomerSettings(weight=3))
    for _ in range(9):
        submit_each(store, "aaabbbccd")
        clock.advance(50)
    claims = claim(store, 20)
    store.finish([Completed(each.fence, real_cost=3_000_000) for each in claims[:9]])
    store.finish([Failed(claims[9].fence, "busy", 1), Released(claims[10].fence)])
    store.finish([Failed(claims[11].fence, "never again")])
    store.submit([new("e", due_at=clock.now() + SECOND_US), new("d"), new("e", key="k")])
    store.sign_on("w", 4)


@pytest.mark.parametrize("costs", [Costs.EQUAL, Costs.LEARNED])
@pytest.mark.parametrize("mode", list(Mode))
def test_a_queue_of_schema_13_goes_on_in_its_order(
    tmp_path: Path, clock: ManualClock, mode: Mode, costs: Costs
) -> None:
    files = [tmp_path / "same.db", tmp_path / "migrated.db"]
    for file in files:
        its_clock = ManualClock(START)
        with closing(open_store(file, its_clock, settings=Settings(mode=mode, costs=costs))) as its:
            fill(its, its_clock)
    with closing(apsw.Connection(str(files[1]))) as connection:
        connection.execute(TO_SCHEMA_13).fetchall()

    states = []
    for file in files:
        its_clock = ManualClock(START + 1_000 * SECOND_US)
        with closing(open_store(file, its_clock)) as its:
            before = snapshot(its)
            assert damages(file) == []
            states.append((before, its.workers(), its.kinds(), claimed_in_order(its)))

    assert states[0] == states[1]
    assert len(states[0][-1]) > 60


def test_a_migrated_queue_can_have_kinds_at_once(file: Path, clock: ManualClock) -> None:
    with closing(open_store(file, clock)) as store:
        fill(store, clock)
    with closing(apsw.Connection(str(file))) as connection:
        connection.execute(TO_SCHEMA_13).fetchall()

    with closing(open_store(file, clock)) as store:
        store.configure_kind("ocr", KindSettings())
        (receipt,) = store.submit([new(kind="ocr")])

        assert ids(claim(store, 1, "ocr")) == [receipt.id]
        assert damages(file) == []


# ── Releases before this one ─────────────────────────────────────────────────────────────────────

# What schema 13 executes for a submission and a claim of one document of a new customer.
SUBMIT_OF_SCHEMA_13 = """
    INSERT INTO customers (number, name, count, count_updated_at, stored_bytes, delayed)
    VALUES (?1, 'customer ' || ?1, 0, ?2, 1025, 0);
    INSERT INTO documents (number, customer, level, order_number, state, priority, count,
        submitted_at, body, content_name, size_bytes, sha256, body_type)
    VALUES (?1, ?1, 1, ?1, 1, 1, 0, ?2, '1', NULL, 1, NULL, 'payload');
    INSERT INTO flows (customer, level, waiting, claimed_to) VALUES (?1, 1, 1, ?1 - 1)
    ON CONFLICT DO UPDATE SET waiting = waiting + excluded.waiting;
    UPDATE queue SET next_number = ?1 + 1, next_customer = ?1 + 1, waiting_1 = waiting_1 + 1;
    INSERT INTO event_log (at, events) VALUES (?2, json_array(json_array(0, ?1, 1, ?1, 1)))"""
CLAIM_OF_SCHEMA_13 = """
    DELETE FROM event_log;
    UPDATE flows SET folded = 1, head_order = ?1, head_since = ?2, head_bound = ?2
    WHERE customer = ?1 AND level = 1;
    UPDATE documents SET state = 2, returned = 0, attempts = attempts + 1, fence = ?1,
        claimed_at = ?2, lease_until = ?3, worker = 'old', charged_cost = 1000000,
        charged_weight = 1000, charge = 1000000000
    WHERE number = ?1 AND state = 1;
    INSERT INTO leases (fence, until, running, documents)
    VALUES (?1, ?3, 1, json_array(?1));
    UPDATE flows SET waiting = waiting - 1, claimed_to = ?1, place = 1000000000, tick = ?1,
        folded = 0, running = 1, head_order = NULL, head_since = NULL, head_bound = NULL, held = 0
    WHERE customer = ?1 AND level = 1;
    UPDATE levels SET clock = clock + 1000000000, weight = 0 WHERE level = 1;
    UPDATE queue SET claims = claims + 1, fence = ?1, tick = ?1,
        scheduler_version = scheduler_version + 1, waiting_1 = waiting_1 - 1"""


class EarlierRelease:
    """A process with schema 13 that has the file open."""

    def __init__(self, file: Path, clock: ManualClock) -> None:
        self._connection = apsw.Connection(str(file))
        self._clock = clock

    def submit(self, number: int) -> None:
        self._execute(SUBMIT_OF_SCHEMA_13, number)

    def claim(self, number: int) -> None:
        self._execute(CLAIM_OF_SCHEMA_13, number)

    def retry(self, number: int) -> None:
        self._execute("UPDATE documents SET state = 1, level = 1 WHERE number = ?1", number)

    def _execute(self, statements: str, number: int) -> None:
        values = (number, self._clock.now(), self._clock.uptime().at + LEASE_US)
        with self._connection:
            for statement in statements.split(";"):
                used = max(n for n in range(4) if n == 0 or f"?{n}" in statement)
                self._connection.execute(statement, values[:used])

    def close(self) -> None:
        self._connection.close()


def opened_by_schema_13(file: Path, monkeypatch: pytest.MonkeyPatch) -> SqliteStore:
    with monkeypatch.context() as patch:
        known = [each for each in schema.migrations() if each.number <= 13]
        patch.setattr(schema, "migrations", lambda: known)
        return SqliteStore(file)


def test_a_release_before_kinds_works_on_the_file_until_there_is_another_kind(
    file: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(open_store(file, clock)) as store, closing(EarlierRelease(file, clock)) as earlier:
        claim(store, 0)  # leases count from this boot
        for number in (1, 2, 3):
            earlier.submit(number)
            earlier.claim(number)
        earlier.submit(4)
        opened_by_schema_13(file, monkeypatch).close()

        assert damages(file) == []
        (default,) = store.kinds()
        assert (default.waiting, default.running) == (1, 3)
        assert [each.document.customer for each in claim(store)] == ["customer 4"]

        store.configure_kind("ocr", KindSettings())

        with pytest.raises(StoreRefused, match="has schema 15.*reads schemas up to 13"):
            opened_by_schema_13(file, monkeypatch)
        earlier.submit(5)  # of the default kind
        with pytest.raises(apsw.ConstraintError, match="has kinds of work.*restart this process"):
            earlier.claim(5)
        assert [each.document.customer for each in claim(store)] == ["customer 5"]
        assert damages(file) == []


def test_a_release_before_kinds_moves_no_document_to_the_default_kind(
    store: SqliteStore, file: Path, clock: ManualClock
) -> None:
    (receipt,) = store.submit([new(kind="ocr")])
    (claimed,) = claim(store)
    store.finish([Failed(claimed.fence, "never again")])
    ((number,),) = execute(file, "SELECT number FROM documents")

    with (
        closing(EarlierRelease(file, clock)) as earlier,
        pytest.raises(apsw.ConstraintError, match="does not belong to its kind of work"),
    ):
        earlier.retry(number)

    assert store.retry([receipt.id]) == [State.DEAD]
    assert ids(claim(store, 1, "ocr")) == [receipt.id]


def test_the_claims_before_the_first_other_kind_count_for_the_patience(
    file: Path, clock: ManualClock
) -> None:
    memory = MemoryStore(clock=clock, key=KEY)
    with closing(open_store(file, clock)) as sqlite:
        served = []
        for store in (memory, sqlite):
            submit_each(store, "a" * 25)  # sinks to level 9
            clock.step(-200)
            clock.advance(200)
        for store in (memory, sqlite):
            submit_each(store, "bcdefgh")
        clock.advance(200)
        for store in (memory, sqlite):
            first = [each.document.customer for each in claim(store, 7)]
            store.configure_kind("ocr", KindSettings())
            submit_each(store, "ijkl")
            served.append(first + [each.document.customer for each in claim(store, 5)])

    assert served[0] == served[1]


def test_a_kind_cannot_be_deleted(store: SqliteStore, file: Path) -> None:
    with pytest.raises(apsw.ConstraintError, match="a kind of work cannot be deleted"):
        execute(file, "DELETE FROM kinds")

    assert [kind.name for kind in store.kinds()] == ["default", "ocr", "text"]


# ── Wrong rows ───────────────────────────────────────────────────────────────────────────────────

WRONG = {
    "UPDATE levels SET weight = 0 WHERE level = 11": "level 1 of kind number 1 is 0, and should be",
    "DELETE FROM levels WHERE level = 11": "level 1 of kind number 1 is 0, and should be 2000",
    "UPDATE kinds SET waiting_1 = 9 WHERE number = 1": "priority 1 of kind number 1 is 9, and",
    "UPDATE flows SET folded = 7 WHERE level = 11": "documents in level 1 of kind number 1 is 7",
    "UPDATE flows SET waiting = 7 WHERE level = 11": "documents of priority 1 of kind number 1 is",
    "UPDATE flows SET head_order = 999 WHERE level = 11": "`head_order` of level 1 of kind number",
    "UPDATE flows SET head_since = NULL WHERE level = 11": "`head_since` of level 1 of kind number",
    "DELETE FROM flows WHERE level = 11": "documents in level 1 of kind number 1 is 0",
    "UPDATE documents SET level = 13 WHERE level = 11": "the level of document",
}


@pytest.mark.parametrize("damage", WRONG)
def test_a_wrong_row_of_a_band_is_found_and_repaired(
    store: SqliteStore, file: Path, damage: str
) -> None:
    prepare(store)
    expected = snapshot(store)
    execute(file, damage)

    assert any(WRONG[damage] in found for found in damages(file))
    repair_all(file)

    assert damages(file) == []
    assert snapshot(store) == expected
    assert sorted(each.document.customer for each in claim(store, 9, "ocr")) == ["a", "a", "b"]
    assert damages(file) == []


@pytest.mark.parametrize(
    "damage", [each for each in WRONG if not each.startswith(("UPDATE kinds", "DELETE FROM flows"))]
)
def test_a_wrong_row_of_a_band_stops_no_claim(
    store: SqliteStore, file: Path, clock: ManualClock, damage: str
) -> None:
    prepare(store)
    execute(file, damage)

    claims = [each for _ in range(4) for each in claim(store, 2)]
    clock.advance(61)  # a minute after a claim found too little, the counters are compared
    claims += claim(store, 9)

    served = sorted((each.document.kind, each.document.customer) for each in claims)
    assert served == [("default", "a"), ("ocr", "a"), ("ocr", "a"), ("ocr", "b"), ("text", "c")]


def prepare(store: SqliteStore) -> None:
    """Let documents of every kind wait, with all events folded."""
    store.submit([new("a", kind="ocr"), new("a", kind="ocr"), new("b", kind="ocr")])
    store.submit([new("c", kind="text"), new("a")])
    assert claim(store, 0) == []


def test_a_head_that_is_not_stored_is_rebuilt_by_the_next_claim(
    file: Path, clock: ManualClock
) -> None:
    with closing(open_store(file, clock)) as store:
        submit_each(store, "aabb")
        claim(store)
        execute(file, "UPDATE flows SET head_since = NULL, head_bound = NULL")

        claims = claim(store, 9)

        assert len(claims) == 3
        assert store.summary().repairs > 0
        assert damages(file) == []


@pytest.mark.parametrize("mode", list(Mode))
def test_a_document_whose_flow_is_damaged_is_explained(
    file: Path, clock: ManualClock, mode: Mode
) -> None:
    with closing(open_store(file, clock, settings=Settings(mode=mode))) as store:
        receipts = submit_each(store, "aabb")
        claim(store, 0)
        execute(file, "UPDATE flows SET head_order = NULL, head_since = NULL, head_bound = NULL")

        assert all(store.snapshot(receipt.id) is not None for receipt in receipts)
        assert store.lanes().started == 0


# ── Clocks ───────────────────────────────────────────────────────────────────────────────────────


def test_times_of_kinds_go_back_together_and_their_order_stays(
    store: SqliteStore, file: Path
) -> None:
    def turns(after: str) -> str:
        for kind in ("ocr", "text"):
            store.submit([new(f"{kind} {len(after)}", kind=kind) for _ in range(3)])
        claim(store, 0)
        execute(file, after)
        return "".join(each.document.kind[0] for each in claim(store, 6))

    plain = turns("SELECT 1")
    shift = f"""
        UPDATE levels SET kind_time = kind_time + {CLOCK_MAX} WHERE level % 10 = 1;
        UPDATE levels SET level_time = level_time + {CLOCK_MAX} WHERE level = 1"""

    shifted = turns(shift)

    assert shifted == plain
    highest = execute(file, "SELECT max(kind_time), max(level_time), max(clock) FROM levels")
    assert max(highest[0]) < CLOCK_MAX


def test_a_kind_without_turns_for_long_overflows_nothing(store: SqliteStore, file: Path) -> None:
    store.submit([new(kind="text")])
    claim(store, 1)
    for _ in range(12):
        store.submit([new(kind="ocr")])
        claim(store, 0)
        execute(file, f"UPDATE levels SET level_time = {CLOCK_MAX}, clock = {CLOCK_MAX + 1}")
        assert len(claim(store, 1, "ocr")) == 1

    store.submit([new(kind="text")])

    assert len(claim(store, 1)) == 1
    assert damages(file) == []


# ── What a claim of one kind costs ───────────────────────────────────────────────────────────────


class Work:
    """Counts the steps of SQLite's virtual machine, and the pages of the write-ahead log."""

    def __init__(self, file: Path, store: SqliteStore) -> None:
        self._log = Path(f"{file}-wal")
        self._database = store._database
        self._steps = 0

    def of(self, call: Callable[[], object]) -> tuple[int, int]:
        """Return the steps and pages of a call."""
        writer = self._database._writer
        assert self._database.truncate_log()
        self._steps = 0
        writer.trace_v2(apsw.SQLITE_TRACE_PROFILE, self._note)
        call()
        writer.trace_v2(0)
        return self._steps, self._log.stat().st_size // (4_096 + 24)  # with the frame's header

    def _note(self, event: dict[str, Any]) -> None:
        self._steps += event["stmt_status"]["SQLITE_STMTSTATUS_VM_STEP"]


def work_of_claims(
    file: Path, settings: Settings, *, kinds: int, customers: int, documents: tuple[int, ...]
) -> list[tuple[int, int]]:
    """Return the work of claims of one kind, alternately of a process that has loaded nothing and
    of one that has. Customers have several bursts of documents of each kind."""
    clock = ManualClock(START)
    with (
        closing(open_store(file, clock, settings=settings)) as store,
        closing(open_store(file, clock)) as other,
    ):
        served, *others = [f"kind-{number}" for number in range(kinds)]
        store.sign_on("w", 1, [served, *others])
        for count in documents:
            for kind in (served, *others):
                for customer in range(customers):
                    store.submit([new(f"customer {customer}", kind=kind) for _ in range(count)])
            clock.advance(2_000)  # resets the counts
        claim(store, 0)
        work = Work(file, store)
        found = []
        for _ in range(4):
            claim(other, 3, served)  # `store` loads its state again
            found.append(work.of(lambda: claim(store, 3, served)))
            found.append(work.of(lambda: claim(store, customers, served)))
        return found


@pytest.mark.parametrize("costs", list(Costs))
@pytest.mark.parametrize("mode", list(Mode))
def test_a_claim_reads_as_much_among_many_kinds_as_among_two(
    tmp_path: Path, mode: Mode, costs: Costs
) -> None:
    """Each customer has documents in many levels of each kind, the oldest in the last."""
    settings = Settings(mode=mode, costs=costs, patience_s=60)
    few, many = (
        work_of_claims(
            tmp_path / f"{kinds}.db", settings, kinds=kinds, customers=8, documents=(20, 3)
        )
        for kinds in (2, 25)
    )

    assert len(few) == 8
    for (steps, _), (steps_among_many, _) in zip(few, many, strict=True):
        assert steps_among_many <= 1.1 * steps


def test_a_claim_writes_as_much_among_many_kinds_as_among_two(tmp_path: Path) -> None:
    """Each customer has documents of each kind, which must not spread its flows over more pages."""
    few, many = (
        work_of_claims(
            tmp_path / f"{kinds}.db", Settings(), kinds=kinds, customers=60, documents=(5,)
        )
        for kinds in (2, 40)
    )

    for (_, pages), (_, pages_among_many) in zip(few, many, strict=True):
        assert pages_among_many <= pages + 10


def test_documents_are_found_by_customer_in_every_band(store: SqliteStore) -> None:
    receipts = []
    for kind in ("ocr", "default", "text", "ocr"):
        receipts += store.submit([new(kind=kind) for _ in range(7)])
    store.cancel([receipts[3].id, receipts[12].id])
    store.submit([new("other", kind="ocr")])

    def found(size: int, **criteria: Any) -> list[str]:
        documents: list[str] = []
        after = None
        while True:
            page = store.find(Filter(customer="acme", **criteria), after=after, size=size)
            documents += ids(page.documents)
            if page.next is None:
                return documents
            after = page.next

    newest_first = ids(receipts)[::-1]
    assert found(100) == found(5) == newest_first
    of_ocr = ids(receipts[21:])[::-1] + ids(receipts[:7])[::-1]
    assert found(4, kinds=("ocr",)) == of_ocr
    assert found(4, kinds=("ocr",), states=(State.CANCELLED,)) == [receipts[3].id]


# ── Copies ───────────────────────────────────────────────────────────────────────────────────────


def test_an_exported_queue_has_its_kinds_and_every_band(
    store: SqliteStore, clock: ManualClock
) -> None:
    store.configure_kind("text", KindSettings(limit=3, attempts_max=2))
    store.configure(Settings(costs=Costs.LEARNED))
    store.submit([new(kind="text"), new(kind="text"), new("b", kind="text"), new("b")])
    store.sign_on("w", 1, ["text"])
    (claimed,) = claim(store, 1, "text")
    store.finish([Completed(claimed.fence, real_cost=5_000_000)])
    claim(store, 1, "text")
    clock.advance(LEASE_S + 1)

    with store.read_transaction() as connection:
        exported = unload(connection, clock.now(), clock.uptime())
        states = list(exported.customer_states)
        documents = list(exported.documents)
        workers = list(exported.workers)

    assert exported.kinds == [
        (0, "default", None, 0, None, None, 0),
        (1, "ocr", None, 0, None, None, 0),
        (2, "text", 3, 0, 2, None, 2),
    ]
    bands = [exported.clocks, exported.weights, exported.kind_times, exported.last_claims]
    assert [len(values) for values in (*bands, exported.waiting)] == [29] * 5
    assert exported.last_claims[band_of(1, 2) - 1] == 2
    assert exported.waiting[0] == 1
    assert exported.waiting[band_of(1, 2) - 1] == 2  # one with an expired lease
    assert [row[-1] for row in states] == [{0: [], 2: [5_000_000]}]
    assert [document.kind for document in documents] == [2, 2, 2, 0]
    assert [row[-1] for row in workers] == [["text"]]


def test_an_error_of_another_release_is_an_error_of_ours(store: SqliteStore, file: Path) -> None:
    """A trigger that refuses an earlier release raises no driver error from a store."""
    store.submit([new()])
    execute(
        file,
        """CREATE TRIGGER later BEFORE INSERT ON leases BEGIN
            SELECT RAISE(ABORT, 'restart this process'); END""",
    )

    with pytest.raises(StoreError, match="restart this process"):
        claim(store)
