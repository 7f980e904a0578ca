"""Real processes and threads on one database: nothing lost, nothing twice, no busy errors.

A child (`tests/racers.py`) reads lines from its parent and answers with lines. No process sleeps:
each waits for a line, for the end of a process, or for a lock.
"""

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import apsw
import psycopg
import pytest

from fairturn.clock import ManualClock
from fairturn.errors import KeyReused, NotFound, QueueFull
from fairturn.model import (
    LEASE_US_MIN,
    Completed,
    Failed,
    Fence,
    NewDocument,
    Outcome,
    Receipt,
    Settings,
    State,
)
from fairturn.priority import Rule
from fairturn.stores.conformance import snapshot
from fairturn.stores.conformance.steps import assert_numbers_are_exact, find_all
from fairturn.stores.postgres import PostgresStore
from fairturn.stores.sqlite import SqliteStore
from tests.racers import LEASE_S, LEASE_US, START, new
from tests.servers.places import AnyStore, Places, opened
from tests.servers.queues import Databases

ROOT = Path(__file__).parent.parent
PATIENCE_S = 60  # how long the parent waits for a child


@pytest.fixture(params=["sqlite", "postgres"])
def places(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Places]:
    with Databases() as databases:
        yield Places(request.param, tmp_path, databases)


class Child:
    """A process, with lines to and from it."""

    def __init__(self, what: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.racers", what],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, value: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(value) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the child ended with {self.process.wait()}"
        return json.loads(line)

    def end(self) -> int:
        return self.process.wait(PATIENCE_S)


@pytest.fixture
def children() -> Iterator[list[Child]]:
    """Start children, and stop all of them at the end."""
    started: list[Child] = []
    yield started
    for child in started:
        if child.process.poll() is None:
            child.process.kill()
        child.process.communicate()


def start(children: list[Child], what: str, n: int = 1) -> list[Child]:
    started = [Child(what) for _ in range(n)]
    children += started
    return started


# ── Processes ────────────────────────────────────────────────────────────────────────────────────


def test_ten_processes_may_open_a_new_queue_at_once(
    places: Places, tmp_path: Path, children: list[Child]
) -> None:
    ten = start(children, "open_files", 10)
    assert [child.answer() for child in ten] == ["ready"] * 10

    for n in range(15 if places.kind == "sqlite" else 5):
        place, gate = places.new(), tmp_path / f"gate{n}"
        with gate.open("w") as shut:
            fcntl.flock(shut, fcntl.LOCK_EX)
            for child in ten:
                child.tell([place, str(gate)])
            assert [child.answer() for child in ten] == ["at the gate"] * 10
        answers = [child.answer() for child in ten]

        store = opened(place)
        assert sorted(count for _, count in answers) == list(range(-9, 1))
        assert {found.id for found in find_all(store)} == {id for id, _ in answers}
        store.close()
    for child in ten:
        child.tell(None)
    assert [child.end() for child in ten] == [0] * 10


def test_processes_that_submit_and_claim_at_once_lose_nothing_and_record_nothing_twice(
    places: Places, children: list[Child]
) -> None:
    place = places.new()
    opened(place, settings=Settings(attempts_max=1_000)).close()
    submitters, claimers = start(children, "submit", 3), start(children, "claim", 3)
    # A batch may exceed the requested number by six.
    for seed, child in enumerate(submitters):
        child.tell([place, seed, 100])
    for seed, child in enumerate(claimers):
        child.tell([place, seed, 300])
    assert [child.answer() for child in children] == ["ready"] * 6

    for child in children:
        child.tell("go")
    receipts = [Receipt(*each) for child in submitters for each in child.answer()]
    attempts = [child.answer() for child in claimers]

    assert [child.end() for child in children] == [0] * 6
    store = opened(place)
    documents = {found.id: found for found in find_all(store)}
    assert len(receipts) == len(documents)
    assert {receipt.id for receipt in receipts} == set(documents)
    assert_counts_are_those_of_a_sequence(receipts)
    assert_each_attempt_had_its_document_alone(
        [Fence(*fence) for claimed, _ in attempts for fence in claimed],
        [(kind, Fence(*fence)) for _, ended in attempts for kind, fence in ended],
        {id for id, found in documents.items() if found.state is State.COMPLETED},
    )
    assert_numbers_are_exact(store)
    store.close()
    if places.kind == "sqlite":
        connection = apsw.Connection(place)
        assert connection.pragma("integrity_check") == "ok"
        connection.close()


def assert_counts_are_those_of_a_sequence(receipts: Sequence[Receipt]) -> None:
    """Assert that the counts are those of one submission after the other."""
    rule = Rule()
    for name in "abc":
        own = [receipt for receipt in receipts if receipt.customer == name]
        counts = sorted((receipt.count for receipt in own), reverse=True)
        assert counts == [-n for n in range(len(own))]
        assert all(receipt.priority == rule.priority(receipt.count) for receipt in own)


def assert_each_attempt_had_its_document_alone(
    claimed: list[Fence], ended: list[tuple[str, Fence]], completed: set[str]
) -> None:
    """Assert that no two attempts share a fence, and that each attempt but the last ended before
    the next began, so that at no time two attempts held one document."""
    assert len(set(claimed)) == len(claimed)
    assert max(Counter(fence for _, fence in ended).values()) == 1
    endings = {fence: kind for kind, fence in ended}
    fences = defaultdict(list)
    for fence in claimed:
        fences[fence.document].append(fence)
    for id, own in fences.items():
        *earlier, last = sorted(own)
        assert all(endings[fence] in ("Failed", "Released") for fence in earlier), id
        assert (endings.get(last) == "Completed") == (id in completed), id


@pytest.mark.parametrize("held", ["claimed by another", "ended by another", "ended as dead"])
def test_a_process_that_was_frozen_beyond_its_lease_records_nothing(
    places: Places, children: list[Child], held: str
) -> None:
    place = places.new()
    clock = ManualClock(START)
    attempts_max = 1 if held == "ended as dead" else 5
    store = opened(place, settings=Settings(attempts_max=attempts_max), clock=clock)
    store.submit([new()] * 5)
    (child,) = start(children, "freeze")
    child.tell([place, False, LEASE_US])
    fences = child.answer()
    stop(child)

    clock.advance(LEASE_S)
    claims = store.claim(5, worker="another", lease_us=LEASE_US).claims
    if held == "ended by another":
        assert store.finish([Completed(each.fence, '"mine"') for each in claims]) == []
    before = snapshot(store)
    os.kill(child.process.pid, signal.SIGCONT)
    child.tell("go on")
    lost_by_renewing, lost_by_finishing = child.answer()

    assert len(claims) == (0 if held == "ended as dead" else 5)
    assert lost_by_renewing == lost_by_finishing == fences
    assert snapshot(store) == before
    assert child.end() == 0
    store.close()


def test_a_frozen_process_loses_its_lease_on_the_clock_of_the_machine_too(
    places: Places, children: list[Child]
) -> None:
    place = places.new()
    store = opened(place)
    store.submit([new()] * 5)
    (child,) = start(children, "freeze")
    child.tell([place, True, LEASE_US_MIN])
    fences = child.answer()
    stop(child)

    claims = store.claim(5, worker="another", lease_us=LEASE_US).claims
    while not claims:
        store.wait(store.version(), 0.02)
        claims = store.claim(5, worker="another", lease_us=LEASE_US).claims
    before = snapshot(store)
    os.kill(child.process.pid, signal.SIGCONT)
    child.tell("go on")

    assert child.answer() == [fences, fences]
    assert snapshot(store) == before
    assert store.finish([Completed(each.fence) for each in claims]) == []
    store.close()


def stop(child: Child) -> None:
    """Send SIGSTOP and wait until the process has stopped."""
    os.kill(child.process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, child.process.pid, os.WSTOPPED | os.WNOWAIT)


def test_a_store_is_refused_after_a_fork_and_goes_on_in_the_process_that_opened_it(
    places: Places, children: list[Child]
) -> None:
    (child,) = start(children, "fork")

    child.tell(places.new())
    answers, counts, waiting = child.answer()

    assert len(answers) == 8
    assert all("forked" in answer for answer in answers), answers
    assert (counts, waiting) == ([0, -1], 2)
    assert child.end() == 0


# ── Threads ──────────────────────────────────────────────────────────────────────────────────────


class Watched(Sequence[NewDocument]):
    """Documents that report when a store begins to read them."""

    def __init__(self, documents: Sequence[NewDocument]) -> None:
        self._documents = documents
        self.read = threading.Event()

    def __len__(self) -> int:
        self.read.set()
        return len(self._documents)

    def __getitem__(self, index: Any) -> Any:
        self.read.set()
        return self._documents[index]

    def __iter__(self) -> Iterator[NewDocument]:
        self.read.set()
        return iter(self._documents)


class Submitters:
    """Threads whose submissions wait behind another transaction."""

    def __init__(self, store: AnyStore, calls: Sequence[Sequence[NewDocument]]) -> None:
        self.answers: list[list[Receipt] | Exception | None] = [None] * len(calls)
        self._store = store
        with held_up(store):
            threads = self._started(calls)
        for thread in threads:
            thread.join()

    def _started(self, calls: Sequence[Sequence[NewDocument]]) -> list[threading.Thread]:
        watched = [Watched(call) for call in calls]
        threads = [
            threading.Thread(target=self._submit, args=(number, documents))
            for number, documents in enumerate(watched)
        ]
        for thread, documents in zip(threads, watched, strict=True):
            thread.start()
            assert documents.read.wait(PATIENCE_S)
        return threads

    def _submit(self, number: int, documents: Sequence[NewDocument]) -> None:
        try:
            self.answers[number] = self._store.submit(documents)
        except Exception as error:
            self.answers[number] = error


@contextmanager
def held_up(store: AnyStore) -> Iterator[None]:
    """Hold a transaction that blocks all submissions."""
    if isinstance(store, PostgresStore):
        with psycopg.connect(store.url) as blocker:
            blocker.execute("LOCK TABLE fairturn.customers IN ACCESS EXCLUSIVE MODE")
            yield
        return
    connection = apsw.Connection(str(store.path))
    connection.execute("BEGIN IMMEDIATE")
    yield
    connection.execute("COMMIT")
    connection.close()


@pytest.fixture
def store(places: Places) -> Iterator[AnyStore]:
    store = opened(places.new(), clock=ManualClock(START))
    yield store
    store.close()


def test_threads_that_submit_to_a_file_at_once_share_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = 0

    def count() -> bool:
        nonlocal commits
        commits += 1
        return False

    monkeypatch.setattr(apsw, "connection_hooks", [lambda made: made.set_commit_hook(count)])
    watched = SqliteStore(tmp_path / "queue.db", clock=ManualClock(START))
    commits = 0

    submitters = Submitters(watched, [[new("abc"[n % 3])] for n in range(20)])

    watched.close()
    receipts = [answer[0] for answer in submitters.answers if isinstance(answer, list)]
    assert len(receipts) == 20
    assert commits < 10
    assert_counts_are_those_of_a_sequence(receipts)


def test_each_thread_gets_its_own_answer(store: AnyStore) -> None:
    calls = [[new(f"c{n}", key=f"{n}", digest=b"") for _ in range(1 + n % 3)] for n in range(20)]

    submitters = Submitters(store, calls)

    for n, (call, answer) in enumerate(zip(calls, submitters.answers, strict=True)):
        assert isinstance(answer, list), answer
        assert [receipt.customer for receipt in answer] == [f"c{n}"] * len(call)
        assert [receipt.replayed for receipt in answer] == [False] + [True] * (len(call) - 1)
        stored = store.read(answer[0].id)
        assert stored is not None
        assert stored.document.customer == f"c{n}"
    assert len(find_all(store)) == 20


def test_a_refused_submission_does_not_hurt_those_that_share_its_commit(
    store: AnyStore,
) -> None:
    store.configure(Settings(waiting_per_customer_max=3))
    store.submit([new("k", key="k", digest=b"1")])
    good = [[new(f"c{n}")] for n in range(6)]
    bad: list[tuple[list[NewDocument], type[Exception]]] = [
        ([new("full")] * 4, QueueFull),
        ([new("c0"), new("k", key="k", digest=b"2")], KeyReused),
        ([new("c1"), new("new"), new("c2", parent="unknown")], NotFound),
    ]
    calls = [
        call for pair in zip(good, [call for call, _ in bad] * 2, strict=True) for call in pair
    ]

    submitters = Submitters(store, calls)

    assert [isinstance(answer, list) for answer in submitters.answers] == [True, False] * 6
    for (_, error), answer in zip(bad * 2, submitters.answers[1::2], strict=True):
        assert type(answer) is error
    accepted = [*(f"c{n}" for n in range(6)), "k"]
    assert sorted(found.customer for found in find_all(store)) == accepted
    assert [found.name for found in store.customers().customers] == accepted
    assert_numbers_are_exact(store)
    assert [receipt.count for receipt in store.submit([new("c0"), new("full")])] == [-1, 0]


def test_threads_that_end_the_documents_of_one_claim_leave_nothing_running(
    store: AnyStore,
) -> None:
    rounds, n = 5, 8
    for _ in range(rounds):
        store.submit([new()] * n)
        fences = [each.fence for each in store.claim(n, worker="w", lease_us=LEASE_US).claims]
        outcomes = [
            Failed(f, "no") if place % 2 else Completed(f) for place, f in enumerate(fences)
        ]
        begin = threading.Barrier(n)

        def end(outcome: Outcome, begin: threading.Barrier = begin) -> list[Fence]:
            begin.wait()
            return store.finish([outcome])

        with ThreadPoolExecutor(n) as threads:
            assert list(threads.map(end, outcomes)) == [[]] * n
        assert store.summary().running == 0

    assert (store.summary().completed, store.summary().dead) == (rounds * n // 2,) * 2


def test_the_same_key_of_many_threads_is_one_document(store: AnyStore) -> None:
    # The first call has a transaction of its own, and the others share the next.
    calls = [[new("b")], *([new(key="k", digest=b"1")] for _ in range(20))]

    submitters = Submitters(store, calls)

    receipts = [answer[0] for answer in submitters.answers[1:] if isinstance(answer, list)]
    assert len(receipts) == 20
    assert len({receipt.id for receipt in receipts}) == 1
    assert sorted(receipt.replayed for receipt in receipts) == [False] + [True] * 19
    assert store.submit([new()])[0].count == -1


def test_a_limit_holds_for_threads_that_submit_at_once(store: AnyStore) -> None:
    store.configure(Settings(waiting_max=7))

    submitters = Submitters(store, [[new(f"c{n % 3}")] for n in range(20)])

    kinds = Counter(type(answer) for answer in submitters.answers)
    assert kinds == {list: 7, QueueFull: 13}
    assert store.summary().waiting == 7
