"""What comes next in each priority, read from one snapshot. Nothing is written."""

from collections.abc import Iterable

from fairturn import ids
from fairturn.clock import Uptime
from fairturn.model import PAGE_MAX, Document, Filter, Lanes
from fairturn.stores.lanes import by_lane, next_numbers
from fairturn.stores.positions import FlowKey
from fairturn.stores.postgres.query import find
from fairturn.stores.postgres.rows import GENERATION, NO_ORDER, QueueRow
from fairturn.stores.postgres.session import Session
from fairturn.stores.postgres.snapshot import PostgresSight
from fairturn.stores.values import WAITING, Row

# By flows_turn, in its order.
_TURNS = f"""
    SELECT level, place, tick, customer, folded FROM fairturn.flows
    WHERE folded > 0 AND NOT held AND generation = {GENERATION} AND level = %s
        AND NOT customer = ANY (%s::bigint[])
    ORDER BY generation, level, place, tick LIMIT %s"""
# By documents_flow, from claimed_to on, where everything waits; and by documents_returned.
_FOLLOWING = f"""
    SELECT order_number, number, cost FROM fairturn.documents
    WHERE customer = %(customer)s AND level = %(level)s AND state = {WAITING} AND NOT returned
        AND order_number > coalesce((
            SELECT nullif(f.claimed_to, {NO_ORDER}) FROM fairturn.flows f
            WHERE f.customer = %(customer)s AND f.level = %(level)s), %(before)s)
    ORDER BY order_number LIMIT %(most)s"""
_RETURNED = f"""
    SELECT order_number, number, cost FROM fairturn.documents
    WHERE returned AND customer = %s AND level = %s AND state = {WAITING}
    ORDER BY order_number LIMIT %s"""


def lanes(session: Session, queue: QueueRow, size: int, now: int, uptime: Uptime) -> Lanes:
    """The next documents of each priority."""
    sight = PostgresSight(session, queue, now, uptime)
    known = sight.turns.standings

    def first_lines(level: int, most: int) -> Iterable[Row]:
        return session.fetch(_TURNS, (level, list(known), most))

    def next_in(flow: FlowKey, before: int, most: int) -> Iterable[Row]:
        customer, level = flow
        values = {"customer": customer, "level": level, "before": before, "most": most}
        return session.fetch(_FOLLOWING, values) + session.fetch(_RETURNED, (*flow, most))

    numbers = next_numbers(sight, size, first_lines, next_in)
    found = [ids.encode(number, queue.key) for number in numbers]
    documents: list[Document] = []
    for start in range(0, len(found), PAGE_MAX):
        wanted = Filter(ids=tuple(found[start : start + PAGE_MAX]))
        documents += find(session, queue.key, wanted, None, PAGE_MAX).documents
    return Lanes(sight.turns.number, by_lane(documents, found, size))
