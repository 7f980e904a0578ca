"""Submissions: one call of the function `submit`, in its own transaction or the caller's."""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from struct import Struct
from typing import Any

import psycopg

from fairturn.clock import Clock, stopwatch
from fairturn.errors import (
    KeyReused,
    NotFound,
    QueueFull,
    QuotaExceeded,
    StoreError,
    StoreRefused,
    StoreUnavailable,
)
from fairturn.model import KINDS_MAX, KindPolicy, NewDocument, Receipt, Settings
from fairturn.stores import crash, ids
from fairturn.stores.admission import refuse_kind_beyond_max, refuse_passed, refuse_unknown_kind
from fairturn.stores.ids import IdKey
from fairturn.stores.postgres.admin import has_wrong_counters, repair_queue
from fairturn.stores.postgres.connection import WAIT_S, PostgresDatabase
from fairturn.stores.postgres.rows import columns, now_of
from fairturn.stores.postgres.session import Session

_LOG = logging.getLogger("fairturn.postgres")

_SHARD_BITS = 4  # arrival_counters of a new queue has 16 shards
# The function has an array for each field of `NewDocument`, in their order; the body has two.
_ARRAYS = {int: "int8[]", int | None: "int8[]", bytes | None: "bytea[]"}  # others are texts
_TYPES = {
    **{name: _ARRAYS.get(type, "text[]") for name, type in NewDocument.__annotations__.items()},
    "body": "text[], %s::bytea[]",
    "parent": "int8[]",  # its number
}
SUBMIT = f"""
    SELECT answer, refused, pending, maximum, refused_number, its_now, receipts, replayed_at
    FROM fairturn.submit(%s::int8, %s::int8, %s::int4,
        {", ".join(f"%s::{type}" for type in _TYPES.values())})"""
_RECEIPT = Struct(">qiB")  # number, count, priority (plus 16 if replayed)
_REPLAYED = 16
_CUSTOMER_FULL, _QUEUE_FULL, _NO_PARENT, _OTHER_QUEUE, _NEW_EPOCH, _OVER_QUOTA = 3, 4, 5, 6, 7, 8
_NO_KIND, _TOO_MANY_KINDS, _EXPIRED = 9, 10, 11
CHECK_EPOCH = "SELECT fairturn.check_epoch()"
_NO_DOCUMENT = 0  # numbers begin with 1

RECOUNT_EVERY_S = 60.0  # a full queue is recounted at most this often


class NewEpoch(Exception):
    """The database was restored or failed over; `CHECK_EPOCH` must run before the submission."""


class PostgresSubmitter:
    """Submits documents for one store."""

    def __init__(
        self, database: PostgresDatabase, clock: Clock | None, random: Random, budget: int
    ) -> None:
        self._database = database
        self._clock = clock
        self._random = random
        self._budget = budget
        self._gate = CustomerGate()
        self._recount_after_s = 0.0  # by the stopwatch

    def submit(self, documents: Sequence[NewDocument], key: IdKey) -> list[Receipt]:
        """Submit documents, all or none, in a transaction of their own."""
        given_now = now_of(self._clock)

        def attempt() -> list[Receipt]:
            return self._in_this_epoch(
                lambda: self._database.transact(
                    lambda session: submit(session, documents, key, given_now, self._random)
                )
            )

        with self._gate.passed((each.customer for each in documents), WAIT_S):
            try:
                return attempt()
            except QueueFull as full:
                if full.limit != "waiting_max" or not self._recount():
                    raise
                return attempt()

    def submit_with(
        self, connection: Any, documents: Sequence[NewDocument], key: IdKey
    ) -> list[Receipt]:
        """Submit documents in the caller's transaction: they exist if it commits."""
        if not isinstance(connection, psycopg.Connection):
            raise TypeError(
                f"connection is a {type(connection).__name__}; it must be a psycopg.Connection "
                "to the database of the queue"
            )
        session = Session(connection, self._database.schema, own=False)
        given_now = now_of(self._clock)
        try:
            if not connection.autocommit:
                session.ask("SELECT 1")  # begins a transaction: the next line sets a savepoint
            with connection.transaction():
                return self._in_this_epoch(
                    lambda: submit(session, documents, key, given_now, self._random)
                )
        except psycopg.Error as error:
            raise self._database.translate_of_caller(error, connection) from error

    def _in_this_epoch(self, attempt: Callable[[], list[Receipt]]) -> list[Receipt]:
        """Repeat a submission after beginning a new epoch. That has a transaction of its own: a
        caller's would hold the lock of claims."""
        try:
            return attempt()
        except NewEpoch:
            self._database.transact(lambda session: session.fetch(CHECK_EPOCH))
        try:
            return attempt()
        except NewEpoch:
            raise StoreUnavailable(
                "a new epoch has begun since the transaction of the connection; roll it back, and "
                "repeat all of it"
            ) from None

    def _recount(self) -> bool:
        """Correct the counters of a full queue if they are wrong; return whether they were.

        It runs at most once every `RECOUNT_EVERY_S` seconds. The check takes no lock: a queue that
        is really full is never locked for it.
        """
        now = stopwatch()
        if now < self._recount_after_s:
            return False
        self._recount_after_s = now + RECOUNT_EVERY_S
        try:
            with self._database.reading() as session:
                if not has_wrong_counters(session):
                    return False
            return self._database.transact(
                lambda session: repair_queue(session, self._budget), wait_s=0
            )
        except StoreError as error:
            _LOG.warning("cannot recount the full queue yet: %s", error)
            return False


def submit(
    session: Session,
    documents: Sequence[NewDocument],
    key: IdKey,
    given_now: int | None,
    random: Random,
) -> list[Receipt]:
    """Submit documents, all or none."""
    if not documents:
        return []
    arrays = to_arrays(documents, key)
    crash.point("submit-before-commit")
    session.unsure = any(document.key is None for document in documents)
    (row,) = session.fetch(
        SUBMIT, (given_now, key.fingerprint, random.getrandbits(_SHARD_BITS), *arrays)
    )
    crash.point("submit-after-commit")
    answer, refused, pending, maximum, number, now, packed, replayed_at = row
    if answer == _NEW_EPOCH:
        raise NewEpoch
    if answer > 1:
        owner = None if number is None or number < 0 else ids.encode(number, key)
        document = documents[(refused or 1) - 1]
        if answer == _NO_KIND:
            refuse_unknown_kind(document.kind, Settings(kinds=KindPolicy.KNOWN))
        if answer == _TOO_MANY_KINDS:
            refuse_kind_beyond_max(document.kind, KINDS_MAX)
        if answer == _EXPIRED and document.expires_at is not None:
            refuse_passed(document.expires_at, document.expires_at)
        raise _refusal(answer, document, pending, maximum, owner)
    stored = list(_RECEIPT.iter_unpack(packed))
    encoded = ids.encode_all([number for number, _, _ in stored], key)
    earlier = iter(replayed_at or ())
    return [
        Receipt(id, document.customer, count, level, now)
        if level < _REPLAYED
        else Receipt(id, document.customer, count, level - _REPLAYED, next(earlier), replayed=True)
        for id, document, (_, count, level) in zip(encoded, documents, stored, strict=True)
    ]


def to_arrays(documents: Sequence[NewDocument], key: IdKey) -> list[list[Any]]:
    """Return the arrays of `SUBMIT`."""
    customers, bodies, body_types, *others, parents, expiries, kinds = columns(documents)
    return [
        customers,
        [body if isinstance(body, str) else None for body in bodies],
        [body if isinstance(body, bytes) else None for body in bodies],
        [body_type.value for body_type in body_types],
        *others,
        [None if id is None else ids.decode(id, key) or _NO_DOCUMENT for id in parents],
        expiries,
        kinds,
    ]


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
    if answer == _OVER_QUOTA:
        return QuotaExceeded(customer=customer, stored_bytes=pending, bytes_max=maximum)
    if answer == _NO_PARENT:
        return NotFound(
            f"customer {customer!r} has no document {document.parent!r} to be the parent"
        )
    if answer == _OTHER_QUEUE:
        return StoreRefused(
            "the connection is to another queue than this one; pass in one to its database"
        )
    which = "a document of the same call" if owner is None else f"document {owner}"
    return KeyReused(
        f"the idempotency key {document.key!r} of customer {customer!r} belongs to {which}, "
        "which differs in more than name and parent"
    )


SUBMISSIONS_PER_CUSTOMER_MAX = 2


class CustomerGate:
    """Limits the submissions in flight for each customer.

    Submissions for one customer run one after the other in the database anyway. More of them would
    only occupy connections.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside: Counter[str] = Counter()

    @contextmanager
    def passed(self, customers: Iterable[str], timeout_s: float) -> Iterator[None]:
        """Wait until a submission for these customers may start; it ends with the block."""
        names = set(customers)
        with self._changed:
            if not self._changed.wait_for(lambda: self._has_room(names), timeout_s):
                name = max(names, key=self._inside.__getitem__)
                raise StoreUnavailable(
                    f"submissions for customer {name!r} have been blocked for {timeout_s:g} s (an "
                    "uncommitted submission?); try again"
                )
            self._inside.update(names)
        try:
            yield
        finally:
            with self._changed:
                self._inside.subtract(names)
                for name in names:
                    if not self._inside[name]:
                        del self._inside[name]
                self._changed.notify_all()

    def _has_room(self, names: set[str]) -> bool:
        return all(self._inside[name] < SUBMISSIONS_PER_CUSTOMER_MAX for name in names)
