"""What comes next in each priority, read from one snapshot of the file. Nothing is written."""

from collections.abc import Iterable
from itertools import islice

import apsw

from fairturn import ids
from fairturn.clock import Uptime
from fairturn.model import PAGE_MAX, Document, Filter, Lanes
from fairturn.stores.lanes import by_lane, next_numbers
from fairturn.stores.positions import FlowKey
from fairturn.stores.sqlite.query import find
from fairturn.stores.sqlite.rows import QueueRow, fetch
from fairturn.stores.sqlite.snapshot import SqliteSight
from fairturn.stores.values import WAITING, Row

# By flows_turn, in its order.
_TURNS = """
    SELECT level, place, tick, customer, folded FROM flows INDEXED BY flows_turn
    WHERE folded > 0 AND held = 0 AND level = ? ORDER BY level, place, tick"""
# By documents_flow, from claimed_to on, where everything waits; and by documents_returned.
_FOLLOWING = f"""
    SELECT d.order_number, d.number, d.cost FROM documents d INDEXED BY documents_flow
    WHERE d.customer = ?1 AND d.level = ?2 AND d.state = {WAITING} AND d.returned = 0
        AND d.order_number > coalesce(
            (SELECT f.claimed_to FROM flows f WHERE f.customer = ?1 AND f.level = ?2), ?4)
    ORDER BY d.order_number LIMIT ?3"""
_RETURNED = f"""
    SELECT order_number, number, cost FROM documents INDEXED BY documents_returned
    WHERE returned = 1 AND customer = ? AND level = ? AND state = {WAITING}
    ORDER BY order_number LIMIT ?"""


def lanes(
    connection: apsw.Connection, queue: QueueRow, size: int, now: int, uptime: Uptime
) -> Lanes:
    """The next documents of each priority."""
    sight = SqliteSight(connection, queue, now, uptime)
    known = sight.turns.standings

    def first_lines(level: int, most: int) -> Iterable[Row]:
        rows = connection.execute(_TURNS, (level,))
        return islice((row for row in rows if row[3] not in known), most)

    def next_in(flow: FlowKey, before: int, most: int) -> Iterable[Row]:
        following = fetch(connection, _FOLLOWING, (*flow, most, before))
        return following + fetch(connection, _RETURNED, (*flow, most))

    numbers = next_numbers(sight, size, first_lines, next_in)
    found = [ids.encode(number, queue.key) for number in numbers]
    documents: list[Document] = []
    for start in range(0, len(found), PAGE_MAX):
        wanted = Filter(ids=tuple(found[start : start + PAGE_MAX]))
        documents += find(connection, queue, wanted, None, PAGE_MAX).documents
    return Lanes(queue.claims, by_lane(documents, found, size))
