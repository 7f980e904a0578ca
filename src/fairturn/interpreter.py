"""What a worker asks of Python's interpreter for as long as it runs.

All of it is of the whole process, in which several workers may run. So what it was before is
remembered by the first who asks for something, and comes back with the last.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

# Threads that have something to compute hand each other the interpreter this often. By default it
# is five times as long: a thread that has to begin something would wait for handlers most of the
# time.
SWITCH_S = 0.001
# In a hurry, a thread keeps it for so long.
HURRY_S = 0.01
# So many objects are to be new before garbage is searched among them, and so many for each document
# that a worker has in hand. With thousands in hand, which are of a handler that does little, they
# were looked through again and again: for a tenth of the worker's time after 700, as it is by
# default, and for a twentieth after 10,000. With few in hand more would only be memory, for what a
# handler in a thread leaves behind in cycles.
YOUNG_MIN = 10_000
YOUNG_EACH = 20


class _Tuning:
    """What was asked for, by workers and by threads in a hurry, and what it was before."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._workers = 0
        self._hurries = 0
        self._switch_s = 0.0
        self._thresholds = (0, 0, 0)
        self._froze = False

    def begin(self) -> None:
        with self._lock:
            self._workers += 1
            if self._workers > 1:
                return
            self._switch_s = sys.getswitchinterval()
            self._thresholds = gc.get_threshold()
            self._froze = gc.get_freeze_count() == 0
            self._switch_often()
            self._search_after(YOUNG_MIN)
            if self._froze:
                gc.freeze()

    def end(self) -> None:
        with self._lock:
            self._workers -= 1
            if self._workers:
                return
            sys.setswitchinterval(self._switch_s)
            gc.set_threshold(*self._thresholds)
            if self._froze:
                gc.unfreeze()

    def have_in_hand(self, documents: int) -> None:
        with self._lock:
            if self._workers:
                self._search_after(max(YOUNG_MIN, YOUNG_EACH * documents))

    def begin_hurry(self) -> None:
        with self._lock:
            self._hurries += 1
            if self._workers:
                sys.setswitchinterval(HURRY_S)

    def end_hurry(self) -> None:
        with self._lock:
            self._hurries -= 1
            if self._workers and not self._hurries:
                self._switch_often()

    def _switch_often(self) -> None:
        sys.setswitchinterval(min(self._switch_s, SWITCH_S))

    def _search_after(self, objects: int) -> None:
        young, *older = self._thresholds
        if young:
            gc.set_threshold(max(young, objects), *older)


_tuning = _Tuning()


@contextmanager
def tuned() -> Iterator[None]:
    """Until the end of the block, threads take turns sooner, and garbage is searched more rarely
    and not in what is loaded now: with thousands of documents a second, everything that was ever
    imported was searched all the time. If somebody else has decided what is searched, or that
    nothing is, that stays."""
    _tuning.begin()
    try:
        yield
    finally:
        _tuning.end()


def have_in_hand(documents: int) -> None:
    """A worker says how many documents it has in hand; of several in a process, the last counts."""
    _tuning.have_in_hand(documents)


class _Hurried:
    """Until the end of the block, which is short, this thread keeps the interpreter if it can: it
    holds something that other processes wait for. Only in a worker, whose threads else take turns
    so soon."""

    def __enter__(self) -> None:
        _tuning.begin_hurry()

    def __exit__(self, *_: object) -> None:
        _tuning.end_hurry()


hurried = _Hurried()
