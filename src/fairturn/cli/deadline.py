"""The deadline of a command after a signal."""

import os
import threading
from collections.abc import Callable

from fairturn.cli.exit_codes import TRY_AGAIN
from fairturn.cli.terminal import plain_number

ENDING_S = 2.0  # after the grace period, to record outcomes and to close the queue


class Deadline:
    """Ends the process `ENDING_S` after its grace period, if it is still running.

    A store that does not answer blocks the threads that call it, and Python waits for threads.
    """

    def __init__(self, grace_s: float, warn: Callable[[str], None]) -> None:
        self._grace_s = grace_s
        self._warn = warn

    def begin(self, *, now: bool = False) -> None:
        """Start the timer; with `now`, without the grace period. The earliest deadline applies."""
        allowed_s = ENDING_S if now else self._grace_s + ENDING_S
        timer = threading.Timer(allowed_s, self._end, (allowed_s,))
        timer.daemon = True
        timer.start()

    def _end(self, allowed_s: float) -> None:
        self._warn(
            f"A call to the queue has not returned {plain_number(allowed_s)} s after the signal; "
            "the command ends without waiting for it."
        )
        os._exit(TRY_AGAIN)
