"""The schedule of a demo's submissions, and a thread that submits them."""

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
PAUSING = "pine"  # pauses until its count is reset

DOCUMENTS = 2_000
DOCUMENT_S = 0.02
RESET_INTERVAL_S = 10.0
# On the page: one pause in twelve is longer, so that quiet customers appear in all lanes.
SHORT_RESET_INTERVAL_S = 1.25
SECONDS = 26.0
_BULK_AT_S = 2.0
_PAUSE_FROM, _PAUSE_S = 1 / 3, 1.15 * RESET_INTERVAL_S  # a share of the duration; seconds
_BATCH = 500


class TrafficBurst(NamedTuple):
    """Documents that one customer submits together, `at_s` after the start."""

    at_s: float
    customer: str
    documents: int


class DemoPace(NamedTuple):
    """The duration of a document in a demo, and the number of workers."""

    document_s: float
    workers: int


def schedule(
    *,
    documents: int = DOCUMENTS,
    seconds: float = SECONDS,
    seed: int = 1,
    again_s: float | None = None,
) -> list[TrafficBurst]:
    """Return a bulk upload, repeated every `again_s` if given, and ten customers that submit about
    one document a second each; one of them pauses."""
    random = Random(seed)
    pause_from = seconds * _PAUSE_FROM
    bulk_at_s = min(_BULK_AT_S, seconds / 4)
    uploads = 1 if again_s is None else 1 + int((seconds - bulk_at_s) / again_s)
    bursts = [
        TrafficBurst(bulk_at_s + number * (again_s or 0), BULK, min(_BATCH, documents - begin))
        for number in range(uploads)
        for begin in range(0, documents, _BATCH)
    ]
    for name in QUIET:
        at_s = random.uniform(0, 1)
        while at_s < seconds:
            pausing = name == PAUSING and pause_from <= at_s < pause_from + _PAUSE_S
            if not pausing:
                bursts.append(TrafficBurst(at_s, name, 1))
            at_s += random.uniform(0.7, 1.3)
    return sorted(bursts)


class TrafficSender:
    """Submits documents by a schedule, in a thread."""

    def __init__(
        self, queue: Queue, bursts: list[TrafficBurst], *, document_s: float = DOCUMENT_S
    ) -> None:
        self._queue = queue
        self._document_s = document_s
        self._bursts = bursts
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._send_all, name="fairturn-demo", daemon=True)
        self.error: Exception | None = None

    @property
    def done(self) -> bool:
        """Whether the thread has ended."""
        return not self._thread.is_alive()

    @contextmanager
    def sending(self) -> Iterator[Callable[[], float]]:
        """Submit while the block runs; yield a function that returns the seconds elapsed."""
        begun = stopwatch()
        self._thread.start()
        try:
            yield lambda: stopwatch() - begun
        finally:
            self._stopping.set()
            self._thread.join()

    def _send_all(self) -> None:
        begun, sent = stopwatch(), 1
        payload = {"seconds": self._document_s}
        try:
            for at_s, customer, documents in self._bursts:
                if self._stopping.wait(max(0.0, begun + at_s - stopwatch())):
                    return
                self._queue.submit_many(
                    Submission(customer=customer, payload=payload, name=f"{customer}-{n:04}.pdf")
                    for n in range(sent, sent + documents)
                )
                sent += documents
        except Exception as error:  # the demo reports it
            self.error = error
