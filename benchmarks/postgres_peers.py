"""Other queues on PostgreSQL, used as their own documentation recommends for throughput.

It runs in an environment of its own (see benchmarks/contest.py). Only pgmq has a notion of
customers: its round robin takes turns by message group.
"""

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import timedelta
from typing import Any

from benchmarks.contest import PAYLOAD, Contestant, Handle, Submitter, calls

Ready = Callable[[], None]
BODY = json.dumps(PAYLOAD).encode()
FOREVER_S = 86_400.0
# The batch size of peers that have one. A larger one is not faster for saq and procrastinate.
AT_ONCE = int(os.environ["AT_ONCE"])
SAQ_AT_ONCE = 50
PROCRASTINATE_AT_ONCE = 10


class Peer:
    def __init__(self, url: str) -> None:
        self._url = url


class Submitting:
    """A submitter made of two functions."""

    def __init__(self, one: Callable[[], Any], many: Callable[[int], Any]) -> None:
        self._one, self._many = one, many

    async def one(self, customer: str) -> None:
        await self._one()

    async def many(self, customers: list[str]) -> None:
        await self._many(len(customers))


# ── pgmq: its SQL, as its Python package installs it ─────────────────────────────────────────────


class Pgmq(Peer):
    QUEUE = "documents"
    fair = False

    def _client(self) -> Any:
        from pgmq import PGMQueue

        return PGMQueue(conn_string=self._url, init_extension=False)

    async def install(self) -> None:
        import psycopg
        from pgmq.install import get_embedded_install_sql, install_pgmq_sql

        with psycopg.connect(self._url) as connection:
            install_pgmq_sql(get_embedded_install_sql(), conn=connection)
        queue = self._client()
        queue.create_queue(self.QUEUE)
        if self.fair:
            queue.create_fifo_index(self.QUEUE)
        queue.close()

    def submitter(self) -> AbstractAsyncContextManager[Submitter]:
        queue = self._client()

        def headers(customer: str) -> dict[str, str] | None:
            return {"x-pgmq-group": customer} if self.fair else None

        def one(customer: str) -> None:
            queue.send(self.QUEUE, PAYLOAD, headers=headers(customer))

        def many(customers: list[str]) -> None:
            every = [{"x-pgmq-group": customer} for customer in customers] if self.fair else None
            queue.send_batch(self.QUEUE, [PAYLOAD] * len(customers), headers=every)

        return calls(one, many, queue.close)

    async def work(self, handle: Handle, ready: Ready, *, idle: bool) -> None:
        from pgmq.notify_listener import SyncNotificationListener

        queue = self._client()
        read = queue.read_grouped_rr if self.fair else queue.read

        def take(_: object = None) -> None:
            while messages := read(self.QUEUE, vt=30, qty=AT_ONCE):
                for _message in messages:
                    handle()
                queue.delete_batch(self.QUEUE, [message.msg_id for message in messages])

        if idle:  # notify for every message instead of at most four times a second
            queue.enable_notify(self.QUEUE, throttle_interval_ms=0)
        ready()
        take()
        if idle:
            SyncNotificationListener(queue).listen(self.QUEUE, take)
        await asyncio.sleep(FOREVER_S)


class PgmqRoundRobin(Pgmq):
    fair = True


# ── pgqueuer ─────────────────────────────────────────────────────────────────────────────────────


class Pgqueuer(Peer):
    async def install(self) -> None:
        import asyncpg
        from pgqueuer.db import AsyncpgDriver
        from pgqueuer.queries import Queries

        connection = await asyncpg.connect(self._url)
        await Queries(AsyncpgDriver(connection)).install()
        await connection.close()

    @asynccontextmanager
    async def submitter(self) -> AsyncIterator[Submitter]:
        import asyncpg
        from pgqueuer.db import AsyncpgDriver
        from pgqueuer.queries import Queries

        connection = await asyncpg.connect(self._url)
        queries = Queries(AsyncpgDriver(connection))
        yield Submitting(
            lambda: queries.enqueue("document", BODY),
            lambda n: queries.enqueue(["document"] * n, [BODY] * n, [0] * n),
        )
        await connection.close()

    async def work(self, handle: Handle, ready: Ready, *, idle: bool) -> None:
        import asyncpg
        from pgqueuer import PgQueuer
        from pgqueuer.db import AsyncpgDriver

        connection = await asyncpg.connect(self._url)
        queuer = PgQueuer(AsyncpgDriver(connection))

        async def process(job: Any) -> None:
            handle()

        queuer.entrypoint("document")(process)
        ready()
        await queuer.run(batch_size=AT_ONCE, dequeue_timeout=timedelta(seconds=30))


# ── chancy ───────────────────────────────────────────────────────────────────────────────────────


class _Found:
    """Chancy imports a function by name, so the worker's process stores the handler here."""

    handle: Handle


async def document(**payload: Any) -> None:
    _Found.handle()


class Chancy(Peer):
    def _app(self) -> Any:
        from chancy import Chancy as App

        return App(self._url, log=logging.getLogger("silent"))

    def _queue(self) -> Any:
        from chancy import Queue
        from chancy.app import Chancy as App

        return Queue(
            "default", concurrency=AT_ONCE, executor=App.Executor.Async, eager_polling=True
        )

    async def install(self) -> None:
        async with self._app() as app:
            await app.migrate()
            await app.declare(self._queue())

    @asynccontextmanager
    async def submitter(self) -> AsyncIterator[Submitter]:
        from chancy import Job

        job = Job(func="benchmarks.postgres_peers.document", kwargs=PAYLOAD)
        async with self._app() as app:

            async def many(n: int) -> None:
                async for _ in app.push_many([job] * n):
                    pass

            yield Submitting(lambda: app.push(job), many)

    async def work(self, handle: Handle, ready: Ready, *, idle: bool) -> None:
        from chancy import Worker

        _Found.handle = handle
        async with self._app() as app:
            worker = Worker(app)
            worker.send_outgoing_interval = 0.05  # the interval in which outcomes are written
            ready()
            async with worker:
                await worker.wait_for_shutdown()


# ── oban ─────────────────────────────────────────────────────────────────────────────────────────


class Oban(Peer):
    async def _pool(self) -> Any:
        from oban import Oban as App

        return await App.create_pool(self._url)

    def _worker(self, handle: Handle) -> Any:
        from oban import worker

        @worker(queue="default")
        class Document:
            async def process(self, job: Any) -> None:
                handle()

        return Document

    async def install(self) -> None:
        from oban.schema import install

        pool = await self._pool()
        await install(pool)
        await pool.close()

    @asynccontextmanager
    async def submitter(self) -> AsyncIterator[Submitter]:
        from oban import Oban as App

        new = self._worker(lambda: None).new
        pool = await self._pool()
        async with App(pool=pool) as app:
            yield Submitting(
                lambda: app.enqueue(new(PAYLOAD)),
                lambda n: app.enqueue_many([new(PAYLOAD) for _ in range(n)]),
            )
        await pool.close()

    async def work(self, handle: Handle, ready: Ready, *, idle: bool) -> None:
        from oban import Oban as App

        self._worker(handle)
        pool = await self._pool()
        ready()
        async with App(pool=pool, queues={"default": AT_ONCE}):
            await asyncio.sleep(FOREVER_S)


# ── saq ──────────────────────────────────────────────────────────────────────────────────────────


class Saq(Peer):
    def _queue(self) -> Any:
        from saq import Queue

        return Queue.from_url(self._url)

    async def install(self) -> None:
        queue = self._queue()
        await queue.connect()
        await queue.disconnect()

    @asynccontextmanager
    async def submitter(self) -> AsyncIterator[Submitter]:
        queue = self._queue()
        await queue.connect()

        async def many(n: int) -> None:  # it has no bulk call
            await asyncio.gather(*(queue.enqueue("document", **PAYLOAD) for _ in range(n)))

        yield Submitting(lambda: queue.enqueue("document", **PAYLOAD), many)
        await queue.disconnect()

    async def work(self, handle: Handle, ready: Ready, *, idle: bool) -> None:
        from saq import Worker

        async def document(context: Any, **payload: Any) -> None:
            handle()

        queue = self._queue()
        await queue.connect()
        ready()
        await Worker(queue, functions=[("document", document)], concurrency=SAQ_AT_ONCE).start()


# ── procrastinate ────────────────────────────────────────────────────────────────────────────────


class Procrastinate(Peer):
    def _app(self, handle: Handle) -> tuple[Any, Any]:
        import procrastinate

        connector = procrastinate.PsycopgConnector(conninfo=self._url, min_size=1, max_size=10)
        app = procrastinate.App(connector=connector)

        async def document(**payload: Any) -> None:
            handle()

        return app, app.task(name="document")(document)

    async def install(self) -> None:
        app, _ = self._app(lambda: None)
        async with app.open_async():
            await app.schema_manager.apply_schema_async()

    @asynccontextmanager
    async def submitter(self) -> AsyncIterator[Submitter]:
        app, document = self._app(lambda: None)
        async with app.open_async():
            yield Submitting(
                lambda: document.defer_async(**PAYLOAD),
                lambda n: document.batch_defer_async(*[PAYLOAD] * n),
            )

    async def work(self, handle: Handle, ready: Ready, *, idle: bool) -> None:
        app, _ = self._app(handle)
        async with app.open_async():
            ready()
            await app.run_worker_async(concurrency=PROCRASTINATE_AT_ONCE, delete_jobs="successful")


CONTESTANTS: dict[str, Callable[[str], Contestant]] = {
    "pgmq": Pgmq,
    "pgmq-round-robin": PgmqRoundRobin,
    "pgqueuer": Pgqueuer,
    "chancy": Chancy,
    "oban": Oban,
    "saq": Saq,
    "procrastinate": Procrastinate,
}
