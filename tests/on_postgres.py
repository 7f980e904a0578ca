"""Helpers for tests on PostgreSQL."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import psycopg

from fairturn.model import Completed, Failed, NewDocument, Outcome, Released
from fairturn.stores.postgres import PostgresStore
from tests.wait import wait_until

BUSY_US = 1_000

PATIENCE_S = 30.0
# How long a process must be waiting. Waits for an `object` do not count: NOTIFY takes such a lock
# across databases.
_WAITING = f"""
    SELECT pid FROM pg_stat_activity
    WHERE datname = current_database() AND wait_event_type = 'Lock' AND wait_event <> 'object'
        AND clock_timestamp() - query_start > interval '{BUSY_US + 1_000} microseconds'"""


def new(customer: str = "acme", **fields: Any) -> NewDocument:
    return NewDocument(customer, "1", **fields)


def ended_somehow(fence: Any, random: Random) -> Outcome:
    completed: Outcome = Completed(fence)
    outcomes: list[Outcome] = [completed, completed, Failed(fence, "x", 0), Released(fence)]
    return random.choice(outcomes)


def terminate_others(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )


@contextmanager
def claims_held_up(url: str) -> Iterator[psycopg.Connection[Any]]:
    """Hold the claim lock; yield a connection for observation."""
    with psycopg.connect(url) as holding, psycopg.connect(url, autocommit=True) as looking:
        holding.execute("SELECT 1 FROM fairturn.queue FOR UPDATE")
        yield looking


def wait_until_waiting(looking: psycopg.Connection[Any], n: int = 1) -> list[int]:
    """Return the server processes that wait for a lock in this database, as soon as there are
    `n`."""
    waiting: list[int] = []

    def are_so_many() -> bool:
        waiting[:] = [pid for (pid,) in looking.execute(_WAITING)]
        return len(waiting) == n

    wait_until(are_so_many, f"{n} of this database wait for a lock")
    return waiting


def woken(store: PostgresStore, change: Any) -> bool:
    """Return whether a change wakes a waiter on another store."""
    version = store.version()
    answers: list[int] = []
    thread = threading.Thread(
        target=lambda: answers.append(store.wait(version, PATIENCE_S)), daemon=True
    )
    thread.start()
    change()
    thread.join(PATIENCE_S)
    return bool(answers) and answers[0] != version
