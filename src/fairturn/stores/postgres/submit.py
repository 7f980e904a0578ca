"""Submissions: one call of the function `submit`, in its own transaction or the caller's."""

from collections.abc import Sequence
from random import Random
from struct import Struct

from fairturn import crash, ids
from fairturn.errors import KeyReused, NotFound, QueueFull, StoreRefused
from fairturn.model import NewDocument, Receipt
from fairturn.stores.postgres.rows import columns, is_payload
from fairturn.stores.postgres.session import Session
from fairturn.stores.values import Row

_SHARD_BITS = 4  # of the rows of `totals` that there are from the beginning
_TYPES = (
    *("text[]", "text[]", "bytea[]", "bool[]", "int8[]", "bytea[]", "text[]", "text[]"),
    *("text[]", "int8[]", "int8[]", "text[]", "bytea[]", "int8[]"),
)
SUBMIT = f"""
    SELECT answer, refused, pending, maximum, refused_number, its_now, receipts, replayed_at
    FROM fairturn.submit(%s::int8, %s::int8, %s::int4,
        {", ".join(f"%s::{kind}" for kind in _TYPES)})"""
_RECEIPT = Struct(">qiB")  # number, count, and priority, plus 16 if its key was known
_REPLAYED = 16
_CUSTOMER_FULL, _QUEUE_FULL, _NO_PARENT, _OTHER_QUEUE, _NEW_EPOCH = 3, 4, 5, 6, 7
CHECK_EPOCH = "SELECT fairturn.check_epoch()"
_NO_DOCUMENT = 0  # a number that no document has


class NewEpoch(Exception):
    """The database was restored, or another server took over: `CHECK_EPOCH` comes first."""


def submit(
    session: Session,
    documents: Sequence[NewDocument],
    key: int,
    moment: int | None,
    random: Random,
) -> list[Receipt]:
    """Submit documents, all or none."""
    if not documents:
        return []
    given = columns([_row(document, key) for document in documents])
    crash.point("submit-before-commit")
    session.unsure = any(document.key is None for document in documents)
    (row,) = session.fetch(SUBMIT, (moment, key, random.getrandbits(_SHARD_BITS), *given))
    crash.point("submit-after-commit")
    answer, refused, pending, maximum, number, now, packed, replayed_at = row
    if answer == _NEW_EPOCH:
        raise NewEpoch
    if answer > 1:
        owner = None if number is None or number < 0 else ids.encode(number, key)
        raise _refusal(answer, documents[(refused or 1) - 1], pending, maximum, owner)
    stored = list(_RECEIPT.iter_unpack(packed))
    encoded = ids.encode_all([number for number, _, _ in stored], key)
    earlier = iter(replayed_at or ())
    return [
        Receipt(id, document.customer, count, level, now)
        if level < _REPLAYED
        else Receipt(id, document.customer, count, level - _REPLAYED, next(earlier), repeated=True)
        for id, document, (_, count, level) in zip(encoded, documents, stored, strict=True)
    ]


def _row(document: NewDocument, key: int) -> Row:
    """A document as the function `submit` takes it."""
    body, parent = document.body, document.parent
    return (
        document.customer,
        body if isinstance(body, str) else None,
        body if isinstance(body, bytes) else None,
        is_payload(document.kind),
        document.size_bytes,
        document.sha256,
        document.content_name,
        document.name,
        document.metadata,
        document.cost,
        document.due_at,
        document.key,
        document.digest,
        None if parent is None else ids.decode(parent, key) or _NO_DOCUMENT,
    )


def _refusal(
    answer: int, document: NewDocument, pending: int, maximum: int, owner: str | None
) -> Exception:
    customer = document.customer
    if answer == _CUSTOMER_FULL:
        return QueueFull(
            limit="waiting_per_customer_max", maximum=maximum, waiting=pending, customer=customer
        )
    if answer == _QUEUE_FULL:
        return QueueFull(limit="waiting_max", maximum=maximum, waiting=pending, customer=None)
    if answer == _NO_PARENT:
        return NotFound(
            f"customer {customer!r} has no document {document.parent!r} to be the parent"
        )
    if answer == _OTHER_QUEUE:
        return StoreRefused(
            "the connection leads to another queue than this one; hand in one to its database"
        )
    which = "a document of the same call" if owner is None else f"document {owner}"
    return KeyReused(
        f"the idempotency key {document.key!r} of customer {customer!r} belongs to {which}, "
        "which has another content, metadata, cost or due time"
    )
