"""Customers and their flows, read from one snapshot for explanations. Claims use them in SQL."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter

from fairturn.scheduling.flows import (
    DEFAULT_KIND,
    CustomerState,
    Flow,
    HeadEntry,
    Mode,
    TurnEntry,
    kind_of,
)
from fairturn.stores.postgres.session import Session
from fairturn.stores.values import Row

# By the primary keys.
_CUSTOMERS = """
    SELECT w.customer, c.name, s.weight, s.running_max, s.paused, s.recent_costs, s.costs_by_kind,
        f.level, f.place, f.tick, f.folded, f.running, f.head_order, f.head_since, f.held
    FROM unnest(%s::bigint[]) AS w(customer)
        LEFT JOIN fairturn.customers c ON c.number = w.customer
        LEFT JOIN fairturn.customer_states s ON s.customer = w.customer
        LEFT JOIN fairturn.flows f ON f.customer = w.customer
    ORDER BY w.customer"""
_FLOW = slice(7, None)
_BY_CUSTOMER = itemgetter(0)


def to_costs(
    recent_costs: Sequence[int], costs_by_kind: Mapping[str, Sequence[int]]
) -> dict[int, Sequence[int]]:
    """Return the recent costs of a customer by kind, from the columns of `customer_states`."""
    others = {int(kind): costs for kind, costs in costs_by_kind.items()}
    return {DEFAULT_KIND: recent_costs, **others}


class SnapshotFlows:
    """A `FlowSource` for `Turns` that apply events and pick no documents."""

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

    def customer_state(self, customer: int) -> CustomerState:
        if customer not in self._read:
            self.expect([customer])
        rows = self._read.pop(customer)
        state = CustomerState(customer)
        _, name, weight, limit, paused, *costs = rows[0][: _FLOW.start]
        if name is not None:
            self.names[customer] = name
        if weight is not None:
            state.weight, state.limit, state.paused = weight, limit, paused
            for kind, recent_costs in to_costs(*costs).items():
                state.head(kind).recent_costs = tuple(recent_costs)
        for row in rows:
            if row[_FLOW][0] is not None:
                self._add_flow(state, row[_FLOW])
        return state

    def _add_flow(self, state: CustomerState, row: Row) -> None:
        band, place, tick, waiting, running, head, since, held = row
        flow = state.flows[band] = Flow(state.customer, band)
        flow.virtual_time = 0 if self._mode is Mode.LEVELS else place
        flow.tick, flow.waiting, flow.running, flow.head_order = tick, waiting, running, head
        flow.active = waiting > 0 and not held
        state.running += running
        if since is not None:
            known = state.head(kind_of(band))
            known.order, known.since = head, since

    def flow(self, customer: int, band: int) -> Flow:
        return Flow(customer, band)

    def flows(self, customer: int, kind: int | None) -> Iterable[tuple[Flow, int | None]]:
        return ()

    def turns(self, kind: int) -> Iterator[TurnEntry]:
        return iter(())

    def heads(self, kind: int) -> Iterator[HeadEntry]:
        return iter(())

    def order_after(self, flow: Flow, order: int) -> int | None:
        raise NotImplementedError("a snapshot is only explained, never claimed from")

    def cost(self, flow: Flow) -> int | None:
        raise NotImplementedError("a snapshot is only explained, never claimed from")
