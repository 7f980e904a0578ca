"""A RabbitMQ server from the system's package, with its own port, folder and node name.

It takes about five seconds to start, so all tests of a run share one; each uses queues of its own.
The programs are called directly: the package's wrappers would switch to the user and the folders of
the system's service, which is neither used nor touched.
"""

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.servers.lifetime import absent, free_port, kept_folder, run_detached, shared
from tests.wait import wait_until

PROGRAMS = Path("/usr/lib/rabbitmq/bin")
ANSWERS_WITHIN_S = 120


class Rabbit:
    """A running server."""

    def __init__(self, port: int, environment: dict[str, str]) -> None:
        self.port = port
        self.url = f"amqp://guest:guest@127.0.0.1:{port}/%2F"
        self._environment = environment

    def control(self, *command: str) -> str:
        """Return the output of `rabbitmqctl`, which takes a second or two."""
        done = subprocess.run(
            [str(PROGRAMS / "rabbitmqctl"), "--quiet", *command],
            env=self._environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout


@contextmanager
def of_this_run() -> Iterator[Rabbit]:
    """Return the server that all processes of this pytest run share."""
    refuse_if_absent()
    with shared("rabbitmq", _start) as known:
        yield Rabbit(**known)


@contextmanager
def started() -> Iterator[Rabbit]:
    """Run a server until the end of the block."""
    refuse_if_absent()
    with kept_folder("rabbitmq") as folder:
        yield Rabbit(**_start(folder))


def refuse_if_absent() -> None:
    if not (PROGRAMS / "rabbitmq-server").exists() or shutil.which("epmd") is None:
        absent("RabbitMQ is not installed (Debian: apt-get install rabbitmq-server)")


def _start(folder: Path) -> dict[str, Any]:
    port, names_port = free_port(), free_port()
    for name, text in {"plugins": "[].\n", "rabbit.conf": "", "environment": ""}.items():
        (folder / name).write_text(text)
    environment = {
        "PATH": os.environ["PATH"],
        "LANG": "C.UTF-8",
        "HOME": str(folder),  # the folder of Erlang's cookie
        "ERL_EPMD_PORT": str(names_port),
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODENAME": f"fairturn-{port}@localhost",
        "RABBITMQ_NODE_PORT": str(port),
        "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
        "RABBITMQ_DIST_PORT": str(free_port()),
        "RABBITMQ_MNESIA_BASE": str(folder / "data"),
        "RABBITMQ_LOG_BASE": str(folder / "logs"),
        "RABBITMQ_LOGS": "-",
        "RABBITMQ_PID_FILE": str(folder / "pid"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
        "RABBITMQ_CONFIG_FILE": str(folder / "rabbit"),
        "RABBITMQ_CONF_ENV_FILE": str(folder / "environment"),
    }
    # Started here, because the server would start one that outlives it.
    run_detached(folder, ["epmd"], environment)
    wait_until(lambda: _listens(names_port), "epmd listens")
    server = run_detached(folder, [str(PROGRAMS / "rabbitmq-server")], environment)
    wait_until(
        lambda: _listens(port) or _ended(server, folder), "RabbitMQ listens", ANSWERS_WITHIN_S
    )
    return {"port": port, "environment": environment}


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _ended(server: int, folder: Path) -> bool:
    if not Path(f"/proc/{server}").exists():
        raise RuntimeError(f"RabbitMQ did not start: {(folder / 'log').read_text()[-2_000:]}")
    return False
