"""A handler that attacks: it reads what it can reach, and kills what it can."""

import ctypes
import os
import signal
import stat
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from fairturn import ClaimedDocument
from tests.handlers import FOREVER, hold

_PTRACE_SEIZE, _PR_GET_DUMPABLE = 0x4206, 3
_READ_BYTES = 64 * 1_048_576


class Attack:
    """One document's attack. The payload names the folder, and the secret of the victim in reverse,
    so that this process does not contain it."""

    def __init__(self, document: ClaimedDocument) -> None:
        self.document = document
        self.folder = Path(document.payload["folder"])
        self._reversed = document.payload.get("reversed", "")

    def contains_secret(self, data: bytes) -> bool:
        return self._reversed.encode() in data[::-1]

    # ── Reads ────────────────────────────────────────────────────────────────────────────────────

    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    def status(self) -> dict[str, Any]:
        lines = Path("/proc/self/status").read_text().splitlines()
        fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        names = ("NoNewPrivs", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
        dumpable = ctypes.CDLL(None).prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0)
        return {name: fields[name] for name in names} | {"dumpable": dumpable}

    def descriptors(self) -> list[str]:
        """Return the files behind the descriptors, and what each contains."""
        found = []
        for link in Path("/proc/self/fd").iterdir():
            with suppress(OSError):
                found.append(str(link.readlink()))
                if stat.S_ISREG(os.fstat(int(link.name)).st_mode):
                    found.append(os.pread(int(link.name), 1_000, 0).decode(errors="replace"))
        return found

    def processes(self) -> dict[str, Any]:
        """Read all of /proc: the processes, and where the secret is."""
        me = os.getpid()
        others = [pid for pid in pids() if pid != me]
        secrets = [
            f"{what} of {pid}" for pid in others for what in self._with_secret(f"/proc/{pid}")
        ]
        traced = [pid for pid in others if ctypes.CDLL(None).ptrace(_PTRACE_SEIZE, pid, 0, 0) == 0]
        return {"others": len(others), "secrets": secrets, "traced": traced}

    def _with_secret(self, process: str) -> Iterator[str]:
        for name in ("environ", "cmdline"):
            with suppress(OSError):
                if self.contains_secret(Path(process, name).read_bytes()):
                    yield name
        with suppress(OSError):
            for link in Path(process, "fd").iterdir():
                if link.is_file() and self.contains_secret(link.read_bytes()):
                    yield f"descriptor {link.name}"
        with suppress(OSError):
            if any(map(self.contains_secret, memory_of(process))):
                yield "memory"

    def network(self) -> dict[str, Any]:
        """Ask the service, found by /proc, for its documents."""
        answers: dict[str, Any] = {}
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            fields = line.split()
            address, port = fields[1].split(":")
            if fields[3] != "0A" or address not in ("0100007F", "00000000"):
                continue
            if str(int(port, 16)) != self.document.payload["port"]:
                continue  # of another program on this machine
            url = f"http://127.0.0.1:{int(port, 16)}/v1/documents"
            try:
                with urllib.request.urlopen(url, timeout=5) as reply:
                    answers[url] = [reply.status, self.contains_secret(reply.read())]
            except urllib.error.HTTPError as error:
                answers[url] = [error.code, self.contains_secret(error.read())]
            except (OSError, ValueError):
                answers[url] = None
        return answers

    # ── Processes ────────────────────────────────────────────────────────────────────────────────

    def hold(self) -> None:
        """The victim: keep the secret in memory until told to end."""
        assert self.document.payload["secret"]
        hold(self.folder / "victim")
        wait_for_file(self.folder / "go on")

    def fork_bomb(self) -> int:
        """Fork until the system refuses; return the number of processes, and leave them running."""
        forked = 0
        held = hold(self.folder / "bomb")
        while forked < 500:
            try:
                if os.fork() == 0:
                    FOREVER.wait()
            except OSError:
                break
            forked += 1
        os.close(held)
        return forked

    def fork_for_ever(self) -> None:
        """Fork a process that forks the next and ends, each in a session of its own, so that no
        list of processes is complete."""
        hold(self.folder / "bomb")
        while True:
            if os.fork():
                FOREVER.wait(0.001)
                os._exit(0)
            os.setsid()

    def daemon(self, then: Callable[[], None]) -> None:
        """Leave a daemon, which acts and stays."""
        if (first := os.fork()) == 0:
            os.setsid()
            if os.fork() == 0:
                for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
                    signal.signal(number, signal.SIG_IGN)
                hold(self.folder / "daemon")
                then()
                hold(self.folder / "acted")
                FOREVER.wait()
            os._exit(0)
        os.waitpid(first, 0)
        wait_for_file(self.folder / "acted")

    def stay(self) -> None:
        self.daemon(lambda: None)
        FOREVER.wait()

    def kill_parent(self) -> None:
        parent = os.getppid()
        self.daemon(lambda: kill(parent))
        kill(parent)
        FOREVER.wait(0.2)

    def kill_all(self) -> None:
        self.daemon(lambda: kill_everything(str(self.folder)))
        kill_everything(str(self.folder))

    # ── Limits ───────────────────────────────────────────────────────────────────────────────────

    def write(self) -> str:
        try:
            with (self.folder / "large").open("wb") as file:
                for _ in range(100):
                    file.write(b"x" * 65_536)
        except OSError as error:
            return error.strerror or ""
        return "no limit"

    def reserve(self) -> int:
        """Reserve far more address space than the limit, as CUDA and Java do."""
        import mmap

        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        return len(mmap.mmap(-1, 1 << 36, flags=private, prot=mmap.PROT_READ))


def attack(document: ClaimedDocument) -> Any:
    return getattr(Attack(document), document.payload["do"])()


def wait_for_file(path: Path) -> None:
    while not path.exists():
        FOREVER.wait(0.005)


def memory_of(process: str) -> Iterator[bytes]:
    """Return the writable memory of a process, in pieces."""
    with Path(process, "mem").open("rb", buffering=0) as memory:
        for line in Path(process, "maps").read_text().splitlines():
            area, mode, *_ = line.split()
            if not mode.startswith("rw"):
                continue
            begin, end = (int(part, 16) for part in area.split("-"))
            with suppress(OSError, ValueError, OverflowError):
                memory.seek(begin)
                yield memory.read(min(end - begin, _READ_BYTES))


def kill(pid: int) -> None:
    with suppress(OSError):
        os.kill(pid, signal.SIGKILL)


def kill_everything(folder: str) -> None:
    """Kill every process of the worker under attack, or of the namespace, except this one."""
    parents = {pid: parent_of(pid) for pid in pids()}
    me = os.getpid()
    worker = next((pid for pid in parents if is_worker(pid, folder)), None)
    if worker is None:  # in a namespace: nothing else can be reached
        kill(-1)
    for pid in parents:
        if pid != me and (worker is None or worker in ancestry(pid, parents)):
            kill(pid)


def pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def ancestry(pid: int, parents: dict[int, int]) -> list[int]:
    line = [pid]
    while (parent := parents.get(line[-1], 0)) and parent not in line:
        line.append(parent)
    return line


def is_worker(pid: int, folder: str) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"tests.hostile_worker" in command and folder.encode() in command
