"""Lines of JSON that describe documents, as they arrive."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from fairturn.cli.batches import Given, Stopped
from fairturn.cli.options import moment_of
from fairturn.model import Submission

# A payload of the largest size, escaped to six characters for each.
LINE_BYTES_MAX = 128 * 1_048_576
FIELDS = ("customer", "payload", "file", "name", "metadata", "key", "cost", "due_at", "parent")
_READ_BYTES = 1_048_576


def groups_of(stream: BinaryIO, name: str, customer: str | None) -> Iterator[list[Given]]:
    """The documents in the lines of a stream, grouped as they arrive: who writes slowly into a pipe
    gets each answer at once. `customer` is for lines that name none.

    A line that is wrong raises `Stopped`, after the lines before it were handed out.
    """
    number = 0
    for lines in _arriving(stream, name):
        group: list[Given] = []
        for line in lines:
            number += 1
            if not line.strip():
                continue
            where = f"{name}, line {number}"
            try:
                group.append(_given(where, line, customer))
            except ValueError as error:
                yield group
                raise Stopped(where, error) from error
        yield group


def _arriving(stream: BinaryIO, name: str) -> Iterator[list[bytes]]:
    """Whole lines, as many as one read gives."""
    parts: list[bytes] = []
    size_bytes = 0
    read = getattr(stream, "read1", stream.read)  # what is there, without waiting for more
    while chunk := read(_READ_BYTES):
        *lines, rest = chunk.split(b"\n")
        if lines:
            lines[0] = b"".join([*parts, lines[0]])
            parts, size_bytes = [], 0
            yield lines
        parts.append(rest)
        size_bytes += len(rest)
        if size_bytes > LINE_BYTES_MAX:
            error = ValueError(f"a line has more than {LINE_BYTES_MAX:,} bytes")
            raise Stopped(name, error)
    if any(parts):
        yield [b"".join(parts)]


def _given(where: str, line: bytes, customer: str | None) -> Given:
    try:
        value = json.loads(line)
    except UnicodeDecodeError:
        raise ValueError("the line is not a text in UTF-8") from None
    except RecursionError:
        raise ValueError("the line has too many lists and objects in each other") from None
    except ValueError as error:
        raise ValueError(f"the line is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError('the line is not an object, such as {"customer":"acme","payload":1}')
    unknown = sorted(value.keys() - set(FIELDS))
    if unknown:
        raise ValueError(f"{unknown[0]!r} is not a field; they are: {', '.join(FIELDS)}")
    if customer is not None:
        value.setdefault("customer", customer)
    if "customer" not in value:
        raise ValueError("the line has no customer, and none was given as CUSTOMER")
    if isinstance(value.get("due_at"), str):
        value["due_at"] = moment_of(value["due_at"])
    return Given(where, Submission(**value), len(line) + _size(value.get("file")))


def _size(file: Any) -> int:
    """The size of a file, if it can be told; what is wrong with it is told when it is read."""
    try:
        return Path(file).stat().st_size
    except (OSError, TypeError, ValueError):
        return 0
