"""Validation and encoding of submissions.

Misuse raises `ValueError` or `TypeError` here, before anything is written.
"""

import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import partial
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from fairturn.clock import Clock, as_timestamp, microseconds
from fairturn.contents.local import Contents, chunks_of
from fairturn.model import (
    CUSTOMER_BYTES_MAX,
    DEFAULT_KIND_NAME,
    INLINE_BYTES_MAX,
    KEY_BYTES_MAX,
    METADATA_BYTES_MAX,
    METADATA_KEYS_MAX,
    NAME_BYTES_MAX,
    PAYLOAD_BYTES_MAX,
    SECONDS_MAX,
    TAG_BYTES_MAX,
    TAGS_MAX,
    TRACEPARENT,
    BodyType,
    ContentRef,
    NewDocument,
    Submission,
    cost_in_millionths,
)
from fairturn.validation import text

JSON_DEPTH_MAX = 64

_PAYLOAD, _CONTENT = BodyType.PAYLOAD, BodyType.CONTENT
# Constructing from all values takes half the time of keyword arguments.
_DOCUMENT: Callable[[Iterable[Any]], NewDocument] = partial(tuple.__new__, NewDocument)
_DEFAULTS = NewDocument("", None)[4:]
_BRACKETS_OF_DEPTH_MAX = 2 * JSON_DEPTH_MAX
_NOT_DESCRIBED = [None] * len(Submission("")[4:-1])


class SubmissionEncoder:
    """Encodes submissions for a store. Create one per call: it caches the customer names that it
    has checked."""

    def __init__(self, contents: Contents, clock: Clock) -> None:
        self._contents = contents
        self._clock = clock
        self._customers: set[str] = set()

    def encode(self, s: Submission) -> NewDocument:
        """Validate a submission and return the document to store. A large content is written to
        `contents`, after all other checks."""
        if not isinstance(s, Submission):
            raise TypeError(f"{s!r:.100} is not a Submission")
        customer, payload, content, file, *described, written = s
        if type(customer) is not str or customer not in self._customers:
            self._customers.add(text.identity(customer, "customer", CUSTOMER_BYTES_MAX))
        if content is None and file is None and written is None:
            body = encode_json(payload, "payload", PAYLOAD_BYTES_MAX)
            size_bytes = len(body)  # JSON text is ASCII
            if size_bytes <= INLINE_BYTES_MAX and described == _NOT_DESCRIBED:
                return _DOCUMENT((customer, body, _PAYLOAD, size_bytes, *_DEFAULTS))
            return self._encode(s, body)
        source = source_of(s)
        try:
            return self._encode(s, source)
        finally:
            if s.file is not None and not isinstance(source, bytes | ContentRef):
                source.close()

    def _encode(self, s: Submission, source: str | bytes | BinaryIO | ContentRef) -> NewDocument:
        described = describe(s)
        fields = described._asdict() | {"expires_at": _expiry_of(described, self._clock)}
        del fields["expires_in_s"]
        body_type = _PAYLOAD if isinstance(source, str) else _CONTENT
        body, size_bytes, sha256, content_name = self._store(source)
        digest = None
        if described.key is not None:
            canonical = _canonical(source).encode() if isinstance(source, str) else sha256
            digest = _digest(body_type, canonical, described)
        return NewDocument(
            s.customer,
            body,
            body_type,
            size_bytes,
            sha256,
            content_name,
            digest=digest,
            **fields,
        )

    def _store(
        self, source: str | bytes | BinaryIO | ContentRef
    ) -> tuple[str | bytes | None, int, bytes | None, str | None]:
        """Return the body for the row, its size, its SHA-256, and the name of its content if it is
        stored outside the row. A payload in the row has no checksum: the database protects it."""
        if isinstance(source, str):
            if len(source) <= INLINE_BYTES_MAX:
                return source, len(source), None, None
            ref = self._contents.put([source.encode()])
        elif isinstance(source, ContentRef):
            ref = source
        else:
            stream = BytesIO(source) if isinstance(source, bytes) else source
            first = _first_bytes(stream, INLINE_BYTES_MAX + 1)
            if len(first) <= INLINE_BYTES_MAX:
                return first, len(first), hashlib.sha256(first).digest(), None
            ref = self._contents.put(chain([first], chunks_of(stream)))
        return None, ref.size_bytes, ref.sha256, ref.name


class SubmissionDescription(NamedTuple):
    """The validated fields of a submission, except its body."""

    name: str | None
    metadata: str | None  # JSON text
    key: str | None
    cost: int | None  # in millionths
    due_at: int | None
    parent: str | None
    tags: str | None  # JSON text
    kind: str
    expires_at: int | None
    expires_in_s: float | None


def describe(s: Submission) -> SubmissionDescription:
    """Validate all fields of a submission except its body."""
    name = Path(s.file).name if s.name is None and s.file is not None else s.name
    refuse_expiry(s.expires_at, s.expires_in_s)
    if s.parent is not None and not isinstance(s.parent, str):
        raise TypeError(f"parent must be the id of a document, not {s.parent!r}")
    return SubmissionDescription(
        name=None if name is None else _name(name),
        metadata=None if s.metadata is None else _metadata(s.metadata),
        key=None if s.key is None else text.identity(s.key, "key", KEY_BYTES_MAX),
        cost=None if s.cost is None else _cost(s.cost),
        due_at=None if s.due_at is None else as_timestamp(s.due_at, "due_at"),
        parent=s.parent,
        tags=None if s.tags is None else tags_json(s.tags),
        kind=DEFAULT_KIND_NAME if s.kind is None else text.kind_name(s.kind),
        expires_at=None if s.expires_at is None else as_timestamp(s.expires_at, "expires_at"),
        expires_in_s=s.expires_in_s,
    )


def _refuse_seconds(expires_in_s: float) -> None:
    if isinstance(expires_in_s, bool) or not isinstance(expires_in_s, int | float):
        raise TypeError(f"expires_in_s is {expires_in_s!r}; it must be a number of seconds")
    if not 0 < expires_in_s <= SECONDS_MAX:
        raise ValueError(
            f"expires_in_s is {expires_in_s}; it must be positive and at most {SECONDS_MAX:g}"
        )


def expiry(
    expires_at: datetime | int | None, expires_in_s: float | None, clock: Clock
) -> int | None:
    """Return an expiry, given as a time or as a number of seconds from now, as a timestamp."""
    refuse_expiry(expires_at, expires_in_s)
    if expires_in_s is not None:
        return clock.now() + microseconds(expires_in_s)
    return None if expires_at is None else as_timestamp(expires_at, "expires_at")


def refuse_expiry(expires_at: datetime | int | None, expires_in_s: float | None) -> None:
    """Raise `TypeError` or `ValueError` for an expiry that no document can have."""
    if expires_at is not None and expires_in_s is not None:
        raise ValueError("expires_at and expires_in_s were given; pass only one of them")
    if expires_at is not None:
        as_timestamp(expires_at, "expires_at")
    if expires_in_s is not None:
        _refuse_seconds(expires_in_s)


def _expiry_of(described: SubmissionDescription, clock: Clock) -> int | None:
    at = expiry(described.expires_at, described.expires_in_s, clock)
    if at is not None and described.due_at is not None and at <= described.due_at:
        raise ValueError("the document would expire before it is due; use an expiry after due_at")
    return at


def source_of(s: Submission) -> bytes | BinaryIO | ContentRef:
    """Return the content of a submission: bytes, a stream (a file is opened), or a reference."""
    given = [
        name for name in ("payload", "content", "file", "written") if getattr(s, name) is not None
    ]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} were given; pass only one of them")
    if s.written is not None:
        return s.written
    if s.file is not None:
        return _opened(s.file)
    if isinstance(s.content, bytes | bytearray | memoryview):
        return bytes(s.content)
    if s.content is None or not hasattr(s.content, "read"):
        raise TypeError(
            f"content must be bytes or a stream of bytes, not {type(s.content).__name__}"
        )
    return s.content


def encode_json(value: Any, what: str, bytes_max: int) -> str:
    """A value as compact JSON in ASCII: NUL and lone surrogates are escaped, so every store can
    hold it and gives back the same value."""
    try:
        encoded = text.compact_json(value)
    except TypeError as error:
        raise TypeError(f"the {what} cannot be encoded as JSON: {error}") from None
    except RecursionError:
        raise ValueError(_too_deep(what)) from None
    except ValueError as error:
        raise ValueError(f"the {what} cannot be encoded as JSON: {error}") from None
    size_bytes = len(encoded)
    if size_bytes > bytes_max:
        raise ValueError(
            f"the {what} has {size_bytes:,} bytes as JSON; at most {bytes_max:,} are allowed"
        )
    # Counting brackets is cheap and rules out the common case.
    if (
        size_bytes > _BRACKETS_OF_DEPTH_MAX
        and encoded.count("[") + encoded.count("{") > JSON_DEPTH_MAX
    ):
        _refuse_deep(value, what)
    return encoded


def _refuse_deep(value: Any, what: str) -> None:
    level = [value]
    for _ in range(JSON_DEPTH_MAX):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list | tuple)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list | tuple)
        ]
        if not level:
            return
    raise ValueError(_too_deep(what))


def _too_deep(what: str) -> str:
    return f"the {what} contains itself, or is nested more than {JSON_DEPTH_MAX} levels deep"


def _opened(file: str | os.PathLike[str]) -> BinaryIO:
    if not isinstance(file, str | os.PathLike):
        raise TypeError(f"file must be a path, not {type(file).__name__}")
    # Checked before opening: open() blocks on a pipe.
    if not stat.S_ISREG(Path(file).stat().st_mode):
        raise ValueError(f"{os.fspath(file)!r} is not a regular file; submit its bytes instead")
    return Path(file).open("rb")


def _first_bytes(stream: BinaryIO, size_bytes: int) -> bytes:
    """Read `size_bytes` of a stream, fewer only at its end. A raw stream may return short reads."""
    parts = []
    while size_bytes > 0 and (part := stream.read(size_bytes)):
        if not isinstance(part, bytes):
            raise TypeError(f"the content yields {type(part).__name__}; open it in binary mode")
        parts.append(part)
        size_bytes -= len(part)
    return b"".join(parts)


def _name(name: str) -> str:
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, not {name!r}")
    return text.description(name, NAME_BYTES_MAX)


def _metadata(metadata: Mapping[str, Any]) -> str | None:
    if not isinstance(metadata, Mapping):
        raise TypeError(f"metadata must be a mapping, not {type(metadata).__name__}")
    if len(metadata) > METADATA_KEYS_MAX:
        raise ValueError(
            f"the metadata has {len(metadata)} keys; at most {METADATA_KEYS_MAX} are allowed"
        )
    for key in metadata:
        if not isinstance(key, str):
            raise TypeError(f"the metadata has the key {key!r}; keys must be texts")
    return encode_json(dict(metadata), "metadata", METADATA_BYTES_MAX) if metadata else None


def tags_json(tags: Iterable[str]) -> str | None:
    """Return tags as a JSON array, sorted and without duplicates; None if there are none."""
    if isinstance(tags, str):
        raise TypeError(f"tags is {tags!r}; it must be a list of texts, such as [{tags!r}]")
    checked = sorted({text.identity(tag, "tag", TAG_BYTES_MAX) for tag in tags})
    if len(checked) > TAGS_MAX:
        raise ValueError(f"{len(checked)} tags were given; at most {TAGS_MAX} are allowed")
    return text.compact_json(checked) if checked else None


def _cost(cost: float) -> int:
    if isinstance(cost, bool) or not isinstance(cost, int | float):
        raise TypeError(f"cost is {cost!r}; it must be a number")
    return cost_in_millionths(cost)


def _canonical(encoded: str) -> str:
    """Return JSON with sorted keys, so that equal values are equal strings."""
    return json.dumps(json.loads(encoded), sort_keys=True, separators=(",", ":"))


def _without_trace(metadata: str) -> str | None:
    """Return metadata without its trace, which differs with each retry of a client."""
    value = json.loads(metadata)
    value.pop(TRACEPARENT, None)
    return json.dumps(value, sort_keys=True, separators=(",", ":")) if value else None


def _digest(body_type: BodyType, body: bytes | None, described: SubmissionDescription) -> bytes:
    """Return the hash that must match when an idempotency key is reused."""
    metadata, tags = described.metadata, described.tags
    compared = [
        body_type.value,
        hashlib.sha256(body or b"").hexdigest(),
        metadata and _without_trace(metadata),
        described.cost,
        described.due_at,
        # Digests of earlier releases stay valid.
        *([] if tags is None else [tags]),
        *([] if described.kind == DEFAULT_KIND_NAME else [f"kind {described.kind}"]),
    ]
    return hashlib.sha256(json.dumps(compared).encode()).digest()
