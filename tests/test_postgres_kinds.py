"""PostgreSQL: kinds of work, and the schema of the release before them."""

import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from random import Random
from typing import Any

import psycopg
import pytest

from fairturn.clock import SECOND_US, ManualClock
from fairturn.errors import KindRefused, StoreRefused
from fairturn.maintenance.copy import copy_queue
from fairturn.model import (
    KINDS_MAX,
    Claim,
    Completed,
    CustomerSettings,
    Failed,
    KindPolicy,
    KindSettings,
    Outcome,
    Settings,
)
from fairturn.scheduling.flows import Costs, Mode
from fairturn.stores.conformance.steps import all_customers, claim, find_all, ids, submit
from fairturn.stores.contract import QueueStore as Store
from fairturn.stores.inspection import Damages
from fairturn.stores.memory import MemoryStore
from fairturn.stores.migrations import Migration
from fairturn.stores.postgres import PostgresStore
from fairturn.stores.postgres import schema as migrating
from fairturn.stores.postgres.audit import recount, repair
from fairturn.stores.postgres.session import Session
from fairturn.stores.postgres.submit import to_arrays
from tests.on_postgres import PATIENCE_S, ended_somehow, new, wait_until_waiting, woken
from tests.recount import differences
from tests.servers import dumps, postgres
from tests.servers.queues import Databases

DATA = Path(__file__).parent / "data"
START = 1_700_000_000 * SECOND_US
LEASE_US = 30 * SECOND_US
OPEN = Settings(kinds=KindPolicy.OPEN)
SCHEMA_OF_KINDS = 14


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START)


@pytest.fixture
def connection(url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(url, autocommit=True) as connection:
        yield connection


@pytest.fixture
def kinds(url: str) -> Iterator[PostgresStore]:
    """A store with the kinds ocr and text, on the clock of the server."""
    with closing(PostgresStore(url, settings=OPEN)) as store:
        store.sign_on("w", 4, ["ocr", "text"])
        yield store


def damages(connection: psycopg.Connection[Any]) -> list[Any]:
    with connection.transaction():
        return list(recount(Session(connection, "fairturn"), lambda done, total: None))


# ── Turns ────────────────────────────────────────────────────────────────────────────────────────

MANY = tuple(f"kind-{n}" for n in range(12))


def program(seed: int, memory: Store, servers: list[PostgresStore], clock: ManualClock) -> None:
    """Run the same calls on memory and on one of several processes in turns; compare the answers.
    Many kinds have a backlog at the same time, and claims serve some or all of them."""
    random = Random(seed)
    running: list[Claim] = []
    for step in range(90):
        server = random.choice(servers)
        names = random.choices(MANY, k=random.choice([0, 2, 25]))
        costs = random.choices([None, 500_000, 4_000_000], k=len(names))
        documents = [
            new(random.choice("abcdefgh"), kind=name, cost=cost)
            for name, cost in zip(names, costs, strict=True)
        ]
        served = random.choice([None, None, MANY[:1], random.sample(MANY, 5)])
        at_most = random.choice([{}, {}, {MANY[0]: 1, MANY[3]: 0}])
        outcomes = [ended_somehow(each.fence, random) for each in running[:7]]
        running = running[7:]
        kind, limit = random.choice(MANY), random.choice([None, 1, 5])
        customer, weight = random.choice("abc"), random.choice([0.5, 1, 3])
        n = random.choice([1, 4, 30])
        answers = []
        for store in (memory, server):
            if step % 9 == 0:
                store.configure_kind(kind, KindSettings(limit=limit, paused=step % 4 == 0))
                store.adjust(customer, CustomerSettings(weight=weight, limit=limit and 9))
            store.submit(documents)
            answers.append(
                store.claim(
                    n,
                    worker="w",
                    lease_us=LEASE_US,
                    kinds=served,
                    at_most=at_most,
                    outcomes=outcomes,
                )
            )
        assert answers[0] == answers[1], f"step {step}"
        running += answers[0].claims
        if step % 10 == 0:
            assert memory.kinds() == server.kinds()
            assert memory.lanes(kind=kind) == server.lanes(kind=kind)
            assert memory.oldest_waiting() == server.oldest_waiting()
        clock.advance(random.choice([0, 0.5, 8, LEASE_US / SECOND_US]))


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("costs", [Costs.KNOWN, Costs.LEARNED])
def test_many_kinds_take_the_turns_of_memory(
    url: str,
    clock: ManualClock,
    connection: psycopg.Connection[Any],
    mode: Mode,
    costs: Costs,
) -> None:
    first = Settings(kinds=KindPolicy.OPEN, mode=mode, costs=costs, patience_s=20)
    memory = MemoryStore(settings=first, clock=clock, key=1)
    with ExitStack() as stack:
        servers = [
            stack.enter_context(closing(PostgresStore(url, settings=first, clock=clock, key=1)))
            for _ in range(2)
        ]

        program(7, memory, servers, clock)

        assert differences(servers[0], url) == []
        assert damages(connection) == []


def test_virtual_times_of_kinds_are_rebased_together(
    url: str, clock: ManualClock, connection: psycopg.Connection[Any]
) -> None:
    """The turns go on as if nothing had happened, also of a kind that no worker serves then."""
    orders = []
    for far in (0, 1 << 60):
        with Databases() as databases:
            place = databases.new()
            with (
                closing(PostgresStore(place, settings=OPEN, clock=clock)) as store,
                psycopg.connect(place, autocommit=True) as connected,
            ):
                for name in ("ocr", "text", "default", "ocr", "text", "default") * 4:
                    submit(store, f"c-{name}-{len(find_all(store)) % 3}", kind=name)
                claim(store, 5)
                connected.execute("UPDATE fairturn.flows SET place = place + %s", (far,))
                for table in ("scheduler_states", "kind_states"):
                    connected.execute(
                        f"UPDATE fairturn.{table} SET "
                        "clocks = ARRAY(SELECT c + %(far)s FROM unnest(clocks) c), "
                        "kind_times = ARRAY(SELECT c + %(far)s FROM unnest(kind_times) c)",
                        {"far": far},
                    )
                connected.execute(
                    "UPDATE fairturn.scheduler_states SET "
                    "level_times = ARRAY(SELECT c + %s FROM unnest(level_times) c)",
                    (far,),
                )
                found = claim(store, 3, kinds=["ocr", "default"])
                found += claim(store, 30)
                ((highest,),) = connected.execute(
                    "SELECT max(greatest(c, k)) FROM fairturn.states_of_kinds() s, "
                    "unnest(s.clocks, s.kind_times) AS u(c, k)"
                ).fetchall()
                assert highest < 1 << 59
            orders.append([(c.document.customer, c.document.kind) for c in found])

    assert len(orders[0]) == 19
    assert orders[0] == orders[1]


def test_a_claim_in_several_transactions_takes_no_more_of_a_kind_than_it_may(
    url: str, clock: ManualClock
) -> None:
    with closing(PostgresStore(url, settings=OPEN, clock=clock, budget=2)) as store:
        for n in range(9):
            submit(store, f"c{n}", kind="ocr")

        found = claim(store, 9, at_most={"ocr": 3})

    assert len(found) == 3


# ── Limits ───────────────────────────────────────────────────────────────────────────────────────


def test_a_limit_of_a_kind_is_exact_with_many_claimers_at_once(url: str) -> None:
    """Documents count here from the reply of their claim to the call that records their outcome,
    which is less than from commit to commit."""
    limit, n_claimers, lock = 3, 4, threading.Lock()
    running, most, done = 0, 0, 0

    def work(store: PostgresStore) -> None:
        nonlocal running, most, done
        last: list[Claim] = []
        while done < 300:
            with lock:
                running -= len(last)
                done += len(last)
            outcomes = [Completed(each.fence) for each in last]
            last = claim(store, 2, kinds=["ocr", "text"], outcomes=outcomes)
            last = [each for each in last if each.document.kind == "ocr"]
            with lock:
                running += len(last)
                most = max(most, running)

    with ExitStack() as stack:
        stores = [
            stack.enter_context(closing(PostgresStore(url, settings=OPEN)))
            for _ in range(n_claimers)
        ]
        stores[0].configure_kind("ocr", KindSettings(limit=limit))
        stores[0].submit([new(f"c{n % 9}", kind="ocr") for n in range(320)])
        stores[0].submit([new(f"c{n % 9}", kind="text") for n in range(50)])
        with ThreadPoolExecutor(n_claimers) as pool:
            for call in [pool.submit(work, store) for store in stores]:
                call.result(PATIENCE_S * 2)

    assert most == limit


def test_an_attempt_whose_outcome_is_in_flight_counts_for_the_limit(
    url: str, kinds: PostgresStore
) -> None:
    kinds.configure_kind("ocr", KindSettings(limit=1))
    submit(kinds, kind="ocr")
    submit(kinds, kind="ocr")
    (running,) = claim(kinds, 2)
    with psycopg.connect(url) as finishing:
        number, fence = (
            finishing.execute(
                "SELECT number, fence FROM fairturn.documents WHERE state = 2"
            ).fetchone()
            or ()
        )
        finishing.execute(
            "SELECT fairturn.finish(NULL, ARRAY[%s]::bigint[], ARRAY[%s]::bigint[], "
            "ARRAY[0]::smallint[], ARRAY[NULL], ARRAY[NULL]::bigint[], ARRAY[NULL]::bigint[], "
            "ARRAY[NULL]::bigint[], ARRAY[NULL], ARRAY[NULL], ARRAY[NULL]::bigint[], "
            "ARRAY[NULL]::bytea[])",
            (number, fence),
        )

        assert claim(kinds, 2) == []
        finishing.commit()

    assert len(claim(kinds, 2)) == 1
    assert kinds.finish([Completed(running.fence)]) == [running.fence]


def test_a_limit_that_is_set_while_a_claim_waits_applies_to_it(
    url: str, kinds: PostgresStore, connection: psycopg.Connection[Any]
) -> None:
    for n in range(4):
        submit(kinds, f"c{n}", kind="ocr")
    found: list[Claim] = []
    with psycopg.connect(url) as claiming:
        claiming.execute("SELECT FROM fairturn.queue FOR NO KEY UPDATE")
        thread = threading.Thread(target=lambda: found.extend(claim(kinds, 4)))
        thread.start()
        wait_until_waiting(connection)
        kinds.configure_kind("ocr", KindSettings(limit=2))
    thread.join(PATIENCE_S)

    assert len(found) == 2


# ── Claims that find nothing ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "why", ["another kind is served", "the kind is paused", "the kind is at its limit"]
)
def test_a_claim_takes_no_lock_if_nothing_of_its_kinds_may_be_claimed(
    url: str, kinds: PostgresStore, why: str
) -> None:
    for n in range(5):
        submit(kinds, f"c{n}", kind="ocr")
    claim(kinds, 1)
    served = ["text"] if why == "another kind is served" else ["ocr"]
    if why == "the kind is paused":
        kinds.configure_kind("ocr", KindSettings(paused=True))
    if why == "the kind is at its limit":
        kinds.configure_kind("ocr", KindSettings(limit=1))
    found: list[list[Claim]] = []
    with psycopg.connect(url) as claiming:
        claiming.execute("SELECT FROM fairturn.queue FOR UPDATE")
        thread = threading.Thread(
            target=lambda: found.append(claim(kinds, kinds=served)), daemon=True
        )
        thread.start()
        thread.join(3)
        assert found == [[]], "the claim waits for the lock of claims"


def flows_read(url: str, n_kinds: int) -> int:
    """Return how many rows of flows a claim of one kind reads, in a queue where every customer has
    documents of this many kinds in two levels."""
    clock, names = ManualClock(START), [f"kind-{n}" for n in range(n_kinds)]
    with (
        closing(
            PostgresStore(url, settings=Settings(kinds=KindPolicy.OPEN, patience_s=0), clock=clock)
        ) as store,
        psycopg.connect(url) as connection,
    ):
        for name in names:
            store.submit([new(f"c{n}-{name}", kind=name) for n in range(6)])
            store.submit([new(f"c{n}", kind=name) for n in range(6)] * 5)
        clock.advance(1)
        claim(store, 10, kinds=names[:1])  # folds all events and compares counters
        at, boot = clock.uptime().at, clock.uptime().boot
        connection.execute(
            "SELECT * FROM fairturn.claim(gen_random_uuid(), 12, 'w', 1000000, %s, %s, %s, 2000, "
            "%s, NULL, NULL)",
            (clock.now(), at, boot, names[:1]),
        )
        ((read,),) = connection.execute(
            "SELECT idx_tup_fetch + seq_tup_read FROM pg_stat_xact_user_tables "
            "WHERE relname = 'flows'"
        ).fetchall()
    return int(read)


def test_a_claim_of_one_kind_reads_no_flows_of_others() -> None:
    with Databases() as databases:
        alone, among_others = (flows_read(databases.new(), n) for n in (1, 30))

    assert among_others == alone > 0


# ── New kinds ────────────────────────────────────────────────────────────────────────────────────


def test_processes_that_create_kinds_at_once_give_each_a_number_of_its_own(url: str) -> None:
    with ExitStack() as stack:
        stores = [stack.enter_context(closing(PostgresStore(url, settings=OPEN))) for _ in range(4)]

        def create(n: int) -> None:
            store = stores[n % 4]
            if n % 3 == 0:
                store.sign_on(f"w{n}", 1, [f"kind-{n}", "shared"])
            elif n % 3 == 1:
                store.configure_kind(f"kind-{n}", KindSettings(limit=n))
            else:
                submit(store, f"c{n}", kind=f"kind-{n}")

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(create, range(40)))

        assert len(stores[0].kinds()) == 42
        assert differences(stores[0], url) == []


def test_a_kind_that_a_transaction_of_the_caller_creates_exists_if_it_commits(
    url: str, kinds: PostgresStore
) -> None:
    with psycopg.connect(url) as connection:
        kinds.submit([new(kind="scan")], connection=connection)
        connection.rollback()
        assert "scan" not in {kind.name for kind in kinds.kinds()}
        kinds.submit([new(kind="scan")], connection=connection)
        connection.commit()

    assert [each.document.kind for each in claim(kinds, kinds=["scan"])] == ["scan"]


def test_a_worker_that_cannot_create_its_kinds_is_not_signed_on(kinds: PostgresStore) -> None:
    kinds.sign_on("first", 1, [f"kind-{n}" for n in range(KINDS_MAX - 4)])

    with pytest.raises(KindRefused, match="'z' cannot be created"):
        kinds.sign_on("second", 1, ["a", "z"])

    assert {worker.worker for worker in kinds.workers()} == {"w", "first"}
    assert len(kinds.kinds()) == KINDS_MAX - 1


def test_a_change_of_a_kind_wakes_waiting_workers(url: str, kinds: PostgresStore) -> None:
    with closing(PostgresStore(url)) as other:
        assert woken(other, lambda: kinds.configure_kind("ocr", KindSettings(paused=True)))


# ── Wrong rows ───────────────────────────────────────────────────────────────────────────────────

OF_OCR = "(SELECT number FROM fairturn.kinds WHERE name = 'ocr')"
WRONG = {
    "no weights": f"UPDATE fairturn.kind_states SET weights = array_fill(0::bigint, ARRAY[9]) "
    f"WHERE kind = {OF_OCR}",
    "weights too low": "UPDATE fairturn.kind_states SET weights = array_fill(-500::bigint, "
    f"ARRAY[9]) WHERE kind = {OF_OCR}",
    "no row": f"DELETE FROM fairturn.kind_states WHERE kind = {OF_OCR}",
    "bounds too high": "UPDATE fairturn.kind_states SET places_from = array_fill(1::bigint << 61, "
    f"ARRAY[9]), heads_from = 1::bigint << 61 WHERE kind = {OF_OCR}",
    "flows that count too few": f"UPDATE fairturn.flows SET folded = 1 WHERE level / 10 = {OF_OCR}",
    "an event of no kind": "INSERT INTO fairturn.event_log (at, customers, levels, heads, sizes) "
    "VALUES (1, '{1}', '{999}', '{1}', '{1}')",
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_row_of_a_kind_stops_no_kind(
    url: str, clock: ManualClock, connection: psycopg.Connection[Any], name: str
) -> None:
    with closing(PostgresStore(url, settings=OPEN, clock=clock)) as store:
        store.submit([new(f"c{n}", kind=kind) for n in range(3) for kind in ("ocr", "text")] * 2)
        claim(store, 1, kinds=["ocr"], lease_us=3_600 * SECOND_US)
        connection.execute(WRONG[name])

        found = []
        for _ in range(20):  # in one second of 16 a claim searches for hidden flows
            found += claim(store, 20, lease_us=3_600 * SECOND_US)
            clock.advance(4)

        assert sorted(each.document.kind for each in found) == ["ocr"] * 5 + ["text"] * 6


PLANTS = {
    "level.weight": f"UPDATE fairturn.kind_states SET weights[1] = 7 WHERE kind = {OF_OCR}",
    "level.places_from": "UPDATE fairturn.kind_states SET places_from = array_fill(1::bigint << "
    f"61, ARRAY[9]) WHERE kind = {OF_OCR}",
    "queue.heads_from": f"UPDATE fairturn.kind_states SET heads_from = 1::bigint << 61 "
    f"WHERE kind = {OF_OCR}",
    "kind.waiting": "UPDATE fairturn.kind_states SET taken[1] = taken[1] + 3 "
    f"WHERE kind = {OF_OCR}",
    "flow.head_since": f"UPDATE fairturn.flows SET head_since = NULL WHERE level / 10 = {OF_OCR}",
    "document.level": "UPDATE fairturn.documents SET level = 1 WHERE number = ("
    f"SELECT min(number) FROM fairturn.documents WHERE state = 1 AND kind = {OF_OCR})",
}


@pytest.mark.parametrize("name", PLANTS)
def test_a_recount_finds_and_repairs_what_is_wrong_in_a_kind(
    url: str, connection: psycopg.Connection[Any], kinds: PostgresStore, name: str
) -> None:
    kinds.submit([new(f"c{n}", kind=kind) for n in range(3) for kind in ("ocr", "text")] * 2)
    claim(kinds, 2)
    assert damages(connection) == []
    connection.execute(PLANTS[name])

    found = Damages(damages(connection))
    repair(url, None, found, lambda done, total: None)

    assert name in {damage.kind for damage in found.shown}
    assert damages(connection) == []
    counted = {kind.name: kind.waiting for kind in kinds.kinds()}
    assert counted == {"default": 0, "ocr": 5, "text": 5}
    assert len(claim(kinds, 20)) == 10


# ── The release before ───────────────────────────────────────────────────────────────────────────

# The calls of the release with schema 13.
CLAIM_OF_13 = """
    SELECT claimed FROM fairturn.claim(gen_random_uuid()::uuid, %s::int4, 'w'::text, 30000000::int8,
        NULL::int8, NULL::int8, 'server'::text, 2000::int4)"""
CLAIM_AFTER_OF_13 = """
    SELECT claimed, lost FROM fairturn.claim_after(gen_random_uuid()::uuid, %s::int4, 'w'::text,
        30000000::int8, NULL::int8, NULL::int8, 'server'::text, 2000::int4, '{}'::int8[],
        '{}'::int8[], '{}'::int2[], '{}'::text[], '{}'::int8[], '{}'::int8[], '{}'::int8[],
        '{}'::text[], '{}'::text[], '{}'::int8[], '{}'::bytea[])"""
SUBMIT_OF_13 = """
    SELECT answer FROM fairturn.submit(NULL::int8, fairturn.id_fingerprint(), 0::int4,
        %s::text[], %s::text[], %s::bytea[], %s::text[], %s::int8[], %s::bytea[], %s::text[],
        %s::text[], %s::text[], %s::text[], %s::int8[], %s::int8[], %s::text[], %s::bytea[],
        %s::int8[])"""


@pytest.fixture
def of_schema_13() -> Iterator[str]:
    """A database that the release with schema 13 has written."""
    name = f"kinds_from_13_{os.getpid()}"
    yield dumps.restore(DATA / "queue-13.dump", name)
    postgres.of_this_run().drop(name)


def test_a_queue_of_the_release_before_goes_on_where_it_was(of_schema_13: str) -> None:
    known = json.loads((DATA / "queue-13.json").read_text("utf-8"))
    clock = ManualClock(START)
    clock.advance(known["read_at"] - START / SECOND_US)
    with (
        closing(PostgresStore(of_schema_13, clock=clock)) as store,
        psycopg.connect(of_schema_13, autocommit=True) as connection,
    ):
        assert migrating.version_of(connection, "fairturn") == migrating.newest()
        documents = [
            [d.name, d.customer, d.state.value, d.priority, d.count, d.attempts]
            for d in find_all(store)
        ]
        customers = [
            [
                *(each.name, each.count, each.waiting, each.running, each.delayed),
                *([*each.waiting_by_priority], each.stored_bytes),
            ]
            for each in all_customers(store)
        ]
        assert (documents, customers) == (known["documents"], known["customers"])
        assert {found.kind for found in find_all(store)} == {"default"}
        assert claimed_one_by_one(store, clock) == known["claimed"]
        assert damages(connection) == []


def test_a_copy_of_a_queue_of_the_release_before_goes_on_where_it_was(
    url: str, of_schema_13: str
) -> None:
    known = json.loads((DATA / "queue-13.json").read_text("utf-8"))
    clock = ManualClock(START)
    clock.advance(known["read_at"] - START / SECOND_US)

    copy_queue(of_schema_13, url)

    with closing(PostgresStore(url, clock=clock)) as store:
        assert claimed_one_by_one(store, clock) == known["claimed"]


def claimed_one_by_one(store: PostgresStore, clock: ManualClock) -> list[str | None]:
    claimed = []
    while found := claim(store, lease_us=300 * SECOND_US):
        claimed += [each.document.name for each in found]
        clock.advance(0.25)
    return claimed


def test_a_copy_of_a_queue_with_kinds_gives_the_same_turns(url: str, clock: ManualClock) -> None:
    with closing(PostgresStore(url, settings=OPEN, clock=clock)) as store:
        store.configure_kind("text", KindSettings(limit=2))
        names = ["ocr", "text", "default", "ocr"] * 6
        store.submit([new(f"c{n % 5}", kind=name) for n, name in enumerate(names)])
        store.finish([Completed(each.fence) for each in claim(store, 7)])
        submit(store, kind="scan")  # no claim has applied it

        copy_queue(url, url, schema="invoices")

        with closing(PostgresStore(url, schema="invoices", clock=clock)) as copied:
            assert copied.kinds() == store.kinds()
            turns = [
                [(each.document.id, each.document.kind) for each in claim(each_store, 30)]
                for each_store in (copied, store)
            ]
    assert len(turns[0]) == 16
    assert turns[0] == turns[1]
    with psycopg.connect(url) as connection:
        rows = connection.execute(
            "SELECT max(m.readable_from) FROM invoices.migrations m"
        ).fetchall()
    assert rows == [(SCHEMA_OF_KINDS,)]


def call_of_13(connection: psycopg.Connection[Any], statement: str, *values: Any) -> Any:
    return connection.execute(statement, values).fetchall()


def test_the_release_before_works_until_the_queue_has_another_kind(
    url: str, connection: psycopg.Connection[Any]
) -> None:
    with closing(PostgresStore(url)) as store:
        arrays = to_arrays([new("a"), new("b")], store._key)[:-2]
        assert call_of_13(connection, SUBMIT_OF_13, *arrays) == [(0,)]
        assert call_of_13(connection, CLAIM_OF_13, 1) == [(1,)]
        assert call_of_13(connection, CLAIM_AFTER_OF_13, 1) == [(1, [])]
        assert readable_from(connection) < SCHEMA_OF_KINDS

        store.sign_on("w", 1, ["ocr"])

        for statement, values in (
            (SUBMIT_OF_13, arrays),
            (CLAIM_OF_13, [1]),
            (CLAIM_AFTER_OF_13, [1]),
        ):
            with pytest.raises(psycopg.errors.FeatureNotSupported, match="has kinds of work"):
                call_of_13(connection, statement, *values)
        assert readable_from(connection) == SCHEMA_OF_KINDS
        assert {found.kind for found in find_all(store)} == {"default"}


def readable_from(connection: psycopg.Connection[Any]) -> int:
    ((version,),) = connection.execute(
        "SELECT readable_from FROM fairturn.migrations ORDER BY number DESC LIMIT 1"
    ).fetchall()
    return int(version)


def test_the_release_before_does_not_open_a_queue_with_another_kind(
    url: str, monkeypatch: pytest.MonkeyPatch, kinds: PostgresStore
) -> None:
    monkeypatch.setattr("fairturn.stores.postgres.schema.newest", lambda: 13)

    with pytest.raises(StoreRefused, match="reads schemas up to 13"):
        PostgresStore(url)


def test_a_later_schema_is_read_by_no_release_that_could_not_read_this_one(
    url: str, kinds: PostgresStore, connection: psycopg.Connection[Any]
) -> None:
    newest = migrating.newest()
    step = Migration(newest + 1, 11, "SELECT 1")

    migrating.migrate(connection, "documents", "fairturn", [step])

    assert readable_from(connection) == SCHEMA_OF_KINDS


# ── Outcomes ─────────────────────────────────────────────────────────────────────────────────────


def test_attempts_of_a_kind_are_limited_also_where_a_limited_customer_waits_in_another(
    url: str, clock: ManualClock, connection: psycopg.Connection[Any]
) -> None:
    with closing(PostgresStore(url, settings=OPEN, clock=clock)) as store:
        store.configure_kind("ocr", KindSettings(attempts_max=2))
        store.adjust("a", CustomerSettings(limit=1))
        first = submit(store, "a", kind="ocr").id
        second = submit(store, "a", kind="text").id
        order = []
        for _ in range(3):
            for each in claim(store, 5):
                order.append(each.document.id)
                outcome: Outcome = Failed(each.fence, "busy", SECOND_US)
                if each.document.id == second:
                    outcome = Completed(each.fence)
                assert store.finish([outcome]) == []
            clock.advance(2)

        assert order == [first, second, first]
        assert damages(connection) == []
        assert ids(found for found in find_all(store) if found.state == "dead") == [first]


def test_random_calls_with_kinds_leave_exact_numbers(
    url: str, clock: ManualClock, connection: psycopg.Connection[Any]
) -> None:
    random = Random(3)
    with closing(PostgresStore(url, settings=OPEN, clock=clock)) as store:
        for step in range(60):
            names = random.choices(["default", "ocr", "text", "scan"], k=6)
            documents = [
                new(random.choice("abcd"), kind=name, due_at=clock.now() + random.choice([0, 9]))
                for name in names
            ]
            receipts = store.submit(documents)
            found = claim(store, 4, kinds=random.choice([None, names[:1]]))
            store.finish([ended_somehow(each.fence, random) for each in found[:3]])
            store.cancel([random.choice(receipts).id])
            store.retry(ids(d for d in find_all(store) if d.state == "dead"))
            if step % 9 == 0:
                store.adjust(
                    random.choice("abcd"), CustomerSettings(limit=random.choice([None, 2]))
                )
                store.configure(Settings(kinds=KindPolicy.OPEN, mode=random.choice(list(Mode))))
            if step % 20 == 19:
                store.purge(random.choice("abcd"))
                store.prune()
            clock.advance(random.choice([0, 3, 40]))

            assert differences(store, url) == []
        assert damages(connection) == []
