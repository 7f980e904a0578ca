"""Every store of the package passes the conformance suite."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from fairturn.clock import Clock
from fairturn.model import Settings
from fairturn.stores.conformance import (
    DurableStoreConformance,
    OpenAgain,
    OpenStore,
    StoreConformance,
    read_order_cases,
    read_priority_cases,
)
from fairturn.stores.contract import QueueStore as Store
from fairturn.stores.memory import MemoryStore
from fairturn.stores.postgres import PostgresStore
from fairturn.stores.sqlite import SqliteStore
from tests.servers.queues import Databases

VECTORS = Path(__file__).parent / "vectors"
PRIORITY_CASES = read_priority_cases(VECTORS / "priority.json")
ORDER_CASES = read_order_cases(VECTORS / "order")


class TestMemory(StoreConformance):
    priority_cases = PRIORITY_CASES
    order_cases = ORDER_CASES

    @pytest.fixture
    def open_store(self) -> OpenStore:
        return MemoryStore


class Sqlite(DurableStoreConformance):
    synchronous: str

    @pytest.fixture
    def opened(self) -> Iterator[list[SqliteStore]]:
        stores: list[SqliteStore] = []
        yield stores
        for store in stores:
            store.close()

    @pytest.fixture
    def open_store(self, tmp_path: Path, opened: list[SqliteStore]) -> OpenStore:
        def open_store(
            *, settings: Settings | None = None, clock: Clock | None = None, key: int | None = None
        ) -> Store:
            opened.append(
                SqliteStore(
                    tmp_path / f"queue{len(opened)}.db",
                    settings=settings,
                    clock=clock,
                    key=key,
                    synchronous=self.synchronous,
                )
            )
            return opened[-1]

        return open_store

    @pytest.fixture
    def open_again(self, opened: list[SqliteStore]) -> OpenAgain:
        def open_again(store: Store, *, clock: Clock) -> Store:
            assert isinstance(store, SqliteStore)
            opened.append(SqliteStore(store.path, clock=clock, synchronous=self.synchronous))
            return opened[-1]

        return open_again


class TestSqlite(Sqlite):
    """The default, which delays some fsyncs."""

    priority_cases = PRIORITY_CASES
    order_cases = ORDER_CASES
    synchronous = "FULL"


@pytest.mark.long
class TestSqliteNormal(Sqlite):
    """The same statements without those fsyncs."""

    priority_cases = PRIORITY_CASES[:1]
    order_cases = ORDER_CASES[:1]
    synchronous = "NORMAL"


class TestPostgres(DurableStoreConformance):
    priority_cases = PRIORITY_CASES
    order_cases = ORDER_CASES
    takes_connections = True
    delays_by_uptime = False  # by the server's clock

    @pytest.fixture
    def opened(self) -> Iterator[list[PostgresStore]]:
        stores: list[PostgresStore] = []
        yield stores
        for store in stores:
            store.close()

    @pytest.fixture
    def open_store(self, opened: list[PostgresStore]) -> Iterator[OpenStore]:
        with Databases(recycled=True) as databases:

            def open_store(
                *,
                settings: Settings | None = None,
                clock: Clock | None = None,
                key: int | None = None,
            ) -> Store:
                store = PostgresStore(databases.new(), settings=settings, clock=clock, key=key)
                opened.append(store)
                return store

            yield open_store
            for store in opened:
                store.close()

    @pytest.fixture
    def open_again(self, opened: list[PostgresStore]) -> OpenAgain:
        def open_again(store: Store, *, clock: Clock) -> Store:
            assert isinstance(store, PostgresStore)
            opened.append(PostgresStore(store.url, clock=clock))
            return opened[-1]

        return open_again


def test_no_part_of_the_suite_hides_a_test_of_another_part() -> None:
    names = Counter(
        name
        for part in DurableStoreConformance.__mro__
        for name in vars(part)
        if name.startswith("test_")
    )

    assert [name for name, parts in names.items() if parts > 1] == []
    assert names.total() > 150


def test_the_vectors_are_all_there() -> None:
    assert len(PRIORITY_CASES) == 12
    assert sum(len(case.checks) for case in PRIORITY_CASES) == 983
    assert len(ORDER_CASES) == 12
