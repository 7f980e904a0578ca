"""Submissions from JSON Lines."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from fairturn.cli.batches import BatchEntry, SubmissionRejected
from fairturn.cli.options import timestamp_of
from fairturn.model import Submission, SubmissionFields
from fairturn.wire import SUBMISSION, TIMESTAMP

# A payload of the maximum size with every character escaped to six.
LINE_BYTES_MAX = 128 * 1_048_576
# A line names a file instead of its content.
FIELDS = ("customer", *(name for name in SubmissionFields.__annotations__ if name != "content"))
_TIMESTAMPS = tuple(field.name for field in SUBMISSION if field.type is TIMESTAMP)
_READ_BYTES = 1_048_576


def groups_of(stream: BinaryIO, name: str, customer: str | None) -> Iterator[list[BatchEntry]]:
    """Yield the documents in the lines of a stream, grouped as they arrive, so that a slow writer
    to a pipe gets its receipts at once. `customer` is the default for lines without one.

    Raise `SubmissionRejected` for an invalid line, after yielding the lines before it.
    """
    number = 0
    for lines in _arriving(stream, name):
        group: list[BatchEntry] = []
        for line in lines:
            number += 1
            if not line.strip():
                continue
            where = f"{name}, line {number}"
            try:
                group.append(_entry(where, line, customer))
            except ValueError as error:
                yield group
                raise SubmissionRejected(where, error) from error
        yield group


def _arriving(stream: BinaryIO, name: str) -> Iterator[list[bytes]]:
    """Yield the complete lines of each read."""
    parts: list[bytes] = []
    size_bytes = 0
    read = getattr(stream, "read1", stream.read)  # read1 does not wait for a full buffer
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
            raise SubmissionRejected(name, error)
    if any(parts):
        yield [b"".join(parts)]


def _entry(where: str, line: bytes, customer: str | None) -> BatchEntry:
    try:
        value = json.loads(line)
    except UnicodeDecodeError:
        raise ValueError("the line is not valid UTF-8") from None
    except RecursionError:
        raise ValueError("the line is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"the line is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError('the line is not a JSON object, such as {"customer":"acme","payload":1}')
    unknown = sorted(value.keys() - set(FIELDS))
    if unknown:
        raise ValueError(f"{unknown[0]!r} is not a field; the fields are: {', '.join(FIELDS)}")
    if customer is not None:
        value.setdefault("customer", customer)
    if "customer" not in value:
        raise ValueError("the line has no customer; add one, or pass CUSTOMER")
    for field in _TIMESTAMPS:
        if isinstance(value.get(field), str):
            value[field] = timestamp_of(value[field])
    return BatchEntry(where, Submission(**value), len(line) + _size(value.get("file")))


def _size(file: Any) -> int:
    """Return the size of a file; 0 on an error, which reading the file will report."""
    try:
        return Path(file).stat().st_size
    except (OSError, TypeError, ValueError):
        return 0
