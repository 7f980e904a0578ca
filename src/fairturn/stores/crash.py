"""Crash points: named places at durable boundaries where a test can kill or stop the process.

In production `point` does nothing. With the environment variable FAIRTURN_CRASH_AT=NAME, read once
at import, the process kills itself with SIGKILL when it reaches that point; with NAME:3, the third
time. FAIRTURN_FREEZE_AT=NAME stops it with SIGSTOP instead, until SIGCONT.
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
    "expire-before-commit",
    "expire-after-commit",
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
        raise ValueError(f"{variable} is {wanted!r}; it must be one of: {', '.join(POINTS)}")
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
