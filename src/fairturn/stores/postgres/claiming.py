"""Claiming: fold in what happened, let `turns.py` decide, write the picks back set-wise.

It is one transaction and, as a rule, two round trips: one that locks the queue and reads all that
will probably be needed, and one that writes and commits. So the lock is held for the time of one.
A large claim reads documents before that, in a round trip without the lock. Who found too little
the last time looks first, and what waits alone is claimed by that (`alone.py`).
"""

from contextlib import suppress
from typing import NamedTuple

import psycopg

from fairturn import crash
from fairturn.interpreter import hurried
from fairturn.model import Claim, Fence
from fairturn.situation import Notes, Seen
from fairturn.stores.postgres.alone import Found, Look, Wanted
from fairturn.stores.postgres.engine import Engine, Folded
from fairturn.stores.postgres.outcomes import Finishing
from fairturn.stores.postgres.rows import QUEUE, QueueRow, to_queue
from fairturn.stores.postgres.session import BEGIN, Session
from fairturn.stores.postgres.sharing import BUSY_US, SHARED_MAX, Wish, serve, wait, want_no_more
from fairturn.stores.postgres.starting import PART, Batch, Lease, Starting, claims_of
from fairturn.stores.values import SettingsCache

_SEEN = """
    INSERT INTO fairturn.workers (name, seen_at, idle) VALUES (%s, %s, %s)
    ON CONFLICT (name) DO UPDATE SET seen_at = excluded.seen_at, idle = excluded.idle"""


class Given(NamedTuple):
    """What it gives, whether anything has changed, and the queue as it was found, unless nobody
    looked at it."""

    claims: list[Claim]
    lost: list[Fence]
    changed: bool
    queue: QueueRow | None = None


class Claiming:
    """The claims of one process."""

    def __init__(self, cache: SettingsCache) -> None:
        self._cache = cache
        self._engine = Engine(cache)
        self._busy = False  # whether the last claim has waited for the lock
        self._dry = False  # whether the last claim found less than it wanted
        self._notes = Notes()

    def claim(
        self, session: Session, wanted: Wanted, finishing: Finishing, known: QueueRow
    ) -> Given:
        """Record the outcomes, and take up to `n` documents."""
        looks, self._dry = self._dry and wanted.n > 0 and not finishing.any, False
        if looks:
            look = self._look(session, wanted, known)
            if look.found is not Found.MORE:
                return Given(look.claims, [], changed=bool(look.claims))
        begun = wanted.n > SHARED_MAX and self._engine.read_ahead(session, wanted)
        with session.together():
            if not begun:
                session.ask(BEGIN)
            finishing.ask(session, wanted.moment)
            told = session.ask(QUEUE) if finishing.needs_a_look() else None
            if told is None:
                asked = self._engine.ask(session, wanted)
        if told is not None:
            ending = finishing.record(
                session, to_queue(told.fetchall()[0], self._cache), wanted.moment
            )
            with session.together():
                ending.write(session)
                asked = self._engine.ask(session, wanted)
        folded = self._engine.fold(session, asked, wanted.uptime)
        finishing.settle(folded.queue)
        self._busy = folded.waited_us > BUSY_US
        claims, changed = self._take(session, wanted, folded, finished=finishing.any)
        return Given(claims, finishing.lost, changed, folded.queue)

    def shares(self, n: int) -> bool:
        """Whether a claim of so many documents is to be shared: others hold the lock, as a rule,
        and there was enough for it the last time."""
        return self._busy and not self._dry and 0 < n <= SHARED_MAX

    def share(self, session: Session, wanted: Wanted, number: int, key: int) -> Given:
        """Take up to `n` documents, or let somebody else take them who has the lock. The number of
        the wish is one that nobody else has, and the key that of the queue."""
        wish = Wish(number, wanted.n, wanted.worker, wanted.lease_us)
        served, self._busy = wait(session, wish)
        if served is not None:
            # What was claimed is written, whether or not the wish can be taken back.
            with suppress(psycopg.OperationalError), session.commit("claim"):
                want_no_more(session, wish)
            at = served.at
            lease = Lease(wanted.worker, served.fence, at, at + wanted.lease_us)
            self._dry = len(served.rows) < wanted.n
            return Given(claims_of(served.rows, served.customers, key, lease), [], changed=True)
        with session.together():
            asked = self._engine.ask(session, wanted)
        folded = self._engine.fold(session, asked, wanted.uptime)
        claims, changed = self._take(session, wanted, folded, wish=wish)
        return Given(claims, [], changed, folded.queue)

    def _take(
        self,
        session: Session,
        wanted: Wanted,
        folded: Folded,
        *,
        finished: bool = False,
        wish: Wish | None = None,
    ) -> tuple[list[Claim], bool]:
        """Pick for this claim, and for those who wait; write it, and commit. What was claimed, and
        whether anything has changed."""
        own = _batch(folded, wanted)
        with hurried:
            self._engine.pick(folded, own, min(wanted.n, PART))
        changed = bool(own.picks or folded.wishes or folded.changed or finished)
        noted = self._notes.due(wanted.worker, folded.now)
        if not changed and not noted and wish is None:
            session.ask("ROLLBACK")  # it was only a look
            self._dry = wanted.n > 0
            return [], False
        starting = Starting(session, own, folded.now)
        with session.commit("claim", meanwhile=self._engine.make_ahead), hurried:
            while PART <= len(own.picks) < wanted.n:
                starting.go_on()
                if not self._engine.pick(folded, own, min(wanted.n - len(own.picks), PART)):
                    break
            if own.picks:
                starting.end()
            shares = []
            for other in folded.wishes:
                shares.append((other, _batch(folded, other)))
                self._engine.pick(folded, shares[-1][1], other.n)
            if shares:
                serve(session, shares, folded.now)
            # Those who are saved may be forgotten.
            names = self._engine.names_of(own.picks)
            others = sum(len(batch.picks) for _, batch in shares)
            self._engine.remember(folded, len(own.picks), others)
            if changed:
                self._engine.save(session, folded)
            if noted:
                idle = wanted.n - len(own.picks)
                session.ask(_SEEN, Seen(wanted.worker, folded.now, idle))
            if wish is not None:
                want_no_more(session, wish)
        self._dry = len(own.picks) < wanted.n
        lease = Lease(wanted.worker, own.fence, folded.now, folded.now + wanted.lease_us)
        return claims_of(starting.rows(), names, folded.queue.key, lease), changed

    def _look(self, session: Session, wanted: Wanted, known: QueueRow) -> Look:
        """See whether there is anything; what waits alone is claimed by that."""
        crash.point("claim-before-commit")
        look = self._engine.look(session, wanted, known, self._notes.noted_at(wanted.worker))
        if look.found is Found.ONE:
            crash.point("claim-after-commit")
        if look.found is not Found.MORE:
            self._notes.due(wanted.worker, look.now)  # then it was noted
            self._dry = True  # nothing is left
        return look

    def forget(self) -> None:
        """Read everything anew next time."""
        self._engine.forget()


def _batch(folded: Folded, wanted: Wanted | Wish) -> Batch:
    """What is to be picked for somebody."""
    until = folded.uptime.at + wanted.lease_us
    return Batch(wanted.worker, folded.state.fence + 1, until, [], [])
