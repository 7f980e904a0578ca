"""A connection that breaks at any exchange of any operation: the repeated call is harmless.

A proxy cuts the connection before the server receives an exchange, or after the server has executed
it and before the client receives the reply. The caller then repeats its call, as a client does. The
documents, contents, counters and counts must be those of one execution. Two exceptions are part of
the contract: a submission without a key may store the document twice, and the documents of a claim
whose reply was lost stay with that claim until its lease expires.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest

from fairturn.errors import FairturnError, StoreUnavailable
from fairturn.queue import Queue
from fairturn.stores.contract import QueueStore as Store
from tests.attempt import Attempt
from tests.faults import (
    NAMED,
    OPERATIONS,
    Operation,
    World,
    changes,
    lasting_problems,
    portrait,
    scene,
)
from tests.servers.wire import Action, Fault, Moment

_SAMPLE = 8


# Methods that a fault cannot affect: a new method of the contract is here, or among the operations.
READING = {
    *("settings", "find", "read", "customers", "summary", "lanes", "snapshot", "workers"),
    *("attempts", "outages"),
    *("kinds", "oldest_waiting", "access_key", "access_keys", "version", "wait", "close"),
    "single_writer",
    "sync",  # changes nothing on PostgreSQL
}


class Reference(NamedTuple):
    """An execution without a fault: its exchanges, and the resulting state."""

    exchanges: int
    left: dict[str, Any]


@cache
def reference(name: str) -> Reference:
    operation = NAMED[name]
    with TemporaryDirectory() as folder, scene(Path(folder)) as (world, wire, actor):
        operation.prepare(world, actor)
        wire.watch()
        operation.call(world, actor)
        exchanges = len(wire.exchanges)
        operation.settle(world)
        return Reference(exchanges, portrait(world))


def problems_of(operation: Operation, fault: Fault) -> list[str]:
    """Return what a fault during an operation, and the repeated call, have damaged."""
    with TemporaryDirectory() as folder, scene(Path(folder)) as (world, wire, actor):
        operation.prepare(world, actor)
        before = portrait(world)
        wire.watch(fault)
        first = Attempt(lambda: operation.call(world, actor))
        found = list(first.problems(f"{operation.name}, {fault},"))
        exchange = wire.exchanges[fault.exchange - 1 : fault.exchange]
        wire.release()
        if first.error is not None or operation.idempotent:
            again = Attempt(lambda: operation.call(world, actor))
            allowed = () if operation.refusal is None else (operation.refusal,)
            found += again.problems("the repeated call", *allowed)
            if isinstance(again.error, FairturnError):
                found.append(f"the repeated call raised {again.error!r}")
        operation.settle(world)
        if operation.idempotent:
            found += changes(reference(operation.name).left, portrait(world))
        else:
            found += _twice_at_most(operation, before, world)
        found += lasting_problems(world, actor)
    return [f"{operation.name}, {fault} ({' '.join(exchange)[:60]}): {each}" for each in found]


def _twice_at_most(operation: Operation, before: dict[str, Any], world: World) -> Iterator[str]:
    """Allow two complete executions of a claim, or of a submission without a key."""
    once, now = reference(operation.name).left, portrait(world)
    if operation.name == "submit":
        more = len(now["documents"]) - len(before["documents"])
        if more not in (1, 2):
            yield f"two calls stored {more} documents"
        return
    started = once["summary"].started - before["summary"].started
    more = now["summary"].started - before["summary"].started
    if more not in (started, 2 * started):
        yield f"two claims of {started} documents started {more} attempts"
    for count in ("completed", "dead", "cancelled", "retried"):
        wanted, shown = getattr(once["summary"], count), getattr(now["summary"], count)
        if shown != wanted:
            yield f"summary: {count} is {shown}; one execution gives {wanted}"


def faults_of(operation: Operation, moment: Moment) -> list[Fault]:
    return [Fault(number, moment) for number in range(1, reference(operation.name).exchanges + 1)]


@pytest.mark.long
@pytest.mark.parametrize("moment", list(Moment), ids=lambda moment: moment.value)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_a_call_repeated_after_a_lost_connection_is_harmless_at_every_exchange(
    operation: Operation, moment: Moment
) -> None:
    found = [
        problem
        for fault in faults_of(operation, moment)
        for problem in problems_of(operation, fault)
    ]

    assert not found, "\n".join(found)


@pytest.mark.long
@pytest.mark.parametrize("moment", list(Moment), ids=lambda moment: moment.value)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_a_call_repeated_after_an_outage_is_harmless(operation: Operation, moment: Moment) -> None:
    last = faults_of(operation, moment)[-1]

    found = problems_of(operation, last._replace(action=Action.OUTAGE))

    assert not found, "\n".join(found)


@pytest.mark.parametrize("seed", range(2))
def test_a_call_repeated_after_a_lost_connection_is_harmless(seed: int) -> None:
    random = Random(seed)
    sample = [
        (operation, random.choice(faults_of(operation, random.choice(list(Moment)))))
        for operation in random.sample(OPERATIONS, _SAMPLE)
    ]

    found = [problem for case in sample for problem in problems_of(*case)]

    assert not found, "\n".join(found)


def test_a_content_whose_submission_lost_its_reply_can_be_read() -> None:
    operation = NAMED["submit-content"]

    found = [
        problem
        for fault in faults_of(operation, Moment.AFTER)
        for problem in problems_of(operation, fault)
    ]

    assert not found, "\n".join(found)


def test_a_cancelled_document_is_reported_once_at_most_whichever_reply_is_lost() -> None:
    operation = NAMED["claim-cancelled"]
    reports = {}
    for fault in (None, *(fault for moment in Moment for fault in faults_of(operation, moment))):
        with TemporaryDirectory() as folder, scene(Path(folder)) as (world, wire, actor):
            operation.prepare(world, actor)
            wire.watch(fault)
            try:
                claimed = operation.call(world, actor)
            except StoreUnavailable:  # a new connection was lost before the claim
                claimed = operation.call(world, actor)
            assert wire.happened == (fault is not None)
            assert len(claimed.claims) == 2, fault
            again = world.store.claim(0, worker="w", lease_us=1)
            reports[fault] = [d.name for d in (*claimed.cancelled, *again.cancelled)]

    assert reports[None] == ["a-1", "b-later"]
    assert all(reported in (["a-1", "b-later"], []) for reported in reports.values()), reports


def test_every_change_of_the_contract_is_among_the_operations() -> None:
    with TemporaryDirectory() as folder, scene(Path(folder)) as (world, _, actor):
        called: set[str] = set()
        spied = Queue(_Spy(actor.store, called), contents=actor.contents, clock=world.clock)
        for operation in OPERATIONS:
            operation.prepare(world, spied)
            try:
                operation.call(world, spied)
            except FairturnError:
                continue

    contract = {name for name in dir(Store) if not name.startswith("_")}
    assert contract - READING <= called


class _Spy:
    """A store that records which of its methods are called."""

    def __init__(self, store: Any, called: set[str]) -> None:
        self._store = store
        self._called = called

    def __getattr__(self, name: str) -> Any:
        self._called.add(name)
        return getattr(self._store, name)
