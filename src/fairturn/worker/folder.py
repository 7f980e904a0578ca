"""The folder for what attempts write: private, and removed even if the worker was killed.

Whoever uses a folder holds a lock on it. The lock ends with the process, however that ends; so a
folder without one is left over, and the next worker removes it.
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
    """A new folder that only this user can read, gone at the end."""
    parent = Path(tempfile.gettempdir())
    _remove_left_over(parent)
    folder, lock = _new_folder(parent)
    try:
        yield folder
    finally:
        os.close(lock)
        remove_folder(str(folder))


def _new_folder(parent: Path) -> tuple[Path, int]:
    """A folder and the lock on it. Another worker that starts at this moment may find the folder
    before it is locked, and remove it as left over: then there is another one."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        with suppress(FileNotFoundError):
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.fstat(lock).st_nlink:
                return folder, lock
            os.close(lock)


def _remove_left_over(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another user's, in use, or being removed by another worker
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_folder(str(folder))
            finally:
                os.close(lock)
