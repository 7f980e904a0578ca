"""Pairs of operations, the first held at every exchange while the second runs.

Afterwards an independent recount equals flows, counters, `summary` and `customers`, and every
waiting document is claimed exactly once. An operation that waits for a lock of the held one
continues when that is released; a visible lock wait ends the hold at once, any other wait after 2
s.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest

from fairturn.clock import SECOND_US, SystemClock, stopwatch
from fairturn.contents.local import Folder
from fairturn.errors import StoreError
from fairturn.queue import Queue
from fairturn.scheduling.flows import Mode
from fairturn.stores.postgres import PostgresStore
from tests import recount
from tests.attempt import Attempt
from tests.faults import (
    NAMED,
    Known,
    Operation,
    World,
    exchanges_of,
    held,
    lasting_problems,
    new,
    scene,
)
from tests.servers import dumps, postgres
from tests.servers.queues import Databases
from tests.servers.wire import Action, Fault, Moment, Wire
from tests.wait import wait_until

HOLD_S = 2.0
_SEED = 18
_SAMPLE = 10
_BLOCKED = """
    SELECT count(*) FROM pg_stat_activity
    WHERE datname = current_database() AND wait_event_type = 'Lock'"""


def _sweep(known: Known, queue: Queue) -> None:
    """Sweep more than an hour after every content was written."""
    assert isinstance(queue.contents, Folder)
    for path in queue.contents.path.rglob("*"):
        if path.is_file():
            os.utime(path, (0, 0))
    queue.sweep()


SWEEP = Operation("sweep-contents", _sweep, lambda world, actor: actor.contents.put([b"orphan"]))
CHANGES = (
    *(NAMED[name] for name in ("prune", "purge", "retry", "cancel", "configure")),
    *(NAMED[name] for name in ("configure-mode", "configure-mode-back")),
    *(NAMED[name] for name in ("adjust-weight", "adjust-limit", "configure-kind")),
    SWEEP,
)
STEPS = tuple(
    NAMED[name]
    for name in (
        "submit-key",
        "submit-many",
        "submit-child",
        "submit-content",
        "submit-kind",
        "claim",
        "claim-kind",
        "claim-with-outcomes",
        "claim-expired",
        "finish-many",
        "finish-released",
        "finish-step",
        "renew",
    )
)
PAIRS = [
    *(pair for change in CHANGES for step in STEPS for pair in ((change, step), (step, change))),
    *product(CHANGES, CHANGES),
]


@cache
def holds(operation: Operation) -> list[Fault]:
    """Return the points between two exchanges of an operation, and the one after its last."""
    with TemporaryDirectory() as folder:
        n = len(exchanges_of(operation, Path(folder)))
    between = [Fault(number, Moment.BEFORE, Action.HOLD) for number in range(2, n + 1)]
    return [*between, Fault(n, Moment.AFTER, Action.HOLD)]


def problems_of(first: Operation, second: Operation, fault: Fault) -> list[str]:
    """Return what is wrong after the second operation ran while the first one was held."""
    with (
        TemporaryDirectory() as folder,
        scene(Path(folder)) as (world, wire, actor),
        another_queue(world) as other,
        psycopg.connect(world.url, autocommit=True) as looking,
    ):
        first.prepare(world, actor)
        second.prepare(world, other)
        held_one, _ = held(wire, fault, lambda: first.call(world, actor))
        running = Attempt(lambda: second.call(world, other))
        ended_or_blocked(running, looking)
        wire.release()
        found = [*_errors(first.name, held_one), *_errors(second.name, running)]
        for operation in (first, second):
            operation.settle(world)
        found += lasting_problems(world, actor)
        at = wire.exchanges[fault.exchange - 1 : fault.exchange]
    case = f"{second.name} while {first.name} is held, {fault} ({' '.join(at)[:50]})"
    return [f"{case}: {each}" for each in found]


def ended_or_blocked(running: Attempt, looking: psycopg.Connection[Any]) -> None:
    """Wait until a call has ended or visibly waits for a lock; for HOLD_S at most."""
    until = stopwatch() + HOLD_S
    while not running.ended(0.02) and stopwatch() < until:
        if looking.execute(_BLOCKED).fetchall() != [(0,)]:
            return


def _errors(name: str, attempt: Attempt) -> Iterator[str]:
    yield from attempt.problems(name)
    if type(attempt.error) is StoreError:  # a driver error without a meaning of its own
        yield f"{name} raised {attempt.error!r}"


@contextmanager
def another_queue(world: World) -> Iterator[Queue]:
    """Return the queue of another process, whose connections have no faults."""
    contents = Folder(world.folder, clock=world.clock)
    with Queue(world.another_store(), contents=contents, clock=world.clock) as queue:
        queue.summary()  # opens a connection
        yield queue


@pytest.mark.long
@pytest.mark.parametrize(("first", "second"), PAIRS, ids=lambda operation: operation.name)
def test_two_operations_interleaved_at_any_exchange_leave_a_consistent_queue(
    first: Operation, second: Operation
) -> None:
    faults = holds(first)
    if first.name == "submit-content" and second is SWEEP:
        # `_sweep` makes every content old. A content whose submission has not reached the server
        # yet is protected only by its age: an hour.
        faults = [fault for fault in faults if fault.moment is Moment.AFTER]

    found = [problem for fault in faults for problem in problems_of(first, second, fault)]

    assert not found, "\n".join(found)


@pytest.mark.parametrize("part", range(3))
def test_two_interleaved_operations_leave_a_consistent_queue(part: int) -> None:
    random = Random(_SEED)
    sample = [(*pair, random.choice(holds(pair[0]))) for pair in random.sample(PAIRS, _SAMPLE)]

    found = [problem for case in sample[part::3] for problem in problems_of(*case)]

    assert not found, "\n".join(found)


def test_a_document_that_is_retried_while_it_is_pruned_stops_no_claim() -> None:
    retry, prune = NAMED["retry"], NAMED["prune"]

    found = [problem for fault in holds(retry) for problem in problems_of(retry, prune, fault)]

    assert not found, "\n".join(found)


# ── Dumps ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "operation",
    [
        operation
        if operation.name in ("claim", "purge")
        else pytest.param(operation, marks=pytest.mark.long)
        for operation in (*STEPS, *(change for change in CHANGES if change is not SWEEP))
    ],
    ids=lambda operation: operation.name,
)
def test_a_dump_that_is_taken_during_an_operation_restores_to_a_consistent_queue(
    operation: Operation,
) -> None:
    found = [
        problem for fault in holds(operation) for problem in problems_of_dump(operation, fault)
    ]

    assert not found, "\n".join(found)


def problems_of_dump(operation: Operation, fault: Fault) -> list[str]:
    """Return what is wrong in a queue restored from a dump that was taken while an operation was
    held."""
    with (
        TemporaryDirectory() as folder,
        TemporaryDirectory() as backup,
        scene(Path(folder)) as (world, wire, actor),
    ):
        file, contents = Path(backup) / "dump", Path(backup) / "contents"
        operation.prepare(world, actor)
        held_one, _ = held(wire, fault, lambda: operation.call(world, actor))
        dumps.dump(world.url, file)
        shutil.copytree(world.folder, contents)
        wire.release()
        found = [*_errors(operation.name, held_one)]
        name = f"{urlsplit(world.url).path.lstrip('/')}_restored"
        url = dumps.restore(file, name)
        try:
            with closing(world.another_store(url)) as store:
                world.store.close()
                world.store, world.url, world.folder = store, url, contents
                with another_queue(world) as other:
                    found = [*found, *lasting_problems(world, other)]
        finally:
            postgres.of_this_run().drop(name)
    return [f"a dump while {operation.name} is held, {fault}: {each}" for each in found]


# ── Lost updates ─────────────────────────────────────────────────────────────────────────────────

WEIGHT = Operation("set-weight", lambda known, queue: queue.set_customer("a", weight=3))
PAUSE = Operation("set-paused", lambda known, queue: queue.set_customer("a", paused=True))
ATTEMPTS = Operation("set-attempts", lambda known, queue: queue.configure(attempts_max=7))
WAITING = Operation("set-waiting", lambda known, queue: queue.configure(waiting_max=1_000))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (WEIGHT, PAUSE),
        pytest.param(PAUSE, WEIGHT, marks=pytest.mark.long),
        pytest.param(ATTEMPTS, WAITING, marks=pytest.mark.long),
    ],
    ids=lambda operation: operation.name,
)
def test_two_changes_of_settings_at_a_time_are_both_in_force(
    first: Operation, second: Operation
) -> None:
    found = []
    for fault in holds(first):
        with (
            TemporaryDirectory() as folder,
            scene(Path(folder)) as (world, wire, actor),
            another_queue(world) as other,
            psycopg.connect(world.url, autocommit=True) as looking,
        ):
            held_one, _ = held(wire, fault, lambda: first.call(world, actor))
            running = Attempt(lambda: second.call(world, other))
            ended_or_blocked(running, looking)
            wire.release()
            assert held_one.ended()
            assert running.ended()
            if held_one.error is None and running.error is None:
                found += [f"{fault}: {each}" for each in _lost_updates(other, first)]

    assert not found, "\n".join(found)


def _lost_updates(queue: Queue, first: Operation) -> Iterator[str]:
    if first in (WEIGHT, PAUSE):
        settings = queue.customer("a").settings
        if (settings.weight, settings.paused) != (3, True):
            yield f"the customer has {settings}"
    else:
        shown = queue.settings
        if (shown.attempts_max, shown.waiting_max) != (7, 1_000):
            yield f"attempts_max is {shown.attempts_max}, waiting_max is {shown.waiting_max}"


# ── Time that passes meanwhile ───────────────────────────────────────────────────────────────────

DELAY_US = SECOND_US // 4


@pytest.mark.long
@pytest.mark.parametrize("mode", [Mode.EQUAL, Mode.LEVELS])
def test_delays_and_leases_that_end_during_a_change_of_mode_are_counted_once(mode: Mode) -> None:
    found: list[str] = []
    number, is_held = 1, True
    while is_held:
        fault = Fault(number, Moment.AFTER, Action.HOLD)
        with Databases(recycled=True) as databases:
            problems, is_held = problems_of_change_of_mode(databases.new(), mode, fault)
        found += [f"{fault}: {problem}" for problem in problems]
        number += 1

    assert not found, "\n".join(found)


def problems_of_change_of_mode(url: str, mode: Mode, fault: Fault) -> tuple[list[str], bool]:
    """Return what is counted wrong if a delay and a lease end, on the server's clock, while it is
    held."""
    name = url.rpartition("/")[2].partition("?")[0]
    with Wire(postgres.of_this_run().url(name, tcp=True)) as wire:
        actor, store = PostgresStore(wire.url), PostgresStore(url)
        with closing(actor), closing(store):
            store.submit([new("a-run"), new("b-1")])
            actor.summary()
            settings = replace(store.settings(), mode=mode)
            due_at = SystemClock().now() + DELAY_US
            store.submit([new("a-1"), new("c-later", due_at=due_at)])
            store.claim(1, worker="w", lease_us=DELAY_US)
            changed, is_held = held(wire, fault, lambda: actor.configure(settings))
            # Until both have ended on the server's clock, which is this machine's.
            wait_until(lambda: SystemClock().now() > due_at + DELAY_US, "the delay has ended")
            wire.release()
            problems = list(changed.problems("configure"))
            return problems + recount.differences(store, url), is_held
