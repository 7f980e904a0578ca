"""The PostgreSQL server of a contest, with a new database for each turn of a contestant."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psycopg
from psycopg import sql

from benchmarks.contest import Board
from fairturn import Queue
from tests.servers.postgres import Server

ROOT = Path(__file__).parent.parent
OWN = "benchmarks.postgres_own"
PEERS = "benchmarks.postgres_peers"
PATIENCE_S = 180
# Queries that return a row while a document has not ended. Outcomes are often written after the
# handler returns, so a queue counts as drained when its own table is.
UNFINISHED = {
    "bare": "SELECT 1 FROM bare WHERE state < 2 LIMIT 1",
    "bare-copy": "SELECT 1 FROM bare WHERE state < 2 LIMIT 1",
    "pgmq": "SELECT 1 FROM pgmq.q_documents LIMIT 1",
    "pgmq-round-robin": "SELECT 1 FROM pgmq.q_documents LIMIT 1",
    "pgqueuer": "SELECT 1 FROM pgqueuer LIMIT 1",
    "chancy": "SELECT 1 FROM chancy_jobs WHERE state IN ('pending', 'running') LIMIT 1",
    "oban": "SELECT 1 FROM oban_jobs WHERE state IN ('available', 'executing') LIMIT 1",
    "saq": "SELECT 1 FROM saq_jobs WHERE status IN ('queued', 'active') LIMIT 1",
    "procrastinate": "SELECT 1 FROM procrastinate_jobs WHERE status IN ('todo', 'doing') LIMIT 1",
}
# Prints the version, and the packages that are not installed.
_LOOK = """
import importlib.util, platform, sys
print(platform.python_version(), *(p for p in sys.argv[1:] if not importlib.util.find_spec(p)))
"""
OURS = ("bare", "bare-copy", "fairturn")


class Arena:
    """Runs contestants in separate processes."""

    def __init__(self, server: Server, folder: Path, peers_python: str, *, at_once: int) -> None:
        self._server = server
        self._folder = folder
        self._peers_python = peers_python
        self._environment = {**os.environ, "AT_ONCE": str(at_once)}
        self._made = 0

    def absent(self, packages: dict[str, str]) -> tuple[str, dict[str, str]]:
        """Return the peers' Python, and the reason for each peer that cannot take part."""
        version, *missing = subprocess.run(
            [self._peers_python, "-c", _LOOK, *packages.values()],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.split()
        why = f"is not there for Python {version}"
        return version, {name: why for name, package in packages.items() if package in missing}

    @contextmanager
    def database(self) -> Iterator[str]:
        """Create an empty database for one turn."""
        self._made += 1
        name = f"turn_{self._made}"
        self._server.create(name)
        try:
            yield self._server.url(name, tcp=True)
        finally:
            self._server.drop(name)

    def fill(self, name: str, url: str, *, many: int = 0) -> None:
        """Install the queue and submit `many` documents in bulk."""
        self._ask(name, url, "fill", many)
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("VACUUM (ANALYZE)")  # as autovacuum would on a queue in use
            connection.execute("CHECKPOINT")  # no flush of these writes in another's turn

    def submitter(self, name: str, url: str) -> "Process":
        """Return a process that has installed the queue and submits when it has its turn."""
        return Process(self._command(name, url, "submit"), name, self._environment)

    def checkpoint(self) -> None:
        """Flush earlier writes, so that they are not flushed in another contestant's turn."""
        self._server.execute(sql.SQL("CHECKPOINT"))

    def drain_s(self, name: str, url: str, *, workers: int, documents: int) -> float:
        """Return how long the workers take until all documents have ended."""
        with ExitStack() as stack:
            unfinished = stack.enter_context(_unfinished(name, url))
            board = self._board()
            start = [
                stack.enter_context(self._worker(name, url, "work", board, place))
                for place in range(workers)
            ]
            begun = time.monotonic()
            for go in start:
                go()
            seen = Board(board)
            _wait_until(lambda: seen.started >= documents, name)
            _wait_until(lambda: not unfinished(), name)
            took = time.monotonic() - begun
            if seen.started != documents:
                print(f"{name} started {seen.started:,} of {documents:,}", file=sys.stderr)
        return took

    def looks_s(self, name: str, url: str, looks: int) -> list[float]:
        """Return the latencies from submission to start in an idle system."""
        board = self._board()
        with self._worker(name, url, "idle", board, 0) as go:
            go()
            found: list[float] = json.loads(self._ask(name, url, "look", board, looks))
        return found

    def _board(self) -> Path:
        path = self._folder / "board"
        Board.make(path)
        return path

    def _command(self, name: str, url: str, *rest: object) -> list[str]:
        python, module = (sys.executable, OWN) if name in OURS else (self._peers_python, PEERS)
        return [python, "-m", "benchmarks.contest", module, name, url, *map(str, rest)]

    def _ask(self, name: str, url: str, *rest: object) -> str:
        done = subprocess.run(
            self._command(name, url, *rest),
            cwd=ROOT,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        if done.returncode:
            raise OutOfContest(f"{name} ended with an error: {last_line(done.stderr)}")
        return done.stdout

    def _worker(self, name: str, url: str, verb: str, board: Path, place: int) -> "Process":
        return Process(self._command(name, url, verb, board, place), name, self._environment)


class OutOfContest(Exception):
    """A contestant failed; the message is its output."""


class Process:
    """A process that reports when it is ready, starts on a line of input, and exits when its input
    ends."""

    def __init__(
        self, command: list[str], name: str, environment: dict[str, str] | None = None
    ) -> None:
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._name = name

    def __enter__(self) -> Callable[[], None]:
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise OutOfContest(f"a worker of {self._name} did not start")
        return self.go

    def go(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def turn_s(self, *words: object) -> float:
        """Start a turn and return the seconds that the process reports."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(*words, file=self._process.stdin, flush=True)
            return float(self._process.stdout.readline())
        except (OSError, ValueError):
            raise OutOfContest(f"{self._name} did not go on") from None

    def answer(self) -> str:
        """Return the output of the process, up to its exit."""
        assert self._process.stdout is not None
        return self._process.stdout.read()

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE_S)


@contextmanager
def _unfinished(name: str, url: str) -> Iterator[Callable[[], bool]]:
    if name == "fairturn":
        with Queue(url) as queue:
            yield lambda: queue.summary().waiting + queue.summary().running > 0
        return
    with psycopg.connect(url, autocommit=True) as connection:
        yield lambda: connection.execute(UNFINISHED[name]).fetchone() is not None


def _wait_until(condition: Callable[[], bool], name: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > end:
            raise OutOfContest(f"{name} was not done after {PATIENCE_S} s")
        time.sleep(0.001)


def last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "nothing"
