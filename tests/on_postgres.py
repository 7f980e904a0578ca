"""What tests of PostgreSQL have in common."""

import threading
from random import Random
from typing import Any

import psycopg

from fairturn.model import Completed, Failed, NewDocument, Outcome, Released
from fairturn.stores.postgres import PostgresStore

PATIENCE_S = 30.0


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
