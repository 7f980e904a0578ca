"""Counts in Redis or Valkey: one key per customer, one script call per check.

redis-py opens the connections: URLs, authentication, TLS. The only command is then written to the
socket directly, because redis-py's overhead per command (pool, retries, callbacks, parser) exceeds
the time of the server.
"""

import os
from binascii import b2a_base64
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from hashlib import sha1
from importlib import resources
from typing import Any, TypeVar

import redis
from redis import exceptions as failures
from redis.backoff import NoBackoff
from redis.connection import ConnectionPool
from redis.retry import Retry

from fairturn.clock import Clock
from fairturn.errors import StoreError, StoreRefused, StoreUnavailable
from fairturn.integrations.counts import TIMEOUT_S, Answer, within
from fairturn.priority import Rule

PREFIX = "fairturn"
IDLE_CONNECTIONS_MAX = 64
LINE_BYTES_MAX = 4_096

T = TypeVar("T")
_SCRIPT = (resources.files("fairturn.integrations.counts") / "check.lua").read_bytes()
_SHA = sha1(_SCRIPT, usedforsecurity=False).hexdigest().encode()
# The script by its hash and by its text, which the server then caches; both take one key.
_BY_HASH, _BY_TEXT = (b"EVALSHA", _SHA, b"1"), (b"EVAL", _SCRIPT, b"1")


class _RedisConnection:
    """A connection for one command at a time, with a reply of one line."""

    def __init__(self, connection: Any) -> None:
        connection.connect()
        self._connection = connection
        self._socket = connection._sock  # there is no public attribute

    def send(self, *command: bytes) -> None:
        packed = b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in command)
        try:
            self._socket.sendall(b"*%d\r\n%b" % (len(command), packed))
        except OSError as error:
            raise _failure(error) from error

    def read(self) -> int:
        try:
            line: bytes = self._socket.recv(LINE_BYTES_MAX)
            while line[-2:] != b"\r\n":
                more = self._socket.recv(LINE_BYTES_MAX)
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


_KINDS: dict[str, type[failures.ResponseError]] = {
    "NOSCRIPT": failures.NoScriptError,
    "NOPERM": failures.NoPermissionError,
}


def _failure(error: OSError) -> failures.RedisError:
    if isinstance(error, TimeoutError):
        return failures.TimeoutError(str(error))
    return failures.ConnectionError(str(error))


class _ScriptedCounts:
    """Base of the counts on a server and in a cluster: the arguments of the script, and the
    timeout."""

    def __init__(
        self,
        url: str,
        *,
        rule: Rule | None = None,
        clock: Clock | None = None,
        prefix: str = PREFIX,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        rule = rule or Rule()
        self._url = as_redis(url)
        self._settings = (str(rule.reset_interval_us).encode(), rule.reset.value.encode())
        self._clock = clock
        self._prefix = prefix.encode()
        self._timeout_s = timeout_s
        self._pool = _pool(self._url, timeout_s)
        self._name = _name(self._pool.connection_kwargs)
        # Of `RedisCounts`; the driver of a cluster has a pool of its own.
        self._idle: deque[_RedisConnection] = deque(maxlen=IDLE_CONNECTIONS_MAX)
        self._pid = os.getpid()

    def _check(self, customer: str) -> tuple[bytes, ...]:
        """Return key and arguments of the script for one check. They contain a random id, so that
        a check that is repeated counts once."""
        # In a cluster, the text in braces determines the node of a key.
        key = b"%b:{%b}:count" % (self._prefix, customer.encode())
        id = b2a_base64(os.urandom(6), newline=False)  # 8 characters
        now = () if self._clock is None else (b"%d" % self._clock.now(),)
        return (key, *self._settings, id, *now)

    def _bounded(self, call: Callable[[], T]) -> T:
        """Call the driver, with one timeout for all of its steps."""
        try:
            return within(self._timeout_s, self._name, call)
        except (failures.RedisError, failures.RedisClusterException) as error:
            raise self._translated(error) from error

    def _translated(self, error: Exception) -> StoreError:
        if isinstance(error, failures.AuthenticationError | failures.NoPermissionError):
            return StoreRefused(
                f"{self._name} denies access: {error}; check user, password and ACL"
            )
        if isinstance(error, failures.TimeoutError):
            limit_ms = self._timeout_s * 1000
            return StoreUnavailable(f"{self._name} did not respond within {limit_ms:.0f} ms")
        return StoreUnavailable(f"{self._name} is unavailable: {error}")


class RedisCounts(_ScriptedCounts):
    """Counts at a URL such as `redis://localhost:6379/0`, or with the scheme `rediss`, `valkey`,
    `valkeys` or `unix`.

    Applications that share a server but not their customers need different prefixes. The server's
    clock is used unless one is given.
    """

    def begin(self, customer: str) -> Answer:
        if self._pid != os.getpid():
            self._idle.clear()  # after a fork they belong to the parent process
            self._pid = os.getpid()
        check = self._check(customer)
        try:
            connection = self._idle.pop()
        except IndexError:
            return self._begin_on_new_connection(check)
        try:
            connection.send(*_BY_HASH, *check)
        except failures.RedisError:
            connection.close()
            return self._begin_on_new_connection(check)
        return partial(self._answer, connection, check)

    def concerns(self) -> list[str]:
        client = redis.Redis(connection_pool=self._pool)
        return self._bounded(lambda: _memory_concerns(self._name, client.info("memory")))

    def close(self) -> None:
        with suppress(IndexError):  # several threads may close at once
            while True:
                self._idle.pop().close()

    def _answer(self, connection: _RedisConnection, check: tuple[bytes, ...]) -> int:
        try:
            return self._read(connection, check)
        except failures.ConnectionError:
            # The server was restarted since the last check on this connection, or the reply was
            # lost: a retry with the same id counts once. Other connections are lost as well.
            self.close()
            return self._begin_on_new_connection(check)()
        except failures.RedisError as error:
            raise self._translated(error) from error

    def _begin_on_new_connection(self, check: tuple[bytes, ...]) -> Answer:
        def run() -> int:
            connection = _RedisConnection(self._pool.make_connection())
            connection.send(*_BY_HASH, *check)
            return self._read(connection, check)

        count = self._bounded(run)
        return lambda: count

    def _read(self, connection: _RedisConnection, check: tuple[bytes, ...]) -> int:
        """Read the reply of the script and release the connection."""
        try:
            try:
                count = connection.read()
            except failures.NoScriptError:
                # The server was restarted, or its script cache flushed.
                connection.send(*_BY_TEXT, *check)
                count = connection.read()
        except BaseException:
            connection.close()  # otherwise the next check would read this reply
            raise
        self._idle.append(connection)
        return count


class RedisClusterCounts(_ScriptedCounts):
    """Counts in a cluster: `redis+cluster://host:port`, with any of its nodes. Each check has one
    key, and so runs on one node."""

    _client: redis.RedisCluster | None = None

    def begin(self, customer: str) -> Answer:
        count = self._bounded(partial(self._run, self._check(customer)))
        return lambda: count

    def concerns(self) -> list[str]:
        def call() -> list[str]:
            memories: Any = self._cluster().info("memory", target_nodes="primaries")
            return [
                concern
                for node, facts in memories.items()
                for concern in _memory_concerns(node, facts)
            ]

        return self._bounded(call)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _run(self, check: tuple[bytes, ...]) -> int:
        """Run the script. The driver retries after a lost connection; the id makes that safe."""
        cluster = self._cluster()
        try:
            return int(cluster.evalsha(_SHA.decode(), 1, *check))
        except failures.NoScriptError:
            return int(cluster.eval(_SCRIPT.decode(), 1, *check))

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


def as_redis(url: str) -> str:
    """Convert a URL to one that redis-py accepts."""
    scheme, separator, rest = url.partition("://")
    its = scheme.removesuffix("+cluster").replace("valkey", "redis")
    return f"{its}{separator}{rest}"


def _memory_concerns(name: str, memory: Mapping[str, Any]) -> list[str]:
    """Return warnings about the output of `INFO memory`."""
    policy = str(memory.get("maxmemory_policy", ""))
    if not policy.startswith("allkeys") or not int(memory.get("maxmemory", 0)):
        return []
    return [
        f"{name} evicts any key when its memory is full (maxmemory-policy is {policy}), which "
        "resets counts; set it to noeviction or volatile-ttl"
    ]


def _pool(url: str, timeout_s: float) -> ConnectionPool:
    """Return a pool that is used only to make connections."""
    try:
        return ConnectionPool.from_url(
            url,
            protocol=2,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
        )
    except ValueError as error:
        raise StoreRefused(f"the URL of the counts is invalid: {error}") from None


def _name(connection: dict[str, Any]) -> str:
    """Return the name of the server in messages, without credentials."""
    if "path" in connection:
        return f"Redis at {connection['path']}"
    host, port = connection.get("host", "localhost"), connection.get("port", 6379)
    return f"Redis at {host}:{port}"
