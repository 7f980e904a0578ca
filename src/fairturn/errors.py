"""The exceptions of fairturn.

    FairturnError
    ├── Refused                 a submission was rejected; nothing was stored, no count changed
    │   ├── QueueFull           too many documents are waiting
    │   ├── QuotaExceeded       the customer's stored documents would have too many bytes
    │   ├── KindRefused         no such kind of work, or too many of them
    │   ├── ExpiryPassed        the document would have expired already
    │   └── KeyReused           the idempotency key belongs to another document
    ├── NotFound                no such document or customer
    ├── NotAllowed              the access key is missing, unknown or lacks this permission
    ├── WrongState              the state of the document or key does not permit the operation
    ├── SettingsConflict        the queue exists with other settings
    ├── HandlerNotLoaded        a worker's child process cannot import its handler
    ├── ContentDamaged          stored bytes are missing or differ from their checksum
    ├── BrokerRefused           an app's broker would ignore or merge the priorities
    ├── TraceError              a trace file is malformed
    └── StoreError              a store failed
        ├── StoreRefused        this file, engine or schema must not be used
        │   └── NoQueue         the database contains no queue
        └── StoreUnavailable    closed or unreachable; retry later
            ├── StoreBusy       another process holds the lock; nothing was stored
            └── StoreFull       no space left on the device; nothing was stored

Misuse of a function raises `ValueError` or `TypeError`.
"""


class FairturnError(Exception):
    """The base class of all exceptions of fairturn, except those for misuse of a function."""


class Refused(FairturnError):
    """A submission was rejected. Nothing was stored and the customer's count did not change."""


class QueueFull(Refused):
    """The customer, or the queue, has too many waiting documents. See `Queue.wait_for_room`."""

    def __init__(self, *, limit: str, maximum: int, waiting: int, customer: str | None) -> None:
        whose = f"customer {customer!r} has" if customer is not None else "the queue has"
        documents = "document" if waiting == 1 else "documents"
        super().__init__(
            f"{whose} {waiting:,} {documents} waiting and the limit {limit} is {maximum:,}; "
            f"retry when fewer are waiting, or raise {limit}"
        )
        self.limit = limit
        self.maximum = maximum
        self.waiting = waiting
        self.customer = customer


class QuotaExceeded(Refused):
    """The stored documents of the customer would have more bytes than allowed."""

    def __init__(self, *, customer: str, stored_bytes: int, bytes_max: int) -> None:
        super().__init__(
            f"the documents of customer {customer!r} have {stored_bytes:,} bytes, and with this "
            f"submission they would have more than the {bytes_max:,} allowed; submit again when "
            "ended documents have been pruned, or raise bytes_max of the customer or "
            "bytes_per_customer_max of the queue"
        )
        self.customer = customer
        self.stored_bytes = stored_bytes
        self.bytes_max = bytes_max


class KindRefused(Refused):
    """The queue has no such kind of work and does not create it, or has the maximum of kinds."""


class ExpiryPassed(Refused):
    """The document would have expired before it was stored, and no idempotency key replays it."""


class KeyReused(Refused):
    """An idempotency key was reused for a document that differs in more than name and parent."""


class NotFound(FairturnError):
    """No such document or customer."""


class NotAllowed(FairturnError):
    """The access key is missing, unknown, expired, or does not permit the operation."""


class WrongState(FairturnError):
    """The state of the document or access key does not permit the operation."""


class SettingsConflict(FairturnError):
    """The queue exists with settings other than those that were passed."""


class HandlerNotLoaded(FairturnError):
    """A child process of a worker cannot import the handler. No document was affected."""


class ContentDamaged(FairturnError):
    """Stored bytes are missing, or differ from the checksum taken when they were stored."""


class BrokerRefused(FairturnError):
    """An app or its broker would ignore or merge the priorities; the message names the setting."""


class TraceError(FairturnError):
    """A trace file is malformed; the message contains the file and the line."""


class StoreError(FairturnError):
    """A store failed."""


class StoreRefused(StoreError):
    """This file, engine or schema must not be used. It was not changed."""


class NoQueue(StoreRefused):
    """The database contains no queue, and the call does not create one."""


class StoreUnavailable(StoreError):
    """The store is busy, closed or unreachable; a retry may succeed."""


class StoreBusy(StoreUnavailable):
    """Another process held the lock until this call timed out. The call stored nothing."""


class StoreFull(StoreUnavailable):
    """No space is left on the device. The call stored nothing; accepted documents are safe."""
