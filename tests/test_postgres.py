"""PostgreSQL: what is its own, beside the promises of every store."""

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from random import Random
from typing import Any

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from psycopg.pq import TransactionStatus

from fairturn.clock import SECOND_US, SERVER_NOW, ManualClock, stopwatch
from fairturn.errors import (
    FairturnError,
    QueueFull,
    StoreError,
    StoreRefused,
    StoreUnavailable,
)
from fairturn.flows import Mode
from fairturn.model import (
    Claim,
    Completed,
    CustomerSettings,
    Failed,
    Filter,
    NewDocument,
    Outcome,
    Receipt,
    Released,
    Settings,
    State,
)
from fairturn.priority import Count, Reset
from fairturn.situation import NOTED_EVERY_US
from fairturn.store import Store
from fairturn.stores.memory import MemoryStore
from fairturn.stores.postgres import (
    PostgresStore,
    database,
    engine,
    migrating,
    pooling,
    watching,
)
from fairturn.stores.postgres.piping import Line
from fairturn.stores.postgres.rows import CONFIGURE, settings_columns
from fairturn.stores.postgres.session import BEGIN, LOCK_SETTINGS, SCHEMA, Session
from fairturn.testing.steps import assert_numbers_are_exact, claim, find_all, submit
from tests.servers import pgbouncer, postgres
from tests.servers.proxy import Proxy
from tests.servers.queues import Databases

START = 1_700_000_000 * SECOND_US
LEASE_US = 30 * SECOND_US
PATIENCE_S = 30.0


def new(customer: str = "acme", **fields: Any) -> NewDocument:
    return NewDocument(customer, "1", **fields)


@pytest.fixture
def databases() -> Iterator[Databases]:
    with Databases() as made:
        yield made


@pytest.fixture
def url(databases: Databases) -> str:
    return databases.new()


@pytest.fixture
def store(url: str) -> Iterator[PostgresStore]:
    opened = PostgresStore(url)
    yield opened
    opened.close()


# ── The schema and its roles ─────────────────────────────────────────────────────────────────────


@pytest.fixture
def role(databases: Databases) -> Iterator[str]:
    name = f"app_{os.getpid()}"
    with psycopg.connect(postgres.of_this_run().url(), autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {name} LOGIN")
        yield name
    with psycopg.connect(postgres.of_this_run().url(), autocommit=True) as connection:
        databases.__exit__(None, None, None)  # what was granted goes with the databases
        connection.execute(f"DROP ROLE {name}")


def as_role(url: str, role: str) -> str:
    return url.replace("postgres@", f"{role}@", 1)


def test_a_role_that_may_not_change_the_schema_can_do_everything_else(
    databases: Databases, role: str
) -> None:
    owner = databases.new(empty=True)
    migrating.migrate_server(owner, grant_to=role)

    store = PostgresStore(as_role(owner, role))
    submit(store, "a", key="k", digest=b"1")
    store.submit([new("b")] * 60)
    store.adjust("a", CustomerSettings(limit=1))
    (first, *others) = claim(store, 3)
    assert store.renew([first.fence], lease_us=LEASE_US) == ([], [])
    assert store.finish([Completed(first.fence, "1"), *(Released(c.fence) for c in others)]) == []
    waiting = next(found for found in find_all(store) if found.state is State.WAITING)
    assert store.cancel([waiting.id]) == [State.CANCELLED]
    store.configure(Settings(mode=Mode.EQUAL))
    while store.prune() is not None:
        pass
    store.purge("b")
    assert_numbers_are_exact(store)
    store.close()

    with (
        psycopg.connect(as_role(owner, role)) as connection,
        pytest.raises(psycopg.errors.InsufficientPrivilege),
    ):
        connection.execute("CREATE TABLE fairturn.another (n integer)")


def test_a_role_without_rights_is_told_what_it_lacks(databases: Databases, role: str) -> None:
    empty, made = databases.new(empty=True), databases.new()

    for url in (empty, made):
        with pytest.raises(StoreRefused, match="may not do what a queue needs"):
            PostgresStore(as_role(url, role))


def test_without_leave_to_migrate_a_database_without_a_schema_is_refused(
    databases: Databases,
) -> None:
    empty = databases.new(empty=True)

    with pytest.raises(StoreRefused, match="has no queue in its schema fairturn; make it with"):
        PostgresStore(empty, migrate=False)

    with psycopg.connect(empty) as connection:
        found = connection.execute("SELECT to_regnamespace('fairturn') IS NULL").fetchall()
    assert found == [(True,)]


def test_a_newer_schema_is_refused_and_left_untouched(url: str) -> None:
    with psycopg.connect(url) as connection:
        connection.execute("INSERT INTO fairturn.migrations (number) VALUES (99)")

    for migrate in (True, False):
        with pytest.raises(StoreRefused, match="has schema 99 and this fairturn knows"):
            PostgresStore(url, migrate=migrate)


def test_two_queues_in_two_schemas_of_one_database_do_not_touch_each_other(url: str) -> None:
    stores = [PostgresStore(url, schema=schema) for schema in ("fairturn", "another")]
    for n, store in enumerate(stores):
        store.submit([new("a")] * (n + 1))
        store.submit([new("b")])
    stores[1].configure(Settings(mode=Mode.LEVELS))

    assert [store.summary().waiting for store in stores] == [2, 3]
    assert [len(claim(store, 9)) for store in stores] == [2, 3]
    assert stores[0].settings().mode is Mode.FAIR
    for store in stores:
        store.close()


def test_a_schema_that_is_no_plain_name_is_refused() -> None:
    for name in ("", "Fair", 'x"; DROP TABLE y; --', "a b", "x" * 64):
        with pytest.raises(ValueError, match="it must be a name of small letters"):
            PostgresStore("postgresql:///x", schema=name)


# ── Sentences ────────────────────────────────────────────────────────────────────────────────────

SECRET = "hunter2"


@pytest.mark.parametrize(
    ("url", "error", "said"),
    [
        (f"postgresql://u:{SECRET}@127.0.0.1:1/db", StoreUnavailable, "cannot be reached"),
        (f"postgresql://u:{SECRET}@nowhere.invalid/db", StoreUnavailable, "cannot be reached"),
        (f"postgresql://u:{SECRET}@h:port/db", StoreRefused, "no PostgreSQL URL"),
        (f"postgresql://u:{SECRET}@h/db?colour=red", StoreRefused, "no PostgreSQL URL"),
    ],
)
def test_an_address_that_leads_nowhere_is_a_sentence_without_the_password(
    url: str, error: type[StoreError], said: str
) -> None:
    with pytest.raises(error, match=said) as raised:
        PostgresStore(url)

    assert SECRET not in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_database_that_does_not_exist_is_named() -> None:
    with pytest.raises(
        StoreRefused, match='"nosuchdatabase" does not exist; make it with: created'
    ):
        PostgresStore(postgres.of_this_run().url("nosuchdatabase"))


def test_a_role_that_does_not_exist_is_named() -> None:
    url = as_role(postgres.of_this_run().url(), "nosuchrole")

    with pytest.raises(StoreRefused, match="cannot be opened: .*; correct the address"):
        PostgresStore(url)


def test_a_read_only_server_is_waited_for(url: str, store: PostgresStore) -> None:
    name = url.rpartition("/")[2].partition("?")[0]
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    terminate_others(url)

    with pytest.raises(StoreUnavailable):
        store.submit([new()])

    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("SET default_transaction_read_only = off")
        connection.execute(f"ALTER DATABASE {name} RESET default_transaction_read_only")
    terminate_others(url)
    assert submit(store).count == 0


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
    assert (kept.count, kept.repeated) == (0, False)
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


def test_more_submitters_than_rows_to_count_in_leave_each_other_undisturbed(
    url: str, store: PostgresStore
) -> None:
    with psycopg.connect(url) as connection:
        ((rows,),) = connection.execute("SELECT count(*) FROM fairturn.totals").fetchall()
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
        with pytest.raises(StoreUnavailable, match="others have held what this call needs"):
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
    with psycopg.connect(url) as other:
        store.submit([new()], connection=other)
        thread, receipts = _submitting(store, customers)
        _wait_until_somebody_waits(url)
        ((released_at,),) = other.execute(f"SELECT {SERVER_NOW}").fetchall()
        other.commit()
        thread.join(PATIENCE_S)

    assert receipts[0].count == -2
    assert receipts[0].submitted_at >= released_at


@pytest.mark.parametrize("customers", [["acme"], ["acme", "zeta"]], ids=["one", "many"])
def test_a_submission_that_waited_for_other_settings_obeys_them(
    url: str, store: PostgresStore, customers: list[str]
) -> None:
    submit(store, "acme")
    settings = Settings(mode=Mode.EQUAL, bounds=(0, -1, -2, -3, -4, -5, -6, -7))
    with psycopg.connect(url) as other:
        other.execute(LOCK_SETTINGS)
        thread, receipts = _submitting(store, customers)
        _wait_until_somebody_waits(url)
        Session(other, SCHEMA).ask(CONFIGURE, settings_columns(settings))
        other.commit()
        thread.join(PATIENCE_S)
        levels = other.execute("SELECT level FROM fairturn.documents ORDER BY number").fetchall()

    assert (receipts[0].count, receipts[0].priority) == (-1, 2)
    assert levels == [(1,)] * (1 + len(customers))


def _submitting(
    store: PostgresStore, customers: list[str]
) -> tuple[threading.Thread, list[Receipt]]:
    """A thread that submits a document of each; what it is told."""
    told: list[Receipt] = []
    thread = threading.Thread(target=lambda: told.extend(store.submit([*map(new, customers)])))
    thread.start()
    return thread, told


def _wait_until_somebody_waits(url: str) -> None:
    until = stopwatch() + PATIENCE_S
    with psycopg.connect(url, autocommit=True) as connection:
        while connection.execute("SELECT 1 FROM pg_locks WHERE NOT granted").fetchone() is None:
            assert stopwatch() < until, "nobody waits for a lock"


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
                outcomes = [_end(each.fence, random) for each in held]
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


def _end(fence: Any, random: Random) -> Outcome:
    completed: Outcome = Completed(fence)
    outcomes: list[Outcome] = [completed, completed, Failed(fence, "x", 0), Released(fence)]
    return random.choice(outcomes)


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
        outcomes = [_end(each.fence, random) for each in ended]
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
        assert (receipt.count, receipt.priority, receipt.submitted_at) == expected
    shown = store.customers(names=["a"]).customers[0]
    assert count is not None
    assert shown.count_updated_at == count.updated_at
    store.close()


def _rule_store(clock: ManualClock) -> PostgresStore:
    """One database for all examples: the customer is purged before each."""
    if not _RULE:
        databases = Databases()
        _RULE.append((databases, databases.new()))
    return PostgresStore(_RULE[0][1], clock=clock)


_RULE: list[tuple[Databases, str]] = []


# ── Lost connections ─────────────────────────────────────────────────────────────────────────────


def terminate_others(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )


def test_connections_that_the_server_has_ended_are_replaced(url: str, store: PostgresStore) -> None:
    submit(store, key="k", digest=b"1")
    calls: list[Any] = [
        lambda: submit(store, key="k", digest=b"1"),
        lambda: store.submit([new("b")] * 3),
        lambda: claim(store, 2),
        lambda: store.finish([Completed(claim(store)[0].fence)]),
        store.summary,
        lambda: find_all(store),
        store.version,
        lambda: store.configure(Settings(attempts_max=2)),
        store.prune,
    ]

    for call in calls:
        terminate_others(url)
        call()

    assert store.summary().waiting == 1
    assert_numbers_are_exact(store)


def test_a_queue_that_loses_its_server_says_so_and_goes_on_when_it_is_back(
    databases: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "WAIT_S", 0.5)
    name = databases.new().rpartition("/")[2].partition("?")[0]
    with Proxy(postgres.of_this_run().url(name, tcp=True)) as proxy:
        store = PostgresStore(proxy.url)
        store.submit([new("a"), new("b")])
        (first,) = claim(store)

        proxy.cut()
        for call in (
            lambda: store.submit([new()]),
            lambda: store.submit([new(), new()]),
            lambda: claim(store),
            store.summary,
        ):
            with pytest.raises(StoreUnavailable, match="cannot be reached|was in use"):
                call()
        proxy.mend()

        deadline = threading.Event()
        while True:
            try:
                assert store.finish([Completed(first.fence)]) == []
                break
            except StoreUnavailable:
                assert not deadline.wait(0.05)
        assert len(claim(store, 9)) == 1
        store.close()


def test_calls_share_at_most_so_many_connections_and_who_waits_in_vain_is_told(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "WAIT_S", 0.05)
    store = PostgresStore(url, pool_max=2)

    with (
        store._database.session(),
        store._database.session(),
        pytest.raises(StoreUnavailable, match="all 2 connections to .* were in use"),
    ):
        store.summary()

    assert store.summary().waiting == 0
    store.close()


def test_a_call_that_waits_for_a_connection_gets_the_next_one_that_is_given_back(url: str) -> None:
    store = PostgresStore(url, pool_max=1)
    told: list[Receipt] = []
    thread = threading.Thread(target=lambda: told.append(submit(store)))

    with store._database.session():
        thread.start()
    thread.join(PATIENCE_S)

    assert len(told) == 1
    store.close()


def test_calls_one_after_the_other_use_one_connection(store: PostgresStore) -> None:
    lent = store._database.session
    with lent() as first, lent():
        pass

    with lent() as session:
        last = session.connection
    for _ in range(3):
        with lent() as session:
            assert session.connection is last
    assert not first.connection.closed


def test_each_thread_goes_on_with_its_own_connection(store: PostgresStore) -> None:
    lent = store._database.session
    taken, done = threading.Event(), threading.Event()

    def use_another() -> None:
        with lent():
            taken.set()
            done.wait(PATIENCE_S)

    thread = threading.Thread(target=use_another)
    with lent() as session:
        own = session.connection
        thread.start()
        assert taken.wait(PATIENCE_S)
    done.set()
    thread.join(PATIENCE_S)

    for _ in range(3):
        with lent() as session:
            assert session.connection is own


def test_a_connection_that_nobody_needs_any_more_goes_back_to_the_pool(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    lent = store._database.session
    with lent(), lent():
        pass
    assert len(store._database._pool._at_hand) == 2
    monkeypatch.setattr(pooling, "_IDLE_S", 0.0)

    with lent() as session:
        used = session.connection

    assert store._database._pool._at_hand == [used]


def test_a_connection_that_is_old_goes_back_to_the_pool_which_replaces_it(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    lent = store._database.session
    with lent() as first, lent():
        pass
    monkeypatch.setattr(pooling, "_AT_HAND_S", 0.0)

    used = set()
    for _ in range(2):
        with lent() as session:
            used.add(session.connection)

    assert first.connection in used
    assert len(used) == 2


def test_a_connection_comes_back_without_a_transaction(store: PostgresStore) -> None:
    with store._database.session() as session:
        session.ask(BEGIN)

    with store._database.session() as another:
        status = another.connection.info.transaction_status
    assert status is TransactionStatus.IDLE
    assert submit(store).count == 0


# ── Hints ────────────────────────────────────────────────────────────────────────────────────────


def woken(store: PostgresStore, change: Any) -> bool:
    """Whether a change wakes whoever waits on another store."""
    version = store.version()
    answers: list[int] = []
    thread = threading.Thread(
        target=lambda: answers.append(store.wait(version, PATIENCE_S)), daemon=True
    )
    thread.start()
    change()
    thread.join(PATIENCE_S)
    return bool(answers) and answers[0] != version


def test_a_hint_wakes_others_without_a_look(
    url: str, store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "POLL_S", 3_600.0)
    other = PostgresStore(url)

    assert woken(store, lambda: submit(other))
    (claimed,) = claim(store)
    assert woken(other, lambda: store.finish([Completed(claimed.fence)]))
    other.close()


@pytest.fixture
def listener(url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"LISTEN {SCHEMA}_changed")
        yield connection


def hints(listener: psycopg.Connection[Any]) -> int:
    """How many hints there were since the last call. The server tells of those that were committed
    before it answers."""
    listener.execute("SELECT 1")
    return len(list(listener.notifies(timeout=0)))


def test_the_first_hint_after_a_quiet_time_goes_along_with_the_submission(
    url: str, listener: psycopg.Connection[Any]
) -> None:
    for documents in ([new()], [new(), new("b")], [new()] * 60):
        store, before = PostgresStore(url), set(threading.enumerate())

        store.submit(documents)

        assert hints(listener) == 1
        assert set(threading.enumerate()) <= before  # nobody else could have sent it
        store.close()
        assert hints(listener) == 0


def test_changes_close_together_share_a_hint(
    url: str, listener: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "_TOGETHER_S", 3_600.0)
    store = PostgresStore(url)

    for _ in range(5):
        submit(store)
    claims = claim(store, 3)
    store.finish([Completed(claimed.fence) for claimed in claims])

    assert hints(listener) == 1
    store.close()
    assert hints(listener) == 1


def news_of(store: PostgresStore) -> int:
    """What it has heard of, when it listens."""
    before = store.wait(-1, 0, certain=False)
    return store.wait(before, PATIENCE_S, certain=False)


def test_what_a_worker_claims_is_told_when_its_handlers_begin(
    url: str, listener: psycopg.Connection[Any]
) -> None:
    store = PostgresStore(url)
    submit(store)
    news = news_of(store)
    assert hints(listener) == 1

    store.claim(1, worker="w", lease_us=LEASE_US, synced=False)
    told = store.wait(news, 0, certain=False)
    store.sync()

    assert told == news
    assert store.wait(news, PATIENCE_S, certain=False) == news + 1
    store.close()
    assert hints(listener) == 1


def test_a_process_hears_of_its_own_changes_once(
    url: str, store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "_TOGETHER_S", 0.0)  # each submission sends a hint
    news = news_of(store)

    for _ in range(5):
        submit(store)
    with psycopg.connect(url, autocommit=True) as another:
        another.execute(f"NOTIFY {SCHEMA}_changed")

    assert store.wait(news + 5, PATIENCE_S, certain=False) == news + 6


HINT = ("pg_notify", "(text, text)", "void")
SYNC = ("pg_logical_emit_message", "(boolean, text, text)", "pg_lsn")


def break_function(url: str, function: tuple[str, str, str], fault: str) -> None:
    """Let a function of the server do something else."""
    name, arguments, result = function
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"UPDATE pg_proc SET proname = 'gone' WHERE proname = '{name}'")
        connection.execute(
            f"CREATE FUNCTION pg_catalog.{name} {arguments} RETURNS {result} LANGUAGE plpgsql AS "
            f"$$ BEGIN {fault}; END $$"
        )


def refuse_to_commit(url: str, table: str) -> None:
    """Let every transaction fail in the end that has put something into a table."""
    with psycopg.connect(url) as connection:
        connection.execute(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE "
            "'not with us'; END $$"
        )
        connection.execute(
            f"CREATE CONSTRAINT TRIGGER refused AFTER INSERT ON {table} "
            "DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION refuse()"
        )


def test_what_fails_when_it_is_committed_is_not_said_to_be_stored(
    url: str, store: PostgresStore
) -> None:
    refuse_to_commit(url, "fairturn.documents")

    for documents in ([new()], [new()], [new()] * 2):  # only with the first one a hint goes along
        with pytest.raises(StoreError, match="not with us"):
            store.submit(documents)

    assert find_all(store) == []


@pytest.mark.parametrize("fault", ["RAISE 'nobody is told'", "INSERT INTO refused VALUES (1)"])
def test_a_hint_that_fails_costs_a_submission_nothing(
    url: str, store: PostgresStore, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(watching, "_TOGETHER_S", 0.0)  # each submission sends one
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE refused (number integer)")
    refuse_to_commit(url, "refused")
    break_function(url, HINT, fault)

    ids = [submit(store).id for _ in range(3)]
    ids += [receipt.id for receipt in store.submit([new(), new("b")])]

    assert sorted(ids) == sorted(found.id for found in find_all(store))
    assert_numbers_are_exact(store)


def test_a_submission_whose_connection_is_lost_before_it_is_on_the_disk_is_not_said_to_be_stored(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "_TOGETHER_S", 3_600.0)  # the first submission sends a hint
    break_function(url, SYNC, "PERFORM pg_terminate_backend(pg_backend_pid())")
    store, other = PostgresStore(url), PostgresStore(url)

    with pytest.raises(StoreUnavailable, match="perhaps after what it was to store was stored"):
        submit(store)
    receipt = submit(other, key="k", digest=b"1")

    assert receipt == submit(other, key="k", digest=b"1")
    assert len(find_all(other)) == 2
    store.close()
    other.close()


def test_a_submission_that_the_server_does_not_sync_is_not_said_to_be_stored(
    url: str, store: PostgresStore
) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "UPDATE pg_proc SET proname = 'gone' WHERE proname = 'pg_logical_emit_message'"
        )

    with pytest.raises(StoreError, match="pg_logical_emit_message"):
        submit(store)


def test_a_submission_is_on_the_disk_when_it_returns_although_its_hint_goes_out_before(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "_TOGETHER_S", 0.0)  # each submission sends a hint
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            f"ALTER DATABASE {connection.info.dbname} SET synchronous_commit = on;"
            "CREATE TABLE written (at pg_lsn);"
            "CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            "INSERT INTO written VALUES (pg_current_wal_insert_lsn()); RETURN NULL; END $$;"
            "CREATE TRIGGER noted AFTER INSERT ON fairturn.documents EXECUTE FUNCTION note()"
        )
        store = PostgresStore(url)
        late = []

        for documents in ([new()], [new(), new("b")], [new()] * 60) * 10:
            store.submit(documents)
            late += connection.execute(
                "SELECT at FROM written WHERE at > pg_current_wal_flush_lsn()"
            ).fetchall()

        assert late == []
        store.close()


def test_a_lost_listener_costs_at_most_a_look_and_comes_back(
    url: str, store: PostgresStore
) -> None:
    other = PostgresStore(url)
    assert woken(store, lambda: submit(other))

    terminate_others(url)

    assert woken(store, lambda: submit(other))
    other.close()


# ── Claims that find nothing ─────────────────────────────────────────────────────────────────────


@contextmanager
def claims_held_up(url: str) -> Iterator[None]:
    """Somebody holds the lock of claims."""
    with psycopg.connect(url) as connection:
        connection.execute("SELECT 1 FROM fairturn.queue FOR UPDATE")
        yield


def claim_at_once(store: PostgresStore) -> list[Claim] | None:
    """What a claim gives; None if it waits for somebody."""
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

    taken = [*claim(other), *claim(store)]  # the other one has seen both arrive

    assert [one.document.id for one in taken] == submitted
    other.close()


def finish_elsewhere(url: str, store: PostgresStore, clock: ManualClock | None = None) -> None:
    """Let another process record an outcome, after this one has found nothing to claim."""
    other = PostgresStore(url, clock=clock)
    other.adjust("acme", CustomerSettings(limit=1))  # so that its end makes room, and is recorded
    submit(other)
    (claimed,) = claim(other)
    assert [claim(store) for _ in range(2)] == [[], []]
    other.finish([Completed(claimed.fence)])
    other.close()


def test_outcomes_of_others_are_no_reason_to_claim_while_nothing_waits(
    url: str, store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_THOROUGH_S", 3_600.0)
    finish_elsewhere(url, store)

    with claims_held_up(url):
        assert claim_at_once(store) == []


def test_outcomes_of_others_are_folded_in_although_nothing_waits_but_not_at_once(
    url: str, store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_THOROUGH_S", 0.0)
    finish_elsewhere(url, store)

    assert claim(store) == []

    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT 1 FROM fairturn.recorded").fetchall() == []


def test_a_worker_that_finds_nothing_is_seen_again_after_some_seconds(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_THOROUGH_S", 3_600.0)
    clock = ManualClock(START)
    store = PostgresStore(url, clock=clock)
    finish_elsewhere(url, store, clock)
    clock.advance(NOTED_EVERY_US / SECOND_US)

    with claims_held_up(url):
        assert claim_at_once(store) == []

    (seen,) = store.workers()
    assert seen.seen_at == clock.now()
    store.close()
    with psycopg.connect(url) as connection:  # what nobody has folded in is not gone with it
        assert len(connection.execute("SELECT 1 FROM fairturn.recorded").fetchall()) == 1


# ── PgBouncer ────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def pooled(url: str) -> Iterator[str]:
    if pgbouncer.find() is None:
        if os.environ.get("FAIRTURN_REQUIRE_SERVICES"):
            pytest.fail("pgbouncer is not installed: apt-get install pgbouncer")
        pytest.skip("pgbouncer is not installed: apt-get install pgbouncer")
    name = url.rpartition("/")[2].partition("?")[0]
    server = postgres.of_this_run().url(name, tcp=True)
    with pgbouncer.started(server, server_connections=2) as address:
        yield address


def test_everything_works_through_a_pooler_that_has_two_connections_for_fifty_clients(
    pooled: str, url: str
) -> None:
    stores = [PostgresStore(pooled, pool_max=10) for _ in range(5)]
    errors: list[BaseException] = []

    def run(seed: int) -> None:
        random, store = Random(seed), stores[seed % 5]
        try:
            for n in range(6):
                store.submit([new(random.choice("abc"))])
                store.submit([new(name) for name in random.choices("abc", k=60)])
                claims = store.claim(20, worker="w", lease_us=LEASE_US).claims
                outcomes = [_end(each.fence, random) for each in claims]
                assert store.finish(outcomes) == []
                store.summary()
                assert store.find(Filter(), size=100).documents
                if n == 3:
                    store.adjust("a", CustomerSettings(weight=2))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)

    assert errors == []
    assert_numbers_are_exact(stores[0])
    assert len(find_all(stores[0], size=1_000)) == 50 * 6 * 61
    for store in stores:
        store.close()


def test_behind_a_pooler_changes_are_heard_of_at_another_address(
    pooled: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "POLL_S", 3_600.0)
    store, other = PostgresStore(pooled, listen_url=url), PostgresStore(pooled)

    assert woken(store, lambda: submit(other))
    store.close()
    other.close()


def test_behind_a_pooler_without_another_address_changes_are_looked_for(
    pooled: str, url: str
) -> None:
    store, other = PostgresStore(pooled), PostgresStore(url)

    assert woken(store, lambda: submit(other))
    store.close()
    other.close()


# ── Upgrades ──────────────────────────────────────────────────────────────────────────────────────


def test_who_runs_goes_on_beside_a_newer_fairturn_and_who_starts_is_refused(
    store: PostgresStore, url: str
) -> None:
    submit(store)
    with psycopg.connect(url) as newer:
        newer.execute("INSERT INTO fairturn.migrations (number) VALUES (9999)")
        newer.execute("ALTER TABLE fairturn.documents ADD COLUMN colour text")
        newer.execute("ALTER TABLE fairturn.flows ADD COLUMN colour text")
        newer.execute("CREATE TABLE fairturn.colours (colour text)")

    submit(store)
    (first, second) = claim(store, 2)
    assert store.finish([Completed(first.fence), Released(second.fence)]) == []
    assert_numbers_are_exact(store)
    with pytest.raises(StoreRefused, match="install the newer fairturn that made it"):
        PostgresStore(url)


# ── Round trips ──────────────────────────────────────────────────────────────────────────────────


def test_after_an_error_in_a_round_trip_the_connection_goes_on_and_nothing_of_it_is_left(
    url: str,
) -> None:
    with Line.connect(url, autocommit=True) as line:
        line.prepares = True
        session = Session(line, "fairturn")

        def divide() -> None:
            with session.together():
                session.ask("BEGIN")
                session.ask("INSERT INTO fairturn.limited (customer) VALUES (%s)", (7,))
                session.ask("SELECT 1 / %s::integer", (0,))
                session.ask("SELECT %s::text || 'never prepared'", ("was ",))

        with pytest.raises(psycopg.errors.DivisionByZero):
            divide()
        line.rollback()

        assert session.fetch("SELECT %s::text || 'never prepared'", ("was ",)) == [
            ("was never prepared",)
        ]
        assert session.fetch("SELECT 1 / %s::integer", (1,)) == [(1,)]
        assert session.fetch("SELECT * FROM fairturn.limited") == []


def test_a_round_trip_may_be_large_in_both_directions(url: str) -> None:
    with Line.connect(url, autocommit=True) as line:
        session = Session(line, "fairturn")
        large = "x" * 1_000_000
        with session.together():
            answers = [session.ask("SELECT repeat(%(text)s, 2)", {"text": large}) for _ in range(8)]

        assert [answer.fetchall() for answer in answers] == [[(large * 2,)]] * 8


def test_a_round_trip_that_is_broken_off_closes_its_connection(url: str) -> None:
    with Line.connect(url, autocommit=True) as line:
        session = Session(line, "fairturn")
        with suppress(KeyboardInterrupt), session.together():
            session.ask("SELECT 1")
            raise KeyboardInterrupt

        assert line.closed


def test_the_errors_of_this_store_are_ours(store: PostgresStore) -> None:
    store.close()

    for call in (store.summary, lambda: submit(store), lambda: claim(store)):
        with pytest.raises(FairturnError, match="was closed"):
            call()
