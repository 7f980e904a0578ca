"""What comes next in each priority, read from one snapshot. Nothing is written."""

from fairturn import ids
from fairturn.clock import Uptime
from fairturn.flows import WEIGHT_ONE
from fairturn.model import PAGE_MAX, Document, Filter, Lanes
from fairturn.situation import Line, charge_of
from fairturn.stores.lanes import Next, by_lane, levels_of, lines_in_turn, take_turns
from fairturn.stores.lineups import look_ahead
from fairturn.stores.postgres.database import Session
from fairturn.stores.postgres.reading import find
from fairturn.stores.postgres.rows import NO_ORDER, QueueRow
from fairturn.stores.postgres.situating import PostgresSight
from fairturn.stores.values import WAITING
from fairturn.turns import Turns

# By flows_turn, in its order.
_TURNS = """
    SELECT level, place, tick, customer, folded FROM fairturn.flows
    WHERE folded > 0 AND NOT held AND level = %s AND NOT customer = ANY (%s::bigint[])
    ORDER BY level, place, tick LIMIT %s"""
_CHARGED = "SELECT customer, weight, recent_costs FROM fairturn.standings"
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
    look_ahead(sight)
    turns = sight.turns
    settings = queue.settings
    changed = list(lines_in_turn(turns.standings.values(), settings))

    def waiting(line: Line, most: int) -> list[Next]:
        values = {
            "customer": line.customer,
            "level": line.level,
            "before": _before_head(turns, line),
            "most": most,
        }
        rows = session.fetch(_FOLLOWING, values)
        rows += session.fetch(_RETURNED, (line.customer, line.level, most))
        return sorted(map(Next._make, rows))[:most]

    found: list[str] = []
    for level, most in levels_of(settings, size):
        lines = [line for line in changed if line.level == level]
        lines += _stored(session, queue, turns, level, most)
        numbers = take_turns(lines, most, settings, waiting)
        found += (ids.encode(number, queue.key) for number in numbers)
    documents: list[Document] = []
    for start in range(0, len(found), PAGE_MAX):
        wanted = Filter(ids=tuple(found[start : start + PAGE_MAX]))
        documents += find(session, queue.key, wanted, None, PAGE_MAX).documents
    return Lanes(turns.number, by_lane(documents, found, size))


def _before_head(turns: Turns, line: Line) -> int:
    """Nothing waits up to here in a flow that is not in the file yet."""
    standing = turns.standings.get(line.customer)
    head = standing.flows[line.level].head_order if standing is not None else None
    return 0 if head is None else head - 1


def _stored(session: Session, queue: QueueRow, turns: Turns, level: int, most: int) -> list[Line]:
    """The first lines of a level, of customers who are as the last claim left them."""
    settings = queue.settings
    plain = charge_of(settings, WEIGHT_ONE, ())
    charges = {
        customer: charge_of(settings, weight, tuple(costs))
        for customer, weight, costs in session.fetch(_CHARGED)
    }
    rows = session.fetch(_TURNS, (level, list(turns.standings), most))
    return [Line._make((*row, charges.get(row[3], plain), None)) for row in rows]
