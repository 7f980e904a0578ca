"""What decides who is next, as the simulator sees it; and the real order of service behind it."""

from typing import NamedTuple, Protocol

from fairturn.model import level_of
from fairturn.scheduling.flows import (
    PATIENCE_US,
    Arrived,
    Backlog,
    Changed,
    Costs,
    Ended,
    Finished,
    Left,
    Mode,
    Pick,
    Returned,
)
from fairturn.scheduling.turns import Turns


class Paper(NamedTuple):
    """A document for an order: its number in the trace, whose it is, and what is known of it."""

    number: int
    customer: int
    priority: int
    submitted_at: int
    cost: int  # in microseconds of work; only an order with known costs may look at it


class Order(Protocol):
    """Hears what happens, and picks. The moments that it is told never go back."""

    def change(self, customer: int, weight: int, limit: int | None, at: int) -> None:
        """From now on the customer has this weight and this limit of running documents."""
        ...

    def arrive(self, paper: Paper, at: int) -> None:
        """A document waits: it was submitted, or the delay after a failed attempt is over."""
        ...

    def leave(self, paper: Paper, at: int) -> None:
        """A waiting document was cancelled."""
        ...

    def take_back(self, paper: Paper, at: int) -> None:
        """A running document waits again, because its lease ran out."""
        ...

    def end(self, pick: Pick, real_cost: int | None, at: int) -> None:
        """A picked document runs no longer: finished at this cost, or failed (None)."""
        ...

    def pick(self, now: int) -> Pick | None:
        """Who is next; `Pick.order` is the number of the document. None: nobody may be served."""
        ...


class RealOrder:
    """`turns.py`, which serves documents in every store, on a backlog in memory."""

    def __init__(
        self, *, mode: Mode, costs: Costs = Costs.EQUAL, patience_us: int = PATIENCE_US
    ) -> None:
        self._mode = mode
        self._backlog = Backlog()
        self._known = costs is Costs.KNOWN
        self._learned = costs is Costs.LEARNED
        self._turns = Turns(self._backlog, mode=mode, costs=costs, patience_us=patience_us)
        self.pick = self._turns.pick

    def change(self, customer: int, weight: int, limit: int | None, at: int) -> None:
        self._turns.apply(Changed(customer, weight, limit, paused=False), at)

    def arrive(self, paper: Paper, at: int) -> None:
        level = self._wait(paper)
        self._turns.apply(Arrived(paper.customer, level, paper.number, 1), at)

    def leave(self, paper: Paper, at: int) -> None:
        level = level_of(paper.priority, self._mode)
        following = self._backlog.discard(paper.customer, level, paper.number)
        self._turns.apply(Left(paper.customer, level, paper.number, following), at)

    def take_back(self, paper: Paper, at: int) -> None:
        level = self._wait(paper)
        self._turns.apply(Returned(paper.customer, level, paper.number, 0), at)

    def end(self, pick: Pick, real_cost: int | None, at: int) -> None:
        if self._learned and real_cost is not None:
            finished = Finished(pick.customer, pick.level, pick.cost, pick.weight, real_cost)
            self._turns.apply(finished, at)
        else:
            self._turns.apply(Ended(pick.customer, pick.level, 1), at)

    def _wait(self, paper: Paper) -> int:
        level = level_of(paper.priority, self._mode)
        known = paper.cost if self._known else None
        self._backlog.add(paper.customer, level, paper.number, known)
        return level
