"""Where durable stores keep their queues, so that a test can run on each of them."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from fairturn.urls import is_address

# A process that a test starts imports only the store that it opens.
if TYPE_CHECKING:
    from fairturn.stores.postgres import PostgresStore
    from fairturn.stores.sqlite import SqliteStore
    from tests.servers.queues import Databases

AnyStore: TypeAlias = "SqliteStore | PostgresStore"


def opener(place: str) -> Callable[..., AnyStore]:
    """What opens the store at a place: an address, or a file."""
    if is_address(place):
        from fairturn.stores.postgres import PostgresStore

        return partial(PostgresStore, place)
    from fairturn.stores.sqlite import SqliteStore

    return partial(SqliteStore, place, synchronous="NORMAL")


def opened(place: str, **fields: Any) -> AnyStore:
    """The store at a place."""
    return opener(place)(**fields)


class Places:
    """Where one kind of store keeps its queues."""

    def __init__(self, kind: str, folder: Path, databases: "Databases") -> None:
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
