"""One submit and one claim of each store enter few modules, so that a reader can follow them.

Modules that every part of the package calls, and that neither decide nor read or write anything,
are not counted.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from fairturn.model import NewDocument
from fairturn.stores.contract import QueueStore
from fairturn.stores.memory import MemoryStore
from fairturn.stores.postgres import PostgresStore
from fairturn.stores.sqlite import SqliteStore
from tests.servers.queues import Databases

MODULES_MAX = 8
LEAVES = {
    "fairturn.clock",
    "fairturn.stores.crash",
    "fairturn.stores.ids",
    "fairturn.model",
    "fairturn.validation.text",
}


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def store(
    request: pytest.FixtureRequest, tmp_path: Path, databases: Databases
) -> Iterator[QueueStore]:
    opened: QueueStore
    if request.param == "memory":
        opened = MemoryStore()
    elif request.param == "sqlite":
        opened = SqliteStore(tmp_path / "queue.db")
    else:
        opened = PostgresStore(databases.new())
    yield opened
    opened.close()


def modules_entered(call: Callable[[], object]) -> set[str]:
    """Return the modules of the package in which a call runs a function, in any thread."""
    entered: set[str] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            entered.add(str(frame.f_globals.get("__name__")))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return {name for name in entered if name.split(".")[0] == "fairturn"} - LEAVES


def test_a_submit_enters_few_modules(store: QueueStore) -> None:
    submit(store)  # opens connections

    entered = modules_entered(lambda: submit(store))

    assert len(entered) <= MODULES_MAX, sorted(entered)


def test_a_claim_enters_few_modules(store: QueueStore) -> None:
    submit(store)
    claim(store)
    submit(store)

    entered = modules_entered(lambda: claim(store))

    assert len(entered) <= MODULES_MAX, sorted(entered)


def submit(store: QueueStore) -> None:
    store.submit([NewDocument(customer="acme", body="{}", size_bytes=2)])


def claim(store: QueueStore) -> None:
    assert store.claim(1, worker="worker", lease_us=30_000_000).claims
