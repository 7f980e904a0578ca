"""Who sends what when, and a thread that does so."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import NamedTuple

from fairturn.clock import stopwatch
from fairturn.model import Submission
from fairturn.queue import Queue

BULK = "zeppelin"
QUIET = ("ash", "birch", "cedar", "elm", "fir", "hazel", "larch", "maple", "oak", "pine")
PAUSING = "pine"  # long enough for its count to be reset

DOCUMENTS = 2_000
DOCUMENT_S = 0.02
RESET_INTERVAL_S = 10.0
# On a page with lanes: one pause in twelve is longer, so quiet customers are seen in all of them.
SHORT_RESET_INTERVAL_S = 1.25
SECONDS = 26.0
_DUMP_AT_S = 2.0
_PAUSE_FROM, _PAUSE_S = 1 / 3, 1.15 * RESET_INTERVAL_S  # a share of the time; seconds
_AT_ONCE = 500


class Sending(NamedTuple):
    """So many documents of one customer, handed in at once, so long after the beginning."""

    at_s: float
    customer: str
    documents: int


class Pace(NamedTuple):
    """How fast the documents of a demo are worked off: so long for each, so many at once."""

    document_s: float
    workers: int


def schedule(
    *,
    documents: int = DOCUMENTS,
    seconds: float = SECONDS,
    seed: int = 1,
    again_s: float | None = None,
) -> list[Sending]:
    """The dump, once or again every so many seconds, and ten customers who send about one document
    a second; one of them pauses."""
    random = Random(seed)
    pause_from = seconds * _PAUSE_FROM
    dump_at_s = min(_DUMP_AT_S, seconds / 4)
    dumps = 1 if again_s is None else 1 + int((seconds - dump_at_s) / again_s)
    sendings = [
        Sending(dump_at_s + number * (again_s or 0), BULK, min(_AT_ONCE, documents - begin))
        for number in range(dumps)
        for begin in range(0, documents, _AT_ONCE)
    ]
    for name in QUIET:
        at_s = random.uniform(0, 1)
        while at_s < seconds:
            pausing = name == PAUSING and pause_from <= at_s < pause_from + _PAUSE_S
            if not pausing:
                sendings.append(Sending(at_s, name, 1))
            at_s += random.uniform(0.7, 1.3)
    return sorted(sendings)


class Sender:
    """Hands in documents by the schedule, in a thread of its own."""

    def __init__(
        self, queue: Queue, sendings: list[Sending], *, document_s: float = DOCUMENT_S
    ) -> None:
        self._queue = queue
        self._document_s = document_s
        self._sendings = sendings
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._send_all, name="fairturn-demo", daemon=True)
        self.error: Exception | None = None

    @property
    def done(self) -> bool:
        """Whether all was handed in."""
        return not self._thread.is_alive()

    @contextmanager
    def sending(self) -> Iterator[Callable[[], float]]:
        """Send while the block runs; gives a function that says how many seconds have passed."""
        begun = stopwatch()
        self._thread.start()
        try:
            yield lambda: stopwatch() - begun
        finally:
            self._stopping.set()
            self._thread.join()

    def _submission(self, customer: str, number: int) -> Submission:
        payload = {"seconds": self._document_s}
        return Submission(customer=customer, payload=payload, name=f"{customer}-{number:04}.pdf")

    def _send_all(self) -> None:
        begun, sent = stopwatch(), 1
        try:
            for at_s, customer, documents in self._sendings:
                if self._stopping.wait(max(0.0, begun + at_s - stopwatch())):
                    return
                self._queue.submit_many(
                    self._submission(customer, sent + number) for number in range(documents)
                )
                sent += documents
        except Exception as error:  # whoever watches must hear of it
            self.error = error
