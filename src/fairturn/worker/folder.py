"""The private folder of a worker's attempts, removed even if the worker was killed.

A worker holds a file lock on its folder until its process ends. A folder without a lock is stale,
and the next worker removes it.
"""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fairturn.worker.handler import remove_folder

_PREFIX = "fairturn-worker-"
_LOCK = "lock"


@contextmanager
def attempts_folder() -> Iterator[Path]:
    """Create a folder that only this user can read, and remove it at the end."""
    parent = Path(tempfile.gettempdir())
    _remove_stale(parent)
    folder, lock = _new_folder(parent)
    try:
        yield folder
    finally:
        os.close(lock)
        remove_folder(str(folder))


def _new_folder(parent: Path) -> tuple[Path, int]:
    """Return a new folder and the descriptor of its lock. Another worker may remove the folder as
    stale before it is locked; then create another."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        with suppress(FileNotFoundError):
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.fstat(lock).st_nlink:
                return folder, lock
            os.close(lock)


def _remove_stale(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # in use, or another worker removes it
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_folder(str(folder))
            finally:
                os.close(lock)
