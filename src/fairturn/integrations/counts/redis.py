"""Counts in Redis or Valkey: one key per customer, one script call per check.

redis-py opens the connections: URLs, authentication, TLS. The only command is then written to the
socket directly, because redis-py's overhead per command (pool, retries, callbacks, parser) exceeds
the time of the server.
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


class _RedisConnection:
    """A connection for one command at a time, with a reply of one line."""

    def __init__(self, connection: Any) -> None:
        connection.connect()
        self._connection = connection
        connected: socket.socket = connection._sock  # there is no public attribute
        if not isinstance(connected, ssl.SSLSocket):
            _use_kernel_timeouts(connected)
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
        message = line[1:-2].decode(errors="replace")
        kind = _KINDS.get(message.partition(" ")[0], failures.ResponseError)
        raise kind(message)

    def close(self) -> None:
        self._connection.disconnect()


def _use_kernel_timeouts(connected: socket.socket) -> None:
    """Replace Python's timeout, which adds a poll() to each call, by those of the kernel."""
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
    """Counts at a URL such as `redis://localhost:6379/0`, or with the scheme `rediss`, `valkey`,
    `valkeys` or `unix`.

    Applications that share a server but not their customers need different prefixes. The server's
    clock is used unless one is given.
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
        self._script = _CheckScript(rule or Rule(), clock, prefix)
        self._timeout_s = timeout_s
        self._pool = _pool(url, timeout_s)
        self._name = _name(self._pool.connection_kwargs)
        self._idle: deque[_RedisConnection] = deque(maxlen=IDLE_CONNECTIONS_MAX)
        self._pid = os.getpid()

    def begin(self, customer: str) -> Answer:
        if self._pid != os.getpid():
            self._idle.clear()  # after a fork they belong to the parent process
            self._pid = os.getpid()
        check = _CheckRequest(customer, new_id())
        try:
            connection = self._idle.pop()
        except IndexError:
            return self._begin_on_new_connection(check)
        try:
            connection.send(self._script.command(check))
        except failures.RedisError:
            connection.close()
            return self._begin_on_new_connection(check)
        return partial(self._answer, connection, check)

    def concerns(self) -> list[str]:
        client = redis.Redis(connection_pool=self._pool)
        return self._bounded(lambda: memory_concerns(self._name, client.info("memory")))

    def close(self) -> None:
        with suppress(IndexError):  # several threads may close at once
            while True:
                self._idle.pop().close()

    def _answer(self, connection: _RedisConnection, check: "_CheckRequest") -> int:
        try:
            return self._read(connection, check)
        except failures.ConnectionError:
            # The server was restarted since the last check on this connection, or the reply was
            # lost: a retry with the same id counts once. Other connections are lost as well.
            self.close()
            return self._begin_on_new_connection(check)()
        except failures.RedisError as error:
            raise translated(error, self._name, self._timeout_s) from error

    def _begin_on_new_connection(self, check: "_CheckRequest") -> Answer:
        """Run the check on a new connection, with one timeout for all steps."""

        def run() -> int:
            connection = _RedisConnection(self._pool.make_connection())
            connection.send(self._script.command(check))
            return self._read(connection, check)

        count = self._bounded(run)
        return lambda: count

    def _read(self, connection: _RedisConnection, check: "_CheckRequest") -> int:
        """Read the reply of the script and release the connection."""
        try:
            try:
                count = connection.read()
            except failures.NoScriptError:
                # The server was restarted, or its script cache flushed.
                connection.send(self._script.whole(check))
                count = connection.read()
        except BaseException:
            connection.close()  # otherwise the next check would read this reply
            raise
        self._idle.append(connection)
        return count

    def _bounded(self, call: Callable[[], T]) -> T:
        try:
            return within(self._timeout_s, self._name, call)
        except failures.RedisError as error:
            raise translated(error, self._name, self._timeout_s) from error


class RedisClusterCounts:
    """Counts in a cluster: `redis+cluster://host:port`, with any of its nodes. Each check has one
    key, and so runs on one node."""

    def __init__(
        self,
        url: str,
        *,
        rule: Rule | None = None,
        clock: Clock | None = None,
        prefix: str = PREFIX,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._script = _CheckScript(rule or Rule(), clock, prefix)
        self._url = as_redis(url)
        self._timeout_s = timeout_s
        self._name = _name(_pool(url, timeout_s).connection_kwargs)
        self._client: redis.RedisCluster | None = None
        self._pid = os.getpid()

    def begin(self, customer: str) -> Answer:
        count = self._bounded(partial(self._run, _CheckRequest(customer, new_id())))
        return lambda: count

    def concerns(self) -> list[str]:
        def call() -> list[str]:
            memories: Any = self._cluster().info("memory", target_nodes="primaries")
            return [
                concern
                for node, facts in memories.items()
                for concern in memory_concerns(node, facts)
            ]

        return self._bounded(call)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _run(self, check: "_CheckRequest") -> int:
        """Run the script. The driver retries after a lost connection; the id makes that safe."""
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
        # One timeout for all redirections to the right node.
        try:
            return within(self._timeout_s, self._name, call)
        except (failures.RedisError, failures.RedisClusterException) as error:
            raise translated(error, self._name, self._timeout_s) from error


class _CheckRequest(NamedTuple):
    """A check. Retries with the same id count once."""

    customer: str
    id: bytes


def new_id() -> bytes:
    """Return an id for a check: 48 random bits as 8 characters."""
    return b2a_base64(os.urandom(6), newline=False)


class _CheckScript:
    """Encodes script calls."""

    def __init__(self, rule: Rule, clock: Clock | None, prefix: str) -> None:
        self._settings = (str(rule.reset_interval_us).encode(), rule.reset.value.encode())
        self._clock = clock
        # In a cluster, the text in braces determines the node of a key.
        self._key = (prefix.encode() + b":{", b"}:count")
        self._key_bytes = len(b"".join(self._key))
        # The constant parts of `command` are encoded once.
        begin, end = self._key
        self._before = _packed(b"EVALSHA", _SHA, b"1", more=2 + len(self._settings)) + b"$"
        self._inside = b"\r\n" + begin
        self._after = end + b"\r\n" + _strings(*self._settings)

    def key(self, customer: str) -> bytes:
        begin, end = self._key
        return begin + customer.encode() + end

    def arguments(self, check: _CheckRequest) -> tuple[bytes, ...]:
        if self._clock is None:
            return (*self._settings, check.id)
        return (*self._settings, check.id, str(self._clock.now()).encode())

    def command(self, check: _CheckRequest) -> bytes:
        """Return the call by the script's hash."""
        if self._clock is None:
            name = check.customer.encode()
            size = b"%d" % (len(name) + self._key_bytes)
            return self._before + size + self._inside + name + self._after + _strings(check.id)
        return _packed(b"EVALSHA", _SHA, b"1", self.key(check.customer), *self.arguments(check))

    def whole(self, check: _CheckRequest) -> bytes:
        """Return the call with the script's text, which the server then caches."""
        return _packed(b"EVAL", _SCRIPT, b"1", self.key(check.customer), *self.arguments(check))


def as_redis(url: str) -> str:
    """Convert a URL to one that redis-py accepts."""
    for ours, its in (
        ("redis+cluster", "redis"),
        ("rediss+cluster", "rediss"),
        ("valkey", "redis"),
    ):
        if url.startswith(f"{ours}://"):
            return its + url[len(ours) :]
    return "rediss" + url[len("valkeys") :] if url.startswith("valkeys://") else url


def memory_concerns(name: str, memory: Mapping[str, Any]) -> list[str]:
    """Return warnings about the output of `INFO memory`."""
    policy = str(memory.get("maxmemory_policy", ""))
    if not policy.startswith("allkeys") or not int(memory.get("maxmemory", 0)):
        return []
    return [
        f"{name} evicts any key when its memory is full (maxmemory-policy is {policy}), which "
        "resets counts; set it to noeviction or volatile-ttl"
    ]


def translated(error: Exception, name: str, timeout_s: float) -> StoreError:
    """Convert an error of the driver to a `StoreError`."""
    if isinstance(error, failures.AuthenticationError | failures.NoPermissionError):
        return StoreRefused(f"{name} denies access: {error}; check user, password and ACL")
    if isinstance(error, failures.TimeoutError):
        return StoreUnavailable(f"{name} did not respond within {timeout_s * 1000:.0f} ms")
    return StoreUnavailable(f"{name} is unavailable: {error}")


def _pool(url: str, timeout_s: float) -> ConnectionPool:
    """Return a pool that is used only to make connections."""
    try:
        return ConnectionPool.from_url(
            as_redis(url),
            protocol=2,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
        )
    except ValueError as error:
        raise StoreRefused(f"the URL of the counts is invalid: {error}") from None


def _packed(*parts: bytes, more: int = 0) -> bytes:
    """Encode a command, or its first parts if `more` follow."""
    return b"*%d\r\n" % (len(parts) + more) + _strings(*parts)


def _strings(*parts: bytes) -> bytes:
    return b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)


def _name(connection: dict[str, Any]) -> str:
    """Return the name of the server in messages, without credentials."""
    if "path" in connection:
        return f"Redis at {connection['path']}"
    host, port = connection.get("host", "localhost"), connection.get("port", 6379)
    return f"Redis at {host}:{port}"
