"""Named points at the durable boundaries, where a test can kill or stop the process.

In production `point` is a function that does nothing. The environment variable
FAIRTURN_CRASH_AT=NAME, read once at import, makes the process kill itself with SIGKILL when it
reaches that point: what is on disk then is all that is left, as after a power cut of the program.
FAIRTURN_CRASH_AT=NAME:3 lets the point pass twice and kills at the third time.
FAIRTURN_FREEZE_AT=NAME stops the process with SIGSTOP instead: SIGCONT lets it go on.
"""

import os
import signal
from collections.abc import Callable

POINTS = (
    "content-before-write",
    "content-before-rename",
    "content-after-rename",
    "submit-before-commit",
    "submit-after-commit",
    "claim-before-commit",
    "claim-after-commit",
    "renew-before-commit",
    "renew-after-commit",
    "finish-before-commit",
    "finish-after-commit",
    "cancel-before-commit",
    "cancel-after-commit",
    "retry-before-commit",
    "retry-after-commit",
    "configure-before-commit",
    "configure-after-commit",
    "prune-before-commit",
    "prune-after-commit",
    "prune-after-delete",
    "migrate-before-commit",
    "migrate-after-commit",
    "backup-before-rename",
    "backup-after-rename",
    "restore-before-rename",
    "restore-after-rename",
    "copy-before-commit",
    "copy-after-commit",
)


def _nothing(name: str) -> None:
    """A crash point in production."""


def _armed(variable: str, at: str) -> Callable[[str], None]:
    wanted, _, times = at.partition(":")
    if wanted not in POINTS:
        raise ValueError(f"{variable} names {wanted!r}; the points are {', '.join(POINTS)}")
    left = int(times or 1)

    def point(name: str) -> None:
        nonlocal left
        if name == wanted:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), _SIGNALS[variable])

    return point


_SIGNALS = {"FAIRTURN_CRASH_AT": signal.SIGKILL, "FAIRTURN_FREEZE_AT": signal.SIGSTOP}
_armed_points = [_armed(name, at) for name in _SIGNALS if (at := os.environ.get(name))]
point: Callable[[str], None] = _armed_points[0] if _armed_points else _nothing
