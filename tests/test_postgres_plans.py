"""PostgreSQL reads rows by indexes; no operation reads dead rows or a number that grows."""

import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from fairturn.clock import SECOND_US, ManualClock, SystemClock
from fairturn.model import CANCELS_KEPT_MAX, Completed, Settings
from fairturn.scheduling.flows import Mode
from fairturn.stores.conformance.steps import claim, ids, submit
from fairturn.stores.postgres import PostgresStore, query
from fairturn.stores.postgres.submit import SUBMIT, to_arrays
from tests.on_postgres import new
from tests.servers import postgres
from tests.servers.queues import Databases

LEASE_US = 300 * SECOND_US
TABLES = {
    *("customers", "documents", "flows", "event_log", "leases", "idempotency_keys"),
    *("customer_states", "scheduler_states"),
    "unreported_cancels",
}


@pytest.fixture(scope="module", params=["without statistics", "with statistics"])
def template(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of a database with many customers, flows and documents, most of which have ended."""
    with Databases() as databases:
        url = databases.new()
        with (
            closing(PostgresStore(url, settings=Settings(patience_s=0))) as store,
            psycopg.connect(url, autocommit=True) as connection,
        ):
            for table in TABLES:  # no statistics but those asked for
                connection.execute(f"ALTER TABLE fairturn.{table} SET (autovacuum_enabled = off)")
            for first in range(0, 2_000, 1_000):
                store.submit([new(f"c{n}") for n in range(first, first + 1_000)] * 3)
            for _ in range(3):
                claims = claim(store, 1_000)
                store.finish([Completed(claimed.fence) for claimed in claims])
            if request.param == "with statistics":
                connection.execute("ANALYZE")
        yield url.rpartition("/")[2].partition("?")[0]


@pytest.fixture
def filled(template: str) -> Iterator[psycopg.Connection[Any]]:
    """A connection to a copy of that database."""
    server, name = postgres.of_this_run(), f"{template}_copy"
    with psycopg.connect(server.create(name, template), autocommit=True) as connection:
        yield connection
    server.drop(name)


CALLS = {
    "claim": "SELECT * FROM fairturn.claim("
    "gen_random_uuid(), 50, 'w', 1000000, NULL, NULL, 'server', 2000, NULL, NULL, NULL)",
    "submit": SUBMIT,
    "finish": "SELECT fairturn.finish(NULL, ARRAY[7]::bigint[], ARRAY[7]::bigint[], "
    "ARRAY[0]::smallint[], ARRAY[NULL], ARRAY[NULL]::bigint[], ARRAY[NULL]::bigint[], "
    "ARRAY[NULL]::bigint[], ARRAY[NULL], ARRAY[NULL], ARRAY[NULL]::bigint[], "
    "ARRAY[NULL]::bytea[], ARRAY[NULL], ARRAY[NULL], ARRAY[NULL]::bigint[], ARRAY[NULL])",
    "cancel": "SELECT fairturn.cancel(NULL, ARRAY[3001, 3002]::bigint[])",
    "retry": "SELECT fairturn.retry(NULL, ARRAY[1, 2]::bigint[])",
    "purge": "SELECT * FROM fairturn.purge(NULL, 'c7', 1000)",
}


@pytest.mark.parametrize("name", CALLS)
def test_no_operation_reads_a_whole_table(filled: psycopg.Connection[Any], name: str) -> None:
    ((key,),) = filled.execute("SELECT id_key FROM fairturn.queue").fetchall()
    documents = [new("c5", key="k"), new("c6")]
    arguments = (None, key, 0, *to_arrays(documents, key)) if name == "submit" else ()
    with filled.transaction():
        filled.execute(CALLS[name], arguments)
        read = filled.execute(
            "SELECT relname, seq_scan FROM pg_stat_xact_user_tables WHERE seq_scan > 0"
        ).fetchall()

    assert {table for table, _ in read} & TABLES == set()


def test_every_operation_has_a_lock_timeout_and_plans_that_statistics_cannot_change(
    filled: psycopg.Connection[Any],
) -> None:
    for name in CALLS:
        rows = filled.execute(
            "SELECT proconfig FROM pg_proc WHERE proname = %s "
            "AND pronamespace = 'fairturn'::regnamespace",
            (name,),
        ).fetchall()
        assert rows
        for (settings,) in rows:  # of each signature
            names = {setting.partition("=")[0] for setting in settings}
            assert {"lock_timeout", "enable_seqscan", "plan_cache_mode", "jit"} <= names, name


def test_the_documents_of_a_customer_are_listed_from_the_newest_on_and_no_others_are_read(
    filled: psycopg.Connection[Any],
) -> None:
    statement = query._newest_of_customer("d.customer = 5")
    values = {"before": 6_000, "lowest": 1, "size": 5, "customer": "c5"}
    with filled.transaction():
        filled.execute("SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off")
        rows = filled.execute(f"EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF) {statement}", values)
        plan = "\n".join(line for (line,) in rows.fetchall())

    assert "documents_flow" in plan
    assert "documents_reordered" in plan
    assert "Rows Removed by Filter" not in plan, plan
    counts = [float(n) for n in re.findall(r"actual rows=([\d.]+)", plan)]
    assert max(counts) <= 5, plan


# ── What is dead ─────────────────────────────────────────────────────────────────────────────────


def test_a_claim_reads_as_much_however_many_rows_an_open_transaction_keeps_from_removal(
    url: str,
) -> None:
    with (
        closing(PostgresStore(url)) as store,
        psycopg.connect(url) as old,
        psycopg.connect(url, autocommit=True) as connection,
    ):
        submit(store, "other")
        before = pages_of_a_claim(connection, store)
        old.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        old.execute("SELECT pg_current_xact_id()")  # no dead row is removed from now on
        for n in range(400):
            submit(store, f"c{n % 3}")
            claims = claim(store)
            store.finish([Completed(claimed.fence) for claimed in claims])

        after = pages_of_a_claim(connection, store)

    assert after < 3 * before, (before, after)


@pytest.mark.parametrize("before", [Mode.FAIR, Mode.EQUAL])
def test_a_claim_reads_as_much_after_a_change_of_mode(url: str, before: Mode) -> None:
    after = Mode.EQUAL if before is Mode.FAIR else Mode.FAIR
    with (
        closing(PostgresStore(url, settings=Settings(mode=before))) as store,
        psycopg.connect(url, autocommit=True) as connection,
    ):
        store.submit([new("a")] * 3_000)
        pages_before = min(pages_of_a_claim(connection, store) for _ in range(3))

        store.configure(replace(store.settings(), mode=after))

        pages_after = min(pages_of_a_claim(connection, store) for _ in range(3))
    assert pages_after < 2 * pages_before, (pages_before, pages_after)


def test_a_claim_reads_as_much_however_many_cancels_were_reported_since_an_open_transaction_began(
    url: str,
) -> None:
    later = SystemClock().now() + 3_600 * SECOND_US
    with (
        closing(PostgresStore(url)) as store,
        psycopg.connect(url) as old,
        psycopg.connect(url, autocommit=True) as connection,
    ):
        receipts = store.submit([new("a", due_at=later)] * CANCELS_KEPT_MAX)
        before = min(pages_of_a_claim(connection, store) for _ in range(3))
        old.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        old.execute("SELECT pg_current_xact_id()")  # no dead row is removed from now on
        store.cancel(ids(receipts))
        while store.claim(0, worker="w", lease_us=LEASE_US).cancelled:
            pass

        after = min(pages_of_a_claim(connection, store) for _ in range(3))

    assert after < before + 50, (before, after)


def pages_of_a_claim(connection: psycopg.Connection[Any], store: PostgresStore) -> int:
    """Return how many pages the server reads to claim one document, repeated reads included."""
    submit(store, "acme")
    rows = connection.execute(f"EXPLAIN (ANALYZE, BUFFERS, TIMING OFF) {CALLS['claim']}")
    plan = "\n".join(line for (line,) in rows.fetchall())
    executed, _, _ = plan.partition("Planning")
    return sum(int(n) for n in re.findall(r"shared hit=(\d+)", executed)[:1])


# ── Leases that expired ──────────────────────────────────────────────────────────────────────────


@pytest.fixture
def stores(url: str) -> Iterator[list[PostgresStore]]:
    """Two processes with one queue, on the clock of the server."""
    opened = [PostgresStore(url) for _ in range(2)]
    yield opened
    for store in opened:
        store.close()


def test_a_lease_that_is_shorter_than_those_seen_before_is_found_when_it_expired(
    stores: list[PostgresStore],
) -> None:
    one, other = stores
    _, second = submit(one), submit(one)
    claim(one, lease_us=LEASE_US)
    claim(one, 0)  # sees the end of that one

    claim(other, lease_us=1)

    assert [c.document.id for c in claim(one, 2)] == [second.id]


def test_a_lease_that_a_renewal_made_shorter_is_found_when_it_expired(
    stores: list[PostgresStore],
) -> None:
    one, other = stores
    submitted = submit(one)
    (running,) = claim(one, lease_us=LEASE_US)
    claim(one, 0)

    other.renew([running.fence], lease_us=1)

    assert [c.document.id for c in claim(one)] == [submitted.id]


def test_a_lease_below_those_seen_before_is_found_before_long(url: str) -> None:
    clock = ManualClock(1_700_000_001 * SECOND_US)
    with closing(PostgresStore(url, clock=clock)) as store, psycopg.connect(url) as connection:
        submitted = submit(store)
        claim(store, lease_us=LEASE_US)
        clock.advance(1)
        claim(store, 0)
        # As if the clock had been set back and forth.
        connection.execute("UPDATE fairturn.leases SET until = -1")
        connection.execute("UPDATE fairturn.documents SET lease_until = -1")
        connection.execute("UPDATE fairturn.scheduler_states SET leases_from = 0")
        connection.commit()
        assert claim(store) == []

        found: list[str] = []
        for _ in range(16):
            clock.advance(1)
            found += [c.document.id for c in claim(store)]

    assert found == [submitted.id]
