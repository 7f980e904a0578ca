"""Submissions as requests.

Submissions are validated here, by the queue's own checks and with its messages, before anything is
sent. Content is streamed; only a batch is held in memory.
"""

import base64
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from itertools import chain, islice
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import urlencode

from fairturn.client.request import HttpRequest, Upload, query_of
from fairturn.client.values import receipt_of
from fairturn.model import (
    CUSTOMER_BYTES_MAX,
    PAYLOAD_BYTES_MAX,
    SUBMIT_DOCUMENTS_MAX,
    ContentRef,
    Receipt,
    Submission,
)
from fairturn.validation import text
from fairturn.validation.submission import describe, encode_json, source_of
from fairturn.wire import (
    BATCH_BYTES_MAX,
    BINARY,
    IDEMPOTENCY_KEY,
    JSON,
    JSON_BYTES_MAX,
    LINES,
    REPLAYED,
    submission_to_json,
)

CHUNK_BYTES = 262_144
_QUERY_BYTES_MAX = 4_096  # proxies limit the length of a request line

ProgressCallback = Callable[[int, int | None], None]  # bytes sent, bytes in all (None: unknown)
NewId = Callable[[], str]  # returns a new random id


class PreparedUpload(NamedTuple):
    """A request that submits documents."""

    request: HttpRequest
    own_keys: tuple[bool, ...]  # for each document: whether the client generated its key
    file: BinaryIO | None = None  # the file that the request reads

    def receipts(self, value: Any, headers: Mapping[str, str]) -> list[Receipt]:
        """The receipts in a response. With a generated key, a replay is a retry of this client:
        the caller sees an ordinary receipt."""
        if "receipts" not in value:
            value = {"receipts": [{**value, "replayed": REPLAYED.lower() in headers}]}
        pairs = zip(value["receipts"], self.own_keys, strict=True)
        return [receipt_of(each, replayed=each["replayed"] and not own) for each, own in pairs]

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


class _ValidSubmission(NamedTuple):
    fields: dict[str, Any]  # JSON values of the fields that are set, except key and body
    key: str
    is_own_key: bool

    @property
    def messages(self) -> dict[str, str]:
        """The messages of the queue for problem codes of a submission."""
        customer = self.fields.get("customer")
        owner = "the customer" if customer is None else f"customer {customer!r}"
        return {
            "key_reused": f"the idempotency key {self.key!r} of {owner} belongs to another "
            "document, which differs in more than name and parent",
            "parent_unknown": f"{owner} has no document {self.fields.get('parent')!r} to be the "
            "parent",
        }


def prepare(
    s: Submission, customer: str | None, progress: ProgressCallback | None, new_id: NewId
) -> PreparedUpload:
    """The request for one document of any size; content is read once for its SHA-256."""
    if _has_payload(s):
        payload = encode_json(s.payload, "payload", PAYLOAD_BYTES_MAX).encode()
        return _payload_upload(_validate(s, customer, new_id), payload)
    source = _source(s)
    file = source if s.file is not None else None
    try:
        valid = _validate(s, customer, new_id)
        upload, sha256 = _streamed(source, progress or (lambda sent, total: None))
        return _content_upload(valid, upload, sha256, new_id)._replace(file=file)
    except BaseException:
        if file is not None:
            file.close()
        raise


def prepare_many(
    submissions: Iterable[Submission],
    customer_of: Callable[[str | None], str | None],
    progress: ProgressCallback | None,
    new_id: NewId,
) -> PreparedUpload | None:
    """The request for all of the documents; None if there are none."""
    rest = iter(submissions)
    first = list(islice(rest, 2))
    if len(first) == 1:  # one document is not limited to the size of a batch
        with _submission_number(0):
            _check_type(first[0])
            return prepare(first[0], customer_of(first[0].customer), progress, new_id)
    lines: list[bytes] = []
    own_keys: list[bool] = []
    size_bytes = 0
    for n, submission in enumerate(chain(first, rest)):
        if n == SUBMIT_DOCUMENTS_MAX:
            raise ValueError(f"at most {SUBMIT_DOCUMENTS_MAX:,} documents are accepted in one call")
        with _submission_number(n):
            _check_type(submission)
            body = _line_body(submission, BATCH_BYTES_MAX - size_bytes)
            valid = _validate(submission, customer_of(submission.customer), new_id)
            lines.append(_line(valid, *body))
            size_bytes += len(lines[-1])
            if size_bytes > BATCH_BYTES_MAX:
                raise ValueError(
                    f"over HTTP one call takes {BATCH_BYTES_MAX:,} bytes; submit fewer documents "
                    "in one call, and large ones one by one"
                )
        own_keys.append(valid.is_own_key)
    return PreparedUpload(_batch(lines), tuple(own_keys)) if lines else None


@contextmanager
def _submission_number(n: int) -> Iterator[None]:
    """Prefix errors with the number of the submission."""
    try:
        yield
    except TypeError as error:
        raise TypeError(f"submission {n}: {error}") from error
    except ValueError as error:
        raise ValueError(f"submission {n}: {error}") from error


def _check_type(submission: Submission) -> None:
    if not isinstance(submission, Submission):
        raise TypeError(f"{submission!r:.100} is not a Submission")


def _validate(s: Submission, customer: str | None, new_id: NewId) -> _ValidSubmission:
    """Check the fields, and generate an idempotency key if there is none: a retry of the request
    must not store the document twice."""
    if customer is not None:
        text.identity(customer, "customer", CUSTOMER_BYTES_MAX)
    described = describe(s)
    fields = {} if customer is None else {"customer": customer}
    key = described.key
    return _ValidSubmission(
        fields | submission_to_json(described), key or f"client-{new_id()}", key is None
    )


def _has_payload(s: Submission) -> bool:
    return s.content is None and s.file is None and s.written is None


def _source(s: Submission) -> BinaryIO:
    source = source_of(s)
    if isinstance(source, ContentRef):
        raise ValueError("written refers to a stored file; pass content or file instead")
    return BytesIO(source) if isinstance(source, bytes) else source


# ── The forms of a request ───────────────────────────────────────────────────────────────────────


def _payload_upload(valid: _ValidSubmission, payload: bytes) -> PreparedUpload:
    """The payload as the body, and the fields in the query; if they do not fit, a batch of one."""
    query = _query(valid)
    if query is None or len(payload) > JSON_BYTES_MAX:
        return PreparedUpload(_batch([_line(valid, "payload", payload)]), (valid.is_own_key,))
    headers = {"Content-Type": JSON, IDEMPOTENCY_KEY: valid.key}
    return _one_document(valid, query, headers, payload)


def _content_upload(
    valid: _ValidSubmission, upload: Upload, sha256: str | None, new_id: NewId
) -> PreparedUpload:
    """The content as the body, and the fields in the query; if they do not fit, a form."""
    if sha256 is not None:
        valid.fields["sha256"] = sha256
    query = _query(valid)
    if query is not None:
        headers = {"Content-Type": BINARY, IDEMPOTENCY_KEY: valid.key}
        return _one_document(valid, query, headers, upload)
    boundary = f"fairturn-{new_id()}"
    headers = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
    return _one_document(valid, {}, headers, _form(valid, upload, boundary))


def _one_document(
    valid: _ValidSubmission, query: dict[str, str], headers: dict[str, str], body: bytes | Upload
) -> PreparedUpload:
    request = HttpRequest(
        "POST",
        "/v1/documents",
        query=query_of(**query),
        headers=headers,
        body=body,
        messages=valid.messages,
    )
    return PreparedUpload(request, (valid.is_own_key,))


def _query(valid: _ValidSubmission) -> dict[str, str] | None:
    """The fields as query parameters; None if they are too long, or if the key cannot be a header:
    HTTP strips spaces at the ends of a header and allows only ASCII."""
    key, query = valid.key, _texts(valid.fields)
    is_header = key.isascii() and key.isprintable() and key == key.strip()
    return query if is_header and len(urlencode(query)) <= _QUERY_BYTES_MAX else None


def _texts(fields: dict[str, Any]) -> dict[str, str]:
    return {
        field: value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
        for field, value in fields.items()
    }


def _form(valid: _ValidSubmission, upload: Upload, boundary: str) -> Upload:
    """A multipart form with the fields and the key, and the content as its file."""
    parts = [
        f'--{boundary}\r\nContent-Disposition: form-data; name="{field}"\r\n\r\n{value}\r\n'
        for field, value in _texts({**valid.fields, "key": valid.key}).items()
    ]
    parts.append(
        f'--{boundary}\r\nContent-Disposition: form-data; name="file"\r\n'
        f"Content-Type: {BINARY}\r\n\r\n"
    )
    head, tail = "".join(parts).encode(), f"\r\n--{boundary}--\r\n".encode()
    size_bytes = upload.size_bytes
    if size_bytes is not None:
        size_bytes += len(head) + len(tail)
    return Upload(lambda: chain([head], upload.chunks(), [tail]), size_bytes, upload.is_repeatable)


def _batch(lines: list[bytes]) -> HttpRequest:
    headers, body = {"Content-Type": LINES}, b"\n".join(lines)
    return HttpRequest("POST", "/v1/documents/batch", headers=headers, body=body)


def _line_body(s: Submission, size_bytes_max: int) -> tuple[str, bytes]:
    """The field of a line that has the body, and its JSON; reads little more than the maximum."""
    if _has_payload(s):
        return "payload", encode_json(s.payload, "payload", PAYLOAD_BYTES_MAX).encode()
    source = _source(s)
    try:
        content = b"".join(_chunks(source, max(0, size_bytes_max) + 1))
    finally:
        if s.file is not None:
            source.close()
    return "content", b'"' + base64.b64encode(content) + b'"'


def _line(valid: _ValidSubmission, field: str, body: bytes) -> bytes:
    head = json.dumps({**valid.fields, "key": valid.key}, separators=(",", ":"))[:-1].encode()
    return b'%s,"%s":%s}' % (head, field.encode(), body)


# ── Bytes ────────────────────────────────────────────────────────────────────────────────────────


def _streamed(source: BinaryIO, progress: ProgressCallback) -> tuple[Upload, str | None]:
    """The bytes to upload, and their SHA-256 if they can be read twice."""
    if not (hasattr(source, "seekable") and source.seekable()):
        chunks = _reported(lambda: _chunks(source), None, progress)
        return Upload(chunks, None, is_repeatable=False), None
    start, size_bytes, digest = source.tell(), 0, hashlib.sha256()
    for chunk in _chunks(source):
        size_bytes += len(chunk)
        digest.update(chunk)

    def from_start() -> Iterator[bytes]:
        source.seek(start)
        return _chunks(source, size_bytes)

    return Upload(_reported(from_start, size_bytes, progress), size_bytes), digest.hexdigest()


def _chunks(source: BinaryIO, size_bytes_max: int | None = None) -> Iterator[bytes]:
    left = size_bytes_max
    while left is None or left > 0:
        chunk = source.read(CHUNK_BYTES if left is None else min(left, CHUNK_BYTES))
        if not chunk:
            return
        if not isinstance(chunk, bytes):
            raise TypeError(f"the content yields {type(chunk).__name__}; open it in binary mode")
        left = None if left is None else left - len(chunk)
        yield chunk


def _reported(
    chunks: Callable[[], Iterator[bytes]], total: int | None, progress: ProgressCallback
) -> Callable[[], Iterator[bytes]]:
    """The same chunks, with a call of `progress` after each; `ValueError` if some are missing."""

    def reported() -> Iterator[bytes]:
        sent = 0
        for chunk in chunks():
            yield chunk
            sent += len(chunk)
            progress(sent, total)
        if total is not None and sent != total:
            raise ValueError(
                f"the content changed while it was sent: it had {total:,} bytes, then {sent:,}"
            )

    return reported
