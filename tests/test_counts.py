"""Counts without a queue: the same rule in every backend, and the loss of a backend."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from importlib import resources
from itertools import count
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit, urlunsplit

import apsw
import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fairturn import Queue
from fairturn.clock import Clock, ManualClock, stopwatch
from fairturn.config import open_counts
from fairturn.errors import StoreRefused, StoreUnavailable
from fairturn.integrations.counts import Counts, within
from fairturn.integrations.counts.memory import CUSTOMERS_MAX, MemoryCounts
from fairturn.integrations.counts.redis import RedisCounts
from fairturn.priority import Count, Reset, Rule
from tests.servers import lossy, postgres, valkey
from tests.servers.lifetime import free_port
from tests.servers.valkey import Valkey
from tests.wait import wait_until

VECTORS = json.loads((Path(__file__).parent / "vectors" / "priority.json").read_text("utf-8"))
INTERVAL = 1_500_000_000
BOUND_S = 0.25
SLACK_S = 2.0  # for a busy machine
PATIENCE_S = 30.0  # where the timeout is not tested

NUMBERS = count(1)


@pytest.fixture(scope="module")
def server() -> Iterator[Valkey]:
    with valkey.started() as started:
        yield started


@pytest.fixture
def redis_server(server: Valkey) -> Valkey:
    server.client().flushall()
    return server


@pytest.fixture(params=["memory", "sqlite", "redis", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Each backend of counts, empty."""
    if request.param == "memory":
        yield ":memory:"
    elif request.param == "sqlite":
        yield str(tmp_path / "counts.db")
    elif request.param == "redis":
        yield request.getfixturevalue("redis_server").url
    else:
        server, name = postgres.of_this_run(), f"counts_{next(NUMBERS)}_{id(tmp_path)}"
        yield server.create(name)
        server.drop(name)


class Open(Protocol):
    def __call__(
        self, place: str | Path, *, rule: Rule | None = None, clock: Clock | None = None
    ) -> Counts: ...


@pytest.fixture
def opened() -> Iterator[Open]:
    """`open_counts` with a long timeout for a busy machine, closed at the end."""
    made: list[Counts] = []

    def open_and_note(
        place: str | Path, *, rule: Rule | None = None, clock: Clock | None = None
    ) -> Counts:
        made.append(open_counts(place, rule=rule, clock=clock, timeout_s=PATIENCE_S))
        return made[-1]

    yield open_and_note
    for counts in made:
        counts.close()


def check(counts: Counts, customer: str = "acme") -> int:
    return counts.begin(customer)()


# ── The rule ─────────────────────────────────────────────────────────────────────────────────────


def test_every_check_of_the_vectors_has_exactly_their_answer_in_every_place(
    place: str, opened: Open
) -> None:
    for case in VECTORS["cases"]:
        clock = ManualClock()
        rule = Rule(
            reset=Reset(case["config"]["reset"]),
            reset_interval_us=round(case["config"]["reset_interval_s"] * 1_000_000),
        )
        counts = opened(place, rule=rule, clock=clock)

        answers = []
        for step in case["steps"]:
            clock.set(round(step["at"] * 1_000_000))
            found = check(counts, f"{case['name']}/{step['customer']}")
            answers.append({**step, "count": found, "priority": rule.priority(found)})

        assert answers == case["steps"], case["name"]


steps_us = st.sampled_from([0, 1, 60_000_000, INTERVAL - 1, INTERVAL, INTERVAL + 1, -1, -INTERVAL])


@given(
    checks=st.lists(st.tuples(st.integers(0, 2), steps_us), max_size=80),
    reset=st.sampled_from(Reset),
    interval_us=st.sampled_from([1_000_000, 60_000_000, INTERVAL]),
    start=st.sampled_from([10 * INTERVAL, 1_800_000_000_000_000, 9_000_000_000_000_000]),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_script_agrees_with_the_rule_on_any_sequence_of_checks(
    redis_server: Valkey,
    checks: list[tuple[int, int]],
    reset: Reset,
    interval_us: int,
    start: int,
) -> None:
    rule = Rule(reset=reset, reset_interval_us=interval_us)
    clock = ManualClock(start)
    counts = RedisCounts(
        redis_server.url,
        rule=rule,
        clock=clock,
        prefix=f"run-{next(NUMBERS)}",
        timeout_s=PATIENCE_S,
    )
    expected: dict[int, Count] = {}

    for customer, step in checks:
        clock.set(clock.now() + step)
        expected[customer] = rule.check(expected.get(customer), clock.now())
        assert check(counts, f"customer {customer}") == expected[customer].value
    counts.close()


def test_without_a_clock_of_ours_the_server_s_own_counts(
    redis_server: Valkey, opened: Open
) -> None:
    counts = opened(redis_server.url)

    assert [check(counts), check(counts)] == [0, -1]

    seconds, microseconds = redis_server.client().time()
    updated_at = int(str(redis_server.client().get("fairturn:{acme}:count")).split()[1])
    assert 0 <= seconds * 1_000_000 + microseconds - updated_at < 60_000_000


# ── At once ──────────────────────────────────────────────────────────────────────────────────────


def at_once(threads: int, call: Any) -> None:
    barrier = threading.Barrier(threads)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            barrier.wait()
            call()
        except BaseException as error:
            errors.append(error)

    running = [threading.Thread(target=run) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert errors == []


def test_checks_at_once_are_as_if_one_came_after_the_other(place: str, opened: Open) -> None:
    counts = opened(place)
    threads, each = 8, 5
    check(counts, "warm")  # creates the table before the measurement
    found: list[int] = []

    at_once(threads, lambda: found.extend([check(counts) for _ in range(each)]))

    assert sorted(found, reverse=True) == list(range(0, -threads * each, -1))


def test_sixty_four_publishers_at_once_find_the_counts_one_after_the_other(
    redis_server: Valkey,
) -> None:
    # A long timeout: on a busy machine 64 connections at once may take a second.
    counts = RedisCounts(redis_server.url, timeout_s=PATIENCE_S)
    found: list[int] = []

    at_once(64, lambda: found.extend([check(counts) for _ in range(20)]))

    assert sorted(found, reverse=True) == list(range(0, -64 * 20, -1))
    counts.close()


def test_processes_and_their_forks_count_together(place: str, opened: Open) -> None:
    if place == ":memory:":
        pytest.skip("memory is that of one process, and says so")
    program = f"""
import os
from fairturn.config import open_counts
counts = open_counts({place!r}, timeout_s={PATIENCE_S})
counts.begin("acme")()
child = os.fork()
for _ in range(50):
    counts.begin("acme")()
if child:
    os.waitpid(child, 0)
"""
    running = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(3)]
    assert [process.wait(60) for process in running] == [0, 0, 0]

    assert check(opened(place)) == -(3 * (1 + 50 + 50))


def test_a_file_that_somebody_else_makes_while_we_look_at_it_is_no_other_program_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "counts.db"

    def make(_: apsw.Cursor, sql: str, __: object) -> bool:
        if "sqlite_schema" in sql:
            hooks.clear()
            with suppress(StoreUnavailable):  # it waits for the reader's lock
                check(open_counts(place, timeout_s=0.01))
        return True

    def watch(connection: apsw.Connection) -> None:
        connection.exec_trace = make

    hooks = [watch]
    monkeypatch.setattr(apsw, "connection_hooks", hooks)

    assert check(open_counts(place)) in {0, -1}
    assert hooks == []


# ── Bounded ──────────────────────────────────────────────────────────────────────────────────────


def test_a_call_that_never_ends_is_given_up_in_time() -> None:
    begun = stopwatch()

    with pytest.raises(StoreUnavailable, match="the library did not respond within 50 ms"):
        within(0.05, "the library", threading.Event().wait)

    assert stopwatch() - begun < 0.05 + SLACK_S


def test_a_bounded_call_gives_and_raises_what_the_call_does() -> None:
    def fail() -> None:
        raise KeyError("a book")

    assert within(10, "the library", lambda: 42) == 42
    with pytest.raises(KeyError, match="a book"):
        within(10, "the library", fail)


@pytest.mark.parametrize("scheme", ["redis", "redis+cluster", "postgresql"])
def test_who_takes_a_connection_and_says_nothing_is_given_up_within_250_ms(scheme: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        counts = open_counts(f"{scheme}://u:hunter2@127.0.0.1:{silent.getsockname()[1]}/0")

        begun = stopwatch()
        with pytest.raises(StoreUnavailable) as refused:
            check(counts)

        assert stopwatch() - begun < BOUND_S + SLACK_S
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("scheme", ["redis", "redis+cluster", "postgresql"])
def test_where_nobody_listens_the_counts_are_not_to_be_had(scheme: str) -> None:
    counts = open_counts(f"{scheme}://u:hunter2@127.0.0.1:{free_port()}/0", timeout_s=PATIENCE_S)

    with pytest.raises(StoreUnavailable) as refused:
        check(counts)

    assert "hunter2" not in str(refused.value)


# ── A reply is lost ──────────────────────────────────────────────────────────────────────────────


def test_in_redis_a_check_whose_reply_was_lost_counts_once(redis_server: Valkey) -> None:
    with lossy.before("127.0.0.1", redis_server.port) as proxy:
        counts = RedisCounts(f"redis://127.0.0.1:{proxy.port}/0", timeout_s=PATIENCE_S)
        found = [check(counts)]
        proxy.lose_reply_to(b"acme")
        found += [check(counts), check(counts)]
        counts.close()

    assert proxy.has_lost_it
    assert found == [0, -1, -2]


@given(
    checks=st.lists(st.integers(0, 90), max_size=200),
    reset=st.sampled_from(Reset),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_script_answers_a_check_that_comes_again_as_the_first_time(
    redis_server: Valkey, checks: list[int], reset: Reset
) -> None:
    """If fewer than 64 others of the customer came in between."""
    script = (resources.files("fairturn.integrations.counts") / "check.lua").read_text("utf-8")
    client, key = redis_server.client(), f"run-{next(NUMBERS)}"
    known: dict[int, int] = {}  # the last checks that counted, newest last

    for number in checks:
        expected = known[number] if number in known else -len(known)
        if number in known and list(known).index(number) < len(known) - 64:
            continue  # evicted
        known[number] = expected
        answer = client.eval(
            script, 1, key, str(INTERVAL), reset.value, f"check{number:03}", str(INTERVAL)
        )
        assert answer == expected


LOSSES = pytest.mark.parametrize(
    "marker, answer", [(b"acme", -1), (b"COMMIT", None)], ids=["before the commit", "of the commit"]
)


@LOSSES
def test_in_postgresql_a_check_whose_reply_was_lost_counts_once(
    marker: bytes, answer: int | None, opened: Open
) -> None:
    server, name = postgres.of_this_run(), f"counts_lost_{next(NUMBERS)}_{os.getpid()}"
    url = urlsplit(server.create(name) and server.url(name, tcp=True))
    assert url.hostname is not None
    assert url.port is not None
    with lossy.before(url.hostname, url.port) as proxy:
        through = urlunsplit(url._replace(netloc=f"postgres@127.0.0.1:{proxy.port}"))
        counts = opened(through)
        assert check(counts) == 0
        proxy.lose_reply_to(marker)
        if answer is None:
            with pytest.raises(StoreUnavailable):  # it may have counted
                check(counts)
        else:
            assert check(counts) == answer
        assert proxy.has_lost_it
        assert check(counts) == -2
        counts.close()
    server.drop(name)


# ── Redis ────────────────────────────────────────────────────────────────────────────────────────


def test_a_customer_is_one_key_that_ends_when_its_count_no_longer_matters(
    redis_server: Valkey,
    opened: Open,
) -> None:
    counts = opened(redis_server.url, rule=Rule(reset_interval_us=60_000_000))
    client = redis_server.client()

    for _ in range(3):
        check(counts, "a}c{me:ü")
        keys = list(client.scan_iter())
        assert keys == ["fairturn:{a}c{me:ü}:count"]
        assert 60_000 < client.pttl(keys[0]) <= 61_000


def test_a_server_that_forgot_its_scripts_is_told_again(redis_server: Valkey, opened: Open) -> None:
    counts = opened(redis_server.url)
    found = []

    for _ in range(4):
        found.append(check(counts))
        redis_server.client().script_flush()

    assert found == [0, -1, -2, -3]


def test_a_key_that_is_lost_means_a_customer_who_is_new(redis_server: Valkey, opened: Open) -> None:
    counts = opened(redis_server.url)
    found = [check(counts), check(counts)]

    redis_server.client().flushall()

    assert [*found, check(counts), check(counts)] == [0, -1, 0, -1]


def test_a_restart_of_the_server_is_survived_by_every_open_connection(opened: Open) -> None:
    with valkey.started() as server:
        counts = opened(server.url)
        at_once(4, lambda: check(counts))

        server.kill()
        with pytest.raises(StoreUnavailable, match=f"127.0.0.1:{server.port}"):
            check(counts)
        server.start()

        assert [check(counts), check(counts)] == [0, -1]


@pytest.mark.parametrize("connected", [True, False])
def test_a_server_that_does_not_answer_is_waited_for_at_most_250_ms(
    connected: bool,
) -> None:
    with valkey.started() as server:
        counts = open_counts(server.url)
        if connected:
            check(counts)
        server.freeze()

        begun = stopwatch()
        with pytest.raises(StoreUnavailable, match="did not respond within"):
            check(counts)
        waited = stopwatch() - begun

        server.thaw()
    assert waited < BOUND_S + SLACK_S


def test_an_answer_that_nobody_waited_for_is_never_taken_for_another_s(
    redis_server: Valkey,
    opened: Open,
) -> None:
    counts = opened(redis_server.url)
    check(counts, "quiet")

    counts.begin("busy")  # moves the count; its reply stays unread

    assert [check(counts, "quiet"), check(counts, "busy")] == [-1, -1]


def test_a_password_never_stands_in_an_error(redis_server: Valkey, opened: Open) -> None:
    counts = opened(f"redis://reader:hunter2@127.0.0.1:{redis_server.port}/0")

    with pytest.raises(StoreRefused, match="denies access") as refused:
        check(counts)

    assert "hunter2" not in str(refused.value)


def test_a_server_that_may_forget_any_key_is_a_concern(opened: Open) -> None:
    with valkey.started("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru") as server:
        (concern,) = opened(server.url).concerns()
        server.command("CONFIG", "SET", "maxmemory-policy", "volatile-ttl")

        assert "maxmemory-policy is allkeys-lru" in concern
        assert opened(server.url).concerns() == []


def test_on_a_cluster_counts_go_on_while_scripts_are_flushed_and_slots_move(opened: Open) -> None:
    customers = [f"customer {number}" for number in range(60)]
    with valkey.cluster() as nodes:
        counts = opened(f"redis+cluster://127.0.0.1:{nodes[0].port}")
        first = [check(counts, customer) for customer in customers]
        for node in nodes:
            node.client().script_flush()
        move_slot(nodes, "fairturn:{customer 7}:count")
        second = [check(counts, customer) for customer in customers]
        held = [len(list(node.client().scan_iter())) for node in nodes]
        counts.close()

    assert (first, second) == ([0] * 60, [-1] * 60)
    assert sum(held) == 60
    assert all(held), "every node has some of the customers"


def move_slot(nodes: list[Valkey], key: str) -> None:
    """Move the hash slot of a key to another node."""
    slot = nodes[0].command("CLUSTER", "KEYSLOT", key)
    (source,) = [node for node in nodes if holds(node, key)]
    target = next(node for node in nodes if node is not source)
    ids = {node: node.command("CLUSTER", "MYID") for node in nodes}
    target.command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source])
    source.command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
    source.command("MIGRATE", "127.0.0.1", target.port, key, 0, 5_000)
    for node in (target, source):
        node.command("CLUSTER", "SETSLOT", slot, "NODE", ids[target])


def holds(node: Valkey, key: str) -> bool:
    return key in list(node.client().scan_iter())


# ── Files and tables ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("place", ["sqlite", "postgres"], indirect=True)
def test_customers_who_are_long_gone_leave_no_row(place: str, opened: Open) -> None:
    clock = ManualClock(1_800_000_000_000_000)
    counts = opened(place, clock=clock)
    for number in range(25):
        check(counts, f"once {number}")

    clock.advance(1_501)
    for number in range(5):
        check(counts, f"again {number}")

    assert rows_in(place) == 5


@pytest.mark.parametrize("place", ["postgres"], indirect=True)
def test_a_customer_whose_row_is_forgotten_while_its_publisher_waits_for_it_is_new(
    place: str, opened: Open
) -> None:
    counts = opened(place)
    assert [check(counts, "back again"), check(counts, "back again")] == [0, -1]
    found: list[int] = []
    with psycopg.connect(place) as other, psycopg.connect(place, autocommit=True) as looking:
        other.execute("SELECT FROM fairturn_counts WHERE customer = 'back again' FOR UPDATE")
        publisher = threading.Thread(target=lambda: found.append(check(counts, "back again")))
        publisher.start()
        wait_until(lambda: waiting_in(looking), "the publisher waits for the row")
        other.execute("DELETE FROM fairturn_counts WHERE customer = 'back again'")
    publisher.join(PATIENCE_S)

    assert [*found, check(counts, "back again")] == [0, -1]


def waiting_in(looking: "psycopg.Connection[Any]") -> int:
    waiting = (
        "SELECT FROM pg_stat_activity "
        "WHERE datname = current_database() AND wait_event_type = 'Lock'"
    )
    return len(looking.execute(waiting).fetchall())


def rows_in(place: str) -> int:
    if place.startswith("postgres"):
        with psycopg.connect(place) as connection:
            return int(connection.execute("SELECT count(*) FROM fairturn_counts").fetchall()[0][0])
    return int(apsw.Connection(place).execute("SELECT count(*) FROM counts").get)


def test_memory_forgets_customers_who_are_long_gone() -> None:
    clock = ManualClock()
    counts = MemoryCounts(rule=Rule(), clock=clock)
    for number in range(CUSTOMERS_MAX):
        counts.begin(f"once {number}")

    clock.advance(1_501)
    counts.begin("again")

    assert len(counts._counts) == 1


def test_the_file_of_a_queue_or_of_another_program_is_left_untouched(
    tmp_path: Path, opened: Open
) -> None:
    Queue(tmp_path / "documents.db").close()
    other = apsw.Connection(str(tmp_path / "other.db"))
    other.execute("CREATE TABLE t (a)")
    other.close()

    for name in ("documents.db", "other.db"):
        before = (tmp_path / name).read_bytes()
        with pytest.raises(StoreRefused, match="use a separate file for the counts"):
            check(opened(tmp_path / name))
        assert (tmp_path / name).read_bytes() == before


def test_a_file_that_others_hold_is_waited_for_at_most_250_ms(tmp_path: Path) -> None:
    counts = open_counts(tmp_path / "counts.db")
    check(counts)
    holder = apsw.Connection(str(tmp_path / "counts.db"))
    holder.execute("BEGIN IMMEDIATE")

    begun = stopwatch()
    with pytest.raises(StoreUnavailable, match="was locked by another writer"):
        check(counts)
    waited = stopwatch() - begun
    holder.execute("ROLLBACK")

    assert waited < BOUND_S + SLACK_S
    assert check(counts) == -1


class Interrupted(ManualClock):
    """A clock that interrupts the publisher once when it is read."""

    interrupts = True

    def now(self) -> int:
        if self.interrupts:
            self.interrupts = False
            raise KeyboardInterrupt
        return super().now()


def test_a_publisher_that_is_interrupted_leaves_the_file_to_others(
    tmp_path: Path, opened: Open
) -> None:
    counts = opened(tmp_path / "counts.db", clock=Interrupted())

    with pytest.raises(KeyboardInterrupt):
        check(counts)

    others = open_counts(tmp_path / "counts.db", clock=ManualClock(), timeout_s=BOUND_S)
    assert [check(others), check(counts)] == [0, -1]
    others.close()


# ── Names ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "place, sentence",
    [
        ("mysql://localhost/d", "mysql:// URLs are not supported for counts; use redis://"),
        ("localhost:6379/0", "use redis://localhost:6379/0, or ./localhost:6379/0 for a file"),
        ("localhost", "use redis://localhost"),
        ("redis://localhost:port", "the URL of the counts is invalid"),
        ("postgresql://localhost:1/d?sslmode", "not a PostgreSQL URL"),
    ],
)
def test_a_place_that_cannot_be_is_refused_with_those_that_can(
    place: str, sentence: str, opened: Open
) -> None:
    with pytest.raises(StoreRefused, match=sentence):
        opened(place)
