"""Concurrency limits: at most N at a time for each access key or client address.

Long polls, downloads, event streams, uploads, other requests and connections use the same class.
All of it runs on the event loop; nothing here is thread-safe.
"""

import asyncio
import hashlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from functools import lru_cache
from ipaddress import IPv6Address, ip_address, ip_network
from types import TracebackType
from typing import TypeVar
from weakref import WeakValueDictionary

from anyio import CapacityLimiter, to_thread
from starlette.types import Scope

from fairturn.service.options import KNOWN_KEYS_MAX
from fairturn.service.problems import Problem, ProblemCode

T = TypeVar("T")

_PERMIT = "permit"  # of a request, in the state of its scope


class ConcurrencyLimit:
    """Limits the permits of each holder, which is the id of a key or a network."""

    def __init__(
        self,
        per_holder_max: int,
        *,
        total_max: int | None = None,
        waiting_max: int = 0,
        retry_after_s: int = 1,
    ) -> None:
        self._per_holder_max = per_holder_max
        self._total_max = total_max
        self._waiting_max = waiting_max
        self._retry_after_s = retry_after_s
        self._held: Counter[str] = Counter()
        self._waiting: defaultdict[str, deque[asyncio.Future[None]]] = defaultdict(deque)

    def total(self) -> int:
        return self._held.total()

    def has_permit(self, holder: str | None) -> bool:
        """Return whether `take` would succeed."""
        in_all = self._total_max is None or self._held.total() < self._total_max
        return in_all and self._held[holder or ""] < self._per_holder_max

    def check(self, holder: str | None) -> None:
        """Raise `Problem` if `take` would."""
        if not self.has_permit(holder):
            raise self._refusal()

    def take(self, holder: str | None) -> "Permit":
        """Return a permit, or raise `Problem` at the limit. The holder None is the local operator
        without a key."""
        self.check(holder)
        return self._count(holder or "")

    async def wait(self, holder: str | None) -> "Permit":
        """Wait for a permit, first come, first served for each holder. Raises `Problem` if
        `waiting_max` requests of the holder are waiting already."""
        name = holder or ""
        if self._held[name] < self._per_holder_max:
            return self._count(name)
        waiting = self._waiting[name]
        if len(waiting) >= self._waiting_max:
            raise self._refusal()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release(name)  # cancelled after its turn had come
            raise
        return Permit(self, name, has_waited=True)

    def _refusal(self) -> Problem:
        return Problem(ProblemCode.TOO_MANY_AT_ONCE, retry_after_s=self._retry_after_s)

    def _count(self, holder: str) -> "Permit":
        self._held[holder] += 1
        return Permit(self, holder)

    def _release(self, holder: str) -> None:
        waiting = self._waiting.get(holder)
        while waiting:
            turn = waiting.popleft()
            if not turn.done():
                turn.set_result(None)  # the permit passes on
                return
        self._waiting.pop(holder, None)
        self._held[holder] -= 1
        if not self._held[holder]:
            del self._held[holder]


class Permit:
    """A permit of a `ConcurrencyLimit`; as a context manager, it is released on exit."""

    __slots__ = ("_holder", "_limit", "has_waited")

    def __init__(self, limit: ConcurrencyLimit, holder: str, *, has_waited: bool = False) -> None:
        self._limit: ConcurrencyLimit | None = limit
        self._holder = holder
        self.has_waited = has_waited  # the client may have disconnected since

    def release(self) -> None:
        """Return the permit. Idempotent."""
        limit, self._limit = self._limit, None
        if limit is not None:
            limit._release(self._holder)

    def __enter__(self) -> "Permit":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


class CoreLimiter:
    """Runs CPU-bound work in threads: one at a time for each holder, and at most `threads` in all,
    so that the work of one customer leaves cores to the others."""

    def __init__(self, threads: int) -> None:
        self._limiter = CapacityLimiter(threads)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def run(self, holder: str | None, work: Callable[[], T]) -> T:
        """Call a function in a thread, after the work of the holder that waits already."""
        async with self._turns.setdefault(holder or "", asyncio.Lock()):
            return await to_thread.run_sync(work, limiter=self._limiter)


class KnownKeys:
    """The ids of keys that were valid lately, for the limit of requests of a key, which applies
    before the key is checked. They authorize nothing."""

    def __init__(self) -> None:
        self._ids: dict[bytes, str] = {}  # by a digest of the key, oldest first

    def id_of(self, shown: str) -> str | None:
        return self._ids.get(_digest(shown))

    def add(self, shown: str, id: str) -> None:
        self._ids[_digest(shown)] = id
        if len(self._ids) > KNOWN_KEYS_MAX:
            del self._ids[next(iter(self._ids))]


def _digest(shown: str) -> bytes:
    return hashlib.sha256(shown.encode("utf-8", "surrogatepass")).digest()


def hold(scope: Scope, permit: Permit) -> None:
    """Release the permit at the end of the request. It replaces the one that the request holds:
    each request is counted once."""
    release(scope)
    scope.setdefault("state", {})[_PERMIT] = permit


def release(scope: Scope) -> None:
    """Release the permit of a request."""
    permit: Permit | None = scope.get("state", {}).get(_PERMIT)
    if permit is not None:
        permit.release()


@lru_cache(10_000)
def network_of(address: str) -> str:
    """Return the IPv4 address, or the IPv6 network of 64 bits, that limits count a client by: a
    provider assigns at least such a network to each of its customers."""
    try:
        ip = ip_address(address)
    except ValueError:
        return address
    if isinstance(ip, IPv6Address) and ip.ipv4_mapped is None:
        return str(ip_network((int(ip), 64), strict=False))
    return address
