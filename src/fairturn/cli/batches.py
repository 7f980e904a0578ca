"""Documents on their way into the queue: batch by batch, and exact about where it stopped."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from fairturn.errors import FairturnError, NotFound, QueueFull, Refused

if TYPE_CHECKING:
    from fairturn.client.sync_client import Client
    from fairturn.model import Receipt, Submission
    from fairturn.queue import Queue

BATCH = 1_000
# A batch of large files is cut earlier, so that not too much is copied before anything is stored.
BATCH_BYTES = 256 * 1_048_576
SERVICE_BATCH_BYTES = 16 * 1_048_576  # in Base64 it is a third more, and 32 MiB are accepted


Sending = Callable[[int, int | None], None]


class Given(NamedTuple):
    """A document to hand in, and where it stands: what an error calls it, if there are several."""

    where: str
    submission: "Submission"
    size_bytes: int = 0


class Stopped(Exception):
    """A document was not accepted. All before it are stored, and nothing after it."""

    def __init__(self, where: str, cause: Exception, sentence: str | None = None) -> None:
        super().__init__(f"{where}: {sentence or cause}" if where else sentence or str(cause))
        self.cause = cause


def hand_in(
    queue: "Queue | Client",
    groups: Iterable[list[Given]],
    *,
    wait_for_room: bool,
    sending: Sending | None = None,
) -> Iterator["list[Receipt]"]:
    """Store groups of documents in their order; the receipts come batch by batch.

    A document that is not accepted raises `Stopped` with its name, after all before it were
    stored. With `wait_for_room` a full queue is no refusal. `sending` hears how many bytes have
    been sent to a service, of a document alone.
    """
    handing = _Handing(queue, wait_for_room, sending)
    for group in groups:
        for batch in _batches(group, handing.batch_bytes):
            yield from handing.store(batch)


def _batches(group: list[Given], batch_bytes: int) -> Iterator[list[Given]]:
    batch: list[Given] = []
    size_bytes = 0
    for given in group:
        if batch and size_bytes + given.size_bytes > batch_bytes:
            yield batch
            batch, size_bytes = [], 0
        batch.append(given)
        size_bytes += given.size_bytes
        if len(batch) == BATCH:
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch


class _Handing:
    """Where batches go, and what to do if there is no room."""

    def __init__(
        self, queue: "Queue | Client", wait_for_room: bool, sending: Sending | None
    ) -> None:
        from fairturn.queue import Queue

        self._queue = queue
        self._wait_for_room = wait_for_room
        if isinstance(queue, Queue):
            self._submit_many: Callable[[Iterator[Submission]], list[Receipt]] = queue.submit_many
            self.batch_bytes = BATCH_BYTES
        else:
            self._submit_many = partial(queue.submit_many, progress=sending)
            self.batch_bytes = SERVICE_BATCH_BYTES

    def store(self, batch: list[Given]) -> Iterator["list[Receipt]"]:
        """The whole batch in one transaction, or, where that is refused, as much of it as there is
        before the document that is at fault."""
        pulled = 0

        def pull() -> Iterator["Submission"]:
            nonlocal pulled
            for given in batch:
                pulled += 1
                content = given.submission.content
                if content is not None and not isinstance(content, bytes) and content.seekable():
                    content.seek(0)  # it may have been read by an attempt before
                yield given.submission

        try:
            receipts = self._submit_many(pull())
        except (ValueError, TypeError, OSError) as error:
            # Each is checked before the next but one is pulled, so it is one of the last two.
            if pulled > 1:
                yield from self.store(batch[: pulled - 1])
            where = batch[pulled - 1].where
            raise Stopped(where, error, _said(error, where, pulled - 1)) from error
        except (Refused, NotFound) as error:
            yield from self._store_refused(batch, error)
        else:
            yield receipts

    def _store_refused(self, batch: list[Given], error: FairturnError) -> Iterator["list[Receipt]"]:
        """A batch was refused as a whole: halves of it lead to the document that is at fault."""
        if len(batch) > 1:
            half = len(batch) // 2
            yield from self.store(batch[:half])
            yield from self.store(batch[half:])
        elif self._wait_for_room and isinstance(error, QueueFull):
            self._queue.wait_for_room(batch[0].submission.customer)
            yield from self.store(batch)
        else:
            raise Stopped(batch[0].where, error) from error


def _said(error: Exception, where: str, n: int) -> str:
    """What is wrong with the n-th submission; a file is named, unless it is what is handed in."""
    if isinstance(error, OSError) and error.strerror:
        named = error.filename is not None and str(error.filename) != where
        return f"{error.filename}: {error.strerror}" if named else error.strerror
    return str(error).removeprefix(f"submission {n}: ")
