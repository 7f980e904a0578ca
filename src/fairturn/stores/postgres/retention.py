"""Pruning and purging, in batches; and contents without a document."""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from fairturn import crash
from fairturn.clock import stopwatch
from fairturn.model import Settings, State
from fairturn.stores.postgres.session import Session

PURGE_BUDGET = 250  # documents in one transaction: its reply goes out before it commits

_PRUNE = """
    SELECT contents, finished
    FROM fairturn.prune(%s::int8, %s::int4, %s::int8, %s::int8, %s::int8)"""
_PURGE = "SELECT contents, done FROM fairturn.purge(%s::int8, %s::text, %s::int4)"
_REFERENCED = """
    SELECT n FROM unnest(%s::text[]) AS n
    WHERE EXISTS (SELECT 1 FROM fairturn.documents WHERE content_name = n)
        OR EXISTS (SELECT 1 FROM fairturn.results WHERE content_name = n)"""
# A submission locks rows of customers before it inserts documents; an outcome writes results. Both
# modes last until the end of the transaction, also of a prepared one; a mere reader has neither.
_WRITERS = """
    SELECT virtualtransaction FROM pg_locks
    WHERE locktype = 'relation' AND mode IN ('RowShareLock', 'RowExclusiveLock')
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
        AND relation IN ('fairturn.customers'::regclass, 'fairturn.documents'::regclass,
            'fairturn.results'::regclass)"""
_POLL_S = 0.01

_LOG = logging.getLogger("fairturn.postgres")


def prune(
    session: Session, settings: Settings, moment: int | None, documents_max: int
) -> list[str] | None:
    """One batch of a round over all documents, then all customers; None at the end of a round
    whose last batch found nothing to forget."""
    kept = [settings.kept_us(s) for s in (State.COMPLETED, State.DEAD, State.CANCELLED)]
    crash.point("prune-before-commit")
    ((contents, finished),) = session.fetch(_PRUNE, (moment, documents_max, *kept))
    crash.point("prune-after-commit")
    return None if finished else contents


def purge(session: Session, name: str, moment: int | None) -> tuple[list[str], bool]:
    """One batch of a customer's documents; the contents that can now be deleted, and whether
    nothing is left of the customer."""
    crash.point("prune-before-commit")
    ((contents, done),) = session.fetch(_PURGE, (moment, name, PURGE_BUDGET))
    crash.point("prune-after-commit")
    return contents, done


def unreferenced(
    reading: Callable[[], AbstractContextManager[Session]],
    content_names: Sequence[str],
    timeout_s: float,
) -> list[str]:
    """Return the contents that no document refers to, now and after every transaction in flight.

    A submission inside a caller's transaction may be uncommitted for any length of time. Its row is
    invisible here, but its transaction holds locks on the tables until it ends. So the second look
    comes after all transactions that held such a lock at the first. No connection and no snapshot
    is held while this waits.
    """
    with reading() as session:
        left = _without_document(session, content_names)
        if not left:
            return left
        writers = set(session.fetch(_WRITERS))
    until = stopwatch() + timeout_s
    while writers:
        if stopwatch() >= until:
            _LOG.info(
                "%d contents without a document are kept for now: %d transactions that use the "
                "queue have been open for %g s and may refer to them",
                len(left),
                len(writers),
                timeout_s,
            )
            return []
        time.sleep(_POLL_S)
        with reading() as session:
            writers &= set(session.fetch(_WRITERS))
    with reading() as session:
        return _without_document(session, left)


def _without_document(session: Session, content_names: Sequence[str]) -> list[str]:
    used = {name for (name,) in session.fetch(_REFERENCED, (list(content_names),))}
    return [name for name in content_names if name not in used]
