"""Named points at the durable boundaries, where a test can kill the process.

In production `point` is a function that does nothing. The environment variable
FAIRTURN_CRASH_AT=NAME, read once at import, makes the process kill itself with SIGKILL when it
reaches that point: what is on disk then is all that is left, as after a power cut of the program.
FAIRTURN_CRASH_AT=NAME:3 lets the point pass twice and kills at the third time.
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
    "copy-before-commit",
    "copy-after-commit",
)


def _nothing(name: str) -> None:
    """A crash point in production."""


def _armed(at: str) -> Callable[[str], None]:
    wanted, _, times = at.partition(":")
    if wanted not in POINTS:
        raise ValueError(f"FAIRTURN_CRASH_AT names {wanted!r}; the points are {', '.join(POINTS)}")
    left = int(times or 1)

    def point(name: str) -> None:
        nonlocal left
        if name == wanted:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    return point


_at = os.environ.get("FAIRTURN_CRASH_AT")
point: Callable[[str], None] = _armed(_at) if _at else _nothing
