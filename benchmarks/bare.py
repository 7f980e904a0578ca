"""The baseline: a bare priority queue in plain apsw, optimised for speed.

It has an id, a customer, a priority, a state, a payload that is a Python value stored as JSON, and
the index that its claims need. It lacks everything that fairturn adds: counts, turns, leases,
fences, attempts, limits, idempotency.
"""

import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import apsw

Row = tuple[str, int, int, Any]  # customer, priority, submitted_at, payload

_SCHEMA = """
    CREATE TABLE documents (
        id           INTEGER PRIMARY KEY,
        customer     TEXT    NOT NULL,
        priority     INTEGER NOT NULL,
        state        INTEGER NOT NULL DEFAULT 0,
        submitted_at INTEGER NOT NULL,
        claimed_at   INTEGER,
        ended_at     INTEGER,
        payload      TEXT    NOT NULL
    );
    CREATE INDEX waiting ON documents (priority, id) WHERE state = 0;
"""
_INSERT = """
    INSERT INTO documents (customer, priority, submitted_at, payload) VALUES (?, ?, ?, ?)"""
# A multi-row insert is a third faster than one statement per row.
_TOGETHER = 40
_INSERT_TOGETHER = _INSERT + ", (?, ?, ?, ?)" * (_TOGETHER - 1)
_CLAIM = """
    UPDATE documents SET state = 1, claimed_at = ?
    WHERE id IN (SELECT id FROM documents WHERE state = 0 ORDER BY priority, id LIMIT ?)
    RETURNING id, customer, payload"""
_FINISH = "UPDATE documents SET state = 2, ended_at = ? WHERE id = ? AND state = 1"


def _dumper() -> Callable[[Any], str]:
    """Return the fastest JSON encoder of the standard library: one created once."""
    make: Any = json.encoder.c_make_encoder  # type: ignore[attr-defined]
    quote: Any = json.encoder.encode_basestring_ascii
    parts = make(None, None, quote, None, ":", ",", False, False, False)
    return lambda value: "".join(parts(value, 0))


_dump = _dumper()


class BareQueue:
    """Submit, claim and finish, each durable when it returns."""

    def __init__(self, path: Path, synchronous: str) -> None:
        self._connection = apsw.Connection(str(path))
        # Plans that do not depend on bound values are never recompiled.
        self._connection.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute(f"PRAGMA synchronous = {synchronous}")
        self._connection.execute("PRAGMA wal_autocheckpoint = 4000")
        self._connection.execute("PRAGMA cache_size = -16384")
        self._connection.execute(_SCHEMA)

    def submit(self, row: Row) -> None:
        self._connection.execute(_INSERT, (*row[:3], _dump(row[3])))  # a transaction of its own

    def submit_many(self, rows: list[Row]) -> None:
        encoded = [(customer, priority, at, _dump(value)) for customer, priority, at, value in rows]
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        together = len(encoded) - len(encoded) % _TOGETHER
        for begin in range(0, together, _TOGETHER):
            values = tuple(chain.from_iterable(encoded[begin : begin + _TOGETHER]))
            connection.execute(_INSERT_TOGETHER, values)
        connection.executemany(_INSERT, encoded[together:])
        connection.execute("COMMIT")

    def claim(self, n: int, now: int) -> list[tuple[int, str, str]]:
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        claimed: list[Any] = connection.execute(_CLAIM, (now, n)).fetchall()
        connection.execute("COMMIT")
        return claimed

    def finish(self, claimed: list[tuple[int, str, str]], now: int) -> None:
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany(_FINISH, [(now, row[0]) for row in claimed])
        connection.execute("COMMIT")

    def close(self) -> None:
        self._connection.close()
