"""Which process uses a file or holds its write lock, as the kernel lists it in /proc/locks.

SQLite locks byte ranges with `fcntl`. A writer locks one byte of the -shm file, or, without a
write-ahead log, the reserved byte of the database file. The list is read as text: opening and
closing one of these files here would release the locks that this very process has on it.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_LOCKS = Path("/proc/locks")
_WAL_WRITE_BYTE = 120  # WAL_WRITE_LOCK in the -shm file
_RESERVED_BYTE = 0x40000001  # RESERVED_BYTE in the database file


class Holder(NamedTuple):
    """A process that holds the write lock."""

    pid: int
    name: str
    is_stopped: bool  # by SIGSTOP, a terminal or a debugger

    def __str__(self) -> str:
        stopped = ", which is stopped" if self.is_stopped else ""
        return f"process {self.pid} ({self.name}{stopped})"


def are_listed() -> bool:
    """Whether this platform lists locks with the processes that hold them."""
    return _LOCKS.exists()


def holder_of(path: Path) -> Holder | None:
    """The process that holds the write lock of a database; None if none is seen.

    A process in another PID namespace, such as another container, is not seen.
    """
    wanted = [
        (*identity, str(byte))
        for name, byte in ((f"{path}-shm", _WAL_WRITE_BYTE), (str(path), _RESERVED_BYTE))
        if (identity := _identity(name)) is not None
    ]
    for pid, mode, (device, inode), byte in _listed():
        if mode == "WRITE" and {(device, inode, byte), ("", inode, byte)} & {*wanted}:
            return _described(pid)
    return None


def user_of(path: Path) -> Holder | None:
    """A process that has a database open; None if none is seen. With a write-ahead log, every
    connection keeps a lock on the database file."""
    wanted = _identity(str(path))
    for pid, _, (device, inode), _ in _listed():
        if wanted in ((device, inode), ("", inode)):
            return _described(pid)
    return None


def _listed() -> Iterator[tuple[int, str, tuple[str, str], str]]:
    """The locks that processes hold: process, READ or WRITE, device and inode, the first byte."""
    try:
        lines = _LOCKS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        # 1: POSIX  ADVISORY  WRITE 1234 fe:00:2147372 120 120; a waiting lock has "->" before it.
        fields = line.split()
        if len(fields) == 8 and fields[1] == "POSIX":
            device, _, inode = fields[5].rpartition(":")
            yield int(fields[4]), fields[3], (device, inode), fields[6]


def _identity(name: str) -> tuple[str, str] | None:
    """The device and the inode of a file, as /proc/locks writes them; no device where `stat` may
    show another one than the kernel does, as on btrfs and overlay file systems."""
    try:
        stat = Path(name).stat()
    except OSError:
        return None
    major, minor = os.major(stat.st_dev), os.minor(stat.st_dev)
    return f"{major:02x}:{minor:02x}" if major else "", str(stat.st_ino)


def _described(pid: int) -> Holder:
    # The command line is not read: it may carry passwords.
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return Holder(pid, "ended", is_stopped=False)
    name, _, rest = stat.partition("(")[2].rpartition(")")
    return Holder(pid, name, is_stopped=rest.split()[0] in "Tt")
