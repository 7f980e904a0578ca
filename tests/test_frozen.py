"""A process that freezes at any exchange of any operation stops no other process.

A frozen process is a paused virtual machine, a stopped process or a lost network: its connections
stay open, and the server waits for its next message. In the samples the proxy holds the connection;
in the long runs SIGSTOP stops a real process at the same points. While it is frozen, other
processes claim within 3 s, submit for other customers and renew their leases. When it resumes, its
call returns or raises a `FairturnError`, and nothing was recorded twice.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from fairturn.clock import stopwatch
from fairturn.contents.local import NoContents
from fairturn.errors import StoreUnavailable
from fairturn.model import Completed, CustomerSettings, State
from fairturn.queue import Queue
from fairturn.stores.conformance.steps import find_all
from fairturn.stores.postgres import PostgresStore
from fairturn.worker.worker import Worker
from tests.attempt import CALL_S, Attempt
from tests.faults import (
    LEASE_S,
    LEASE_US,
    NAMED,
    Operation,
    World,
    exchanges_of,
    held,
    lasting_problems,
    new,
    scene,
)
from tests.servers import postgres
from tests.servers.wire import Action, Fault, Moment, Wire
from tests.wait import wait_until

ROOT = Path(__file__).parent.parent
CLAIM_S = 3.0  # others claim again within this time
SUBMIT_S = 1.5  # others submit and renew within this time
_SEED = 18
_SAMPLE = 4

FROZEN = (
    "submit-key",
    "submit-many",
    "submit-kind",
    "claim",
    "claim-with-outcomes",
    "claim-expired",
    "claim-kind",
    "renew",
    "finish-completed",
    "finish-many",
    "finish-released",
    "cancel",
    "retry",
    "configure",
    "configure-mode",
    "adjust-limit",
    "configure-kind",
    "sign-on-kinds",
    "prune",
    "purge",
)
# The frozen process records outcomes of these, while another process takes them over.
TAKEN_OVER = ("finish-completed", "finish-many", "finish-released", "claim-with-outcomes", "renew")


@cache
def holds(name: str) -> list[Fault]:
    """Return every point of an operation at which its process can freeze. After an exchange is the
    same as before the next one, so only the last reply is held afterwards."""
    with TemporaryDirectory() as folder:
        n = len(exchanges_of(NAMED[name], Path(folder)))
    before = [Fault(number, Moment.BEFORE, Action.HOLD) for number in range(1, n + 1)]
    return [*before, Fault(n, Moment.AFTER, Action.HOLD)]


def stops(name: str) -> list[Fault]:
    """Return the same points for a process that is stopped while it waits for a reply: it does not
    send its next exchange before it resumes."""
    return [Fault(number, Moment.AFTER, Action.HOLD) for number in range(1, len(holds(name)))]


# ── While it is frozen ───────────────────────────────────────────────────────────────────────────


def problems_of_others(world: World, other: PostgresStore) -> list[str]:
    """Return what other processes cannot do now."""
    begun = stopwatch()
    claims = Attempt(lambda: _claim_one(other, begun + CLAIM_S))
    submits = Attempt(lambda: world.store.submit([new("q-new")]))
    renews = Attempt(lambda: world.store.renew([world.fences["o-run"]], lease_us=LEASE_US))
    finishes = Attempt(lambda: world.store.finish([Completed(world.fences["p-run"])]))
    found = []
    for what, attempt, limit_s in (
        ("submits", submits, SUBMIT_S),
        ("finishes", finishes, CLAIM_S),
        ("renews", renews, SUBMIT_S),
        ("claims", claims, CLAIM_S),
    ):
        if not attempt.ended(max(0.0, begun + limit_s - stopwatch())):
            found.append(f"no other process {what} within {limit_s:g} s")
        elif attempt.error is not None:
            found.append(f"no other process {what}: {attempt.error!r}")
    if claims.ended(0) and claims.error is None and not claims.answer:
        found.append("another process's claim gives no document")
    if renews.ended(0) and renews.error is None and renews.answer.lost:
        found.append("another process has lost its lease")
    return found


def _claim_one(store: PostgresStore, until: float) -> Any:
    """Claim like a worker: retry while the store is unavailable."""
    while True:
        try:
            return store.claim(1, worker="other", lease_us=LEASE_US).claims
        except StoreUnavailable:
            if stopwatch() > until:
                raise


def problems_after(world: World, other: PostgresStore, operation: Operation) -> Iterator[str]:
    operation.settle(world)
    yield from lasting_problems(world, Queue(other, contents=NoContents()))


@contextmanager
def other_store(world: World) -> Iterator[PostgresStore]:
    """Return the store of another process, which has claimed before."""
    store = world.another_store()
    store.claim(0, worker="other", lease_us=LEASE_US)
    try:
        yield store
    finally:
        store.close()


# ── A lost network ───────────────────────────────────────────────────────────────────────────────


def problems_of(operation: Operation, fault: Fault) -> list[str]:
    """Return what a held connection does to others, and what is wrong when it resumes."""
    with (
        TemporaryDirectory() as folder,
        scene(Path(folder)) as (world, wire, actor),
        other_store(world) as other,
    ):
        operation.prepare(world, actor)
        frozen, is_held = held(wire, fault, lambda: operation.call(world, actor))
        found = problems_of_others(world, other) if is_held else []
        wire.release()
        found += frozen.problems("the call that was held")
        found += problems_after(world, other, operation)
        at = wire.exchanges[fault.exchange - 1 : fault.exchange]
    return [f"{operation.name}, {fault} ({' '.join(at)[:60]}): {each}" for each in found]


def test_a_lost_network_stops_no_other_process() -> None:
    random = Random(_SEED)
    sample = [(NAMED[name], random.choice(holds(name))) for name in random.sample(FROZEN, _SAMPLE)]

    found = [problem for case in sample for problem in problems_of(*case)]

    assert not found, "\n".join(found)


def test_a_network_lost_in_a_claim_stops_no_other_process() -> None:
    found = [problem for fault in holds("claim") for problem in problems_of(NAMED["claim"], fault)]

    assert not found, "\n".join(found)


@pytest.mark.long
@pytest.mark.parametrize("name", FROZEN)
def test_a_network_lost_at_any_exchange_stops_no_other_process(name: str) -> None:
    found = [problem for fault in holds(name) for problem in problems_of(NAMED[name], fault)]

    assert not found, "\n".join(found)


@pytest.mark.long
@pytest.mark.parametrize("name", TAKEN_OVER)
def test_an_outcome_held_until_its_lease_expired_is_not_recorded_twice(name: str) -> None:
    found = [problem for fault in holds(name) for problem in problems_of_takeover(name, fault)]

    assert not found, "\n".join(found)


def problems_of_takeover(name: str, fault: Fault) -> list[str]:
    """Return what is recorded twice if another process completes the documents of a frozen one."""
    operation = NAMED[name]
    with (
        TemporaryDirectory() as folder,
        scene(Path(folder)) as (world, wire, actor),
        other_store(world) as other,
    ):
        frozen, _ = held(wire, fault, lambda: operation.call(world, actor))
        world.clock.advance(LEASE_S + 1)
        taker = Attempt(lambda: _complete_all(other))
        taker.ended(CLAIM_S)
        wire.release()
        found = [*frozen.problems("the call that was held"), *taker.problems("the taker")]
        summary = world.store.summary()
        states = [document.state for document in find_all(world.store)]
        for state, counted in (
            (State.COMPLETED, summary.completed),
            (State.DEAD, summary.dead),
            (State.CANCELLED, summary.cancelled),
        ):
            if states.count(state) != counted:
                found.append(f"{counted} documents counted as {state}; {states.count(state)} are")
        found += problems_after(world, other, operation)
    return [f"{name}, {fault}: {each}" for each in found]


def _complete_all(store: PostgresStore) -> None:
    while claims := store.claim(5, worker="taker", lease_us=LEASE_US).claims:
        store.finish([Completed(claim.fence) for claim in claims])


# ── A stopped process ────────────────────────────────────────────────────────────────────────────


class Child:
    """A process that runs operations, controlled by lines."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.frozen_process"],
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
        reading = Attempt(self.process.stdout.readline)
        assert reading.ended(), f"the process has not answered within {CALL_S:g} s"
        assert reading.answer, f"the process ended with {self.process.wait()}"
        return json.loads(reading.answer)

    def stop(self) -> None:
        """Send SIGSTOP and wait until the process has stopped."""
        os.kill(self.process.pid, signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def child() -> Iterator[Child]:
    started = Child()
    yield started
    started.end()


def problems_of_stop(child: Child, operation: Operation, fault: Fault) -> list[str]:
    """Return what a stopped process does to others, and what is wrong when it resumes."""
    with (
        TemporaryDirectory() as folder,
        scene(Path(folder)) as (world, wire, actor),
        other_store(world) as other,
    ):
        operation.prepare(world, actor)
        child.tell([wire.url, folder, operation.name, world.as_json()])
        assert child.answer() == "ready"
        wire.watch(fault)
        child.tell("go")
        # Null, or the name of a FairturnError: another error ends the process.
        answer = Attempt(child.answer, at_end=wire.reached)
        assert wire.reached.wait(CALL_S), f"neither held nor ended; it made {wire.exchanges}"
        found: list[str] = []
        if wire.happened:
            child.stop()
            wire.release()
            found = problems_of_others(world, other)
            child.go_on()
        found += answer.problems("the process that was stopped")
        found += problems_after(world, other, operation)
    return [f"{operation.name}, {fault}, stopped: {each}" for each in found]


def test_a_process_stopped_in_a_claim_stops_no_other_process(child: Child) -> None:
    found = problems_of_stop(child, NAMED["claim"], stops("claim")[-2])

    assert not found, "\n".join(found)


@pytest.mark.long
@pytest.mark.parametrize("name", FROZEN)
def test_a_process_stopped_at_any_exchange_stops_no_other_process(child: Child, name: str) -> None:
    found = [
        problem for fault in stops(name) for problem in problems_of_stop(child, NAMED[name], fault)
    ]

    assert not found, "\n".join(found)


# ── Workers ──────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def workers_beside_a_frozen_process(url: str, fault: Fault) -> Iterator["Workers"]:
    """Run two workers with free slots that keep claiming while a purge is held."""
    name = url.rpartition("/")[2].partition("?")[0]
    with Wire(postgres.of_this_run().url(name, tcp=True)) as wire:
        actor = PostgresStore(wire.url)
        actor.adjust("p", CustomerSettings(paused=True))
        actor.submit([new(label) for label in ("a-1", "b-1", "c-1", "d-1", "p-1")])
        workers = Workers(url)
        wait_until(lambda: len(workers.started) == 4, "four documents are started")
        frozen, _ = held(wire, fault, lambda: actor.purge("p"))
        workers.release = wire.release
        with closing(PostgresStore(url)) as other:
            other.submit([new("e-1")])  # makes both claim now
        try:
            yield workers
        finally:
            wire.release()
            workers.finish.set()
            workers.stop(CALL_S)
            assert frozen.ended()
            actor.close()


class Workers:
    """Two workers in threads of this process. Their handlers run until `finish` is set."""

    def __init__(self, url: str) -> None:
        self.started: list[str] = []
        self.twice, self.finish = threading.Event(), threading.Event()
        self.release: Any = None
        # More slots than documents, so that both keep claiming.
        self._workers = [
            Worker(
                Queue(PostgresStore(url), contents=NoContents()),
                self._handle,
                threads=True,
                concurrency=8,
                lease_s=1,
            )
            for _ in range(2)
        ]
        self._runs = [Attempt(worker.run) for worker in self._workers]

    def _handle(self, document: Any) -> None:
        if document.id in self.started:
            self.twice.set()
        self.started.append(document.id)
        self.finish.wait(CALL_S)

    def stop(self, within_s: float) -> bool:
        """Return whether all of them stop within this time."""
        for worker in self._workers:
            worker.stop(now=True)
        return all(run.ended(within_s) for run in self._runs)


PURGE_HELD = [Fault(number, Moment.AFTER, Action.HOLD) for number in range(1, 4)]


@pytest.mark.long
@pytest.mark.parametrize("fault", PURGE_HELD, ids=str)
def test_a_worker_keeps_its_leases_while_another_process_is_frozen(url: str, fault: Fault) -> None:
    with workers_beside_a_frozen_process(url, fault) as workers:
        workers.twice.wait(4.0)  # four times the lease
        workers.release()
        assert not workers.twice.wait(2.0), "a document was started twice while its worker lived"


@pytest.mark.long
@pytest.mark.parametrize("fault", PURGE_HELD, ids=str)
def test_a_worker_obeys_stop_while_another_process_is_frozen(url: str, fault: Fault) -> None:
    with workers_beside_a_frozen_process(url, fault) as workers:
        workers.finish.set()
        workers.twice.wait(1.0)  # until both wait for the claim
        assert workers.stop(5.0), "a worker did not stop while another process was frozen"
