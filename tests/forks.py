"""Processes for tests that start many, one after the other: forks of one that has imported all.

To import the stores and the tests takes a new process half a second, longer than such a child
lives. So one process imports them, has neither threads nor connections, and each child is a fork of
it: a process of its own, with its own environment, that can be killed as any other.
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
    """How a child ended, as `subprocess` says it, and what it wrote."""

    code: int
    stdout: str
    stderr: str


class Forks:
    """The process that forks."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def run(self, function: str, *arguments: str, **environment: str) -> Ended:
        """Call a function of the module in a child, with these variables added."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([function, arguments, environment]) + "\n")
        self._process.stdin.flush()
        return Ended(*json.loads(self._process.stdout.readline()))


@contextmanager
def forks_of(module: str) -> Iterator[Forks]:
    """A process that has imported a module, for as long as the block runs."""
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
    """Run one child after the other, as asked for by lines, until there are no more."""
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
    """Do as a new process would, and end."""
    code = 1
    try:
        signal.alarm(ENDED_WITHIN_S)
        os.environ.update(environment)
        importlib.reload(importlib.import_module("fairturn.crash"))  # it reads the environment
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
