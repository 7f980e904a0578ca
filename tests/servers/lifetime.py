"""Servers that stop when their last user exits, however that happens.

A server runs in a folder. Each process that uses it holds a lock on a file there, and the kernel
releases the locks of dead processes. A reaper process waits until the lock is free, then stops the
programs of the server and removes the folder. These processes are detached, because some tests
count their children.
"""

import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

STOPPED_WITHIN_S = 20


@contextmanager
def kept_folder(name: str) -> Iterator[Path]:
    """Create a folder for a server that this process uses, guarded by a reaper."""
    folder = Path(tempfile.mkdtemp(prefix=f"fairturn-{name}-"))
    with (folder / "users").open("w") as users:
        fcntl.flock(users, fcntl.LOCK_SH)
        _start_keeper(folder)
        yield folder


@contextmanager
def shared(name: str, start: Callable[[Path], dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Return the result of `start` for a server that all processes of this pytest run share: the
    first process starts it, and it stops with the last."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", f"process-{os.getpid()}")
    folder = Path(tempfile.gettempdir()) / f"fairturn-{name}-{run}"
    folder.mkdir(mode=0o755, exist_ok=True)
    with (folder / "users").open("a") as users:
        fcntl.flock(users, fcntl.LOCK_SH)
        with (folder / "starting").open("a") as starting:
            fcntl.flock(starting, fcntl.LOCK_EX)
            note = folder / "server.json"
            if not note.exists():
                _start_keeper(folder)
                note.write_text(json.dumps(start(folder)))
        yield json.loads(note.read_text())


def run_server(
    folder: Path, command: list[str], user: str | None = None
) -> subprocess.Popen[bytes]:
    """Start a program in a process group that the reaper ends; it writes to `log`."""
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            user=user,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    with (folder / "groups").open("a") as groups:
        groups.write(f"{process.pid}\n")
    return process


def run_detached(folder: Path, command: list[str], environment: dict[str, str]) -> int:
    """The same for a program that outlives its parent; return its process id."""
    told = subprocess.run(
        [sys.executable, "-I", __file__, "detach", str(folder), *command],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return int(told.stdout)


def free_port() -> int:
    """Return a port that is not in use."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def absent(what: str) -> NoReturn:
    """Skip the test because a service is not installed; fail where all are required."""
    import pytest

    if os.environ.get("FAIRTURN_REQUIRE_SERVICES") == "1":
        pytest.fail(f"{what}; FAIRTURN_REQUIRE_SERVICES=1 asks for it")
    pytest.skip(f"NOT TESTED: {what}")


# ── The keeper: a process of its own ─────────────────────────────────────────────────────────────


def _start_keeper(folder: Path) -> None:
    subprocess.run([sys.executable, "-I", __file__, "guard", str(folder)], check=True)


def guard(folder: Path) -> None:
    """Start a detached reaper."""
    subprocess.Popen(
        [sys.executable, "-I", __file__, "keep", str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def detach(folder: Path, command: list[str]) -> None:
    """Start a detached program and print its process id."""
    sys.stdout.write(str(run_server(folder, command).pid))


def keep(folder: Path) -> None:
    """Wait until no process uses the folder, then end its programs and remove it."""
    for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    with (folder / "users").open("a") as users:
        fcntl.flock(users, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            for group in reversed((folder / "groups").read_text().split()):
                with suppress(ProcessLookupError):
                    os.killpg(int(group), signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    verb, place = sys.argv[1], Path(sys.argv[2])
    if verb == "keep":
        keep(place)
    elif verb == "guard":
        guard(place)
    else:
        detach(place, sys.argv[3:])
