"""Submissions as requests: in which form each is sent, and its bytes piece by piece.

What is wrong with a submission is found here by the queue's own checks, before anything is sent, so
that it is told in the same words. Nothing larger than a batch is ever in memory.
"""

import base64
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import urlencode

from fairturn.client.exchange import Ask, Upload
from fairturn.client.problems import Answer
from fairturn.client.values import receipt_of
from fairturn.model import (
    CUSTOMER_BYTES_MAX,
    PAYLOAD_BYTES_MAX,
    SUBMIT_DOCUMENTS_MAX,
    ContentRef,
    Receipt,
    Submission,
)
from fairturn.scheduling.flows import COST_ONE
from fairturn.validation import text
from fairturn.validation.submission import Described, describe, source_of, to_json
from fairturn.wire import (
    BATCH_BYTES_MAX,
    BINARY,
    IDEMPOTENCY_KEY,
    JSON,
    JSON_BYTES_MAX,
    LINES,
    REPEATED,
)

PIECE_BYTES = 262_144
# What is longer than this does not belong into the first line of a request.
_QUERY_BYTES_MAX = 4_096

Progress = Callable[[int, int | None], None]  # hears how many bytes are sent, and of how many
NewName = Callable[[], str]  # 32 random characters that nothing else has


class Prepared(NamedTuple):
    """A request with documents, and what belongs to it."""

    ask: Ask
    own_keys: tuple[bool, ...]  # of each document: whether its key was made here
    file: BinaryIO | None = None  # to be closed when it was sent

    def receipts(self, answer: Answer) -> list[Receipt]:
        """What the answer says. A key that was made here is repeated only by this client."""
        value = answer.json
        if "receipts" not in value:
            value["repeated"] = REPEATED.lower() in answer.headers
            value = {"receipts": [value]}
        answered = zip(value["receipts"], self.own_keys, strict=True)
        return [receipt_of(each, repeated=each["repeated"] and not own) for each, own in answered]

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


class _Checked(NamedTuple):
    """A submission that was found to be right."""

    customer: str | None  # None: the key says it
    described: Described
    key: str
    own_key: bool


def prepare(
    s: Submission, customer: str | None, progress: Progress | None, new_name: NewName
) -> Prepared:
    """One document: whatever its size, never more than a piece of it is in memory."""
    _check_customer(customer)
    if s.content is None and s.file is None and s.written is None:
        body = to_json(s.payload, "payload", PAYLOAD_BYTES_MAX).encode()
        return _with_payload(_check(s, customer, new_name), body)
    source = _source(s)
    file = source if s.file is not None and not isinstance(source, bytes) else None
    try:
        checked = _check(s, customer, new_name)
        upload, sha256 = _upload(source, progress or (lambda sent, total: None))
        return _with_content(checked, upload, sha256, new_name)._replace(file=file)
    except BaseException:
        if file is not None:
            file.close()
        raise


def prepare_many(
    submissions: Iterable[Submission],
    customer_of: Callable[[str | None], str | None],
    new_name: NewName,
) -> Prepared:
    """Many documents in one request, which are stored together or not at all."""
    lines: list[bytes] = []
    own_keys: list[bool] = []
    size_bytes = 0
    for n, submission in enumerate(submissions):
        if n == SUBMIT_DOCUMENTS_MAX:
            raise ValueError(f"at most {SUBMIT_DOCUMENTS_MAX:,} documents are accepted in one call")
        try:
            if not isinstance(submission, Submission):
                raise TypeError(f"{submission!r:.100} is not a Submission")
            customer = _check_customer(customer_of(submission.customer))
            carried = _carried(submission, BATCH_BYTES_MAX - size_bytes)
            checked = _check(submission, customer, new_name)
            line = _line(checked, carried)
        except TypeError as error:
            raise TypeError(f"submission {n}: {error}") from error
        except ValueError as error:
            raise ValueError(f"submission {n}: {error}") from error
        lines.append(line)
        own_keys.append(checked.own_key)
        size_bytes += len(line)
        if size_bytes > BATCH_BYTES_MAX:
            raise ValueError(_too_much(n))
    return Prepared(_lines(lines), tuple(own_keys))


def _too_much(n: int) -> str:
    return (
        f"submission {n}: over HTTP one call takes {BATCH_BYTES_MAX:,} bytes; submit fewer in one "
        "call, and large documents one by one"
    )


def _check_customer(customer: str | None) -> str | None:
    return None if customer is None else text.identity(customer, "customer", CUSTOMER_BYTES_MAX)


def _check(s: Submission, customer: str | None, new_name: NewName) -> _Checked:
    """A submission without an idempotency key gets one: sent twice, it is stored once."""
    described = describe(s)
    key = described.key or f"client-{new_name()}"
    return _Checked(customer, described, key, described.key is None)


def _source(s: Submission) -> bytes | BinaryIO:
    source = source_of(s)
    if isinstance(source, ContentRef):
        raise ValueError("written is a content beside the queue itself; give content or file")
    return source


# ── The forms of a request ───────────────────────────────────────────────────────────────────────


def _with_payload(checked: _Checked, body: bytes) -> Prepared:
    fields = _fields(checked)
    if len(body) > JSON_BYTES_MAX or not _fit(fields, checked.key):
        return Prepared(_lines([_line(checked, ("payload", body))]), (checked.own_key,))
    ask = Ask(
        "POST",
        "/v1/documents",
        query=tuple(fields.items()),
        headers={"Content-Type": JSON, IDEMPOTENCY_KEY: checked.key},
        body=body,
        said=_said(checked),
    )
    return Prepared(ask, (checked.own_key,))


def _with_content(
    checked: _Checked, upload: Upload, sha256: str | None, new_name: NewName
) -> Prepared:
    fields = _fields(checked)
    if sha256 is not None:
        fields["sha256"] = sha256
    headers = {"Content-Type": BINARY, IDEMPOTENCY_KEY: checked.key}
    if not _fit(fields, checked.key):
        boundary = f"fairturn-{new_name()}"
        upload = _form({**fields, "key": checked.key}, upload, boundary)
        headers = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
        fields = {}
    ask = Ask(
        "POST",
        "/v1/documents",
        query=tuple(fields.items()),
        headers=headers,
        body=upload,
        said=_said(checked),
    )
    return Prepared(ask, (checked.own_key,))


def _fields(checked: _Checked) -> dict[str, str]:
    name, metadata, _, cost, due_at, parent = checked.described
    given = {
        "customer": checked.customer,
        "name": name,
        "metadata": metadata,
        "cost": None if cost is None else repr(cost / COST_ONE),
        "due_at": None if due_at is None else str(due_at),
        "parent": parent,
    }
    return {field: value for field, value in given.items() if value is not None}


def _fit(fields: dict[str, str], key: str) -> bool:
    """Whether the fields can go into the query, and the key into a header: there, spaces at its
    ends would be lost, and other characters than those of ASCII changed."""
    plain = key.isascii() and key.isprintable() and key == key.strip()
    return plain and len(urlencode(fields)) <= _QUERY_BYTES_MAX


def _said(checked: _Checked) -> dict[str, str]:
    """What the queue itself would say."""
    described = checked.described
    whose = "the customer" if checked.customer is None else f"customer {checked.customer!r}"
    return {
        "key_reused": f"the idempotency key {checked.key!r} of {whose} belongs to another document,"
        " which has another content, metadata, cost or due time",
        "parent_unknown": f"{whose} has no document {described.parent!r} to be the parent",
    }


def _lines(lines: list[bytes]) -> Ask:
    return Ask(
        "POST", "/v1/documents/batch", headers={"Content-Type": LINES}, body=b"\n".join(lines)
    )


def _carried(s: Submission, size_bytes_max: int) -> tuple[str, bytes]:
    """What a line carries: the name of the field, and its value as JSON."""
    if s.content is None and s.file is None and s.written is None:
        return "payload", to_json(s.payload, "payload", PAYLOAD_BYTES_MAX).encode()
    source = _source(s)
    if isinstance(source, bytes):
        content = source
    else:
        try:
            content = b"".join(_read(source, max(0, size_bytes_max) + 1))
        finally:
            if s.file is not None:
                source.close()
    return "content", b'"' + base64.b64encode(content) + b'"'


def _line(checked: _Checked, carried: tuple[str, bytes]) -> bytes:
    name, metadata, _, cost, due_at, parent = checked.described
    given: dict[str, Any] = {
        "customer": checked.customer,
        "name": name,
        "metadata": None if metadata is None else json.loads(metadata),
        "key": checked.key,
        "cost": None if cost is None else cost / COST_ONE,
        "due_at": due_at,
        "parent": parent,
    }
    fields = {field: value for field, value in given.items() if value is not None}
    word, value = carried
    head = json.dumps(fields, separators=(",", ":"))[:-1].encode()
    return b'%s,"%s":%s}' % (head, word.encode(), value)


# ── Bytes ────────────────────────────────────────────────────────────────────────────────────────


def _upload(source: bytes | BinaryIO, progress: Progress) -> tuple[Upload, str | None]:
    """The bytes of a content, and their checksum if they can be read before they are sent."""
    if isinstance(source, bytes):
        view = memoryview(source)

        def of_bytes() -> Iterator[bytes]:
            parts = range(0, len(view), PIECE_BYTES)
            return (bytes(view[start : start + PIECE_BYTES]) for start in parts)

        pieces = _told(of_bytes, len(view), progress)
        return Upload(pieces, len(view)), hashlib.sha256(view).hexdigest()
    if not source.seekable():
        return Upload(_told(lambda: _read(source), None, progress), None, again=False), None
    start, size_bytes, digest = source.tell(), 0, hashlib.sha256()
    for piece in _read(source):
        size_bytes += len(piece)
        digest.update(piece)

    def of_file() -> Iterator[bytes]:
        source.seek(start)
        return _read(source, size_bytes)

    return Upload(_told(of_file, size_bytes, progress), size_bytes), digest.hexdigest()


def _read(source: BinaryIO, size_bytes_max: int | None = None) -> Iterator[bytes]:
    left = size_bytes_max
    while left is None or left > 0:
        piece = source.read(PIECE_BYTES if left is None else min(left, PIECE_BYTES))
        if not piece:
            return
        if not isinstance(piece, bytes):
            raise TypeError(
                f"the content gives {type(piece).__name__}; it must be opened as binary"
            )
        left = None if left is None else left - len(piece)
        yield piece


def _told(
    pieces: Callable[[], Iterator[bytes]], total: int | None, progress: Progress
) -> Callable[[], Iterator[bytes]]:
    """The same, and `progress` hears of each piece that was taken."""

    def told() -> Iterator[bytes]:
        sent = 0
        for piece in pieces():
            yield piece
            sent += len(piece)
            progress(sent, total)
        if total is not None and sent != total:
            raise ValueError(
                f"the content changed while it was sent: it had {total:,} bytes, then {sent:,}"
            )

    return told


def _form(fields: dict[str, str], upload: Upload, boundary: str) -> Upload:
    """The same bytes as the file of a form, with fields that fit nowhere else."""
    parts = [
        f'--{boundary}\r\nContent-Disposition: form-data; name="{field}"\r\n\r\n{value}\r\n'
        for field, value in fields.items()
    ]
    parts.append(
        f'--{boundary}\r\nContent-Disposition: form-data; name="file"\r\n'
        f"Content-Type: {BINARY}\r\n\r\n"
    )
    head, tail = "".join(parts).encode(), f"\r\n--{boundary}--\r\n".encode()

    def pieces() -> Iterator[bytes]:
        yield head
        yield from upload.pieces()
        yield tail

    size_bytes = upload.size_bytes
    whole = None if size_bytes is None else len(head) + size_bytes + len(tail)
    return Upload(pieces, whole, upload.again)
