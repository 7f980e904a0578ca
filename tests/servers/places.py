"""Where durable stores keep their queues, so that a test can run on each of them."""

from pathlib import Path
from typing import Any

from fairturn.config import is_address
from fairturn.stores.postgres import PostgresStore
from fairturn.stores.sqlite import SqliteStore
from tests.servers.queues import Databases

AnyStore = SqliteStore | PostgresStore


def opened(place: str, **fields: Any) -> AnyStore:
    """The store at a place: an address, or a file."""
    if is_address(place):
        return PostgresStore(place, **fields)
    return SqliteStore(place, synchronous="NORMAL", **fields)


class Places:
    """Where one kind of store keeps its queues."""

    def __init__(self, kind: str, folder: Path, databases: Databases) -> None:
        self.kind = kind
        self._folder = folder
        self._databases = databases
        self._made = 0

    def new(self) -> str:
        """A place where nothing is yet."""
        self._made += 1
        if self.kind == "postgres":
            return self._databases.new(empty=True)
        return str(self._folder / f"queue{self._made}.db")
