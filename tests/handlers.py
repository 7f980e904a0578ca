"""Handlers for the tests of the worker: correct ones, and ones that misbehave.

A child process imports this module. Handlers report more than their result by files in the folder
that the payload names.
"""

import ctypes
import fcntl
import os
import resource
import signal
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

from fairturn import ClaimedDocument, GiveUp, ResultFile, Retry

FOREVER = threading.Event()
TOKEN = os.urandom(8).hex()  # of this process


def nothing(document: ClaimedDocument) -> None:
    pass


def double(document: ClaimedDocument) -> dict[str, Any]:
    return {"doubled": document.payload * 2, "process": TOKEN}


async def double_later(document: ClaimedDocument) -> dict[str, Any]:
    import asyncio

    loop = asyncio.get_running_loop()
    woken = loop.create_future()
    loop.call_later(0.01, woken.set_result, None)
    await woken
    return {"doubled": document.payload * 2, "loop": id(loop)}


def tell_everything(document: ClaimedDocument) -> dict[str, Any]:
    return {
        "id": document.id,
        "customer": document.customer,
        "name": document.name,
        "metadata": document.metadata,
        "priority": document.priority,
        "count": document.count,
        "attempt": document.attempt,
        "size_bytes": document.size_bytes,
        "submitted_at": document.submitted_at.isoformat(),
        "submitted_at_us": document.submitted_at_us,
        "fence": str(document.fence),
    }


def misspell_an_attribute(document: ClaimedDocument) -> None:
    document.pririty = 1  # type: ignore[attr-defined]


def size_of_content(document: ClaimedDocument) -> dict[str, Any]:
    with document.open() as stream:
        streamed = len(stream.read())
    return {
        "streamed": streamed,
        "read": len(document.read()),
        "file": document.path.stat().st_size,
    }


def size_of_payload(document: ClaimedDocument) -> int:
    return len(document.payload)


def write_file(document: ClaimedDocument) -> ResultFile:
    file = document.folder / "result.bin"
    file.write_bytes(b"page " * 100_000)
    return ResultFile(file, {"pages": 3, "folder": str(document.folder)})


def use_folder(document: ClaimedDocument) -> str:
    (document.folder / "scratch").write_text("something")
    return str(document.folder)


def close_its_output_and_open_a_file(document: ClaimedDocument) -> None:
    file = Path(document.payload, document.id)
    os.close(1)
    assert os.open(file, os.O_WRONLY | os.O_CREAT) == 1


def nest_folders(document: ClaimedDocument) -> str:
    """Create folders as deep as an archive may contain."""
    inside = os.open(document.folder, os.O_RDONLY)
    for _ in range(3_000):
        os.mkdir("a", dir_fd=inside)
        deeper = os.open("a", os.O_RDONLY, dir_fd=inside)
        os.close(inside)
        inside = deeper
    os.close(inside)
    return str(document.folder)


def nest_folders_and_exit(document: ClaimedDocument) -> None:
    nest_folders(document)
    os._exit(3)


def use_folder_and_hang(document: ClaimedDocument) -> None:
    use_folder(document)
    hang(document)


def name_no_file(document: ClaimedDocument) -> ResultFile:
    return ResultFile(document.folder)


def try_again_at_first(document: ClaimedDocument) -> int:
    if document.attempt < 3:
        raise Retry("the server is busy", after_s=0.01)
    return document.attempt


def try_again_at_no_time(document: ClaimedDocument) -> None:
    raise Retry("the server is busy", after_s=timedelta(seconds=5))  # type: ignore[arg-type]


def try_again_in_its_own_way(document: ClaimedDocument) -> None:
    class Busy(Retry):
        def __init__(self, code: int) -> None:
            self.code = code

    raise Busy(503)


def never_again(document: ClaimedDocument) -> None:
    raise GiveUp("this is not a PDF")


def fail(document: ClaimedDocument) -> None:
    raise ValueError("page 3 is torn")


def fail_with_strange_text(document: ClaimedDocument) -> None:
    raise ValueError("NUL \x00 and half a character \ud800 " + "x" * 100_000)


def fail_without_text(document: ClaimedDocument) -> None:
    class SilentError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    raise SilentError


def answer_with_a_set(document: ClaimedDocument) -> Any:
    return {1, 2}


def answer_with_too_much(document: ClaimedDocument) -> Any:
    return "x" * (17 * 1_048_576)


def answer_with_strange_text(document: ClaimedDocument) -> Any:
    return "NUL \x00 and half a character \ud800"


def report_progress(document: ClaimedDocument) -> None:
    document.progress(3, 10)
    Path(document.payload, "reported").touch()
    wait_for(document, "go on")


def environment(document: ClaimedDocument) -> dict[str, Any]:
    return {
        "names": sorted(os.environ),
        "modules": sorted(sys.modules),
        "argv": sys.argv,
        "descriptors": [str(file.resolve()) for file in Path("/proc/self/fd").iterdir()],
    }


def limits(document: ClaimedDocument) -> dict[str, int]:
    return {
        "memory": resource.getrlimit(resource.RLIMIT_DATA)[1],
        "file": resource.getrlimit(resource.RLIMIT_FSIZE)[1],
    }


def resident_bytes(document: ClaimedDocument) -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# ── Those that tell when they began, and wait ────────────────────────────────────────────────────


def hold(mark: Path) -> int:
    """Create a file and lock it, for as long as this process or a process that it forks runs. Tests
    cannot use process ids: a child has a PID namespace of its own."""
    new = mark.with_name(f"{mark.name}.new")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT, 0o666)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    new.rename(mark)
    return descriptor


def began(document: ClaimedDocument) -> None:
    """Create a file that marks the start of this attempt, locked until its process has ended."""
    hold(Path(document.payload, f"began-{document.id}-{document.attempt}"))


def name_its_process(document: ClaimedDocument) -> str:
    """Return the name of a file that is locked until this process has ended."""
    if not Path(document.payload, TOKEN).exists():
        hold(Path(document.payload, TOKEN))
    return TOKEN


def wait_for(document: ClaimedDocument, name: str) -> None:
    """Wait until a file of this name is in the folder."""
    while not Path(document.payload, name).exists():
        FOREVER.wait(0.005)


def hang(document: ClaimedDocument) -> None:
    began(document)
    FOREVER.wait()


def finish_when_told(document: ClaimedDocument) -> int:
    began(document)
    wait_for(document, "go on")
    return document.attempt


def take_20_ms(document: ClaimedDocument) -> None:
    FOREVER.wait(0.02)


# ── Those that misbehave ─────────────────────────────────────────────────────────────────────────


def hang_and_refuse_to_end(document: ClaimedDocument) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    hang(document)


def hold_the_interpreter(document: ClaimedDocument) -> None:
    """Sleep in C without releasing the GIL."""
    began(document)
    ctypes.PyDLL(None).usleep(1_500_000)


def exit_at_once(document: ClaimedDocument) -> None:
    os._exit(3)


def exit_with_success(document: ClaimedDocument) -> None:
    os._exit(0)


def exit_politely(document: ClaimedDocument) -> None:
    sys.exit(4)


def segfault(document: ClaimedDocument) -> None:
    ctypes.string_at(0)


def kill_itself(document: ClaimedDocument) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_its_group(document: ClaimedDocument) -> None:
    os.killpg(0, signal.SIGKILL)


def eat_memory(document: ClaimedDocument) -> None:
    bytearray(1 << 30)


def eat_memory_bit_by_bit(document: ClaimedDocument) -> None:
    eaten = []
    while True:
        eaten.append(bytearray(1 << 20))


def fork_and_return_twice(document: ClaimedDocument) -> str:
    return "child" if os.fork() == 0 else "parent"


def fork_and_open_files(document: ClaimedDocument) -> None:
    """Open files in a fork: they get the descriptors of pipes that it does not have."""
    if (forked := os.fork()) == 0:
        for number in range(100):
            os.open(Path(document.payload, f"opened {number}"), os.O_CREAT | os.O_WRONLY)
    else:
        os.waitpid(forked, 0)


def pipes_of_a_fork(document: ClaimedDocument) -> list[str]:
    """Return the pipes of a forked process, except the one that reports them."""
    mine, its = os.pipe()
    if os.fork() == 0:
        descriptors = Path("/proc/self/fd").iterdir()
        pipes = [fd.name for fd in descriptors if "pipe:" in str(fd.resolve())]
        os.write(its, " ".join(sorted(set(pipes) - {str(mine), str(its)})).encode())
        os._exit(0)
    os.wait()
    return os.read(mine, 1_000).decode().split()


def leave_a_process(document: ClaimedDocument) -> None:
    held = hold(Path(document.payload, "left"))
    subprocess.Popen(["sleep", "1000"], pass_fds=[held])
    os.close(held)


def leave_a_daemon(document: ClaimedDocument) -> None:
    """Fork twice with a new session in between, as daemons do; ignore SIGTERM and SIGHUP."""
    if (first := os.fork()) == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            hold(Path(document.payload, "left"))
            FOREVER.wait()
        os._exit(0)
    os.waitpid(first, 0)
    wait_for(document, "left")


def leave_a_daemon_and_hang(document: ClaimedDocument) -> None:
    leave_a_daemon(document)
    hang(document)


def leave_a_daemon_and_crash(document: ClaimedDocument) -> None:
    leave_a_daemon(document)
    kill_itself(document)


def close_every_descriptor(document: ClaimedDocument) -> None:
    os.closerange(0, 1_000)


def close_descriptors_and_hang(document: ClaimedDocument) -> None:
    os.closerange(3, 1_000)
    FOREVER.wait()


def write_nonsense_to_every_descriptor(document: ClaimedDocument) -> None:
    for descriptor in range(3, 1_000):  # those of the child follow all that its worker has open
        try:
            os.write(descriptor, b"\xff" * 100)
        except OSError:
            continue
    FOREVER.wait()


def print_megabytes(document: ClaimedDocument) -> None:
    for _ in range(200):
        os.write(1, b"x" * 99_999 + b"\n")


def print_lines(document: ClaimedDocument) -> None:
    sys.stdout.write(f"out {document.payload}\n")
    sys.stderr.write("red \x1b[31m")
