"""Long polls: limited per key, and ended when the client disconnects or its key is revoked."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

from fastapi import Request

from fairturn.errors import StoreError
from fairturn.service.callers import Caller, takes_token
from fairturn.service.concurrency import hold
from fairturn.service.problems import Problem, ProblemCode
from fairturn.service.service import Service, service_of

KEYS_EVERY_S = 0.5  # least time between two checks of the keys
KEYS_S_MAX = 15.0  # most time: a key can expire without a change of the store

T = TypeVar("T")


async def poll(request: Request, caller: Caller, wait: Callable[[], Awaitable[T]]) -> T:
    """Await `wait` as one of the long polls of a key. Raises `Problem` above the limit, and if the
    client disconnects or the key is revoked meanwhile."""
    service = service_of(request)
    hold(request.scope, service.polls.take(caller.key))
    watch: KeyWatch = request.app.state.key_watch
    waiting = asyncio.ensure_future(wait())
    gone = asyncio.ensure_future(disconnection(request))
    revoked = watch.revocation(caller)
    try:
        futures: set[asyncio.Future[Any]] = {waiting, gone, revoked}
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        if revoked.done():
            raise Problem(ProblemCode.KEY_UNKNOWN)
        if waiting.done():
            return waiting.result()
        gone.result()  # raises the problem of a body that is too large or too slow
        raise Problem(ProblemCode.CUT_OFF)
    finally:
        watch.forget(caller, revoked)
        waiting.cancel()
        gone.cancel()
        await asyncio.gather(waiting, gone, return_exceptions=True)


async def disconnection(request: Request) -> None:
    """Wait until the client disconnects."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def still_open(service: Service, caller: Caller) -> bool:
    """Return whether the key of a caller has neither expired nor been revoked."""
    if caller.key is None:
        return takes_token(service)
    key = service.keys.find(caller.key)
    return key is not None and key.opens(service.clock.now())


class KeyWatch:
    """Checks the keys of long polls after a change: each key once, however many polls it has. It
    runs only while there are long polls."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._revocations: dict[Caller, set[asyncio.Future[None]]] = {}
        self._checking: asyncio.Task[None] | None = None

    def revocation(self, caller: Caller) -> asyncio.Future[None]:
        """Return a future that completes when the key has expired or been revoked."""
        revocation: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._revocations.setdefault(caller, set()).add(revocation)
        if self._checking is None:
            self._checking = asyncio.create_task(self._check())
        return revocation

    def forget(self, caller: Caller, revocation: asyncio.Future[None]) -> None:
        """End the watch that `revocation` began."""
        waiting = self._revocations.get(caller, set())
        waiting.discard(revocation)
        revocation.cancel()
        if not waiting:
            self._revocations.pop(caller, None)

    async def _check(self) -> None:
        watch = self._service.watch
        try:
            while self._revocations and not watch.closed:
                version = watch.version
                with suppress(StoreError):  # retried at the next change, or after `KEYS_S_MAX`
                    for caller in await self._service.run(self._closed, list(self._revocations)):
                        for revocation in self._revocations.get(caller, ()):
                            if not revocation.done():
                                revocation.set_result(None)
                await asyncio.sleep(KEYS_EVERY_S)
                if self._revocations:
                    await watch.change(version, KEYS_S_MAX)
        finally:
            self._checking = None

    def _closed(self, callers: list[Caller]) -> list[Caller]:
        return [each for each in callers if not still_open(self._service, each)]
