"""The locations of durable stores, so that a test can run on each of them."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from fairturn.stores.urls import is_address

# A process that a test starts imports only the store that it opens.
if TYPE_CHECKING:
    from fairturn.stores.postgres import PostgresStore
    from fairturn.stores.sqlite import SqliteStore
    from tests.servers.queues import Databases

AnyStore: TypeAlias = "SqliteStore | PostgresStore"


def opener(place: str) -> Callable[..., AnyStore]:
    """Return the function that opens the store at a URL or a file."""
    if is_address(place):
        from fairturn.stores.postgres import PostgresStore

        return partial(PostgresStore, place)
    from fairturn.stores.sqlite import SqliteStore

    return partial(SqliteStore, place, synchronous="NORMAL")


def opened(place: str, **fields: Any) -> AnyStore:
    """Open the store at a location."""
    return opener(place)(**fields)


class Places:
    """The locations of one kind of store."""

    def __init__(self, kind: str, folder: Path, databases: "Databases") -> None:
        self.kind = kind
        self._folder = folder
        self._databases = databases
        self._made = 0

    def new(self) -> str:
        """Return an unused location."""
        self._made += 1
        if self.kind == "postgres":
            return self._databases.new(empty=True)
        return str(self._folder / f"queue{self._made}.db")
