"""The time that a command has to end after a signal."""

import os
import threading
from collections.abc import Callable

from fairturn.cli.exit_codes import TRY_AGAIN
from fairturn.cli.terminal import plain_number

ENDING_S = 2.0  # after the grace period, to record outcomes and to close the queue


class Deadline:
    """Ends the process if it has not ended by itself soon after its grace period.

    A store that does not answer blocks the threads that call it, and Python would wait for them.
    """

    def __init__(self, grace_s: float, warn: Callable[[str], None]) -> None:
        self._grace_s = grace_s
        self._warn = warn

    def begin(self, *, now: bool = False) -> None:
        """Start the time; with `now`, without the grace period. The earliest deadline counts."""
        allowed_s = ENDING_S if now else self._grace_s + ENDING_S
        timer = threading.Timer(allowed_s, self._end, (allowed_s,))
        timer.daemon = True
        timer.start()

    def _end(self, allowed_s: float) -> None:
        self._warn(
            f"A call of the queue has not returned {plain_number(allowed_s)} s after the signal; "
            "the command ends without it."
        )
        os._exit(TRY_AGAIN)
