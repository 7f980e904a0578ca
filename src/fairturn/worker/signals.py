"""SIGTERM and SIGINT, for as long as a worker runs in the main thread."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def handled(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` for each of these signals; in another thread than the main one, do nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, lambda number, frame: stop()) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
