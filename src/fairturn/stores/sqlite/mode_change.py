"""Another mode: the waiting documents go into new flows, in their order, with clocks at 0."""

import apsw

from fairturn.clock import Uptime
from fairturn.model import Settings
from fairturn.scheduling.flows import Arrived, Resumed
from fairturn.stores.sqlite.claim import Claiming
from fairturn.stores.sqlite.counters import Tally
from fairturn.stores.sqlite.rows import QueueRow, fetch
from fairturn.stores.values import DELAYED, RUNNING, WAITING

_HEADS = "SELECT customer, head_since FROM flows WHERE head_since IS NOT NULL"
_RELEVEL = f"""
    UPDATE documents SET level = CASE ? WHEN 'equal' THEN 1 ELSE priority END,
        charged_cost = NULL, charged_weight = NULL, charge = NULL,
        returned = (state = {WAITING})
    WHERE state IN ({DELAYED}, {WAITING}, {RUNNING})"""
_CLEAR = "DELETE FROM flows; UPDATE levels SET clock = 0, weight = 0"
_RUNNING = f"""
    SELECT d.customer, d.level, count(*) FROM leases l, json_each(l.documents) j
        JOIN documents d ON d.number = j.value
    WHERE d.state = {RUNNING} AND d.fence = l.fence GROUP BY d.customer, d.level"""
_WAITING = """
    SELECT customer, level, min(order_number), count(*)
    FROM documents INDEXED BY documents_returned
    WHERE returned = 1 GROUP BY customer, level ORDER BY 3"""


def rebuild(
    connection: apsw.Connection, queue: QueueRow, settings: Settings, now: int, uptime: Uptime
) -> None:
    """Fold in what was recorded under the old mode, then build the flows of the new one.

    All documents that wait now count as returned, so that the new flows need not look for them
    among those that ended long ago; what comes later comes after them."""
    claiming = Claiming()
    tally = Tally()
    claiming.fold(connection, queue, tally, now=now, uptime=uptime)
    claiming.save(connection, queue, tally)
    heads: dict[int, int] = dict(connection.execute(_HEADS))
    connection.execute(_RELEVEL, (settings.mode,))
    connection.execute(_CLEAR)

    queue.settings = settings
    claiming = Claiming()
    tally = Tally()
    turns = claiming.fold(connection, queue, tally, now=now, uptime=uptime)
    for customer, level, n in fetch(connection, _RUNNING):
        turns.apply(Resumed(customer, level, n), now)
    for customer, level, order, n in fetch(connection, _WAITING):
        tally.flows[customer, level] = n
        turns.apply(Arrived(customer, level, order, n), heads.get(customer, now))
    for customer in turns.standings:
        claiming.expect_after(customer, queue.next_number - 1)
    claiming.save(connection, queue, tally)
