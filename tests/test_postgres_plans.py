"""What PostgreSQL reads for a claim: by indexes, in order, and nothing that grows or is dead."""

import itertools
import re
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest

from fairturn.clock import SECOND_US
from fairturn.flows import Mode
from fairturn.model import Settings
from fairturn.stores.postgres import (
    PostgresStore,
    asking,
    engine,
    expiring,
    reading,
    saving,
    taking,
)
from fairturn.stores.postgres.adapting import adapt
from fairturn.stores.postgres.session import PLAN, PLAN_BY_INDEXES
from fairturn.testing.steps import claim, submit
from tests.servers.queues import Databases

LEASE_US = 300 * SECOND_US


@pytest.fixture
def url() -> Iterator[str]:
    with Databases() as databases:
        yield databases.new()


@pytest.fixture(params=["without statistics", "with statistics"])
def filled(request: pytest.FixtureRequest, url: str) -> Iterator[psycopg.Connection[Any]]:
    """A queue with many customers, flows and documents, most of which have ended."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(FILL)
        if request.param == "with statistics":
            connection.execute("ANALYZE")
        yield connection


FILL = """
    INSERT INTO fairturn.customers (number, name)
    SELECT n, 'c' || n FROM generate_series(1, 2000) n;
    INSERT INTO fairturn.documents (number, customer, order_number, count, submitted_at, size_bytes,
        level, priority, state, is_payload)
    SELECT n, 1 + n % 2000, n, 0, n, 1, 9, 9, CASE WHEN n < 30000 THEN 3 ELSE 1 END, true
    FROM generate_series(1, 40000) n;
    INSERT INTO fairturn.flows (customer, level, place, tick, folded, running, taken, claimed_to,
        head_order, head_since, head_bound, held)
    SELECT n, 9, n * 7 % 2000, n, 5, 0, 0, 29999, 30000 + (n + 1999) % 2000, n, n, false
    FROM generate_series(1, 2000) n"""


def plan_of(connection: psycopg.Connection[Any], statement: str, values: Any) -> str:
    """How the server executes a statement whose values it does not know before."""
    cursor = connection.cursor()
    adapt(cursor.adapters)
    connection.execute("SET plan_cache_mode = force_generic_plan")
    connection.execute("BEGIN")
    connection.execute(f"SELECT {PLAN_BY_INDEXES}")
    explain = "EXPLAIN (ANALYZE, BUFFERS, COSTS OFF, TIMING OFF)"
    rows = cursor.execute(f"{explain} {statement}", values)
    plan = "\n".join(line for (line,) in rows.fetchall())
    connection.execute("ROLLBACK")
    return plan


PAGE = {"level": 0, "place": 0, "tick": 0, "size": 101}


@pytest.mark.parametrize("name", ["PAGE_LOAD", "PAGE_NEXT", "HEADS"])
def test_a_claim_reads_its_page_by_the_index_in_order_and_nothing_that_grows(
    filled: psycopg.Connection[Any], name: str
) -> None:
    plan = plan_of(filled, getattr(asking, name), (0, 0, 101) if name == "HEADS" else PAGE)

    index = "flows_head" if name == "HEADS" else "flows_turn"
    assert f"Index Scan using {index} on flows" in plan or f"Index Only Scan using {index}" in plan
    assert "Seq Scan on documents" not in plan
    assert "Seq Scan on flows" not in plan
    rows = [float(n) for n in re.findall(r"actual rows=([\d.]+)", plan)]
    assert max(rows) <= 300, plan


def test_the_state_of_the_queue_is_found_by_the_ends_of_indexes(
    filled: psycopg.Connection[Any],
) -> None:
    plan = plan_of(filled, engine._STATE, {"version": 5, "since": "0", "leases_from": 7})

    assert "Seq Scan on documents" not in plan
    assert "Sort" not in plan, plan
    assert "turns_pkey" in plan
    assert "documents_delayed" in plan
    assert "Index Cond: (until >= " in plan


def test_a_flow_that_others_have_changed_is_found_by_its_newest_version(
    filled: psycopg.Connection[Any],
) -> None:
    filled.execute("UPDATE fairturn.turns SET customers = '{5}', levels = '{9}', disturbed = '{f}'")

    plan = plan_of(filled, asking.MISSED, (-1,))

    assert "Index Scan Backward using flows_pkey" in plan, plan
    assert "Seq Scan on flows" not in plan, plan


def test_what_was_recorded_is_found_from_where_the_last_claim_stood(
    filled: psycopg.Connection[Any],
) -> None:
    plan = plan_of(filled, taking.TAKE_RECORDED, {"since": "5", "late": [3, 4]})

    assert "Seq Scan on recorded" not in plan, plan
    assert "Index Cond: (xid >=" in plan, plan
    assert "Index Cond: (xid = ANY" in plan, plan


def test_the_next_documents_of_a_line_are_read_from_where_it_stands(
    filled: psycopg.Connection[Any],
) -> None:
    values = ([5, 6], [9, 9], [30_004, 30_005], [30_003, 30_004], [32, 32])

    plan = plan_of(filled, asking.NEXT, values)

    assert "documents_flow" in plan
    assert "Seq Scan on documents" not in plan
    assert "Rows Removed by Filter" not in plan, plan


def test_the_documents_of_a_customer_are_listed_from_the_newest_on_and_no_others_are_read(
    filled: psycopg.Connection[Any],
) -> None:
    values = {"before": 39_000, "lowest": 1, "size": 5}

    plan = plan_of(filled, reading._its_numbers("d.customer = 5"), values)

    assert "documents_flow" in plan
    assert "documents_reordered" in plan
    assert "Seq Scan on documents" not in plan
    assert "Rows Removed by Filter" not in plan, plan
    rows = [float(n) for n in re.findall(r"actual rows=([\d.]+)", plan)]
    assert max(rows) <= 5, plan


def test_nothing_is_compiled_although_plans_that_are_forced_seem_costly(
    filled: psycopg.Connection[Any],
) -> None:
    with filled.transaction():
        filled.execute("SELECT set_config('jit', 'on', true)")
        filled.execute(PLAN)

        assert filled.execute("SHOW jit").fetchall() == [("off",)]


# ── What is dead ─────────────────────────────────────────────────────────────────────────────────


def test_a_flow_is_found_as_soon_however_many_of_its_versions_are_dead(url: str) -> None:
    with (
        closing(PostgresStore(url, settings=Settings(mode=Mode.EQUAL))) as store,
        psycopg.connect(url) as old,
        psycopg.connect(url, autocommit=True) as connection,
    ):
        old.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        old.execute("SELECT pg_current_xact_id()")  # nothing is removed from now on
        for _ in range(100):
            submit(store)
            claim(store)
        ((customer, level, version),) = connection.execute(
            "SELECT customer, level, version FROM fairturn.flows"
        ).fetchall()
        flow = (customer, level, 0, 0, 0, 0, 0, 0, None, None, None, False)

        plan = plan_of(connection, saving._SAVE_FLOWS, (version + 1, *([v] for v in flow)))

    assert "Index Scan Backward using flows_pkey" in plan, plan
    assert pages_of(plan) < 40, plan


def pages_of(plan: str) -> int:
    """How many pages a statement has read, each as often as it did."""
    executed, _, _ = plan.partition("Planning")
    return max(int(n) for n in re.findall(r"shared hit=(\d+)", executed))


# ── Leases that ran out ──────────────────────────────────────────────────────────────────────────


@pytest.fixture
def stores(url: str) -> Iterator[list[PostgresStore]]:
    """Two processes that have one queue open, on the clock of the server."""
    opened = [PostgresStore(url) for _ in range(2)]
    yield opened
    for store in opened:
        store.close()


def test_a_lease_that_is_shorter_than_those_seen_before_is_found_when_it_ran_out(
    stores: list[PostgresStore],
) -> None:
    one, other = stores
    _, second = submit(one), submit(one)
    claim(one, lease_us=LEASE_US)
    claim(one, 0)  # it sees the end of that one

    claim(other, lease_us=1)

    assert [c.document.id for c in claim(one, 2)] == [second.id]


def test_a_lease_that_a_renewal_made_shorter_is_found_when_it_ran_out(
    stores: list[PostgresStore],
) -> None:
    one, other = stores
    submitted = submit(one)
    (running,) = claim(one, lease_us=LEASE_US)
    claim(one, 0)

    other.renew([running.fence], lease_us=1)

    assert [c.document.id for c in claim(one)] == [submitted.id]


def test_a_lease_that_ended_before_those_seen_is_found_after_some_seconds(
    url: str, stores: list[PostgresStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = itertools.count()
    monkeypatch.setattr(expiring, "stopwatch", lambda: 100.0 + next(passed) / 1_000)
    one, _ = stores
    submitted = submit(one)
    claim(one, lease_us=LEASE_US)
    claim(one, 0)
    with psycopg.connect(url) as connection:  # as if the clock had stepped back meanwhile
        connection.execute("UPDATE fairturn.leases SET until = 1")
        connection.execute("UPDATE fairturn.documents SET lease_until = 1")
    assert claim(one) == []

    monkeypatch.setattr(expiring, "stopwatch", lambda: 111.0)

    assert [c.document.id for c in claim(one)] == [submitted.id]
