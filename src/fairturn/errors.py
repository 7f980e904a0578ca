"""Everything that can go wrong in the world, as one shallow tree.

    FairturnError
    ├── Refused                 a submission was not accepted; nothing was stored, no check was made
    │   ├── QueueFull           too many documents wait; there will be room later
    │   └── KeyReused           the idempotency key belongs to another document
    ├── NotFound                no such document or customer
    ├── NotAllowed              the service does not let this access key do this
    ├── WrongState              the document's state does not allow this
    ├── SettingsConflict        the queue was made with other settings
    ├── HandlerNotLoaded        a worker's child cannot import its handler
    ├── ContentDamaged          stored bytes are missing or differ from their checksum
    ├── BrokerRefused           an app's broker would ignore or fold the priorities
    ├── TraceError              a trace file is not what it should be
    └── StoreError              the store cannot do its work
        ├── StoreRefused        this file, engine or schema must not be used
        │   └── NoQueue         there is no queue in this database
        └── StoreUnavailable    closed or out of reach; try again later
            ├── StoreBusy       another process holds the lock; nothing was stored
            └── StoreFull       no space left on the device; nothing was stored

Misuse of a function is a `ValueError` or a `TypeError`, as everywhere in Python.
"""


class FairturnError(Exception):
    """The root: catch this to catch everything that fairturn raises about the world."""


class Refused(FairturnError):
    """A submission was not accepted. Nothing was stored and the customer's count did not move."""


class QueueFull(Refused):
    """Too many documents wait, for the customer or in all; `Queue.wait_for_room` waits for less."""

    def __init__(self, *, limit: str, maximum: int, waiting: int, customer: str | None) -> None:
        whose = f"customer {customer!r} has" if customer is not None else "the queue has"
        documents = "document" if waiting == 1 else "documents"
        super().__init__(
            f"{whose} {waiting:,} {documents} waiting and the limit {limit} is {maximum:,}; "
            f"submit again when some are done, or raise {limit}"
        )
        self.limit = limit
        self.maximum = maximum
        self.waiting = waiting
        self.customer = customer


class KeyReused(Refused):
    """An idempotency key came again with another content, metadata, cost or due time."""


class NotFound(FairturnError):
    """No such document or customer."""


class NotAllowed(FairturnError):
    """The service asks for an access key, does not know this one, or has not made it for this."""


class WrongState(FairturnError):
    """The document's state does not allow what was asked for."""


class SettingsConflict(FairturnError):
    """A process was configured otherwise than the queue that it opened."""


class HandlerNotLoaded(FairturnError):
    """A child process of a worker cannot import the handler; no document was touched."""


class ContentDamaged(FairturnError):
    """Stored bytes are missing, or they differ from the checksum taken when they came in."""


class BrokerRefused(FairturnError):
    """An app or its broker would make priorities meaningless; the message says what to set."""


class TraceError(FairturnError):
    """A trace file is not what it should be; the message names file and line."""


class StoreError(FairturnError):
    """The store cannot do its work."""


class StoreRefused(StoreError):
    """This file, engine or schema must not be used; it was left untouched."""


class NoQueue(StoreRefused):
    """There is no queue in this database, and the caller did not ask to make one."""


class StoreUnavailable(StoreError):
    """The store is busy, closed or out of reach; the same call may succeed later."""


class StoreBusy(StoreUnavailable):
    """Another process held the lock for as long as this call may wait. It stored nothing."""


class StoreFull(StoreUnavailable):
    """No space is left on the device. What was accepted is safe; this call stored nothing."""
