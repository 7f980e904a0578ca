"""What the tests of a store have in common: how a store is opened, and on which clock."""

from collections.abc import Sequence
from typing import ClassVar, Protocol

import pytest

from fairturn.clock import Clock, ManualClock
from fairturn.model import Settings
from fairturn.stores.conformance.steps import START
from fairturn.stores.conformance.vectors import OrderCase, PriorityCase
from fairturn.stores.contract import Store


class OpenStore(Protocol):
    """Opens a new, empty store with these settings (or the defaults), clock and key for ids."""

    def __call__(
        self,
        *,
        settings: Settings | None = None,
        clock: Clock | None = None,
        key: int | None = None,
    ) -> Store: ...


class OpenAgain(Protocol):
    """Opens what a store has opened once more, as another process would."""

    def __call__(self, store: Store, *, clock: Clock) -> Store: ...


class StoreSuite:
    """Tests of one part of the contract. `open_store` is what an author provides.

    The vectors are handed in, too: without them the tests that need them are skipped.
    """

    priority_cases: ClassVar[Sequence[PriorityCase]] = ()
    order_cases: ClassVar[Sequence[OrderCase]] = ()
    # Whether `submit` can take part in a transaction of the caller's.
    takes_connections: ClassVar[bool] = False
    # Whether the delay of a retry is measured by `Clock.uptime`, which no step of the clock moves.
    delays_by_uptime: ClassVar[bool] = True

    @pytest.fixture
    def open_store(self) -> OpenStore:
        """Override this: a function that opens a new store, and closes it after the test."""
        raise NotImplementedError(f"{type(self).__name__} must have a fixture open_store")

    @pytest.fixture
    def clock(self) -> ManualClock:
        return ManualClock(START)

    @pytest.fixture
    def store(self, open_store: OpenStore, clock: ManualClock) -> Store:
        return open_store(clock=clock)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        for argument, cases in (
            ("priority_case", self.priority_cases),
            ("order_case", self.order_cases),
        ):
            if argument in metafunc.fixturenames:
                metafunc.parametrize(argument, cases, ids=[case.name for case in cases])
