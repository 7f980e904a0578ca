"""Access keys in the database, and what an operator sees of the queue at a glance."""

from collections.abc import Mapping
from typing import Any

from fairturn import crash
from fairturn.access.keys import ACCESS_KEYS_MAX, AccessKey, Role
from fairturn.explain.snapshot import WORKERS_MAX, Seen
from fairturn.stores.postgres.rows import MOMENT, NO_ORDER
from fairturn.stores.postgres.session import Session
from fairturn.stores.values import WAITING

_COLUMNS = "id, role, customer, name, digest, made_at, used_at, ends_at"
_ADD = f"""
    INSERT INTO fairturn.access_keys ({_COLUMNS}) VALUES (%s, %s, %s, %s, %s, %s, %s, %s)
    ON CONFLICT (id) DO NOTHING"""
_COUNT = "SELECT count(*) FROM fairturn.access_keys"
_KEY = f"SELECT {_COLUMNS} FROM fairturn.access_keys WHERE id = %s"
_KEYS = f"SELECT {_COLUMNS} FROM fairturn.access_keys WHERE id > %s ORDER BY id LIMIT %s"
# By access_keys_customer.
_ITS_KEYS = f"""
    SELECT {_COLUMNS} FROM fairturn.access_keys
    WHERE customer = %s AND id > %s ORDER BY id LIMIT %s"""
_END = "UPDATE fairturn.access_keys SET ends_at = least(ends_at, %s) WHERE id = %s"
_USE = "UPDATE fairturn.access_keys SET used_at = greatest(used_at, %s) WHERE id = %s"
_SIGN_ON = f"""
    INSERT INTO fairturn.workers (name, seen_at, slots) VALUES (%s, {MOMENT}, %s)
    ON CONFLICT (name) DO UPDATE SET seen_at = excluded.seen_at, slots = excluded.slots"""
_SIGN_OFF = "DELETE FROM fairturn.workers WHERE name = %s"
_WORKERS = "SELECT name, seen_at, slots FROM fairturn.workers ORDER BY name LIMIT %s"
# The first that waits in each flow, as far as claims have folded it in, and of what was recorded
# since: by documents_flow. And what was returned: by documents_returned.
_SINCE = "greatest(submitted_at, coalesce(due_at, 0))"
_OLDEST = f"""
    SELECT w.level, min(w.since) FROM (
        SELECT f.level, d.since FROM (
            SELECT customer, level, claimed_to AS after FROM fairturn.flows
            WHERE folded > 0 AND claimed_to < {NO_ORDER}
            UNION ALL
            SELECT a.customer, a.level, a.head - 1 FROM fairturn.recorded r
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
    GROUP BY w.level"""


def add(session: Session, key: AccessKey) -> None:
    """Keep a new key."""
    ((number,),) = session.fetch(_COUNT)
    if number >= ACCESS_KEYS_MAX:
        raise ValueError(f"there are {ACCESS_KEYS_MAX:,} keys already; no more are allowed")
    crash.point("configure-before-commit")
    session.ask(_ADD, (key.id, key.role.value, *key[2:]))
    crash.point("configure-after-commit")
    # It may be there because this was tried before, on a connection that was lost.
    if find(session, key.id) != key:
        raise ValueError(f"there is a key {key.id} already")


def find(session: Session, id: str) -> AccessKey | None:
    """The key of this id."""
    rows = session.fetch(_KEY, (id,))
    return _key(rows[0]) if rows else None


def page(session: Session, customer: str | None, after: str | None, size: int) -> list[AccessKey]:
    """Keys by their ids."""
    if customer is None:
        rows = session.fetch(_KEYS, (after or "", size))
    else:
        rows = session.fetch(_ITS_KEYS, (customer, after or "", size))
    return [_key(row) for row in rows]


def end(session: Session, id: str, at: int) -> AccessKey | None:
    """Let a key end at a moment, or when it would have ended before."""
    crash.point("configure-before-commit")
    session.ask(_END, (at, id))
    crash.point("configure-after-commit")
    return find(session, id)


def use(session: Session, id: str, at: int) -> None:
    """Note that a key was used."""
    session.ask(_USE, (at, id))


def workers(session: Session) -> list[Seen]:
    """Who works, by name."""
    return [Seen._make(row) for row in session.fetch(_WORKERS, (WORKERS_MAX,))]


def sign_on(session: Session, worker: str, slots: int, moment: int | None) -> None:
    """Keep the heartbeat of a worker."""
    session.ask(_SIGN_ON, (worker, moment, slots))


def sign_off(session: Session, worker: str) -> None:
    """Remove a worker."""
    session.ask(_SIGN_OFF, (worker,))


def oldest_waiting(session: Session) -> Mapping[int, int]:
    """By level: since when the first document of the customer who has waited longest waits."""
    return dict(session.fetch(_OLDEST))


def _key(row: tuple[Any, ...]) -> AccessKey:
    id, role, customer, name, digest, *moments = row
    return AccessKey(id, Role(role), customer, name, bytes(digest), *moments)
