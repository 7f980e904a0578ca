"""Access keys in the file, and what an operator sees of the queue at a glance."""

from collections.abc import Mapping

import apsw

from fairturn.access.keys import ACCESS_KEYS_MAX, AccessKey, Role
from fairturn.explain.snapshot import WORKERS_MAX, Seen
from fairturn.stores.values import WAITING

_COLUMNS = "id, role, customer, name, digest, made_at, used_at, ends_at"
_ADD = f"INSERT INTO access_keys ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
_COUNT = "SELECT count(*) FROM access_keys"
_KEY = f"SELECT {_COLUMNS} FROM access_keys WHERE id = ?"
_KEYS = f"SELECT {_COLUMNS} FROM access_keys WHERE id > ? ORDER BY id LIMIT ?"
# By access_keys_customer.
_ITS_KEYS = f"SELECT {_COLUMNS} FROM access_keys WHERE customer = ? AND id > ? ORDER BY id LIMIT ?"
_END = "UPDATE access_keys SET ends_at = min(coalesce(ends_at, ?1), ?1) WHERE id = ?2"
_USE = "UPDATE access_keys SET used_at = max(coalesce(used_at, ?1), ?1) WHERE id = ?2"
_FORGET = "DELETE FROM access_keys WHERE customer = ?"
_SIGN_ON = "INSERT OR REPLACE INTO workers (name, seen_at, idle, slots) VALUES (?, ?, 0, ?)"
_SIGN_OFF = "DELETE FROM workers WHERE name = ?"
_WORKERS = "SELECT name, seen_at, slots FROM workers ORDER BY name LIMIT ?"
# What waits in a flow comes after its claimed_to, or was returned: the first of each, by
# documents_flow and documents_returned.
_OLDEST = f"""
    SELECT level, min(since) FROM (
        SELECT f.level AS level, (
            SELECT max(d.submitted_at, coalesce(d.due_at, 0))
            FROM documents d INDEXED BY documents_flow
            WHERE d.customer = f.customer AND d.level = f.level AND d.order_number > f.claimed_to
                AND d.state = {WAITING}
            ORDER BY d.order_number LIMIT 1) AS since
        FROM flows f WHERE f.waiting > 0
        UNION ALL
        SELECT d.level, max(d.submitted_at, coalesce(d.due_at, 0))
        FROM documents d INDEXED BY documents_returned
        WHERE d.returned = 1 AND d.state = {WAITING})
    WHERE since IS NOT NULL GROUP BY level"""


def add(connection: apsw.Connection, key: AccessKey) -> None:
    """Keep a new key."""
    if connection.execute(_COUNT).get >= ACCESS_KEYS_MAX:
        raise ValueError(f"there are {ACCESS_KEYS_MAX:,} keys already; no more are allowed")
    if connection.execute(_KEY, (key.id,)).fetchone() is not None:
        raise ValueError(f"there is a key {key.id} already")
    connection.execute(_ADD, tuple(key))


def find(connection: apsw.Connection, id: str) -> AccessKey | None:
    """The key of this id."""
    row = connection.execute(_KEY, (id,)).fetchone()
    return None if row is None else _key(row)


def page(
    connection: apsw.Connection, customer: str | None, after: str | None, size: int
) -> list[AccessKey]:
    """Keys by their ids."""
    if customer is None:
        rows = connection.execute(_KEYS, (after or "", size))
    else:
        rows = connection.execute(_ITS_KEYS, (customer, after or "", size))
    return [_key(row) for row in rows]


def end(connection: apsw.Connection, id: str, at: int) -> AccessKey | None:
    """Let a key end at a moment, or when it would have ended before."""
    connection.execute(_END, (at, id))
    return find(connection, id)


def use(connection: apsw.Connection, id: str, at: int) -> None:
    """Note that a key was used."""
    connection.execute(_USE, (at, id))


def forget(connection: apsw.Connection, customer: str) -> None:
    """Delete the keys of a customer."""
    connection.execute(_FORGET, (customer,))


def workers(connection: apsw.Connection) -> list[Seen]:
    """Who works, by name."""
    return [Seen._make(row) for row in connection.execute(_WORKERS, (WORKERS_MAX,))]


def sign_on(connection: apsw.Connection, seen: Seen) -> None:
    """Keep the heartbeat of a worker."""
    connection.execute(_SIGN_ON, seen)


def sign_off(connection: apsw.Connection, worker: str) -> None:
    """Remove a worker."""
    connection.execute(_SIGN_OFF, (worker,))


def oldest_waiting(connection: apsw.Connection) -> Mapping[int, int]:
    """By level: since when the first document of the customer who has waited longest waits."""
    return dict(connection.execute(_OLDEST))


def _key(row: tuple[str, ...]) -> AccessKey:
    key = AccessKey._make(row)
    return key._replace(role=Role(key.role))
