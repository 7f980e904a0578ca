"""Customers and their flows, read from one snapshot for explanations. Claims read them in SQL."""

from collections.abc import Collection, Iterable, Iterator
from itertools import groupby
from operator import itemgetter

from fairturn.scheduling.flows import Flow, Mode, Standing
from fairturn.stores.postgres.session import Session
from fairturn.stores.values import Row

# By the primary keys.
_CUSTOMERS = """
    SELECT w.customer, c.name, s.weight, s.running_max, s.paused, s.recent_costs,
        f.level, f.place, f.tick, f.folded, f.running, f.head_order, f.head_since, f.held
    FROM unnest(%s::bigint[]) AS w(customer)
        LEFT JOIN fairturn.customers c ON c.number = w.customer
        LEFT JOIN fairturn.standings s ON s.customer = w.customer
        LEFT JOIN fairturn.flows f ON f.customer = w.customer
    ORDER BY w.customer"""
_FLOW = slice(6, None)
_BY_CUSTOMER = itemgetter(0)


class SnapshotShelf:
    """A `Shelf` for an engine that applies events and picks nothing."""

    def __init__(self, session: Session, mode: Mode) -> None:
        self.names: dict[int, str] = {}
        self._session = session
        self._mode = mode
        self._read: dict[int, list[Row]] = {}

    def expect(self, customers: Collection[int]) -> None:
        """Read these customers in one statement."""
        if customers:
            rows = self._session.fetch(_CUSTOMERS, ([*customers],))
            self._read.update((c, list(own)) for c, own in groupby(rows, _BY_CUSTOMER))

    def standing(self, customer: int) -> Standing:
        if customer not in self._read:
            self.expect([customer])
        rows = self._read.pop(customer)
        standing = Standing(customer)
        _, name, weight, limit, paused, costs = rows[0][: _FLOW.start]
        if name is not None:
            self.names[customer] = name
        if weight is not None:
            standing.weight, standing.limit, standing.paused = weight, limit, paused
            standing.recent_costs = tuple(costs)
        for row in rows:
            if row[_FLOW][0] is not None:
                self._add_flow(standing, row[_FLOW])
        return standing

    def _add_flow(self, standing: Standing, row: Row) -> None:
        level, place, tick, waiting, running, head, since, held = row
        flow = standing.flows[level] = Flow(standing.customer, level)
        flow.virtual_time = 0 if self._mode is Mode.LEVELS else place
        flow.tick, flow.waiting, flow.running, flow.head_order = tick, waiting, running, head
        flow.active = waiting > 0 and not held
        standing.running += running
        if since is not None:
            standing.head_order, standing.head_since = head, since

    def flow(self, customer: int, level: int) -> Flow:
        return Flow(customer, level)

    def flows(self, customer: int) -> Iterable[Flow]:
        return ()

    def turns(self) -> Iterator[tuple[int, int, int, int]]:
        return iter(())

    def heads(self) -> Iterator[tuple[int, int, int]]:
        return iter(())

    def order_after(self, flow: Flow, order: int) -> int | None:
        raise NotImplementedError("a snapshot is only explained, never claimed from")

    def cost(self, flow: Flow) -> int | None:
        raise NotImplementedError("a snapshot is only explained, never claimed from")
