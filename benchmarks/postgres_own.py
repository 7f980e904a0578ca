"""fairturn on PostgreSQL, and the baseline: a bare queue in psycopg, optimised for speed.

The bare queue has an id, a customer, a priority, a state, a payload stored as JSON, and the index
that its claims need. It lacks everything that fairturn adds: counts, turns, leases, fences,
attempts, limits, idempotency.
"""

import asyncio
import json
import os
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import psycopg

from benchmarks.contest import PAYLOAD, Contestant, Handle, Submitter, calls
from fairturn import Queue, Submission, Worker

BATCH = 100
FOREVER_S = 86_400.0
_NOW = 1_800_000_000_000_000
_SCHEMA = """
    CREATE TABLE bare (
        id           bigint   PRIMARY KEY GENERATED ALWAYS AS IDENTITY,
        customer     text     NOT NULL,
        priority     smallint NOT NULL,
        state        smallint NOT NULL DEFAULT 0,
        submitted_at bigint   NOT NULL,
        claimed_at   bigint,
        ended_at     bigint,
        payload      text     NOT NULL
    );
    CREATE INDEX bare_waiting ON bare (priority, id) WHERE state = 0;
"""
_INSERT = """
    INSERT INTO bare (customer, priority, submitted_at, payload) VALUES (%s, %s, %s, %s)"""
# psycopg takes longer to write arrays for unnest() than both sides need for JSON.
_INSERT_MANY = """
    INSERT INTO bare (customer, priority, submitted_at, payload)
    SELECT r ->> 0, (r ->> 1)::smallint, (r ->> 2)::bigint, r ->> 3
    FROM json_array_elements(%s::json) AS r"""
_COPY = "COPY bare (customer, priority, submitted_at, payload) FROM STDIN"
# An array forces the planner to use the primary key; a join can become a hash join.
_CLAIM = """
    UPDATE bare SET state = 1, claimed_at = %s
    WHERE id = ANY (ARRAY (
        SELECT id FROM bare WHERE state = 0 ORDER BY priority, id LIMIT %s FOR UPDATE SKIP LOCKED))
    RETURNING id, customer, payload"""
_FINISH = "UPDATE bare SET state = 2, ended_at = %s WHERE id = ANY (%s::bigint[]) AND state = 1"


class Bare:
    """Claims of 100, in one round trip and one transaction with the outcomes of the previous
    claim."""

    def __init__(self, url: str) -> None:
        self._url = url

    def _connect(self) -> psycopg.Connection[Any]:
        return psycopg.connect(self._url, autocommit=True)

    async def install(self) -> None:
        with self._connect() as connection:
            connection.execute(_SCHEMA)

    def submitter(self) -> AbstractAsyncContextManager[Submitter]:
        connection = self._connect()
        cursor = connection.cursor(binary=True)

        def one(customer: str) -> None:
            row = (customer, 5, _NOW, json.dumps(PAYLOAD))
            cursor.execute(_INSERT, row, prepare=True)

        def many(customers: list[str]) -> None:
            self._submit_many(connection, customers)

        return calls(one, many, connection.close)

    def _submit_many(self, connection: psycopg.Connection[Any], customers: list[str]) -> None:
        rows = [(customer, 5, _NOW, json.dumps(PAYLOAD)) for customer in customers]
        connection.execute(_INSERT_MANY, (json.dumps(rows),), prepare=True)

    async def work(self, handle: Handle, ready: Callable[[], None], *, idle: bool) -> None:
        with self._connect() as connection:
            ready()
            with connection.pipeline() as pipeline:
                claim, finish = connection.cursor(binary=True), connection.cursor(binary=True)
                claimed: list[Any] = []
                while True:
                    if claimed:
                        numbers = "{" + ",".join(str(row[0]) for row in claimed) + "}"
                        finish.execute(_FINISH, (_NOW, numbers), prepare=True)
                    claim.execute(_CLAIM, (_NOW, BATCH), prepare=True)
                    pipeline.sync()
                    claimed = claim.fetchall()
                    if not claimed:
                        break
                    for row in claimed:
                        json.loads(row[2])
                        handle()
        await asyncio.sleep(FOREVER_S)


class BareCopy(Bare):
    """The same, with COPY for bulk submissions."""

    def _submit_many(self, connection: psycopg.Connection[Any], customers: list[str]) -> None:
        with connection.cursor().copy(_COPY) as copy:
            for customer in customers:
                copy.write_row((customer, 5, _NOW, json.dumps(PAYLOAD)))


class Fairturn:
    """A worker with threads, in mode `fair`, with default settings."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def install(self) -> None:
        Queue(self._url).close()

    def submitter(self) -> AbstractAsyncContextManager[Submitter]:
        queue = Queue(self._url)

        def one(customer: str) -> None:
            queue.submit(customer, payload=PAYLOAD)

        def many(customers: list[str]) -> None:
            queue.submit_many(Submission(customer=c, payload=PAYLOAD) for c in customers)

        return calls(one, many, queue.close)

    async def work(self, handle: Handle, ready: Callable[[], None], *, idle: bool) -> None:
        def process(document: object) -> None:
            handle()

        with Queue(self._url) as queue:
            worker = Worker(queue, process, concurrency=os.cpu_count() or 1, threads=True)
            ready()
            worker.run()


CONTESTANTS: dict[str, Callable[[str], Contestant]] = {
    "bare": Bare,
    "bare-copy": BareCopy,
    "fairturn": Fairturn,
}
