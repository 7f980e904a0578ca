"""What was served, as values; one place turns them into lines."""

import json
import logging
from collections.abc import Callable
from typing import NamedTuple, TextIO

from fairturn.clock import microseconds


class Served(NamedTuple):
    """A request that was answered. Neither the query nor a header is part of it: a key, a name or
    a metadata field has no place in a log."""

    at: int
    method: str
    route: str  # with the names of its parameters, such as /v1/documents/{id}
    status: int
    seconds: float
    address: str
    key: str | None  # the id


def json_lines(stream: TextIO) -> Callable[[Served], None]:
    """A function that writes each as a line of JSON. Control characters are escaped by JSON."""

    def write(served: Served) -> None:
        line = {"event": "served", **served._asdict(), "seconds": round(served.seconds, 6)}
        stream.write(json.dumps(line) + "\n")
        stream.flush()

    return write


class JsonFormatter(logging.Formatter):
    """What the server itself has to say, such as an error of ours with its traceback, as one line
    of JSON like the rest."""

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
