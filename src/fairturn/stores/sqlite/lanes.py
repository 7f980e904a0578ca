"""What comes next in each priority, read from one snapshot of the file. Nothing is written."""

import json

import apsw

from fairturn import ids
from fairturn.clock import Uptime
from fairturn.flows import WEIGHT_ONE
from fairturn.model import PAGE_MAX, Document, Filter, Lanes
from fairturn.situation import Line, charge_of
from fairturn.stores.lanes import Next, by_lane, levels_of, lines_in_turn, take_turns
from fairturn.stores.lineups import look_ahead
from fairturn.stores.sqlite.reading import find
from fairturn.stores.sqlite.rows import QueueRow, fetch
from fairturn.stores.sqlite.situating import SqliteSight
from fairturn.stores.values import WAITING
from fairturn.turns import Turns

# By flows_turn, in its order.
_TURNS = """
    SELECT level, place, tick, customer, folded FROM flows INDEXED BY flows_turn
    WHERE folded > 0 AND held = 0 AND level = ? ORDER BY level, place, tick"""
_CHARGED = "SELECT customer, weight, recent_costs FROM standings"
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
    look_ahead(sight)
    turns = sight.turns
    settings = queue.settings
    changed = list(lines_in_turn(turns.standings.values(), settings))

    def waiting(line: Line, most: int) -> list[Next]:
        flow = (line.customer, line.level)
        rows = fetch(connection, _FOLLOWING, (*flow, most, _before_head(turns, line)))
        rows += fetch(connection, _RETURNED, (*flow, most))
        return sorted(map(Next._make, rows))[:most]

    found: list[str] = []
    for level, most in levels_of(settings, size):
        lines = [line for line in changed if line.level == level]
        lines += _stored(connection, queue, turns, level, most)
        numbers = take_turns(lines, most, settings, waiting)
        found += (ids.encode(number, queue.key) for number in numbers)
    documents: list[Document] = []
    for start in range(0, len(found), PAGE_MAX):
        wanted = Filter(ids=tuple(found[start : start + PAGE_MAX]))
        documents += find(connection, queue, wanted, None, PAGE_MAX).documents
    return Lanes(queue.claims, by_lane(documents, found, size))


def _before_head(turns: Turns, line: Line) -> int:
    """Nothing waits up to here in a flow that is not in the file yet."""
    standing = turns.standings.get(line.customer)
    head = standing.flows[line.level].head_order if standing is not None else None
    return 0 if head is None else head - 1


def _stored(
    connection: apsw.Connection, queue: QueueRow, turns: Turns, level: int, most: int
) -> list[Line]:
    """The first lines of a level, of customers who are as the last claim left them."""
    settings = queue.settings
    plain = charge_of(settings, WEIGHT_ONE, ())
    charges = {
        customer: charge_of(settings, weight, tuple(json.loads(costs)))
        for customer, weight, costs in fetch(connection, _CHARGED)
    }
    lines: list[Line] = []
    for row in connection.execute(_TURNS, (level,)):
        if len(lines) == most:
            break
        level, place, tick, customer, folded = row
        if customer not in turns.standings:
            charge = charges.get(customer, plain)
            lines.append(Line(level, place, tick, customer, folded, charge))
    return lines
