"""The store in an SQLite file: rejected files, settings, a full disk, query plans."""

import os
import re
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import apsw
import pytest

from fairturn.clock import SECOND_US, Clock, ManualClock
from fairturn.errors import FairturnError, StoreError, StoreFull, StoreRefused, StoreUnavailable
from fairturn.model import (
    COST_MAX,
    Advanced,
    Completed,
    CustomerSettings,
    Failed,
    Filter,
    KindSettings,
    NewDocument,
    OutageReport,
    Outcome,
    Settings,
    State,
    cost_in_millionths,
)
from fairturn.scheduling.flows import Costs, Mode
from fairturn.stores.conformance import snapshot
from fairturn.stores.sqlite import SqliteStore, submit
from fairturn.stores.sqlite.flows import CLOCK_MAX
from fairturn.stores.sqlite.schema import migrate, refuse_engine

START = 1_700_000_000 * SECOND_US
LEASE_US = 30 * SECOND_US
MIB = 1_048_576


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "queue.db"


@contextmanager
def opened(file: Path, clock: Clock | None = None, **options: Any) -> Iterator[SqliteStore]:
    store = SqliteStore(file, clock=clock, **options)
    try:
        yield store
    finally:
        store.close()


def new(customer: str = "acme", **fields: Any) -> NewDocument:
    return NewDocument(customer, "1", **fields)


# ── Files that are refused ───────────────────────────────────────────────────────────────────────


def make_text(file: Path) -> None:
    file.write_text("Dear diary,\n" * 1_000)


def make_bytes_that_begin_like_a_database(file: Path) -> None:
    file.write_bytes(b"SQLite format 3\x00" + b"\xff" * 5_000)


def make_a_database_of_another_program(file: Path) -> None:
    connection = apsw.Connection(str(file))
    connection.execute("CREATE TABLE songs (title TEXT); INSERT INTO songs VALUES ('x')")
    connection.close()


def make_a_wal_database_of_another_program(file: Path) -> None:
    connection = apsw.Connection(str(file))
    connection.pragma("journal_mode", "wal")
    connection.execute("CREATE TABLE songs (title TEXT)")
    connection.close()


def make_a_database_with_an_id_of_another_program(file: Path) -> None:
    connection = apsw.Connection(str(file))
    connection.execute("PRAGMA application_id = 77")
    connection.close()


def make_a_newer_schema(file: Path) -> None:
    with opened(file) as store:
        store.submit([new()])
    connection = apsw.Connection(str(file))
    connection.execute("PRAGMA user_version = 9999")
    connection.close()


FOREIGN = {
    "a text": (make_text, "is not a database"),
    "a damaged header": (make_bytes_that_begin_like_a_database, "is not a database"),
    "another program": (make_a_database_of_another_program, "of another program"),
    "another program, WAL": (make_a_wal_database_of_another_program, "of another program"),
    "another id": (make_a_database_with_an_id_of_another_program, "of another program"),
    "a newer schema": (make_a_newer_schema, "has schema 9999.*install the newer fairturn"),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_a_file_that_is_not_ours_is_refused_and_left_untouched(file: Path, what: str) -> None:
    make, sentence = FOREIGN[what]
    make(file)
    before = file.read_bytes()
    modified_at = file.stat().st_mtime_ns

    with pytest.raises(StoreRefused, match=sentence) as refused:
        SqliteStore(file)

    assert str(file) in str(refused.value)
    assert file.read_bytes() == before
    assert file.stat().st_mtime_ns == modified_at
    assert [each.name for each in file.parent.iterdir()] == [file.name]


def test_a_file_that_another_process_makes_in_this_moment_is_not_foreign(file: Path) -> None:
    late, early = apsw.Connection(str(file)), apsw.Connection(str(file))
    late.pragma("journal_mode", "wal")
    made: list[Path] = []

    def make_it_meanwhile(_: object, statement: str, __: object) -> bool:
        if "sqlite_schema" in statement and not made:
            migrate(early, str(file))
            made.append(file)
        return True

    late.exec_trace = make_it_meanwhile
    migrate(late, str(file))

    assert made
    assert late.execute("SELECT count(*) FROM queue").get is not None
    late.close()
    early.close()


def test_a_folder_that_does_not_exist_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(StoreRefused, match="folder .*missing does not exist"):
        SqliteStore(tmp_path / "missing" / "queue.db")

    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(StoreRefused, match="is a folder"):
        SqliteStore(tmp_path)

    assert list(tmp_path.iterdir()) == []


def test_an_empty_file_becomes_a_queue(file: Path) -> None:
    file.touch()

    with opened(file) as store:
        assert store.submit([new()])[0].count == 0


def test_a_file_that_is_cut_off_is_an_error_of_ours(file: Path) -> None:
    with opened(file) as store:
        store.submit([new()] * 1_000)
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])

    with pytest.raises(FairturnError):
        open_and_read_everything(file)


def open_and_read_everything(file: Path) -> None:
    with opened(file) as store:
        snapshot(store)
        store.claim(1_000, worker="w", lease_us=LEASE_US)


def test_a_synchronous_that_does_not_exist_is_refused_by_name(file: Path) -> None:
    with pytest.raises(ValueError, match="synchronous is 'OFF'; it must be FULL or NORMAL"):
        SqliteStore(file, synchronous="OFF")

    assert not file.exists()


# ── The engine ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "version",
    ["3.6.23", "3.44.6", "3.44.7", "3.50.7", "3.50.8", "3.51.3", "3.52.0", "3.54.1", "4.0.0"],
)
def test_an_engine_without_the_wal_reset_bug_is_used(version: str) -> None:
    refuse_engine(version)


@pytest.mark.parametrize(
    "version",
    ["3.7.0", "3.40.1", "3.44.5", "3.45.0", "3.49.9", "3.50.0", "3.50.6", "3.51.0", "3.51.2"],
)
def test_an_engine_with_the_wal_reset_bug_is_refused(version: str) -> None:
    with pytest.raises(StoreRefused, match=f"SQLite {version} can lose committed writes"):
        refuse_engine(version)


def test_a_store_is_not_opened_with_an_engine_that_is_refused(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apsw, "sqlite_lib_version", lambda: "3.50.4")

    with pytest.raises(StoreRefused, match="3.50.4"):
        SqliteStore(file)

    assert not file.exists()


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[apsw.Connection]:
    """Every connection that is opened during the test."""
    made: list[apsw.Connection] = []
    monkeypatch.setattr(apsw, "connection_hooks", [*apsw.connection_hooks, made.append])
    return made


@pytest.mark.parametrize("synchronous, number", [("FULL", 2), ("NORMAL", 1)])
def test_the_settings_of_the_engine_are_in_force_on_every_connection(
    file: Path, connections: list[apsw.Connection], synchronous: str, number: int
) -> None:
    wanted = {
        "journal_mode": "wal",
        "synchronous": number,
        "journal_size_limit": 64 * MIB,
        "foreign_keys": 1,
        "trusted_schema": 0,
        "cell_size_check": 1,
        "mmap_size": 0,
    }
    with opened(file, synchronous=synchronous) as store:
        store.submit([new()])
        with store._database.reading():
            store.summary()

        found = [{name: c.pragma(name) for name in wanted} for c in connections]

    assert len(found) == 3  # one writer, and the concurrent readers
    assert found == [wanted] * 3


def test_threads_that_read_one_after_the_other_share_a_connection(
    file: Path, connections: list[apsw.Connection]
) -> None:
    with opened(file) as store:
        for _ in range(20):
            reading = threading.Thread(target=store.summary)
            reading.start()
            reading.join()

        assert len(connections) == 2


def test_only_the_owner_can_read_a_new_file_and_those_beside_it(file: Path) -> None:
    with opened(file) as store:
        store.submit([new()])

        modes = {path.name: path.stat().st_mode & 0o777 for path in file.parent.glob("*.db*")}

    assert len(modes) == 3
    assert set(modes.values()) == {0o600}


def test_the_file_carries_our_id_and_the_number_of_its_schema(file: Path) -> None:
    with opened(file):
        pass

    connection = apsw.Connection(str(file))
    assert connection.pragma("application_id") == int.from_bytes(b"FTN1", "big")
    assert int(connection.pragma("user_version")) >= 1
    connection.close()


# ── Network file systems ─────────────────────────────────────────────────────────────────────────


@pytest.fixture
def mounted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """A mount table in which the test's folder has this type of file system."""
    kinds: list[str] = []
    read_text = Path.read_text

    def read(path: Path, encoding: str | None = None, errors: str | None = None) -> str:
        table = read_text(path, encoding, errors)
        if str(path).endswith("mountinfo"):
            place = str(tmp_path.resolve()).replace(" ", "\\040")
            table += "".join(
                f"99 1 0:99 / {place} rw,relatime shared:1 - {kind} server:/share rw\n"
                for kind in kinds
            )
        return table

    monkeypatch.setattr(Path, "read_text", read)
    return kinds


@pytest.mark.parametrize(
    "kind", ["nfs", "nfs4", "cifs", "smb3", "9p", "virtiofs", "fuse", "fuse.sshfs"]
)
def test_a_network_file_system_is_refused_by_its_type(
    file: Path, mounted: list[str], kind: str
) -> None:
    mounted.append(kind)

    with pytest.raises(StoreRefused, match=f"is on a {re.escape(kind)} file system"):
        SqliteStore(file)

    assert not file.exists()


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "fuseblk"])
def test_a_local_file_system_is_used(file: Path, mounted: list[str], kind: str) -> None:
    mounted.append(kind)

    with opened(file) as store:
        assert store.summary().waiting == 0


def test_who_takes_the_risk_of_a_network_file_system_gets_no_shared_memory(
    file: Path, mounted: list[str], connections: list[apsw.Connection]
) -> None:
    mounted.append("nfs4")

    store = SqliteStore(file, allow_network=True)
    store.submit([new()])
    modes = [connection.pragma("journal_mode") for connection in connections]
    store.close()

    assert modes
    assert set(modes) == {"delete"}


# ── Closed ───────────────────────────────────────────────────────────────────────────────────────


def test_a_store_that_was_closed_says_so(file: Path) -> None:
    store = SqliteStore(file)
    (receipt,) = store.submit([new()])
    store.read(receipt.id)

    store.close()

    for call in (
        lambda: store.submit([new()]),
        lambda: store.claim(1, worker="w", lease_us=LEASE_US),
        lambda: store.read(receipt.id),
        lambda: store.finish([]),
        store.summary,
        store.version,
        store.settings,
        store.prune,
    ):
        with pytest.raises(StoreUnavailable, match="was closed"):
            call()


def test_closing_leaves_one_file(file: Path) -> None:
    with opened(file) as store:
        store.submit([new()])

    assert [each.name for each in file.parent.iterdir()] == [file.name]


# ── What is left ─────────────────────────────────────────────────────────────────────────────────


# Tables with rows that belong to no customer.
_OWN_ROWS = {"migrations", "queue", "levels", "kinds", "outcome_counters", "workers"}


def rows_left(file: Path) -> dict[str, int]:
    """Return the number of rows of each table that has rows of customers."""
    connection = apsw.Connection(str(file))
    tables = [name for (name,) in connection.execute("SELECT name FROM pragma_table_list")]
    rows = {
        name: connection.execute(f'SELECT count(*) FROM "{name}"').get
        for name in tables
        if not name.startswith("sqlite_") and name not in _OWN_ROWS
    }
    connection.close()
    return {name: n for name, n in rows.items() if n}


def live(store: SqliteStore, clock: ManualClock) -> None:
    """Leave rows in every table."""
    store.adjust("acme", CustomerSettings(weight=2, limit=5))
    store.submit([new(key=f"{n}", digest=b"1") for n in range(12)])
    store.configure_kind("ocr", KindSettings())
    store.submit([new(kind="ocr") for _ in range(3)])
    store.submit([NewDocument("acme", "x" * 100_000, size_bytes=100_000)])
    store.submit([new(due_at=clock.now() + SECOND_US)])
    claims = store.claim(3, worker="w", lease_us=LEASE_US).claims
    store.finish([Completed(claims[0].fence, "1"), Failed(claims[1].fence, "no")])
    (claim,) = store.claim(1, worker="w", lease_us=LEASE_US, kinds=["ocr"]).claims
    store.finish([Completed(claim.fence)])
    store.claim(1, worker="w", lease_us=LEASE_US)


@pytest.mark.parametrize("costs", list(Costs))
def test_nothing_is_left_of_a_customer_that_was_purged(
    file: Path, clock: ManualClock, costs: Costs
) -> None:
    with opened(file, clock, settings=Settings(costs=costs)) as store:
        live(store, clock)
        assert len(rows_left(file)) >= 5

        store.purge("acme")
        store.claim(1, worker="w", lease_us=LEASE_US)

        assert rows_left(file) == {}


# While costs are learned, the recent costs of a customer are stored.
@pytest.mark.parametrize("costs", [Costs.EQUAL, Costs.KNOWN])
def test_nothing_is_left_of_a_customer_that_is_idle_for_long(
    file: Path, clock: ManualClock, costs: Costs
) -> None:
    with opened(file, clock, settings=Settings(costs=costs)) as store:
        live(store, clock)
        store.adjust("acme", CustomerSettings())
        clock.advance(LEASE_US / SECOND_US)
        while claims := store.claim(5, worker="w", lease_us=LEASE_US).claims:
            assert store.finish([Completed(claim.fence) for claim in claims]) == []
        clock.advance(365 * 86_400)

        while store.prune() is not None:
            pass

        assert rows_left(file) == {}


# ── A full disk ──────────────────────────────────────────────────────────────────────────────────


def fill(place: Path, leave_bytes: int) -> Path:
    """Create a file that leaves only this much space."""
    stat = os.statvfs(place)
    ballast = place / "ballast"
    with ballast.open("wb") as file:
        left = stat.f_bavail * stat.f_frsize - leave_bytes
        while left > 0:
            file.write(bytes(min(MIB, left)))
            left -= MIB
    return ballast


def test_a_full_disk_refuses_submissions_and_lets_work_go_on(
    small_disk: Path, clock: ManualClock
) -> None:
    with opened(small_disk / "queue.db", clock) as store:
        store.submit([new(f"customer {n % 9}") for n in range(400)])
        before = snapshot(store)
        ballast = fill(small_disk, 6 * MIB)

        with pytest.raises(StoreFull, match="MiB left.*make room and try again"):
            store.submit([new()])
        assert snapshot(store) == before

        # Every document fails once and is completed, within the reserve.
        claims = store.claim(400, worker="w", lease_us=LEASE_US).claims
        assert store.renew([claim.fence for claim in claims], lease_us=LEASE_US) == ([], [])
        assert store.finish([Failed(claim.fence, "x" * 500, 0) for claim in claims]) == []
        outcomes: list[Completed] = []
        while True:
            claims, lost, _ = store.claim(50, worker="w", lease_us=LEASE_US, outcomes=outcomes)
            assert lost == []
            if not claims:
                break
            outcomes = [Completed(claim.fence, result='"done"') for claim in claims]
        with pytest.raises(StoreFull):
            store.submit([new()])

        ballast.unlink()
        assert store.submit([new()])[0].count == 0
        states = Counter(stored.document.state for stored in snapshot(store).documents)
        assert states == {State.COMPLETED: 400, State.WAITING: 1}
    assert_whole(small_disk / "queue.db")


def test_a_disk_with_no_room_at_all_loses_nothing(small_disk: Path, clock: ManualClock) -> None:
    with opened(small_disk / "queue.db", clock) as store:
        receipts = store.submit([new(f"customer {n % 9}") for n in range(300)])
        ballast = fill(small_disk, 0)
        accepted = {receipt.id for receipt in receipts}

        failed = 0
        for _ in range(50):
            with suppress(StoreFull):
                store.submit([new()])
                pytest.fail("a submission was accepted on a full disk")
            try:
                store.claim(5, worker="w", lease_us=LEASE_US)
            except StoreFull:
                failed += 1
        before = snapshot(store)
        assert {found.document.id for found in before.documents} == accepted
        ballast.unlink()

        assert snapshot(store) == before
        clock.advance(30)
        claims = store.claim(300, worker="w", lease_us=LEASE_US).claims
        assert {claim.document.id for claim in claims} == accepted
        assert store.finish([Completed(claim.fence) for claim in claims]) == []
    assert_whole(small_disk / "queue.db")


def test_filling_and_making_room_again_and_again_loses_nothing(
    small_disk: Path, clock: ManualClock
) -> None:
    accepted: set[str] = set()
    completed: set[str] = set()
    refused = 0
    with opened(small_disk / "queue.db", clock) as store:
        for cycle in range(10):
            ballast = fill(small_disk, (cycle % 5) * 2 * MIB) if cycle % 2 else None
            try:
                accepted |= {receipt.id for receipt in store.submit([new()] * 20)}
            except StoreFull:
                refused += 1
            with suppress(StoreFull):
                claims = store.claim(10, worker="w", lease_us=LEASE_US).claims
                assert store.finish([Completed(claim.fence) for claim in claims]) == []
                completed |= {claim.document.id for claim in claims}
            if ballast is not None:
                ballast.unlink()
            clock.advance(30)

        found = {stored.document.id: stored.document.state for stored in snapshot(store).documents}
    assert refused > 0
    assert set(found) == accepted
    assert {id for id, state in found.items() if state is State.COMPLETED} >= completed
    assert_whole(small_disk / "queue.db")


def assert_whole(file: Path) -> None:
    connection = apsw.Connection(str(file))
    assert connection.pragma("integrity_check") == "ok"
    connection.close()


# ── Plans ────────────────────────────────────────────────────────────────────────────────────────

# Tables with one row, with at most a hundred, with the events since the last claim, with the
# running documents, which a claim counts if it serves a kind with a limit, and with services.
SMALL = {
    "migrations",
    "queue",
    "outcome_counters",
    "kinds",
    "event_log",
    "unreported_cancels",
    "leases",
    "outages",
    "kind_services",
}


def work_through(store: SqliteStore, clock: ManualClock) -> None:
    """Everything that a claim can meet: expired leases, delays, limits, pauses, patience, kinds,
    steps, checkpoints, expiries and outages."""
    store.configure_kind("ocr", KindSettings(limit=1_000))
    store.sign_on("w", 1, needs={"ocr": ["gpu"]})
    for n in range(40):
        store.submit([new(f"customer {m % 13}", cost=m) for m in range(n, n + 9)])
        store.submit([new(f"customer {m % 13}", kind="ocr") for m in range(n, n + 5)])
        store.submit([new("later", due_at=clock.now() + SECOND_US)])
        store.submit([new("brief", expires_at=clock.now() + m * SECOND_US) for m in (5, 30, 90)])
        store.adjust(f"customer {n % 5}", CustomerSettings(limit=2, weight=1 + n % 3))
        store.adjust("customer 7", CustomerSettings(paused=n % 2 == 0))
        claims = store.claim(7, worker="w", lease_us=LEASE_US).claims
        store.finish([Completed(claim.fence) for claim in claims[:2]])
        store.finish([Failed(claim.fence, "busy", SECOND_US) for claim in claims[2:4]])
        fences = [claim.fence for claim in claims[4:]]
        store.renew(fences, lease_us=LEASE_US, checkpoints=dict.fromkeys(fences[2:], "1"))
        outcomes: list[Outcome] = [Completed(claim.fence) for claim in claims[4:5]]
        outcomes += [Advanced(claim.fence, "ocr", "1") for claim in claims[5:6]]
        outcomes += [OutageReport(claim.fence, "down") for claim in claims[6:]]
        store.claim(3, worker="w", lease_us=LEASE_US, outcomes=outcomes)
        clock.advance(20)


@pytest.mark.parametrize("costs", list(Costs))
@pytest.mark.parametrize("mode", list(Mode))
def test_no_statement_of_a_claim_walks_a_table_or_sorts(
    file: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, mode: Mode, costs: Costs
) -> None:
    settings = Settings(mode=mode, costs=costs, patience_s=30)
    statements: set[str] = set()
    claiming = False

    def note(statement: dict[str, object]) -> None:
        if claiming:
            statements.add(str(statement["sql"]))

    def watch(connection: apsw.Connection) -> None:
        connection.trace_v2(apsw.SQLITE_TRACE_STMT, note)

    monkeypatch.setattr(apsw, "connection_hooks", [*apsw.connection_hooks, watch])
    with opened(file, clock, settings=settings, synchronous="NORMAL") as store:
        work_through(store, clock)
    # Three processes: what one has cached, another has to read.
    with ExitStack() as stack:
        stores = [stack.enter_context(opened(file, clock)) for _ in range(3)]
        for n in range(24):
            store = stores[n % 5 % 3]
            store.submit([new("customer 3"), new("new")])
            store.resume("kind:ocr")  # a claim that came up short scans all flows once a minute
            kinds = (None, ["ocr"], ["default", "ocr"])[n % 3]
            claiming = True
            running = store.claim(2, worker="w", lease_us=LEASE_US).claims
            outcomes: list[Outcome] = [
                (Completed(claim.fence), Failed(claim.fence, "x", 0), Advanced(claim.fence, "ocr"))[
                    n % 3
                ]
                for claim in running
            ]
            store.claim(5, worker="w", lease_us=LEASE_US, kinds=kinds, outcomes=outcomes)
            claiming = False
            clock.advance(20)

    plans = {statement: plan_of(file, statement) for statement in statements}
    problems = [
        f"{step}\n    in {' '.join(statement.split())}"
        for statement, plan in plans.items()
        for step in plan
        if walks(step) and not is_of_subquery(step, plan)
    ]
    assert not problems, "\n".join(problems)
    for statement, plan in plans.items():
        for index in re.findall(r"INDEXED BY (\w+)", statement):
            assert any(re.search(rf"USING (COVERING )?INDEX {index}\b", step) for step in plan)
    assert len(re.findall(r"INDEX \w+_\w+", str(plans))) > 3


def plan_of(file: Path, statement: str) -> list[str]:
    if not re.match(r"\s*(SELECT|INSERT|UPDATE|DELETE|WITH)\b", statement):
        return []
    connection = apsw.Connection(str(file), flags=apsw.SQLITE_OPEN_READONLY)
    numbered = list(map(int, re.findall(r"\?(\d+)", statement)))
    bound = max(numbered) if numbered else statement.count("?")
    try:
        rows = connection.execute(f"EXPLAIN QUERY PLAN {statement}", (1,) * bound)
        return [str(row[3]) for row in rows]
    finally:
        connection.close()


def walks(step: str) -> bool:
    """Return whether the cost of a plan's step grows with the number of documents or customers."""
    if "TEMP B-TREE" in step:
        return True
    scanned = re.match(r"SCAN (?!CONSTANT ROW)(\w+)(?! VIRTUAL TABLE)", step)
    # Claims scan an index in its order up to a LIMIT.
    return scanned is not None and scanned[1] not in SMALL and "INDEX" not in step


def is_of_subquery(step: str, plan: list[str]) -> bool:
    """Return whether a step reads the rows of a subquery, whose own steps are in the plan too."""
    return step.startswith("SCAN ") and f"CO-ROUTINE {step.removeprefix('SCAN ')}" in plan


# ── The end of 64 bits ───────────────────────────────────────────────────────────────────────────


def test_clocks_go_back_together_long_before_the_end_of_64_bits_and_the_order_stays(
    file: Path, clock: ManualClock
) -> None:
    settings = Settings(mode=Mode.EQUAL, costs=Costs.KNOWN)
    highest_charge = {"cost": cost_in_millionths(COST_MAX)}
    served = []
    highest = 0
    with opened(file, clock, settings=settings, synchronous="NORMAL") as store:
        for customer in "ab":
            store.adjust(customer, CustomerSettings(weight=0.01))
        for _ in range(26):
            store.submit([new("ab"[n % 2], **highest_charge) for n in range(1_000)])
            claims, *_ = store.claim(1_000, worker="w", lease_us=LEASE_US)
            store.finish([Completed(claim.fence) for claim in claims])
            served += [claim.document.customer for claim in claims]
            clocks = apsw.Connection(str(file)).execute("SELECT max(clock) FROM levels").get
            assert clocks > highest or clocks == 0  # it went back, and by design only to 0
            highest = clocks
        assert highest < CLOCK_MAX < 26_000 * 1_000 * highest_charge["cost"] // 20

    assert served == ["a", "b"] * 13_000


# ── Interrupts ───────────────────────────────────────────────────────────────────────────────────


def test_a_submitter_that_is_interrupted_while_it_waits_leaves_the_line_to_the_others(
    file: Path,
) -> None:
    with opened(file) as store:
        somebody = apsw.Connection(str(file))
        somebody.execute("BEGIN IMMEDIATE")  # blocks the writer
        leader = threading.Thread(target=store.submit, args=([new("leader")],))
        leader.start()
        while not store._group_commit._writer:
            os.sched_yield()

        caught = threading.Event()

        def interrupt(*_: object) -> None:
            if not caught.is_set():
                caught.set()
                raise KeyboardInterrupt

        def signal_until_caught() -> None:
            while not store._group_commit._requests:
                os.sched_yield()
            # A change just before the wait begins does not end it, so there are several.
            while not caught.wait(0.01):
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

        before = signal.signal(signal.SIGUSR1, interrupt)
        signalling = threading.Thread(target=signal_until_caught)
        signalling.start()
        with pytest.raises(KeyboardInterrupt):
            store.submit([new("interrupted")])
        signalling.join()
        signal.signal(signal.SIGUSR1, before)
        somebody.execute("ROLLBACK")
        leader.join()
        store.submit([new("the next")])

        documents = store.find(Filter()).documents
        assert [document.customer for document in documents] == ["the next", "leader"]


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_process_is_refused_at_once_while_a_thread_of_its_parent_submits(
    file: Path,
) -> None:
    with opened(file) as store:
        somebody = apsw.Connection(str(file))
        somebody.execute("BEGIN IMMEDIATE")  # blocks the writer
        writer = threading.Thread(target=store.submit, args=([new()],))
        writer.start()
        while not store._group_commit._writer:
            os.sched_yield()

        child = os.fork()
        if not child:
            signal.alarm(10)
            with suppress(StoreError):
                store.submit([new("forked")])
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        somebody.execute("ROLLBACK")
        writer.join()

        assert os.waitstatus_to_exitcode(status) == 0


def test_a_submitter_that_is_interrupted_at_any_call_holds_up_nobody(file: Path) -> None:
    interrupted = 0
    with opened(file, synchronous="NORMAL") as store:
        while interrupt_at(interrupted + 1, lambda: store.submit([new("interrupted")])):
            interrupted += 1
            other = threading.Thread(target=store.submit, args=([new("other")],), daemon=True)
            other.start()
            other.join(10)
            assert not other.is_alive(), f"after an interrupt at call {interrupted}"

        assert interrupted > 50
        others = store.find(Filter(customer="other"), size=interrupted).documents
        assert len(others) == interrupted


def interrupt_at(number: int, work: Callable[[], object]) -> bool:
    """Raise KeyboardInterrupt at the n-th point of `submit.py` where Python handles signals: at a
    call, or after a C function. Return False if the work ended before."""
    before = sys.getprofile()
    seen = 0

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal seen
        here = frame.f_code.co_filename == submit.__file__
        if here and event in ("call", "c_return"):
            seen += 1
            if seen == number:
                raise KeyboardInterrupt

    sys.setprofile(count)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(before)
    return False


# ── Bounds ───────────────────────────────────────────────────────────────────────────────────────


def test_settings_of_a_newer_version_are_refused_by_name(file: Path, clock: ManualClock) -> None:
    with opened(file, clock):
        pass
    connection = apsw.Connection(str(file))
    connection.execute("UPDATE queue SET settings = json_set(settings, '$.colour', 'blue')")
    connection.close()

    with (
        opened(file, clock) as store,
        pytest.raises(StoreRefused, match="does not support: colour; install the newer fairturn"),
    ):
        store.settings()
