"""The deadline of a command after a signal."""

import os
import threading
from collections.abc import Callable

from fairturn.cli.exit_codes import TRY_AGAIN
from fairturn.cli.terminal import plain_number

ENDING_S = 2.0  # after the grace period, to record outcomes and to close the queue


def begin_deadline(grace_s: float, warn: Callable[[str], None], *, now: bool) -> None:
    """End the process `ENDING_S` after its grace period if it is still running, with `now` without
    the grace period. The earliest deadline applies.

    A store that does not answer blocks the threads that call it, and Python waits for threads.
    """
    allowed_s = ENDING_S if now else grace_s + ENDING_S

    def end() -> None:
        warn(
            f"A call to the queue has not returned {plain_number(allowed_s)} s after the signal; "
            "the command ends without waiting for it."
        )
        os._exit(TRY_AGAIN)

    timer = threading.Timer(allowed_s, end)
    timer.daemon = True
    timer.start()
