"""What a claim asks the database for ahead, in one round trip, and the statements for it."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from fairturn.stores.postgres.piping import Result
from fairturn.stores.postgres.rows import UNSEEN, UNSEEN_LATE, Horizon, newest_flow
from fairturn.stores.postgres.session import Answer, Session
from fairturn.stores.values import Row

AHEAD_MAX = 32  # rows of one flow

# What a flow has waiting from some order on, in its order: by documents_flow what was not claimed
# yet, and by documents_returned. Where it is used, `f` is the flow, and the limit follows.
_WAITING = """
    SELECT d.order_number, d.number, d.priority, d.cost, d.returned FROM (
        (SELECT order_number, number, priority, cost, returned FROM fairturn.documents
        WHERE customer = f.customer AND level = f.level AND order_number > f.after
            AND state = 1 AND NOT returned
        ORDER BY customer, level, order_number LIMIT {limit})
        UNION ALL
        (SELECT order_number, number, priority, cost, returned FROM fairturn.documents
        WHERE returned AND customer = f.customer AND level = f.level
            AND order_number >= f.head_order
        ORDER BY customer, level, order_number LIMIT {limit})) d
    ORDER BY d.order_number LIMIT {limit}"""
ORDER, NUMBER, PRIORITY, COST, RETURNED = range(5)

# By flows_turn, in its order, from some place on.
_PAGE = """
    WITH page AS MATERIALIZED (
        SELECT customer, level, place, tick, head_order, claimed_to FROM fairturn.flows
        WHERE folded > 0 AND NOT held
            AND (level, place, tick) > (%(level)s::smallint, %(place)s, %(tick)s)
        ORDER BY level, place, tick LIMIT %(size)s)"""
_FLOW_COLUMNS = """
    f.level, f.place, f.tick, f.folded, f.running, f.taken, f.claimed_to, f.head_order,
    f.head_since, f.head_bound, f.held"""
_LOAD_COLUMNS = f"""
    SELECT w.customer, c.name, s.weight, s.running_max, s.paused, s.recent_costs, {_FLOW_COLUMNS}"""
FLOW = slice(6, None)  # where the columns of a flow stand in such a row
# By the primary keys.
_LOAD_FROM = """
        LEFT JOIN fairturn.customers c ON c.number = w.customer
        LEFT JOIN fairturn.standings s ON s.customer = w.customer
        LEFT JOIN fairturn.flows f ON f.customer = w.customer
    ORDER BY w.customer"""
PAGE_LOAD = f"{_PAGE} {_LOAD_COLUMNS} FROM (SELECT DISTINCT customer FROM page) w {_LOAD_FROM}"
LOAD = f"{_LOAD_COLUMNS} FROM unnest(%s::bigint[]) AS w(customer) {_LOAD_FROM}"
# Of those of whom something was recorded. By the primary key of `recorded`.
_RECORDED_LOAD = f"""
    {_LOAD_COLUMNS} FROM (
        SELECT unnest(customers) FROM fairturn.recorded WHERE {UNSEEN}
        UNION
        SELECT unnest(customers) FROM fairturn.recorded WHERE {UNSEEN_LATE}) AS w(customer)
    {_LOAD_FROM}"""
# The flows that other claims have changed since some version, as they are now. By the primary keys.
MISSED = f"""
    SELECT w.customer, w.disturbed, {_FLOW_COLUMNS} FROM (
        SELECT u.customer, u.level, bool_or(u.disturbed) AS disturbed
        FROM fairturn.turns t
            CROSS JOIN LATERAL unnest(t.customers, t.levels, t.disturbed)
                AS u(customer, level, disturbed)
        WHERE t.version > %s GROUP BY u.customer, u.level) w
        CROSS JOIN LATERAL ({newest_flow("*", "w")}) f
    ORDER BY w.customer"""
_MISSED_LOAD = f"""
    {_LOAD_COLUMNS} FROM (
        SELECT DISTINCT unnest(t.customers) FROM fairturn.turns t WHERE t.version > %s)
        AS w(customer)
    {_LOAD_FROM}"""
_NEXT_COLUMNS = "SELECT f.customer, f.level, d.* FROM"
# As many for each flow as it takes to have one for each turn, and the one after that.
_SHARE = "(SELECT 1 + (%(size)s - 2 + count(*)) / greatest(count(*), 1) FROM page)"
PAGE_NEXT = f"""
    {_PAGE} SELECT f.customer, f.level, f.place, f.tick, d.* FROM (
        SELECT customer, level, place, tick, head_order,
            greatest(claimed_to, head_order - 1) AS after
        FROM page) f
        LEFT JOIN LATERAL ({_WAITING.format(limit=_SHARE)}) d ON true"""
_DOCUMENT = slice(4, None)  # where the columns of a document stand in such a row
# By the primary key of `recorded`, and by documents_flow. Many submissions may have come for one
# flow: its first documents are read once, from the first of them on.
_RECORDED_NEXT = f"""
    {_NEXT_COLUMNS} (
        SELECT a.customer, a.level, min(a.head) - 1 AS after, sum(a.size) AS size
        FROM (
            SELECT customers, levels, heads, sizes FROM fairturn.recorded
            WHERE {UNSEEN} AND heads IS NOT NULL
            UNION ALL
            SELECT customers, levels, heads, sizes FROM fairturn.recorded
            WHERE {UNSEEN_LATE} AND heads IS NOT NULL) r
            CROSS JOIN LATERAL unnest(r.customers, r.levels, r.heads, r.sizes)
                AS a(customer, level, head, size)
        GROUP BY a.customer, a.level) f
        CROSS JOIN LATERAL (
            SELECT order_number, number, priority, cost, returned FROM fairturn.documents
            WHERE customer = f.customer AND level = f.level AND order_number > f.after
                AND state = 1 AND NOT returned
            ORDER BY customer, level, order_number LIMIT least(f.size, %(size)s)) d"""
NEXT = f"""
    {_NEXT_COLUMNS} unnest(%s::bigint[], %s::smallint[], %s::bigint[], %s::bigint[], %s::bigint[])
        AS f(customer, level, head_order, after, size)
        CROSS JOIN LATERAL ({_WAITING.format(limit="f.size")}) d"""
# By flows_head, in its order.
HEADS = """
    SELECT head_bound, 0::bigint, customer FROM fairturn.flows
    WHERE head_bound IS NOT NULL AND NOT held AND (head_bound, customer) > (%s, %s)
    ORDER BY head_bound, customer LIMIT %s"""


class Wants(Protocol):
    """What a shelf says that it will need."""

    page: int
    wants_arrivals: bool
    wants_newcomers: bool
    front: tuple[int, int, int, int] | None

    def page_values(self) -> dict[str, int] | None:
        """The next page of turns, unless those that were read are enough."""
        ...

    def page_values_later(self) -> dict[str, int] | None:
        """The page that the claim after this one will probably need."""
        ...

    def expect_page(self, page: "Page") -> None:
        """That page comes with the next round trip."""
        ...

    def heads_values(self) -> tuple[int, int, int] | None:
        """The first page of heads, unless one was read."""
        ...

    def wanted(self) -> list[list[Any]]:
        """The flows whose next documents are needed."""
        ...


Ask = Callable[[str, dict[str, int]], Answer]


class Page:
    """A page of turns, with all that their customers need to be loaded, and their documents."""

    def __init__(self, ask: Ask, values: dict[str, int]) -> None:
        self.size = values["size"]
        self.load = ask(PAGE_LOAD, values)
        self.next = ask(PAGE_NEXT, values)

    @property
    def is_there(self) -> bool:
        """Whether the round trip is over that it comes with."""
        return isinstance(self.next, Result) and self.next.is_there


class Asked:
    """What was asked for ahead: the rows are there when the round trip is over."""

    def __init__(
        self,
        shelf: Wants,
        session: Session,
        horizon: Horizon,
        missed: int | None = None,
        *,
        strangers: bool = False,
    ) -> None:
        """`missed`: the version since when others may have changed flows; `strangers`: perhaps of
        customers that are not loaded. Then the first turns are others than here, and their
        documents are read at once: to read them when they are picked is another round trip."""
        page, heads = shelf.page_values(), shelf.heads_values()
        self.page = Page(session.ask, page) if page is not None else None
        self.heads = session.ask(HEADS, heads) if heads is not None else None
        self.load_recorded: Answer | None = None
        self.arrived: Answer | None = None
        if shelf.wants_arrivals:
            values = {**horizon._asdict(), "size": min(shelf.page, AHEAD_MAX)}
            if shelf.wants_newcomers:
                self.load_recorded = session.ask(_RECORDED_LOAD, values)
            self.arrived = session.ask(_RECORDED_NEXT, values)
        wanted = shelf.wanted()
        self.more = session.ask(NEXT, wanted) if wanted else None
        self.missed: Answer | None = None
        self.load_missed: Answer | None = None
        self.front: Answer | None = None
        if missed is not None:
            self.missed = session.ask(MISSED, (missed,))
            if shelf.front is not None:
                level, place, tick, _ = shelf.front
                before = {"level": level, "place": place, "tick": tick - 1, "size": shelf.page}
                self.front = session.ask(PAGE_NEXT, before)
            self.load_missed = session.ask(_MISSED_LOAD, (missed,)) if strangers else None
        later = shelf.page_values_later() if page is None else None
        if later is not None:
            shelf.expect_page(Page(session.ask_later, later))


def grouped(rows: Iterable[Row]) -> dict[tuple[int, int], list[Row]]:
    """Rows of documents by their flows."""
    found: dict[tuple[int, int], list[Row]] = {}
    for row in rows:
        found.setdefault((row[0], row[1]), []).append(row[2:])
    return found


def paged(
    rows: Iterable[Row],
) -> tuple[list[tuple[int, int, int, int]], dict[tuple[int, int], list[Row]]]:
    """Rows of `PAGE_NEXT`: the turns in their order, and the documents of each flow."""
    turns: list[tuple[int, int, int, int]] = []
    found: dict[tuple[int, int], list[Row]] = {}
    for row in rows:
        customer, level, place, tick = row[:4]
        documents = found.get((customer, level))
        if documents is None:
            documents = found[customer, level] = []
            turns.append((level, place, tick, customer))
        if row[4] is not None:
            documents.append(row[_DOCUMENT])
    turns.sort()
    return turns, found
