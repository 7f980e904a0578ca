"""The base class of the store tests: fixtures for the store and the clock."""

from collections.abc import Sequence
from typing import ClassVar, Protocol

import pytest

from fairturn.clock import Clock, ManualClock
from fairturn.model import Settings
from fairturn.stores.conformance.steps import START, with_kinds
from fairturn.stores.conformance.vectors import OrderCase, PriorityCase
from fairturn.stores.contract import QueueStore as Store


class OpenStore(Protocol):
    """Opens a new, empty store with these settings, clock and key for ids."""

    def __call__(
        self,
        *,
        settings: Settings | None = None,
        clock: Clock | None = None,
        key: int | None = None,
    ) -> Store: ...


class OpenAgain(Protocol):
    """Opens the queue of a store once more, as another process would."""

    def __call__(self, store: Store, *, clock: Clock) -> Store: ...


class StoreSuite:
    """Tests of one part of the contract.

    Subclasses provide the fixture `open_store`, and vectors: without these the tests that need
    them are skipped.
    """

    priority_cases: ClassVar[Sequence[PriorityCase]] = ()
    order_cases: ClassVar[Sequence[OrderCase]] = ()
    # Whether `submit` can join a transaction of the caller.
    takes_connections: ClassVar[bool] = False
    # Whether retry delays are measured by `Clock.uptime`, which steps of the clock do not change.
    delays_by_uptime: ClassVar[bool] = True

    @pytest.fixture
    def open_store(self) -> OpenStore:
        """Override this: return a function that opens a new store, and close it after the test."""
        raise NotImplementedError(f"{type(self).__name__} has no fixture open_store: define one")

    @pytest.fixture
    def clock(self) -> ManualClock:
        return ManualClock(START)

    @pytest.fixture
    def store(self, open_store: OpenStore, clock: ManualClock) -> Store:
        return open_store(clock=clock)

    @pytest.fixture
    def kinds(self, open_store: OpenStore, clock: ManualClock) -> Store:
        """A store with the kinds ocr and text."""
        return with_kinds(open_store(clock=clock))

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        for argument, cases in (
            ("priority_case", self.priority_cases),
            ("order_case", self.order_cases),
        ):
            if argument in metafunc.fixturenames:
                metafunc.parametrize(argument, cases, ids=[case.name for case in cases])
