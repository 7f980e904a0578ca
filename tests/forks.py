"""Processes for tests that start many: forks of one process that has imported everything.

Importing the stores and the tests takes half a second, longer than such a child lives. So one
process without threads and connections imports them, and each child is a fork of it, with its own
environment, that can be killed like any other.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
ENDED_WITHIN_S = 60


class Ended(NamedTuple):
    """The exit code of a child, as in `subprocess`, and its output."""

    code: int
    stdout: str
    stderr: str


class Forks:
    """The process that forks."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def run(self, function: str, *arguments: str, **environment: str) -> Ended:
        """Call a function of the module in a child, with these environment variables added."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([function, arguments, environment]) + "\n")
        self._process.stdin.flush()
        return Ended(*json.loads(self._process.stdout.readline()))


@contextmanager
def forks_of(module: str) -> Iterator[Forks]:
    """Yield a process that has imported a module."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.forks", module],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield Forks(process)


# ── The process that forks ───────────────────────────────────────────────────────────────────────


def serve(module: str) -> None:
    """Run one child after the other, one for each line of input."""
    importlib.import_module(module)
    for line in sys.stdin:
        function, arguments, environment = json.loads(line)
        with TemporaryFile("w+") as stdout, TemporaryFile("w+") as stderr:
            child = os.fork()
            if child == 0:
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.dup2(stdout.fileno(), 1)
                os.dup2(stderr.fileno(), 2)
                _be_a_child(module, function, arguments, environment)
            _, status = os.waitpid(child, 0)
            stdout.seek(0)
            stderr.seek(0)
            ended = Ended(os.waitstatus_to_exitcode(status), stdout.read(), stderr.read())
        sys.stdout.write(json.dumps(ended) + "\n")
        sys.stdout.flush()


def _be_a_child(
    module: str, function: str, arguments: list[str], environment: dict[str, str]
) -> None:
    """Set up the child like a new process, run the function and exit."""
    code = 1
    try:
        signal.alarm(ENDED_WITHIN_S)
        os.environ.update(environment)
        importlib.reload(importlib.import_module("fairturn.stores.crash"))  # reads the environment
        getattr(sys.modules[module], function)(*arguments)
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(sys.argv[1])
