"""PostgreSQL: its own behaviour, beside the promises of every store."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from random import Random
from typing import Any

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairturn.clock import SECOND_US, SERVER_NOW, ManualClock
from fairturn.errors import QueueFull, StoreError, StoreRefused, StoreUnavailable
from fairturn.model import (
    Claim,
    Completed,
    CustomerSettings,
    Failed,
    NewDocument,
    Outcome,
    Receipt,
    Settings,
    State,
)
from fairturn.priority import Count, Reset
from fairturn.scheduling.flows import Mode
from fairturn.stores.conformance.steps import assert_numbers_are_exact, claim, find_all, submit
from fairturn.stores.contract import QueueStore as Store
from fairturn.stores.memory import MemoryStore
from fairturn.stores.postgres import PostgresStore
from fairturn.stores.postgres import connection as database
from fairturn.stores.postgres.load import SETTINGS
from fairturn.stores.postgres.rows import settings_columns
from fairturn.stores.postgres.session import LOCK_SETTINGS, Session
from fairturn.stores.urls import SCHEMA
from tests.on_postgres import PATIENCE_S, ended_somehow, new, wait_until_waiting
from tests.servers.queues import Databases

START = 1_700_000_000 * SECOND_US
LEASE_US = 30 * SECOND_US


# ── The transaction of the caller ────────────────────────────────────────────────────────────────


def test_a_document_exists_exactly_if_the_callers_own_rows_do(
    url: str, store: PostgresStore
) -> None:
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE invoices (id text)")
        connection.commit()
        (lost,) = store.submit([new(key="k", digest=b"1")], connection=connection)
        connection.execute("INSERT INTO invoices VALUES (%s)", (lost.id,))
        assert store.read(lost.id) is None
        connection.rollback()
        (kept,) = store.submit([new(key="k", digest=b"1")], connection=connection)
        connection.execute("INSERT INTO invoices VALUES (%s)", (kept.id,))
        connection.commit()
        rows = connection.execute("SELECT id FROM invoices").fetchall()

    assert [found.id for found in find_all(store)] == [id for (id,) in rows] == [kept.id]
    assert (kept.count, kept.replayed) == (0, False)
    assert [each.document.id for each in claim(store, 9)] == [kept.id]
    assert_numbers_are_exact(store)


def test_a_refusal_leaves_the_callers_transaction_as_it_was(url: str, store: PostgresStore) -> None:
    store.configure(Settings(waiting_per_customer_max=3))
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TEMPORARY TABLE mine AS SELECT 1 AS n")
        with pytest.raises(QueueFull):
            store.submit([new("full")] * 4, connection=connection)
        store.submit([new("good")] * 2, connection=connection)
        assert connection.execute("SELECT n FROM mine").fetchall() == [(1,)]
        connection.commit()

    assert [found.customer for found in find_all(store)] == ["good", "good"]
    assert [known.name for known in store.customers().customers] == ["good"]


def test_many_documents_go_into_the_callers_transaction_too(url: str, store: PostgresStore) -> None:
    with psycopg.connect(url) as connection:
        receipts = store.submit([new("abc"[n % 3]) for n in range(300)], connection=connection)
        connection.commit()

    assert {found.id for found in find_all(store)} == {receipt.id for receipt in receipts}
    assert_numbers_are_exact(store)


def test_a_connection_that_commits_by_itself_makes_one_transaction_of_the_call(
    url: str, store: PostgresStore
) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        (receipt,) = store.submit([new()], connection=connection)

        assert store.read(receipt.id) is not None


def test_something_else_than_a_connection_is_refused(store: PostgresStore) -> None:
    with pytest.raises(TypeError, match="it must be a psycopg.Connection"):
        store.submit([new()], connection=object())


def test_a_connection_to_another_queue_is_refused_and_nothing_is_stored_there(
    url: str, store: PostgresStore
) -> None:
    with Databases() as databases:
        another = PostgresStore(databases.new())
        with psycopg.connect(another.url) as connection:
            with pytest.raises(StoreRefused, match="is to another queue than this one"):
                store.submit([new()], connection=connection)
            connection.commit()

        assert find_all(another) == []
        another.close()


def in_an_empty_database(connection: psycopg.Connection[Any]) -> None:
    connection.execute("DROP SCHEMA fairturn CASCADE")


def read_only(connection: psycopg.Connection[Any]) -> None:
    connection.execute("SET TRANSACTION READ ONLY")


def as_a_stranger(connection: psycopg.Connection[Any]) -> None:
    connection.execute("CREATE ROLE stranger")
    connection.execute("SET LOCAL ROLE stranger")


@pytest.mark.parametrize(
    ("trouble", "sentence"),
    [
        (in_an_empty_database, "which has no queue in its schema fairturn; pass in one to"),
        (read_only, "the transaction of the connection is read-only"),
        (as_a_stranger, "of the connection lacks a privilege that a queue needs"),
        (lambda connection: connection.close(), "the connection passed in is closed"),
    ],
)
def test_what_is_wrong_with_the_callers_connection_is_said_of_it(
    url: str, store: PostgresStore, trouble: Any, sentence: str
) -> None:
    connection = psycopg.connect(url)
    trouble(connection)

    with pytest.raises(StoreError, match=sentence):
        store.submit([new()], connection=connection)

    connection.close()  # and so nothing of it stays


@pytest.mark.parametrize("isolation", list(psycopg.IsolationLevel), ids=str)
def test_a_submission_takes_part_in_a_transaction_of_every_isolation_level(
    url: str, isolation: psycopg.IsolationLevel
) -> None:
    # With this seed all submissions draw different shards. If two of them drew the same one, the
    # caller's transaction would have to be repeated: see the next test.
    store = PostgresStore(url, random=Random(1))
    submit(store, "a")
    with psycopg.connect(url) as connection:
        connection.isolation_level = isolation
        connection.execute("SELECT count(*) FROM fairturn.documents")
        claim(store)
        submit(store, "other")
        receipts = store.submit([new("a"), new("new")], connection=connection)
        claim(store)
        connection.commit()

    assert {each.document.id for each in claim(store, 9)} >= {receipt.id for receipt in receipts}
    assert_numbers_are_exact(store)
    store.close()


def test_a_transaction_of_the_caller_that_was_overtaken_is_to_be_repeated(
    url: str, store: PostgresStore
) -> None:
    submit(store)
    with psycopg.connect(url) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.execute("SELECT 1")
        submit(store)

        with pytest.raises(StoreUnavailable, match="roll it back, and repeat all of it"):
            store.submit([new()], connection=connection)


# ── Locks ────────────────────────────────────────────────────────────────────────────────────────


def test_a_submitter_frozen_before_its_commit_leaves_everybody_else_undisturbed(
    url: str, store: PostgresStore
) -> None:
    store.submit([new("a"), new("b"), new("b")])
    store.adjust("b", CustomerSettings(limit=2))
    with psycopg.connect(url) as frozen:
        store.submit([new("a"), new("frozen")], connection=frozen)
        done: list[str] = []

        def work() -> None:
            first = claim(store, 2)
            outcomes: list[Outcome] = [Completed(first[0].fence), Failed(first[1].fence, "x", 0)]
            done.extend(each.document.customer for each in first)
            submit(store, "b")
            store.submit([new("c")] * 60)
            store.cancel([submit(store, "d").id])
            done.extend(each.document.customer for each in claim(store, 9, outcomes=outcomes))

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "somebody waits for the frozen submitter"
        assert {"a", "b", "c"} <= set(done)
        assert "frozen" not in done
        frozen.commit()

    assert "frozen" in {each.document.customer for each in claim(store, 100)}
    assert_numbers_are_exact(store)


def test_a_submission_counts_in_one_row_whatever_the_server_knows_of_them(
    url: str, store: PostgresStore
) -> None:
    submit(store)
    with psycopg.connect(url) as connection:
        connection.execute(
            "ANALYZE fairturn.arrival_counters"
        )  # small enough to be read as a whole
        connection.commit()
        store.submit([new("b")], connection=connection)
        held = connection.execute(
            "SELECT objid FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid() "
            "AND classid = (hashtext('fairturn.arrival_counters')::bigint & 4294967295)::oid"
        ).fetchall()

    assert len(held) == 1


def test_more_submitters_than_rows_to_count_in_leave_each_other_undisturbed(
    url: str, store: PostgresStore
) -> None:
    with psycopg.connect(url) as connection:
        ((rows,),) = connection.execute("SELECT count(*) FROM fairturn.arrival_counters").fetchall()
    with ExitStack() as frozen:
        for n in range(rows + 2):
            connection = frozen.enter_context(psycopg.connect(url))
            connection.execute("SET lock_timeout = '10s'")
            store.submit([new(f"frozen-{n}")] * (n + 1), connection=connection)
        others = [_submitting(store, customers)[0] for customers in (["alone"], ["many"] * 3)]
        for thread in others:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "somebody waits for the frozen submitters"

        assert store.summary().waiting == 4

    assert store.summary().waiting == 4 + sum(range(1, rows + 3))
    assert_numbers_are_exact(store)


def test_a_cancel_waits_for_an_outcome_under_way_and_claims_do_not(
    url: str, store: PostgresStore
) -> None:
    store.submit([new("a"), new("b")])
    (first,) = claim(store)
    states: list[Any] = []
    with psycopg.connect(url) as recording:
        recording.execute("SELECT 1 FROM fairturn.documents WHERE state = 2 FOR UPDATE")
        thread = threading.Thread(
            target=lambda: states.extend(store.cancel([first.document.id])), daemon=True
        )
        thread.start()

        assert len(claim(store)) == 1
        assert states == []

    thread.join(PATIENCE_S)
    assert states == [State.RUNNING]
    assert store.renew([first.fence], lease_us=LEASE_US).cancelled == [first.fence]


def test_a_change_of_settings_waits_for_a_submitter_and_says_so_in_the_end(
    url: str, store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "WAIT_S", 0.1)
    with psycopg.connect(url) as frozen:
        store.submit([new("a")], connection=frozen)
        with pytest.raises(
            StoreUnavailable, match="other transactions have held locks that this call needs"
        ):
            store.configure(Settings(mode=Mode.EQUAL))
        assert submit(store, "b").count == 0
        frozen.commit()

    store.configure(Settings(mode=Mode.EQUAL))

    assert len(claim(store, 9)) == 2
    assert_numbers_are_exact(store)


@pytest.mark.parametrize("customers", [["acme"], ["acme", "zeta"]], ids=["one", "many"])
def test_a_submission_that_waited_for_its_customer_comes_after_what_it_waited_for(
    url: str, store: PostgresStore, customers: list[str]
) -> None:
    submit(store, "acme")
    with psycopg.connect(url) as other, psycopg.connect(url, autocommit=True) as looking:
        store.submit([new()], connection=other)
        thread, receipts = _submitting(store, customers)
        wait_until_waiting(looking)
        ((released_at,),) = other.execute(f"SELECT {SERVER_NOW}").fetchall()
        other.commit()
        thread.join(PATIENCE_S)

    assert receipts[0].count == -2
    assert receipts[0].submitted_at_us >= released_at


@pytest.mark.parametrize("customers", [["acme"], ["acme", "zeta"]], ids=["one", "many"])
def test_a_submission_that_waited_for_other_settings_obeys_them(
    url: str, store: PostgresStore, customers: list[str]
) -> None:
    submit(store, "acme")
    settings = Settings(mode=Mode.EQUAL, bounds=(0, -1, -2, -3, -4, -5, -6, -7))
    with psycopg.connect(url) as other, psycopg.connect(url, autocommit=True) as looking:
        other.execute(LOCK_SETTINGS)
        thread, receipts = _submitting(store, customers)
        wait_until_waiting(looking)
        Session(other, SCHEMA, own=False).ask(SETTINGS, settings_columns(settings))
        other.commit()
        thread.join(PATIENCE_S)
        levels = other.execute("SELECT level FROM fairturn.documents ORDER BY number").fetchall()

    assert (receipts[0].count, receipts[0].priority) == (-1, 2)
    assert levels == [(1,)] * (1 + len(customers))


def _submitting(
    store: PostgresStore, customers: list[str]
) -> tuple[threading.Thread, list[Receipt]]:
    """Submit a document of each in a thread; return its results."""
    told: list[Receipt] = []
    thread = threading.Thread(target=lambda: told.extend(store.submit([*map(new, customers)])))
    thread.start()
    return thread, told


@pytest.mark.parametrize("more", [[], ["\t\n\r"], ["ä"]], ids=["plain", "blanks", "letters"])
def test_what_many_documents_carry_comes_back_as_it_was(
    store: PostgresStore, more: list[str]
) -> None:
    bodies = [r'"\\"', r'"\n\t\\N"', r'"\."', "[]", *(f'["{text}"]' for text in more)] * 20

    receipts = store.submit([NewDocument("acme", body, size_bytes=7) for body in bodies])

    kept = [store.read(receipt.id) for receipt in receipts]
    assert [stored.body for stored in kept if stored] == bodies
    assert {stored.document.size_bytes for stored in kept if stored} == {7}


def test_mixed_work_of_many_threads_meets_no_deadlock(url: str) -> None:
    stores = [PostgresStore(url) for _ in range(2)]
    ended = threading.Event()
    errors: list[BaseException] = []

    def run(seed: int) -> None:
        random, store = Random(seed), stores[seed % 2]
        held: list[Any] = []
        try:
            while not ended.is_set():
                names = random.choices("abcdefgh", k=random.choice([1, 3, 70]))
                with suppress(QueueFull):
                    store.submit([new(name) for name in names])
                held += store.claim(random.randint(1, 30), worker="w", lease_us=LEASE_US).claims
                outcomes = [ended_somehow(each.fence, random) for each in held]
                store.renew([each.fence for each in held], lease_us=LEASE_US)
                held = []
                if random.random() < 0.5:
                    store.finish(outcomes)
                else:
                    held += store.claim(5, worker="w", lease_us=LEASE_US, outcomes=outcomes).claims
                if random.random() < 0.2:
                    some = find_all(store, size=50)[:50]
                    store.cancel([found.id for found in random.sample(some, min(5, len(some)))])
                    store.adjust(random.choice("abc"), CustomerSettings(limit=50))
        except BaseException as error:
            errors.append(error)
            ended.set()

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    ended.wait(3)
    ended.set()
    for thread in threads:
        thread.join(PATIENCE_S)

    with psycopg.connect(url) as connection:
        ((deadlocks,),) = connection.execute(
            "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
        ).fetchall()
    assert errors == []
    assert deadlocks == 0
    claim(stores[0], 0)
    assert_numbers_are_exact(stores[0])
    for store in stores:
        store.close()


# ── Several processes that claim ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("mode", list(Mode))
def test_processes_that_claim_by_turns_give_the_order_of_one(url: str, mode: Mode) -> None:
    clock, random = ManualClock(START), Random(7)
    first = Settings(mode=mode, patience_s=20)
    memory = MemoryStore(settings=first, clock=clock, key=1)
    processes = [PostgresStore(url, settings=first, clock=clock, key=1) for _ in range(3)]
    both: list[Store] = [memory, processes[0]]
    for store in both:
        store.adjust("c3", CustomerSettings(weight=3))
        store.adjust("c5", CustomerSettings(limit=2))
    running: list[Any] = []

    for step in range(120):
        server = random.choice(processes)
        both = [memory, server]
        names = [f"c{random.randrange(60)}" for _ in range(random.choice([0, 1, 30, 90]))]
        ended, running = running[: random.randrange(12)], running[random.randrange(12) :]
        cancelled = [each.document.id for each in ended[:1]]
        outcomes = [ended_somehow(each.fence, random) for each in ended]
        n = random.choice([1, 1, 5, 40])
        answers = []
        for store in both:
            store.submit([new(name) for name in names])
            store.cancel(cancelled)
            answers.append(store.claim(n, worker="w", lease_us=LEASE_US, outcomes=outcomes))
        assert answers[0] == answers[1], f"step {step}"
        running += answers[0].claims
        clock.advance(random.choice([0, 0.5, 3]))

    assert_numbers_are_exact(processes[0])
    for each in processes:
        each.close()


# ── The copy of the rule ─────────────────────────────────────────────────────────────────────────

BOUNDS = st.lists(st.integers(-40, 3), min_size=8, max_size=8, unique=True)


@settings(deadline=None)
@given(
    bounds=BOUNDS,
    reset=st.sampled_from(Reset),
    interval_s=st.sampled_from([1, 1_500]),
    steps=st.lists(st.sampled_from([0, 1, -1, 1_500, 1_501, -3_000]), min_size=1, max_size=30),
)
def test_the_rule_in_the_database_is_the_rule(
    bounds: list[int], reset: Reset, interval_s: int, steps: list[int]
) -> None:
    kept = Settings(
        bounds=tuple(sorted(bounds, reverse=True)), reset=reset, reset_interval_s=interval_s
    )
    clock = ManualClock(START)
    store = _rule_store(clock)
    store.configure(kept)
    store.purge("a")
    count: Count | None = None
    for step in steps:
        clock.step(step)
        count = kept.rule.check(count, clock.now())

        receipt = submit(store, "a")

        expected = (count.value, kept.rule.priority(count.value), clock.now())
        assert (receipt.count, receipt.priority, receipt.submitted_at_us) == expected
    shown = store.customers(names=["a"]).customers[0]
    assert count is not None
    assert shown.count_updated_at_us == count.updated_at
    store.close()


def _rule_store(clock: ManualClock) -> PostgresStore:
    """One database for all examples: the customer is purged before each."""
    if not _RULE:
        databases = Databases()
        _RULE.append((databases, databases.new()))
    return PostgresStore(_RULE[0][1], clock=clock)


_RULE: list[tuple[Databases, str]] = []


# ── Claims that find nothing ─────────────────────────────────────────────────────────────────────


@contextmanager
def claims_held_up(url: str) -> Iterator[None]:
    """Hold the claim lock."""
    with psycopg.connect(url) as connection:
        connection.execute("SELECT 1 FROM fairturn.queue FOR UPDATE")
        yield


def claim_at_once(store: PostgresStore) -> list[Claim] | None:
    """Return the result of a claim; None if it waits for a lock."""
    found: list[list[Claim]] = []
    thread = threading.Thread(target=lambda: found.append(claim(store, 2)), daemon=True)
    thread.start()
    thread.join(3)
    return found[0] if found else None


def test_a_claim_that_finds_nothing_again_waits_for_nobody(url: str, store: PostgresStore) -> None:
    submit(store)
    store.adjust("paused", CustomerSettings(paused=True))
    submit(store, "paused")
    assert [len(claim(store, 2)) for _ in range(2)] == [1, 0]

    with claims_held_up(url):
        assert claim_at_once(store) == []
        assert claim_at_once(store) == []


def test_after_it_found_nothing_a_claim_finds_what_another_process_has_left(
    url: str, store: PostgresStore
) -> None:
    assert [claim(store) for _ in range(2)] == [[], []]
    other = PostgresStore(url)
    submitted = [submit(other).id for _ in range(2)]

    taken = [*claim(other), *claim(store)]  # the other store has seen both arrive

    assert [one.document.id for one in taken] == submitted
    other.close()
