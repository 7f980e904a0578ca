"""Statements on their way to the server: those of one round trip in one packet, each prepared once
for its connection.

The driver's own pipeline hands every statement to the network by itself, and makes an object of
many parts for each: a claim of one document has a dozen, and they took longer than the claim.
"""

import re
import select
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import psycopg
from psycopg import abc, pq
from psycopg.adapt import PyFormat, Transformer
from psycopg.errors import error_from_result
from psycopg_pool import ConnectionPool

from fairturn.clock import stopwatch
from fairturn.stores.postgres.adapting import literal
from fairturn.stores.values import Row

Values = Sequence[Any] | dict[str, Any]

_PLACE = re.compile(r"%(?:%|s|\((\w+)\)s)")
_GIVES_ROWS = (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK)
_SYNC = pq.ExecStatus.PIPELINE_SYNC


class Line(psycopg.Connection[Any]):
    """A connection that remembers what was prepared on it."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.prepares = False
        self.prepared: dict[tuple[bytes, tuple[int, ...]], bytes] = {}
        self.pool: ConnectionPool[Line] | None = None  # where it comes from
        self.used_by: object = None  # who has used it last,
        self.given_back_s = 0.0  # and when it gave it back
        self.made_at = stopwatch()

    @cached_property
    def transformer(self) -> abc.Transformer:
        """What makes bytes of values, and values of bytes: not before it has our adapters."""
        return Transformer(self)

    @cached_property
    def input(self) -> select.poll:
        """What waits for the server to say something."""
        waiting = select.poll()
        waiting.register(self.pgconn.socket, select.POLLIN)
        return waiting


class Result:
    """What a statement gives: it is there when the round trip is over."""

    __slots__ = ("_line", "received")

    def __init__(self, line: Line, received: pq.abc.PGresult | None = None) -> None:
        self._line = line
        self.received = received

    @property
    def is_there(self) -> bool:
        return self.received is not None

    def fetchall(self) -> list[Row]:
        assert self.received is not None, "the round trip is not over"
        transformer = self._line.transformer
        transformer.set_pgresult(self.received)
        return transformer.load_rows(0, self.received.ntuples, tuple)

    @property
    def rowcount(self) -> int:
        """How many rows it gave or changed."""
        assert self.received is not None, "the round trip is not over"
        return self.received.command_tuples or 0


# What is expected back: a result, or something that was prepared.
_Expected = Result | tuple[bytes, tuple[int, ...]]


def nothing() -> None:
    """What is done meanwhile if there is nothing to do."""


class NotSynced(psycopg.OperationalError):
    """Something was committed and is perhaps not on the disk: what was to follow it has failed."""


class Afterwards(NamedTuple):
    """A statement that follows what a round trip commits, in a transaction of its own."""

    statement: str
    values: Values
    may_fail: bool


class Pipe:
    """The statements of one round trip. They are sent when it is closed, or before that."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._expected: list[_Expected] = []
        self._later: list[tuple[str, Values, Result]] = []
        self._behind: list[_Expected] = []  # of the round trip before, and not received yet
        line.pgconn.enter_pipeline_mode()

    def add(self, statement: str, values: Values) -> Result:
        """A statement of the round trip."""
        asked = Result(self._line)
        self._send(statement, values, asked, self._expected)
        return asked

    def add_later(self, statement: str, values: Values) -> Result:
        """A statement that follows those of the round trip, and whose rows come with the next one:
        the server executes it while the others are looked at."""
        asked = Result(self._line)
        self._later.append((statement, values, asked))
        return asked

    def _send(
        self, statement: str, values: Values, asked: Result, expected: list[_Expected]
    ) -> None:
        line = self._line
        given = _Dumped(line, statement, values)
        if line.prepares and given.key not in line.prepared:
            name = line.prepared[given.key] = b"fairturn_%d" % len(line.prepared)
            line.pgconn.send_prepare(name, *given.key)
            expected.append(given.key)
        given.send()
        expected.append(asked)

    def send(self) -> None:
        """Send what was added so far: the server is at work on it while more is added."""
        self._line.pgconn.flush()

    def exchange(self) -> None:
        """Send all that was added so far, and wait for what comes back; more may follow."""
        error = self._exchange((), nothing)
        if error is not None:
            raise error

    def close(
        self,
        afterwards: Sequence[Afterwards] = (),
        meanwhile: Callable[[], None] = nothing,
    ) -> bool:
        """Send all, and wait for what comes back; the first error is raised. What is to be executed
        afterwards goes along, each in a transaction of its own; `meanwhile` is called when all was
        sent. Whether something is to be received with another round trip."""
        try:
            error = self._exchange(afterwards, meanwhile)
            if error is not None and self._behind:
                behind, self._behind = self._behind, []
                self._receive(behind)  # the transaction has failed: nothing of it counts
            if not self._behind:
                self._line.pgconn.exit_pipeline_mode()
        except BaseException:
            self.drop()
            raise
        if error is not None:
            raise error
        return bool(self._behind)

    def drop(self) -> None:
        """Nobody knows what the server has heard of it: the connection cannot be used any more."""
        self._line.close()

    def _exchange(
        self, afterwards: Sequence[Afterwards], meanwhile: Callable[[], None]
    ) -> psycopg.Error | None:
        pgconn = self._line.pgconn
        pgconn.pipeline_sync()
        expected, self._expected = self._expected, []
        behind, self._behind = self._behind, []
        for statement, values, asked in self._later:
            self._send(statement, values, asked, self._behind)
        if self._later:
            self._later = []
            pgconn.pipeline_sync()
        following: list[tuple[list[_Expected], bool]] = []
        for statement, values, may_fail in afterwards:
            following.append(([], may_fail))
            self._send(statement, values, Result(self._line), following[-1][0])
            pgconn.pipeline_sync()
        _flush(pgconn)
        error = self._receive(behind) if behind else None
        if error is None:
            meanwhile()
        failed = self._receive(expected)
        error = error or failed
        for also_expected, may_fail in following:
            failed = self._receive(also_expected)
            if failed is not None and not may_fail:
                error = error or NotSynced(str(failed))
        return error

    def _receive(self, all_expected: list[_Expected]) -> psycopg.Error | None:
        """What comes back up to the end of a transaction; and the first error in it."""
        line = self._line
        error: psycopg.Error | None = None
        for expected in all_expected:
            result = _one_result(line)
            if result.status in _GIVES_ROWS:
                if isinstance(expected, Result):
                    expected.received = result
                continue
            if not isinstance(expected, Result):
                line.prepared.pop(expected)
            if result.status == pq.ExecStatus.FATAL_ERROR and error is None:
                error = _error(line.pgconn, result)
        # The end of it: without a COMMIT among the statements it is there that they are committed.
        while (last := _next_result(line) or _next_result(line)) is not None:
            if last.status == _SYNC:
                return error
            failed = _error(line.pgconn, last)
            error = error or failed
        raise psycopg.OperationalError("the server has said nothing more")


def ask_alone(line: Line, statement: str, values: Values) -> Result:
    """One statement as a round trip of its own: once it is prepared it needs no pipeline."""
    given = _Dumped(line, statement, values)
    if line.prepares and given.key not in line.prepared:
        pipe = Pipe(line)
        asked = pipe.add(statement, values)
        pipe.close()
        return asked
    try:
        given.send()
        _flush(line.pgconn)
        result = _one_result(line)
        error = None if result.status in _GIVES_ROWS else _error(line.pgconn, result)
    except BaseException:
        line.close()  # nobody knows what the server has heard
        raise
    if error is not None:
        raise error
    return Result(line, result)


class _Dumped:
    """A statement with its values as they go to the server."""

    __slots__ = ("_formats", "_line", "_values", "key")

    def __init__(self, line: Line, statement: str, values: Values) -> None:
        text, names = _translated(statement)
        given = [values[name] for name in names] if isinstance(values, dict) else values
        if list in map(type, given):
            given = [literal(value) if type(value) is list else value for value in given]
        transformer = line.transformer
        self._line = line
        self._values = transformer.dump_sequence(given, [PyFormat.AUTO] * len(given))
        self._formats = transformer.formats
        self.key = (text, transformer.types or ())  # what is prepared

    def send(self) -> None:
        pgconn, line = self._line.pgconn, self._line
        if line.prepares:
            name = line.prepared[self.key]
            pgconn.send_query_prepared(name, self._values, self._formats, pq.Format.BINARY)
        else:
            text, types = self.key
            pgconn.send_query_params(text, self._values, types, self._formats, pq.Format.BINARY)


def _flush(pgconn: pq.abc.PGconn) -> None:
    """Send all. The server may want to be heard before it listens on."""
    if not pgconn.flush():
        return
    waiting = select.poll()
    waiting.register(pgconn.socket, select.POLLIN | select.POLLOUT)
    while pgconn.flush():
        ((_, ready),) = waiting.poll()
        if ready != select.POLLOUT:
            pgconn.consume_input()


def _one_result(line: Line) -> pq.abc.PGresult:
    """The result of a statement; or why it could not be committed, which follows it."""
    pgconn = line.pgconn
    result = None
    while True:
        if pgconn.is_busy():
            _wait_for_result(line)
        following = pgconn.get_result()
        if following is None:
            assert result is not None
            return result
        result = following


def _next_result(line: Line) -> pq.abc.PGresult | None:
    _wait_for_result(line)
    return line.pgconn.get_result()


def _wait_for_result(line: Line) -> None:
    pgconn = line.pgconn
    while pgconn.is_busy():
        line.input.poll()
        pgconn.consume_input()


def _error(pgconn: pq.abc.PGconn, result: pq.abc.PGresult) -> psycopg.Error:
    """What the server has refused; raised at once where the connection is lost with it."""
    error = error_from_result(result)
    if pgconn.status == pq.ConnStatus.BAD:
        raise error if error.sqlstate else psycopg.OperationalError(str(error))
    return error


@lru_cache(maxsize=512)
def _translated(statement: str) -> tuple[bytes, tuple[str, ...]]:
    """A statement with the server's places for values, and their names where they have any."""
    names: list[str] = []
    places = 0

    def place(match: re.Match[str]) -> str:
        nonlocal places
        if match[0] == "%%":
            return "%"
        if match[1] is None:
            places += 1
            return f"${places}"
        if match[1] not in names:
            names.append(match[1])
        return f"${names.index(match[1]) + 1}"

    return _PLACE.sub(place, statement).encode(), tuple(names)
