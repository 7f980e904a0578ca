"""Statements on their way to the server: those of one round trip in one packet, each prepared once
for its connection.

The driver's own pipeline hands every statement to the network by itself, and makes an object of
many parts for each: a claim of one document has a dozen, and they took longer than the claim.
"""

import re
import select
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import psycopg
from psycopg import abc, pq
from psycopg.adapt import PyFormat, Transformer
from psycopg.errors import error_from_result

from fairturn.stores.values import Row

Values = Sequence[Any] | Mapping[str, Any]

_PLACE = re.compile(r"%(?:%|s|\((\w+)\)s)")
_GIVES_ROWS = (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK)


class Line(psycopg.Connection[Any]):
    """A connection that remembers what was prepared on it."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.prepares = False
        self.prepared: dict[tuple[bytes, tuple[int, ...]], bytes] = {}
        self.transformer: abc.Transformer | None = None


class Result:
    """What a statement gives: it is there when the round trip is over."""

    __slots__ = ("_line", "_result")

    def __init__(self, line: Line) -> None:
        self._line = line
        self._result: pq.abc.PGresult | None = None

    def receive(self, result: pq.abc.PGresult) -> None:
        self._result = result

    def fetchall(self) -> list[Row]:
        assert self._result is not None, "the round trip is not over"
        transformer = _transformer(self._line)
        transformer.set_pgresult(self._result)
        return transformer.load_rows(0, self._result.ntuples, tuple)

    @property
    def rowcount(self) -> int:
        """How many rows it gave or changed."""
        assert self._result is not None, "the round trip is not over"
        return self._result.command_tuples or 0


class Pipe:
    """The statements of one round trip. They are sent when it is closed."""

    def __init__(self, line: Line) -> None:
        self._line = line
        # What is expected back, in order: a result, or something that was prepared.
        self._expected: list[Result | tuple[bytes, tuple[int, ...]]] = []
        line.pgconn.enter_pipeline_mode()

    def add(self, statement: str, values: Values) -> Result:
        line, pgconn = self._line, self._line.pgconn
        text, names = _translated(statement)
        given = [values[name] for name in names] if isinstance(values, Mapping) else values
        transformer = _transformer(line)
        dumped = transformer.dump_sequence(given, [PyFormat.AUTO] * len(given))
        types, formats = transformer.types or (), transformer.formats
        asked = Result(line)
        if not line.prepares:
            pgconn.send_query_params(text, dumped, types, formats, pq.Format.BINARY)
        else:
            key = (text, types)
            name = line.prepared.get(key)
            if name is None:
                name = b"fairturn_%d" % len(line.prepared)
                line.prepared[key] = name
                pgconn.send_prepare(name, text, types)
                self._expected.append(key)
            pgconn.send_query_prepared(name, dumped, formats, pq.Format.BINARY)
        self._expected.append(asked)
        return asked

    def close(self) -> None:
        """Send all, and wait for what comes back; the first error is raised."""
        try:
            error = self._exchange()
        except BaseException:
            self.drop()
            raise
        if error is not None:
            raise error

    def drop(self) -> None:
        """Nobody knows what the server has heard of it: the connection cannot be used any more."""
        self._line.close()

    def _exchange(self) -> psycopg.Error | None:
        pgconn = self._line.pgconn
        pgconn.pipeline_sync()
        waiting = select.poll()
        waiting.register(pgconn.socket, select.POLLIN | select.POLLOUT)
        while pgconn.flush():
            ((_, ready),) = waiting.poll()
            if ready != select.POLLOUT:
                pgconn.consume_input()
        waiting.modify(pgconn.socket, select.POLLIN)
        error: psycopg.Error | None = None
        for expected in self._expected:
            result = _next_result(pgconn, waiting)
            assert result is not None
            while _next_result(pgconn, waiting) is not None:
                pass
            if result.status in _GIVES_ROWS:
                if isinstance(expected, Result):
                    expected.receive(result)
                continue
            if not isinstance(expected, Result):
                self._line.prepared.pop(expected)
            if result.status == pq.ExecStatus.FATAL_ERROR and error is None:
                error = error_from_result(result)
                if pgconn.status == pq.ConnStatus.BAD:
                    raise error if error.sqlstate else psycopg.OperationalError(str(error))
        _next_result(pgconn, waiting)  # the end of the pipeline
        pgconn.exit_pipeline_mode()
        return error


def _next_result(pgconn: pq.abc.PGconn, waiting: select.poll) -> pq.abc.PGresult | None:
    while pgconn.is_busy():
        waiting.poll()
        pgconn.consume_input()
    return pgconn.get_result()


def _transformer(line: Line) -> abc.Transformer:
    if line.transformer is None:
        line.transformer = Transformer(line)
    return line.transformer


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
