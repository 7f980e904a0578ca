"""What was served, as values; one place turns them into lines."""

import json
from collections.abc import Callable
from typing import NamedTuple, TextIO


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
