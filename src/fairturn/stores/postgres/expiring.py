"""What time alone changes, as a part of a claim: leases that ran out, and delays that end."""

from itertools import groupby
from operator import itemgetter

from fairturn.clock import Uptime, stopwatch
from fairturn.flows import Arrived, Event
from fairturn.model import State
from fairturn.stores.ending import Attempt, end_of_lease
from fairturn.stores.ends import Ends
from fairturn.stores.postgres.rows import QueueRow, add_ends, columns
from fairturn.stores.postgres.session import Session
from fairturn.stores.values import CODES, RUNNING, WAITING, Row

# By leases_until, and the primary key of documents. A document that somebody is recording the
# outcome of is left to that; whoever holds the queue waits for no document.
_LEASES = f"""
    SELECT l.fence, l.running, d.*
    FROM (
        SELECT fence, running, documents FROM fairturn.leases {{which}} FOR UPDATE SKIP LOCKED) l
        CROSS JOIN LATERAL unnest(l.documents) AS n(number)
        CROSS JOIN LATERAL (
            SELECT lease_until, number, priority, customer, level, order_number, attempts,
                cancel_requested
            FROM fairturn.documents
            WHERE number = n.number AND state = {RUNNING} AND fence = l.fence
            FOR NO KEY UPDATE SKIP LOCKED) d"""
_EXPIRED = _LEASES.format(which="WHERE until <= %s")
_ALL_LEASES = _LEASES.format(which="")
# By documents_delayed, in its order.
_DUE = """
    SELECT number, customer, level, priority, order_number, delayed_until
    FROM fairturn.documents WHERE delayed_until <= %s
    ORDER BY delayed_until, number"""
_ORDERS = """
    SELECT nextval('fairturn.document_numbers') FROM generate_series(1, %s)"""

_EXPIRE = f"""
    UPDATE fairturn.documents SET state = {WAITING}, returned = true, error = %s
    WHERE number = ANY (%s)"""
_EXPIRE_LAST = """
    UPDATE fairturn.documents SET state = %s::smallint, failed = true, ended_at = %s, error = %s
    WHERE number = ANY (%s)"""
_SHRINK_LEASE = """
    UPDATE fairturn.leases SET until = %s, running = %s, documents = %s WHERE fence = %s"""
_DROP_LEASES = "DELETE FROM fairturn.leases WHERE fence = ANY (%s)"
_PROMOTE = f"""
    UPDATE fairturn.documents d SET state = {WAITING}, returned = true, delayed_until = NULL,
        order_number = v.order_number
    FROM unnest(%s::bigint[], %s::bigint[]) AS v(number, order_number)
    WHERE d.number = v.number"""
_FENCE = itemgetter(0)


# When the first lease and the first delay end: for the first round trip of a claim. By leases_until
# and documents_delayed, in their order.
FIRST_LEASE_ENDS = """
    (SELECT until FROM fairturn.leases WHERE until >= %(leases_from)s ORDER BY until LIMIT 1)"""
FIRST_DELAY_ENDS = """
    (SELECT delayed_until FROM fairturn.documents WHERE delayed_until IS NOT NULL
        ORDER BY delayed_until, number LIMIT 1)"""
_LOOK_AT_ALL_S = 10.0  # so late may a lease be found whose end the others do not tell


def has_passed(moment: int | None, now: int) -> bool:
    """Whether an end that was found, if any, lies in the past."""
    return moment is not None and moment <= now


class LeasesSeen:
    """From where on the first end of a lease is to be looked for.

    No lease ended before the first one that was seen, and those that begin after that end after
    that: so the ends of what is long over, which may lie dead in the index, need not be passed
    each time. Only if the server's clock steps back, or a renewal is held up for as long as the
    lease that it gives, a lease may end before: for them all is looked at now and then.
    """

    def __init__(self) -> None:
        self._from = 0
        self._all_at_s = 0.0

    def look_from(self, uptime: Uptime | None) -> int:
        """Where the next look begins. Time that is handed in may be any."""
        if uptime is not None:
            return 0
        if stopwatch() >= self._all_at_s:
            self._all_at_s = stopwatch() + _LOOK_AT_ALL_S
            return 0
        return self._from

    def look_again(self, looked_from: int) -> None:
        """Let the next look begin where the last one did: what that found is not taken back yet."""
        self._from = min(self._from, looked_from)

    def see(self, first: int | None, now: int) -> None:
        """What was found."""
        self._from = now if first is None else min(first, now)


class Expiring:
    """What is read and decided before a claim folds it in, and written before it picks: what waits
    again is to be found among the documents that wait."""

    def __init__(self, queue: QueueRow, now: int, uptime: Uptime) -> None:
        self.expired: list[Event] = []
        self.due: list[tuple[int, Arrived]] = []
        self.began: list[tuple[int, int, int]] = []  # (customer, level, priority) of what waits now
        self._settings = queue.settings
        self._now = now
        self._uptime = uptime
        self._ended: dict[tuple[State, str | None], list[int]] = {}
        self._counted = Ends()
        self._shrunk: list[Row] = []
        self._dropped: list[int] = []
        self._promoted: list[tuple[int, int]] = []

    @property
    def any(self) -> bool:
        """Whether anything is to be written."""
        return bool(self.expired or self.due or self._shrunk or self._dropped)

    def expire(self, session: Session, *, all_of_them: bool) -> None:
        """Take back documents whose leases ran out, oldest first; after a restart of the machine,
        all that run."""
        at = self._uptime.at
        rows = session.fetch(_ALL_LEASES) if all_of_them else session.fetch(_EXPIRED, (at,))
        for row in sorted(self._run_out(rows, at, all_of_them=all_of_them)):
            _, number, priority, *rest = row
            attempt = Attempt(*rest)
            ending = end_of_lease(attempt, self._settings)
            self._counted.attempt(ending)
            self.expired.append(ending.event)
            if ending.state is State.WAITING:
                self.began.append((attempt.customer, attempt.level, priority))
            self._ended.setdefault((ending.state, ending.error), []).append(number)

    def _run_out(self, rows: list[Row], at: int, *, all_of_them: bool) -> list[Row]:
        """The documents whose leases ran out."""
        expired: list[Row] = []
        for fence, documents in groupby(sorted(rows), _FENCE):
            inside = list(documents)
            if len(inside) < inside[0][1]:
                continue  # some are being recorded: the next claim looks again
            left = [] if all_of_them else [row for row in inside if row[2] > at]
            expired += [row[2:] for row in inside if row not in left]
            if not left:
                self._dropped.append(fence)
            else:
                until = min(row[2] for row in left)
                self._shrunk.append((until, len(left), [row[3] for row in left], fence))
        return expired

    def promote(self, session: Session) -> None:
        """Let documents wait whose time has come; the first time they get their order."""
        rows = session.fetch(_DUE, (self._now,))
        new = sum(row[4] is None for row in rows)
        orders = iter(session.fetch(_ORDERS, (new,)) if new else [])
        for number, customer, level, priority, given, due_at in rows:
            order = next(orders)[0] if given is None else given
            self._promoted.append((number, order))
            self.began.append((customer, level, priority))
            self.due.append((due_at, Arrived(customer, level, order, 1)))

    def write(self, session: Session) -> None:
        for (state, error), numbers in self._ended.items():
            if state is State.WAITING:
                session.ask(_EXPIRE, (error, numbers))
            else:
                session.ask(_EXPIRE_LAST, (CODES[state], self._now, error, numbers))
        add_ends(session, self._counted)
        for shrunk in self._shrunk:
            session.ask(_SHRINK_LEASE, shrunk)
        if self._dropped:
            session.ask(_DROP_LEASES, (self._dropped,))
        if self._promoted:
            session.ask(_PROMOTE, columns(self._promoted))
