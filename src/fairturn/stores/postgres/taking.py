"""What a claim takes out of the database: what was recorded for it, and what others have moved."""

from collections.abc import Iterable

from fairturn.flows import Changed, Ended, Event, Finished, Returned
from fairturn.stores.postgres.rows import RECORDED_COLUMNS, UNSEEN, UNSEEN_LATE, Told, to_recorded
from fairturn.stores.values import RUNNING, Row

# By the primary key. What the last claim has seen is gone. With it, of the customers that got a
# limit, how many documents run in each level, and what was moved: of the same moment, so that what
# comes after it is told later.
# The events of a change of settings begin so.
_CHANGED = "events LIKE '[[5,%%'"
_NOTHING = "NULL, NULL, NULL, NULL, NULL, NULL, NULL"  # in the place of `RECORDED_COLUMNS`
TAKE_RECORDED = f"""
    WITH taken_early AS (
        DELETE FROM fairturn.recorded WHERE {UNSEEN}
        RETURNING {RECORDED_COLUMNS}),
    taken_late AS (
        DELETE FROM fairturn.recorded WHERE {UNSEEN_LATE}
        RETURNING {RECORDED_COLUMNS}),
    taken AS (SELECT * FROM taken_early UNION ALL SELECT * FROM taken_late),
    running AS (
        SELECT d.customer, d.level, count(*) AS n
        FROM fairturn.leases l JOIN fairturn.documents d ON d.number = ANY (l.documents)
        WHERE EXISTS (SELECT 1 FROM taken WHERE {_CHANGED})
            AND d.state = {RUNNING} AND d.fence = l.fence
            AND d.customer IN (SELECT unnest(customers) FROM taken WHERE {_CHANGED})
        GROUP BY d.customer, d.level),
    moved AS (
        DELETE FROM fairturn.moved
        RETURNING customer, level, waiting, priority, delayed)
    SELECT {RECORDED_COLUMNS}, NULL::bigint, NULL::smallint, NULL::bigint, NULL::smallint,
        NULL::integer
    FROM taken
    UNION ALL
    SELECT {_NOTHING}, customer, level, n, NULL, NULL FROM running
    UNION ALL
    SELECT {_NOTHING}, customer, level, waiting, priority, delayed FROM moved"""


def taken(rows: list[Row]) -> tuple[Told, dict[int, dict[int, int]], list[Row]]:
    """What was recorded; of customers that got a limit, how many documents run; and what others
    have moved."""
    running: dict[int, dict[int, int]] = {}
    events: list[Row] = []
    moved: list[Row] = []
    for row in rows:
        customer, level, n, priority, _ = row[7:]
        if customer is None:
            events.append(row[:7])
        elif priority is None:
            running.setdefault(customer, {})[level] = n
        else:
            moved.append(row[7:])
    told = to_recorded(events)
    for _, happened in told.recorded:
        for event in happened:
            if type(event) is Changed and event.limit is not None:
                running.setdefault(event.customer, {})
    return told, running, moved


def leave_out(running: dict[int, dict[int, int]], ended: Iterable[Event]) -> None:
    """Some of what was counted as running does not run any more."""
    for event in ended:
        if event.customer in running and isinstance(event, Ended | Finished | Returned):
            levels = running[event.customer]
            levels[event.level] -= event.n if isinstance(event, Ended) else 1
