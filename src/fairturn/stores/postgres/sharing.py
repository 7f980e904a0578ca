"""Claims that wait for each other: the one that has the queue's lock serves the others, too.

A claim holds the lock for the time of a round trip, however many documents it takes. So one that
has found the queue busy leaves word what it wants before it waits. Whoever has the lock then picks
for all who wait, in the order in which they came, each with a fence and a lease of its own; and who
gets the lock and was served already lets it go at once.
"""

from collections.abc import Sequence
from typing import NamedTuple

from fairturn.clock import SERVER_WAITED
from fairturn.stores.postgres.asking import NUMBER
from fairturn.stores.postgres.rows import UNSEEN, columns
from fairturn.stores.postgres.session import BEGIN, COMMIT, Session
from fairturn.stores.postgres.starting import STARTED_COLUMNS, Batch
from fairturn.stores.values import RUNNING, Row

# One that has waited for so long for the lock says what it wants the next time.
BUSY_US = 1_000
# More than this is worth a claim of its own; and so many are served by one.
SHARED_MAX = 50
_SERVED_MAX = 64
NUMBER_BITS = 31  # of a wish
_NOTHING = 0  # in the place of a fence

_WANT = """
    INSERT INTO fairturn.wanted (number, n, worker, lease_us)
    VALUES (%s::integer, %s::integer, %s, %s)"""
_AWAIT = f"SELECT its_fence, {SERVER_WAITED} FROM fairturn.await_turn(%s::integer)"
_WANT_NO_MORE = "DELETE FROM fairturn.wanted WHERE number = %s::integer"
# What is left of those who are gone: nobody waits there, and nothing of theirs is under way.
FORGET_WISHES = """
    DELETE FROM fairturn.wanted
    WHERE xid < pg_snapshot_xmin(pg_current_snapshot())
        AND pg_try_advisory_xact_lock(hashtext('fairturn.wanted'), number)"""
# By the primary keys; nothing if nobody has served it.
_SERVED = f"""
    SELECT {STARTED_COLUMNS}, c.name, d.claimed_at
    FROM fairturn.wanted w
        JOIN fairturn.leases l ON l.fence = w.fence
        CROSS JOIN LATERAL unnest(l.documents) WITH ORDINALITY AS g(number, position)
        JOIN fairturn.documents d ON d.number = g.number
        JOIN fairturn.customers c ON c.number = d.customer
    WHERE w.number = %s::integer AND d.state = {RUNNING} AND d.fence = w.fence
    ORDER BY g.position"""
# As a part of a statement of a claim. By wanted_xid: who does not hold the lock by agreement does
# not wait, or not yet.
WANTED = f"""
    (SELECT json_agg(json_build_array(number, n, worker, lease_us)) FROM (
        SELECT number, n, worker, lease_us FROM fairturn.wanted
        WHERE {UNSEEN} AND fence IS NULL
            AND NOT pg_try_advisory_xact_lock(hashtext('fairturn.wanted'), number)
        ORDER BY xid LIMIT {_SERVED_MAX}) w)"""
# By the primary keys. The claim fails if one of the documents does not wait.
_SERVE = f"""
    WITH wishes AS MATERIALIZED (
        SELECT * FROM unnest(%s::integer[], %s::bigint[], %s::text[], %s::bigint[])
            AS w(number, fence, worker, until)),
    started AS (
        UPDATE fairturn.documents d SET state = {RUNNING}, returned = false,
            attempts = attempts + 1, fence = w.fence, claimed_at = %s, lease_until = w.until,
            worker = w.worker, charged_cost = v.cost, charged_weight = v.weight, charge = v.charge
        FROM unnest(%s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[])
                WITH ORDINALITY AS v(number, fence, cost, weight, charge, position)
            JOIN wishes w ON w.fence = v.fence
        WHERE d.number = v.number AND d.state = 1
        RETURNING d.number, w.fence, w.until, v.position),
    leased AS (
        INSERT INTO fairturn.leases (fence, until, running, documents)
        SELECT fence, until, count(*), array_agg(number ORDER BY position)
        FROM started GROUP BY fence, until),
    told AS (
        UPDATE fairturn.wanted f SET fence = w.fence FROM wishes w WHERE f.number = w.number)
    SELECT 1 / (SELECT CASE WHEN count(*) = %s THEN 1 ELSE 0 END FROM started)"""


class Wish(NamedTuple):
    """What a claim wants that waits."""

    number: int
    n: int
    worker: str
    lease_us: int


class Served(NamedTuple):
    """What somebody else has claimed for a wish."""

    fence: int
    at: int
    customers: list[str]
    rows: list[Row]


class Waited(NamedTuple):
    """How a wait for the lock has ended: served, or with the lock."""

    served: Served | None
    busy: bool


def wait(session: Session, wish: Wish) -> Waited:
    """Leave word, for all to see, and wait for the lock in a transaction that is to be ended."""
    with session.together():
        session.ask(BEGIN)
        session.ask(_WANT, wish)
        session.ask(COMMIT)
        session.ask(BEGIN)
        awaited = session.ask(_AWAIT, (wish.number,))
        served = session.ask(_SERVED, (wish.number,))
    ((fence, waited_us),) = awaited.fetchall()
    busy = waited_us > BUSY_US
    if fence is None:
        return Waited(None, busy)
    rows = served.fetchall()
    at = rows[0][-1] if rows else 0
    return Waited(Served(fence, at, [row[-2] for row in rows], [row[:-2] for row in rows]), busy)


def want_no_more(session: Session, wish: Wish) -> None:
    """The wish is fulfilled."""
    session.ask(_WANT_NO_MORE, (wish.number,))


def serve(session: Session, shares: Sequence[tuple[Wish, Batch]], now: int) -> None:
    """Let the documents run that were picked for others."""
    wishes = [
        (wish.number, batch.fence if batch.picks else _NOTHING, batch.worker, batch.until)
        for wish, batch in shares
    ]
    started = [
        (row[NUMBER], batch.fence, pick.cost, pick.weight, pick.charge)
        for _, batch in shares
        for pick, row in zip(batch.picks, batch.rows, strict=True)
    ]
    values = columns(started) or [[], [], [], [], []]
    session.ask(_SERVE, (*columns(wishes), now, *values, len(started)))
