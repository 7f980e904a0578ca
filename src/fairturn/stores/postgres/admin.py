"""Administration: cancel, retry, settings, repairs, prune, purge, access keys and heartbeats.

Each write is one statement, most of them a call of a function in `functions/`.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import IntEnum
from typing import Any

from fairturn.access.keys import ACCESS_KEYS_MAX, AccessKey, Role
from fairturn.clock import SERVER_NOW, Uptime, stopwatch
from fairturn.explain.snapshot import WORKERS_MAX, WorkerHeartbeat
from fairturn.model import (
    ENDED,
    KINDS_MAX,
    CustomerSettings,
    KindSettings,
    Settings,
    State,
    weight_in_thousandths,
)
from fairturn.scheduling.flows import BANDS_PER_KIND
from fairturn.stores import crash, ids
from fairturn.stores.admission import refuse_kind_beyond_max, refuse_passed
from fairturn.stores.ids import IdKey
from fairturn.stores.postgres.rows import NO_ORDER, SERVER_BOOT, settings_columns
from fairturn.stores.postgres.session import Session
from fairturn.stores.values import STATES, WAITING, Row

_CANCEL = "SELECT fairturn.cancel(%s::int8, %s::int8[])"
_RETRY = "SELECT fairturn.retry(%s::int8, %s::int8[], %s::int8)"
_ADJUST = """
    SELECT fairturn.adjust(%s::int8, %s::text, %s::int4, %s::int4, %s::bool, %s::int8,
        %s::bool, %s::int4, %s::int4, %s::bool, %s::int8)"""
_CONFIGURE = """
    SELECT fairturn.configure(%s::int8, %s::int8, %s::text, %s::int4, %s::int8, %s::text,
        %s::int8[], %s::int8, %s::bool, %s::bool, %s::int8, %s::int8, %s::text, %s::text, %s::int8,
        %s::int4, %s::int8)"""
_CONFIGURE_KIND = """
    SELECT fairturn.configure_kind(%s::text, %s::int4, %s::bool, %s::int4, %s::int8,
        %s::bool, %s::int4, %s::bool, %s::int4, %s::int8)"""
_CONVERT = "SELECT fairturn.convert_next(%s::int4)"
REPAIR_CUSTOMERS = "SELECT fairturn.repair_customers(%s::int8[], %s::int4)"
_COUNT_TIMEOUT = "SET LOCAL statement_timeout = '5s'"
_WRONG_COUNTERS = """
    SELECT EXISTS (
        SELECT FROM fairturn.audit_queue() a
        WHERE a.kind IN ('queue.waiting', 'queue.delayed'))"""
REPAIR_QUEUE = "SELECT fairturn.repair_queue(%s::int4)"
_NO_DOCUMENT = 0  # numbers begin with 1
_TOO_MANY_KINDS = 2  # an answer of `configure_kind`


def cancel(
    session: Session, documents: Sequence[str], key: IdKey, given_now: int | None
) -> list[State | None]:
    """Cancel documents that have not started and ask running ones to stop; return the states
    afterwards."""
    crash.point("cancel-before-commit")
    ((states,),) = session.fetch(_CANCEL, (given_now, _numbers(documents, key)))
    crash.point("cancel-after-commit")
    return _to_states(states)


def retry(
    session: Session,
    documents: Sequence[str],
    key: IdKey,
    expires_at: int | None,
    given_now: int | None,
) -> list[State | None]:
    """Return dead documents to the queue, and with a new expiry expired ones; return the states
    before."""
    crash.point("retry-before-commit")
    ((states,),) = session.fetch(_RETRY, (given_now, _numbers(documents, key), expires_at))
    crash.point("retry-after-commit")
    if states is None:
        assert expires_at is not None
        refuse_passed(expires_at, expires_at)
    return _to_states(states)


def _numbers(documents: Sequence[str], key: IdKey) -> list[int]:
    return [ids.decode(id, key) or _NO_DOCUMENT for id in documents]


def _to_states(states: Sequence[int | None]) -> list[State | None]:
    return [None if state is None else STATES[state] for state in states]


def adjust(
    session: Session,
    name: str,
    settings: CustomerSettings,
    expected: CustomerSettings | None,
    given_now: int | None,
) -> bool:
    """Change a customer's settings; return False if the present ones are not as expected."""
    old = (None, None, None, None) if expected is None else _customer_columns(expected)
    values = (given_now, name, *_customer_columns(settings), expected is not None, *old)
    crash.point("configure-before-commit")
    ((applied,),) = session.fetch(_ADJUST, values)
    crash.point("configure-after-commit")
    return bool(applied)


def _customer_columns(settings: CustomerSettings) -> Row:
    weight = weight_in_thousandths(settings.weight)
    return weight, settings.limit, settings.paused, settings.bytes_max


def configure_kind(
    session: Session, name: str, settings: KindSettings, expected: KindSettings | None
) -> bool:
    """Change the settings of a kind; return False if the present ones are not as expected."""
    old = (None, None, None, None) if expected is None else _kind_columns(expected)
    values = (name, *_kind_columns(settings), expected is not None, *old)
    crash.point("configure-before-commit")
    ((result,),) = session.fetch(_CONFIGURE_KIND, values)
    crash.point("configure-after-commit")
    if result == _TOO_MANY_KINDS:
        refuse_kind_beyond_max(name, KINDS_MAX)
    return bool(result)


def _kind_columns(settings: KindSettings) -> Row:
    return settings.limit, settings.paused, settings.attempts_max, settings.expires_in_us


class ConfigureResult(IntEnum):
    """The result of one call of `configure`."""

    STALE_VERSION = 0  # the settings in force are not the expected ones
    IN_FORCE = 1
    AGAIN = 2  # more events must be applied before the mode can change: call it again


def configure(
    session: Session,
    settings: Settings,
    expected_version: int | None,
    *,
    given_now: int | None,
    uptime: Uptime | None,
    budget: int,
) -> ConfigureResult:
    """Replace the settings, if those in force have the expected version."""
    at, boot = (uptime.at, uptime.boot) if uptime else (None, SERVER_BOOT)
    values = (given_now, at, boot, budget, expected_version, *settings_columns(settings))
    crash.point("configure-before-commit")
    ((result,),) = session.fetch(_CONFIGURE, values)
    crash.point("configure-after-commit")
    return ConfigureResult(result)


def convert(session: Session, budget: int) -> bool:
    """Convert the flows of the next customers to a new mode; return whether all are converted."""
    ((done,),) = session.fetch(_CONVERT, (budget,))
    return bool(done)


_PROBE = f"""
    INSERT INTO fairturn.probes AS p (probed_at) VALUES ({SERVER_NOW})
    ON CONFLICT (one) DO UPDATE SET probed_at = excluded.probed_at
    RETURNING (SELECT count(*) FROM fairturn.queue)"""


def probe(session: Session) -> None:
    """Write a row and read one."""
    session.fetch(_PROBE)


def repair_customers(session: Session, customers: Sequence[int], budget: int) -> bool:
    """Rebuild the flows and counters of these customers from their documents. Return False if this
    call only applied events; then call it again."""
    ((done,),) = session.fetch(REPAIR_CUSTOMERS, ([*customers], budget))
    return bool(done)


def has_wrong_counters(session: Session) -> bool:
    """Return whether the queue's counters of waiting and delayed documents are wrong, in the
    snapshot of the session. The count of the documents times out after 5 s."""
    session.ask(_COUNT_TIMEOUT)
    ((wrong,),) = session.fetch(_WRONG_COUNTERS)
    return bool(wrong)


def repair_queue(session: Session, budget: int) -> bool:
    """Correct the queue's counters of waiting and delayed documents. The documents are counted
    before the queue is locked."""
    ((done,),) = session.fetch(REPAIR_QUEUE, (budget,))
    return bool(done)


PURGE_BUDGET = 250  # documents per transaction: the server sends the reply before it commits

_PRUNE = """
    SELECT contents, finished
    FROM fairturn.prune(%s::int8, %s::int4, %s::int8[])"""
_PURGE = "SELECT contents, done FROM fairturn.purge(%s::int8, %s::text, %s::int4)"
_REFERENCED = """
    SELECT n FROM unnest(%s::text[]) AS n
    WHERE EXISTS (SELECT 1 FROM fairturn.documents WHERE content_name = n)
        OR EXISTS (SELECT 1 FROM fairturn.results WHERE content_name = n)
        OR EXISTS (SELECT 1 FROM fairturn.attempts WHERE content_name = n)"""
# A submission locks rows of customers before it inserts documents; an outcome locks documents
# before it inserts results and attempts. Both lock modes are held until the transaction ends, even
# a prepared one. Readers take neither.
_WRITERS = """
    SELECT virtualtransaction FROM pg_locks
    WHERE locktype = 'relation' AND mode IN ('RowShareLock', 'RowExclusiveLock')
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
        AND relation IN ('fairturn.customers'::regclass, 'fairturn.documents'::regclass,
            'fairturn.results'::regclass)"""
_POLL_S = 0.01

_LOG = logging.getLogger("fairturn.postgres")


def prune(
    session: Session, settings: Settings, given_now: int | None, documents_max: int
) -> list[str] | None:
    """Prune one batch of a round over all documents, then all customers. Return the contents to
    delete, or None at the end of a round whose last batch found nothing to prune."""
    kept = [settings.kept_us(state) if state in ENDED else None for state in STATES]
    crash.point("prune-before-commit")
    ((contents, finished),) = session.fetch(_PRUNE, (given_now, documents_max, kept))
    crash.point("prune-after-commit")
    return None if finished else contents


def purge(session: Session, name: str, given_now: int | None) -> tuple[list[str], bool]:
    """Delete one batch of a customer's documents. Return the contents to delete, and whether
    nothing is left of the customer."""
    crash.point("prune-before-commit")
    ((contents, done),) = session.fetch(_PURGE, (given_now, name, PURGE_BUDGET))
    crash.point("prune-after-commit")
    return contents, done


def unreferenced(
    reading: Callable[[], AbstractContextManager[Session]],
    content_names: Sequence[str],
    timeout_s: float,
) -> list[str]:
    """Return the contents that no document refers to, now and after every transaction in flight.

    A submission inside a caller's transaction may stay uncommitted for any length of time. Its row
    is invisible here, but its transaction holds locks on the tables until it ends. So the second
    check follows the end of every transaction that held such a lock at the first. No connection and
    no snapshot is held while this waits.
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


_KEY_COLUMNS = "id, role, customer, name, digest, made_at, used_at, ends_at"
_ADD_KEY = f"""
    INSERT INTO fairturn.access_keys ({_KEY_COLUMNS}) VALUES (%s, %s, %s, %s, %s, %s, %s, %s)
    ON CONFLICT (id) DO NOTHING"""
_COUNT_KEYS = "SELECT count(*) FROM fairturn.access_keys"
_KEY = f"SELECT {_KEY_COLUMNS} FROM fairturn.access_keys WHERE id = %s"
_KEYS = f"SELECT {_KEY_COLUMNS} FROM fairturn.access_keys WHERE id > %s ORDER BY id LIMIT %s"
# By access_keys_customer.
_ITS_KEYS = f"""
    SELECT {_KEY_COLUMNS} FROM fairturn.access_keys
    WHERE customer = %s AND id > %s ORDER BY id LIMIT %s"""
_END_KEY = "UPDATE fairturn.access_keys SET ends_at = least(ends_at, %s) WHERE id = %s"
_USE_KEY = "UPDATE fairturn.access_keys SET used_at = greatest(used_at, %s) WHERE id = %s"
_SIGN_ON = """
    SELECT fairturn.sign_on(%s::int8, %s::text, %s::int8, %s::text[], %s::text[], %s::text[],
        %s::text[])"""
_SIGN_OFF = "DELETE FROM fairturn.workers WHERE name = %s"
_WORKERS = "SELECT name, seen_at, slots, kinds FROM fairturn.workers ORDER BY name LIMIT %s"
# The head of each flow, of those in the event log too: by documents_flow. Returned documents: by
# documents_returned.
_SINCE = "greatest(submitted_at, coalesce(due_at, 0))"
_OLDEST = f"""
    SELECT w.level % {BANDS_PER_KIND}, min(w.since) FROM (
        SELECT f.level, d.since FROM (
            SELECT customer, level, claimed_to AS after FROM fairturn.flows
            WHERE folded > 0 AND claimed_to < {NO_ORDER}
            UNION ALL
            SELECT a.customer, a.level, a.head - 1 FROM fairturn.event_log r
                CROSS JOIN LATERAL unnest(r.customers, r.levels, r.heads)
                    AS a(customer, level, head)
            WHERE r.heads IS NOT NULL) f
            CROSS JOIN LATERAL (
                SELECT {_SINCE} AS since FROM fairturn.documents
                WHERE customer = f.customer AND level = f.level AND order_number > f.after
                    AND state = {WAITING} AND NOT returned
                ORDER BY customer, level, order_number LIMIT 1) d
        UNION ALL
        SELECT level, {_SINCE} FROM fairturn.documents WHERE returned AND state = {WAITING}) w
    GROUP BY 1"""


def add_key(session: Session, key: AccessKey) -> None:
    """Store a new key."""
    ((number,),) = session.fetch(_COUNT_KEYS)
    if number >= ACCESS_KEYS_MAX:
        raise ValueError(f"the queue has {number:,} access keys; {ACCESS_KEYS_MAX:,} is the limit")
    crash.point("configure-before-commit")
    session.ask(_ADD_KEY, (key.id, key.role.value, *key[2:]))
    crash.point("configure-after-commit")
    # An earlier attempt on a lost connection may have stored it.
    if find_key(session, key.id) != key:
        raise ValueError(f"the access key {key.id} exists already")


def find_key(session: Session, id: str) -> AccessKey | None:
    rows = session.fetch(_KEY, (id,))
    return _to_key(rows[0]) if rows else None


def page_of_keys(
    session: Session, customer: str | None, after: str | None, size: int
) -> list[AccessKey]:
    """Return one page of keys, by id."""
    if customer is None:
        rows = session.fetch(_KEYS, (after or "", size))
    else:
        rows = session.fetch(_ITS_KEYS, (customer, after or "", size))
    return [_to_key(row) for row in rows]


def end_key(session: Session, id: str, at: int) -> AccessKey | None:
    """Revoke a key at a time, unless it expires earlier."""
    crash.point("configure-before-commit")
    session.ask(_END_KEY, (at, id))
    crash.point("configure-after-commit")
    return find_key(session, id)


def note_use(session: Session, id: str, at: int) -> None:
    session.ask(_USE_KEY, (at, id))


def workers(session: Session) -> list[WorkerHeartbeat]:
    """Return the heartbeats of workers, by name."""
    return [
        WorkerHeartbeat(name, seen_at, slots, None if kinds is None else tuple(kinds))
        for name, seen_at, slots, kinds in session.fetch(_WORKERS, (WORKERS_MAX,))
    ]


def sign_on(
    session: Session,
    worker: str,
    slots: int,
    kinds: Sequence[str] | None,
    *,
    needs: Mapping[str, Sequence[str]],
    given_now: int | None,
) -> None:
    """Record a worker's heartbeat and the services that kinds need, and create new kinds."""
    served = None if kinds is None else sorted(set(kinds))
    pairs = sorted({(kind, service) for kind, services in needs.items() for service in services})
    needed = [[kind for kind, _ in pairs], [service for _, service in pairs]]
    ((refused,),) = session.fetch(_SIGN_ON, (given_now, worker, slots, served, [*needs], *needed))
    if refused is not None:
        refuse_kind_beyond_max(refused, KINDS_MAX)


def sign_off(session: Session, worker: str) -> None:
    session.ask(_SIGN_OFF, (worker,))


def oldest_waiting(session: Session) -> Mapping[int, int]:
    """Return, by level, since when the head that has waited longest has been waiting."""
    return dict(session.fetch(_OLDEST))


def _to_key(row: tuple[Any, ...]) -> AccessKey:
    id, role, customer, name, digest, *timestamps = row
    return AccessKey(id, Role(role), customer, name, bytes(digest), *timestamps)
