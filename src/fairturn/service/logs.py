"""The access log, and the server's log as JSON lines."""

import json
import logging
from collections.abc import Callable
from typing import NamedTuple, TextIO

from fairturn.clock import microseconds


class AccessLogEntry(NamedTuple):
    """A request and its status. It has neither the query nor headers, which may contain access
    keys, names or metadata."""

    at: int
    method: str
    route: str  # with the names of its parameters, such as /v1/documents/{id}
    status: int
    seconds: float
    address: str
    key: str | None  # the id


def json_lines(stream: TextIO) -> Callable[[AccessLogEntry], None]:
    """Return a function that writes each entry as a line of JSON."""

    def write(served: AccessLogEntry) -> None:
        line = {"event": "served", **served._asdict(), "seconds": round(served.seconds, 6)}
        stream.write(json.dumps(line) + "\n")
        stream.flush()

    return write


class LogFormatter(logging.Formatter):
    """Formats a log record, with its traceback, as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "event": "logged",
            "at": microseconds(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)
