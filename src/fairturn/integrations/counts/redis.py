"""Counts in Redis or Valkey: one key a customer, one script a check.

The driver connects, with all that belongs to it: addresses, passwords, TLS. Then the one command
that is ever sent goes over its socket directly: what a client adds to a command (a pool, retries,
callbacks, a parser for every kind of answer) takes longer than the server needs for it.
"""

import os
import socket
import ssl
import struct
from binascii import b2a_base64
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from hashlib import sha1
from importlib import resources
from typing import Any, NamedTuple, TypeVar

import redis
from redis import exceptions as failures
from redis.backoff import NoBackoff
from redis.connection import ConnectionPool
from redis.retry import Retry

from fairturn.clock import Clock
from fairturn.errors import StoreError, StoreRefused, StoreUnavailable
from fairturn.integrations.counts import TIMEOUT_S, Answer
from fairturn.integrations.counts.bounded import within
from fairturn.priority import Rule

PREFIX = "fairturn"
IDLE_CONNECTIONS_MAX = 64
LINE_BYTES_MAX = 4_096

T = TypeVar("T")
_SCRIPT = (resources.files("fairturn.integrations.counts") / "check.lua").read_bytes()
_SHA = sha1(_SCRIPT, usedforsecurity=False).hexdigest().encode()


class _Line:
    """A connection on which one command is sent at a time, and one line read."""

    def __init__(self, connection: Any) -> None:
        connection.connect()
        self._connection = connection
        connected: socket.socket = connection._sock  # there is no public way to it
        if not isinstance(connected, ssl.SSLSocket):
            _let_the_kernel_watch(connected)
        self._send, self._receive = connected.sendall, connected.recv

    def send(self, command: bytes) -> None:
        try:
            self._send(command)
        except OSError as error:
            raise _failure(error) from error

    def read(self) -> int:
        try:
            line = self._receive(LINE_BYTES_MAX)
            while line[-2:] != b"\r\n":
                more = self._receive(LINE_BYTES_MAX)
                if not more:
                    raise failures.ConnectionError("the server closed the connection")
                line += more
        except OSError as error:
            raise _failure(error) from error
        if line[:1] == b":":
            return int(line[1:-2])
        said = line[1:-2].decode(errors="replace")
        kind = _KINDS.get(said.partition(" ")[0], failures.ResponseError)
        raise kind(said)

    def close(self) -> None:
        self._connection.disconnect()


def _let_the_kernel_watch(connected: socket.socket) -> None:
    """Let the kernel end a call that takes too long. Python would ask before each call whether it
    may be made, which is a second system call."""
    timeout_s = connected.gettimeout()
    if timeout_s is None:
        return
    limit = struct.pack("ll", int(timeout_s), round(timeout_s % 1 * 1e6))
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    connected.settimeout(None)


_KINDS: dict[str, type[failures.ResponseError]] = {
    "NOSCRIPT": failures.NoScriptError,
    "NOPERM": failures.NoPermissionError,
}


def _failure(error: OSError) -> failures.RedisError:
    if isinstance(error, TimeoutError | BlockingIOError):
        return failures.TimeoutError(str(error))
    return failures.ConnectionError(str(error))


class RedisCounts:
    """Counts at an address such as `redis://localhost:6379/0`.

    `rediss://`, `valkey://`, `valkeys://` and `unix://` addresses are understood as well. Apps that
    share a server and not their customers take a `prefix` each. The server's clock counts, unless
    one is handed in.
    """

    def __init__(
        self,
        url: str,
        *,
        rule: Rule | None = None,
        clock: Clock | None = None,
        prefix: str = PREFIX,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._script = _Script(rule or Rule(), clock, prefix)
        self._timeout_s = timeout_s
        self._pool = _pool(url, timeout_s)
        self._name = _name(self._pool.connection_kwargs)
        self._idle: deque[_Line] = deque(maxlen=IDLE_CONNECTIONS_MAX)
        self._pid = os.getpid()

    def begin(self, customer: str) -> Answer:
        if self._pid != os.getpid():
            self._idle.clear()  # the connections of the process that this one was forked from
            self._pid = os.getpid()
        check = _Check(customer, new_id())
        try:
            line = self._idle.pop()
        except IndexError:
            return self._begin_anew(check)
        try:
            line.send(self._script.command(check))
        except failures.RedisError:
            line.close()
            return self._begin_anew(check)
        return partial(self._answer, line, check)

    def concerns(self) -> list[str]:
        client = redis.Redis(connection_pool=self._pool)
        return self._bounded(lambda: memory_concerns(self._name, client.info("memory")))

    def close(self) -> None:
        with suppress(IndexError):  # until there are no more; several threads may close at once
            while True:
                self._idle.pop().close()

    def _answer(self, line: _Line, check: "_Check") -> int:
        try:
            return self._read(line, check)
        except failures.ConnectionError:
            # The server was restarted since the last check on this connection, or the reply was
            # lost: the same check again counts once. The other connections are lost as well.
            self.close()
            return self._begin_anew(check)()
        except failures.RedisError as error:
            raise translated(error, self._name, self._timeout_s) from error

    def _begin_anew(self, check: "_Check") -> Answer:
        """The whole check on a new connection, which takes several steps, bounded together."""

        def run() -> int:
            line = _Line(self._pool.make_connection())
            line.send(self._script.command(check))
            return self._read(line, check)

        count = self._bounded(run)
        return lambda: count

    def _read(self, line: _Line, check: "_Check") -> int:
        """The answer to the script; then the connection is free for others."""
        try:
            try:
                count = line.read()
            except failures.NoScriptError:
                # A server that was started anew, or told to forget its scripts.
                line.send(self._script.whole(check))
                count = line.read()
        except BaseException:
            line.close()  # or the next check would read this one's answer
            raise
        self._idle.append(line)
        return count

    def _bounded(self, call: Callable[[], T]) -> T:
        try:
            return within(self._timeout_s, self._name, call)
        except failures.RedisError as error:
            raise translated(error, self._name, self._timeout_s) from error


class RedisClusterCounts:
    """Counts in a cluster: `redis+cluster://host:port`, with any of its nodes.

    Each check has one key, so it belongs to one node, wherever that is at the moment.
    """

    def __init__(
        self,
        url: str,
        *,
        rule: Rule | None = None,
        clock: Clock | None = None,
        prefix: str = PREFIX,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._script = _Script(rule or Rule(), clock, prefix)
        self._url = as_redis(url)
        self._timeout_s = timeout_s
        self._name = _name(_pool(url, timeout_s).connection_kwargs)
        self._client: redis.RedisCluster | None = None
        self._pid = os.getpid()

    def begin(self, customer: str) -> Answer:
        count = self._bounded(partial(self._run, _Check(customer, new_id())))
        return lambda: count

    def concerns(self) -> list[str]:
        def ask() -> list[str]:
            memories: Any = self._cluster().info("memory", target_nodes="primaries")
            return [
                concern
                for node, facts in memories.items()
                for concern in memory_concerns(node, facts)
            ]

        return self._bounded(ask)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _run(self, check: "_Check") -> int:
        """The driver sends a command again if it loses a connection: with the id, that is safe."""
        cluster, script = self._cluster(), self._script
        key, arguments = script.key(check.customer), script.arguments(check)
        try:
            return int(cluster.evalsha(_SHA.decode(), 1, key, *arguments))
        except failures.NoScriptError:
            return int(cluster.eval(_SCRIPT.decode(), 1, key, *arguments))

    def _cluster(self) -> redis.RedisCluster:
        if self._client is None or self._pid != os.getpid():
            self._pid = os.getpid()
            self._client = redis.RedisCluster.from_url(
                self._url,
                protocol=2,
                socket_timeout=self._timeout_s,
                socket_connect_timeout=self._timeout_s,
            )
        return self._client

    def _bounded(self, call: Callable[[], T]) -> T:
        # Looking for the right node may take several steps, so they are bounded together.
        try:
            return within(self._timeout_s, self._name, call)
        except (failures.RedisError, failures.RedisClusterException) as error:
            raise translated(error, self._name, self._timeout_s) from error


class _Check(NamedTuple):
    """A check, which counts once, however often it is sent."""

    customer: str
    id: bytes


def new_id() -> bytes:
    """An id for a check: 48 random bits as 8 characters."""
    return b2a_base64(os.urandom(6), newline=False)


class _Script:
    """The call of the script for a check."""

    def __init__(self, rule: Rule, clock: Clock | None, prefix: str) -> None:
        self._settings = (str(rule.reset_interval_us).encode(), rule.reset.value.encode())
        self._clock = clock
        # The braces are for a cluster: what stands in them decides where a key lives.
        self._key = (prefix.encode() + b":{", b"}:count")
        self._key_bytes = len(b"".join(self._key))
        # All of the usual command but the customer is put together once and not each time.
        begin, end = self._key
        self._before = _packed(b"EVALSHA", _SHA, b"1", more=2 + len(self._settings)) + b"$"
        self._inside = b"\r\n" + begin
        self._after = end + b"\r\n" + _strings(*self._settings)

    def key(self, customer: str) -> bytes:
        begin, end = self._key
        return begin + customer.encode() + end

    def arguments(self, check: _Check) -> tuple[bytes, ...]:
        if self._clock is None:
            return (*self._settings, check.id)
        return (*self._settings, check.id, str(self._clock.now()).encode())

    def command(self, check: _Check) -> bytes:
        """The call by the script's name."""
        if self._clock is None:
            name = check.customer.encode()
            size = b"%d" % (len(name) + self._key_bytes)
            return self._before + size + self._inside + name + self._after + _strings(check.id)
        return _packed(b"EVALSHA", _SHA, b"1", self.key(check.customer), *self.arguments(check))

    def whole(self, check: _Check) -> bytes:
        """The call with the script itself, which the server keeps from then on."""
        return _packed(b"EVAL", _SCRIPT, b"1", self.key(check.customer), *self.arguments(check))


def as_redis(url: str) -> str:
    """The address in the words of the driver, for which Valkey is a Redis."""
    for ours, its in (
        ("redis+cluster", "redis"),
        ("rediss+cluster", "rediss"),
        ("valkey", "redis"),
    ):
        if url.startswith(f"{ours}://"):
            return its + url[len(ours) :]
    return "rediss" + url[len("valkeys") :] if url.startswith("valkeys://") else url


def memory_concerns(name: str, memory: Mapping[str, Any]) -> list[str]:
    """What `INFO memory` says that an operator should know."""
    policy = str(memory.get("maxmemory_policy", ""))
    if not policy.startswith("allkeys") or not int(memory.get("maxmemory", 0)):
        return []
    return [
        f"{name} forgets any key when its memory is full (maxmemory-policy is {policy}), so a "
        "customer's count can be 0 again at any moment; set it to noeviction or volatile-ttl"
    ]


def translated(error: Exception, name: str, timeout_s: float) -> StoreError:
    """A driver's error as one of ours."""
    if isinstance(error, failures.AuthenticationError | failures.NoPermissionError):
        return StoreRefused(f"{name} does not let us in: {error}; check user, password and ACL")
    if isinstance(error, failures.TimeoutError):
        return StoreUnavailable(f"{name} did not answer within {timeout_s * 1000:.0f} ms")
    return StoreUnavailable(f"{name} cannot count now: {error}")


def _pool(url: str, timeout_s: float) -> ConnectionPool:
    """How to connect to the address. The driver's pool is not used, only its way to connect."""
    try:
        return ConnectionPool.from_url(
            as_redis(url),
            protocol=2,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
        )
    except ValueError as error:
        raise StoreRefused(f"the address of the counts is not understood: {error}") from None


def _packed(*parts: bytes, more: int = 0) -> bytes:
    """A command as it goes over the wire, or its beginning, if there is more to come."""
    return b"*%d\r\n" % (len(parts) + more) + _strings(*parts)


def _strings(*parts: bytes) -> bytes:
    return b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)


def _name(connection: dict[str, Any]) -> str:
    """The place for people, without user and password."""
    if "path" in connection:
        return f"Redis at {connection['path']}"
    host, port = connection.get("host", "localhost"), connection.get("port", 6379)
    return f"Redis at {host}:{port}"
