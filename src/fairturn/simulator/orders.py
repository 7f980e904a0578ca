"""The protocol of orders of service, and the order of the queue itself."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from fairturn.model import level_of
from fairturn.scheduling.flows import (
    DEFAULT_KIND,
    PATIENCE_US,
    ArrivalEvent,
    Backlog,
    CancelEvent,
    CompletionEvent,
    Costs,
    EndEvent,
    Mode,
    Pick,
    RequeueEvent,
    SettingsEvent,
    band_of,
)
from fairturn.scheduling.turns import Turns


class Paper(NamedTuple):
    """A document of a trace."""

    number: int
    customer: int
    priority: int
    submitted_at: int
    cost: int  # in microseconds of work; read only by an order with known costs
    kind: int = DEFAULT_KIND


class Order(Protocol):
    """Receives events and picks documents. Timestamps never decrease."""

    def change(self, customer: int, weight: int, limit: int | None, at: int) -> None:
        """Set a customer's weight and limit of running documents."""
        ...

    def arrive(self, paper: Paper, at: int) -> None:
        """Add a waiting document: submitted, or due after a failed attempt."""
        ...

    def leave(self, paper: Paper, at: int) -> None:
        """Remove a waiting document that was cancelled."""
        ...

    def take_back(self, paper: Paper, at: int) -> None:
        """Return a running document whose lease expired to the waiting ones."""
        ...

    def end(self, pick: Pick, real_cost: int | None, at: int) -> None:
        """End a picked document: finished at this cost, or failed (None)."""
        ...

    def pick(self, now: int, kinds: Sequence[int]) -> Pick | None:
        """Return the next document of these kinds, with its number as `Pick.order`; None if none is
        eligible."""
        ...


class RealOrder:
    """The order of the queue, `turns.py`, on a backlog in memory. `kinds` are the names of the
    kinds of work, by number."""

    def __init__(
        self,
        *,
        mode: Mode,
        costs: Costs = Costs.EQUAL,
        patience_us: int = PATIENCE_US,
        kinds: Sequence[str] = (),
    ) -> None:
        self._mode = mode
        self._backlog = Backlog()
        self._known = costs is Costs.KNOWN
        self._learned = costs is Costs.LEARNED
        self._turns = Turns(
            self._backlog,
            mode=mode,
            costs=costs,
            patience_us=patience_us,
            kind_names=dict(enumerate(kinds)),
        )
        self.pick = self._turns.pick

    def change(self, customer: int, weight: int, limit: int | None, at: int) -> None:
        self._turns.apply(SettingsEvent(customer, weight, limit, paused=False), at)

    def arrive(self, paper: Paper, at: int) -> None:
        band = self._wait(paper)
        self._turns.apply(ArrivalEvent(paper.customer, band, paper.number, 1), at)

    def leave(self, paper: Paper, at: int) -> None:
        band = self._band(paper)
        following = self._backlog.discard(paper.customer, band, paper.number)
        self._turns.apply(CancelEvent(paper.customer, band, paper.number, following), at)

    def take_back(self, paper: Paper, at: int) -> None:
        band = self._wait(paper)
        self._turns.apply(RequeueEvent(paper.customer, band, paper.number, 0), at)

    def end(self, pick: Pick, real_cost: int | None, at: int) -> None:
        if self._learned and real_cost is not None:
            finished = CompletionEvent(pick.customer, pick.band, pick.cost, pick.weight, real_cost)
            self._turns.apply(finished, at)
        else:
            self._turns.apply(EndEvent(pick.customer, pick.band, 1), at)

    def _wait(self, paper: Paper) -> int:
        band = self._band(paper)
        known = paper.cost if self._known else None
        self._backlog.add(paper.customer, band, paper.number, known)
        return band

    def _band(self, paper: Paper) -> int:
        return band_of(level_of(paper.priority, self._mode), paper.kind)
