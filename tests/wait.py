"""Waiting for another process or thread without a guessed delay."""

import threading
from collections.abc import Callable

from fairturn.clock import stopwatch

PATIENCE_S = 30
_NEVER = threading.Event()


def wait_until(condition: Callable[[], object], what: str, patience_s: float = PATIENCE_S) -> None:
    """Wait until the condition holds; fail with what did not happen if it never does."""
    end = stopwatch() + patience_s
    while not condition():
        if stopwatch() > end:
            raise AssertionError(f"it did not happen within {patience_s:g} s that {what}")
        _NEVER.wait(0.01)
