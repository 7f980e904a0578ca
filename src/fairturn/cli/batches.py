"""Submission in batches that reports exactly which document was rejected."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

from fairturn.cli.target import QueueOrClient
from fairturn.errors import FairturnError, NotFound, QueueFull, Refused
from fairturn.model import Receipt, Submission

BATCH = 1_000
BATCH_BYTES = 256 * 1_048_576  # bounds the bytes that are copied before a commit
SERVICE_BATCH_BYTES = 16 * 1_048_576  # Base64 adds a third, and the service accepts 32 MiB

Sending = Callable[[int, int | None], None]


class BatchEntry(NamedTuple):
    """A document to submit, and its place in the input, for errors; empty for a single one."""

    where: str
    submission: Submission
    size_bytes: int = 0


class SubmissionRejected(Exception):
    """A document was rejected. All documents before it are stored, and none after it."""

    def __init__(self, where: str, cause: Exception, sentence: str | None = None) -> None:
        super().__init__(f"{where}: {sentence or cause}" if where else sentence or str(cause))
        self.cause = cause


def hand_in(
    queue: QueueOrClient,
    groups: Iterable[list[BatchEntry]],
    *,
    wait_for_room: bool,
    sending: Sending | None = None,
) -> Iterator[list[Receipt]]:
    """Submit groups of documents in order and yield the receipts of each batch.

    Raise `SubmissionRejected` for a rejected document, after all documents before it are stored.
    With `wait_for_room`, wait while the queue is full. `sending` is called with the bytes sent of a
    document that is sent to a service alone.
    """
    submitter = _BatchSubmitter(queue, wait_for_room, sending)
    for group in groups:
        for batch in _batches(group, submitter.batch_bytes):
            yield from submitter.store(batch)


def _batches(group: list[BatchEntry], batch_bytes: int) -> Iterator[list[BatchEntry]]:
    batch: list[BatchEntry] = []
    size_bytes = 0
    for entry in group:
        if batch and size_bytes + entry.size_bytes > batch_bytes:
            yield batch
            batch, size_bytes = [], 0
        batch.append(entry)
        size_bytes += entry.size_bytes
        if len(batch) == BATCH:
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch


class _BatchSubmitter:
    def __init__(self, queue: QueueOrClient, wait_for_room: bool, sending: Sending | None) -> None:
        from fairturn.queue import Queue

        self._queue = queue
        self._wait_for_room = wait_for_room
        if isinstance(queue, Queue):
            self._submit_many: Callable[[Iterator[Submission]], list[Receipt]] = queue.submit_many
            self.batch_bytes = BATCH_BYTES
        else:
            self._submit_many = partial(queue.submit_many, progress=sending)
            self.batch_bytes = SERVICE_BATCH_BYTES

    def store(self, batch: list[BatchEntry]) -> Iterator[list[Receipt]]:
        """Submit a batch in one transaction; if it is rejected, the documents before the one at
        fault."""
        pulled = 0

        def pull() -> Iterator[Submission]:
            nonlocal pulled
            for entry in batch:
                pulled += 1
                content = entry.submission.content
                if content is not None and not isinstance(content, bytes) and content.seekable():
                    content.seek(0)  # a previous attempt may have read it
                yield entry.submission

        try:
            receipts = self._submit_many(pull())
        except (ValueError, TypeError, OSError) as error:
            # At fault is the last document pulled, or the one before it: then this call raises.
            if pulled > 1:
                yield from self.store(batch[: pulled - 1])
            where = batch[pulled - 1].where
            raise SubmissionRejected(where, error, _message(error, where, pulled - 1)) from error
        except (Refused, NotFound) as error:
            yield from self._store_halves(batch, error)
        else:
            yield receipts

    def _store_halves(
        self, batch: list[BatchEntry], error: FairturnError
    ) -> Iterator[list[Receipt]]:
        """Submit a rejected batch in halves, to find the document at fault."""
        if len(batch) > 1:
            half = len(batch) // 2
            yield from self.store(batch[:half])
            yield from self.store(batch[half:])
        elif self._wait_for_room and isinstance(error, QueueFull):
            self._queue.wait_for_room(batch[0].submission.customer)
            yield from self.store(batch)
        else:
            raise SubmissionRejected(batch[0].where, error) from error


def _message(error: Exception, where: str, n: int) -> str:
    """Return the message for submission `n`, with the file of an `OSError` unless `where` is it."""
    if isinstance(error, OSError) and error.strerror:
        named = error.filename is not None and str(error.filename) != where
        return f"{error.filename}: {error.strerror}" if named else error.strerror
    return str(error).removeprefix(f"submission {n}: ")
