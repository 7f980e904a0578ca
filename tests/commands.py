"""Run commands, in this process where possible, otherwise as the installed program."""

import json
import os
import pty
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from fairturn import Claim, Completed, Failed, Queue
from fairturn.cli import main
from fairturn.clock import SECOND_US
from fairturn.model import OutageReport

SCRIPT = Path(sys.executable).with_name("fairturn")
LEASE_US = 30_000_000


def fairturn(*arguments: str | Path, stdin: str | bytes | None = None) -> Result:
    """Run a command in this process."""
    result = CliRunner().invoke(main, [str(argument) for argument in arguments], input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception  # a command prints a sentence, never a traceback
    return result


def lines_of(result: Result) -> list[dict[str, Any]]:
    """Return the JSON lines of a command that succeeded."""
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def error_of(result: Result, code: int) -> str:
    """Return the sentence of a command that failed with this exit code."""
    assert result.exit_code == code, result.output
    *_, last = result.stderr.splitlines()
    assert last.startswith("Error: ")
    return last.removeprefix("Error: ")


def shown_on_a_terminal(
    stream: str, *arguments: str | Path, typed: str = "", code: int = 0, **environment: str
) -> str:
    """Return the program's output when this stream is a terminal, and check its exit code."""
    screen, terminal = pty.openpty()
    with subprocess.Popen(
        [SCRIPT, *arguments],
        stdin=subprocess.PIPE,
        stdout=terminal if stream == "stdout" else subprocess.DEVNULL,
        stderr=terminal if stream == "stderr" else subprocess.DEVNULL,
        env={**os.environ, "TERM": "xterm-256color", **environment},
    ) as process:
        os.close(terminal)
        assert process.stdin is not None
        process.stdin.write(typed.encode())
        process.stdin.close()
        shown = b""
        with suppress(OSError), os.fdopen(screen, "rb", buffering=0) as lines:
            while part := lines.read(4_096):  # on Linux, the end of the program is an error
                shown += part
    assert process.returncode == code
    return shown.decode()


def claim(queue: Queue, n: int = 1) -> list[Claim]:
    return queue.store.claim(n, worker="w", lease_us=LEASE_US).claims


def complete(queue: Queue, n: int = 1, result: str = '{"pages":3}') -> list[str]:
    """Complete documents and return their ids."""
    claims = claim(queue, n)
    queue.store.finish([Completed(claimed.fence, result) for claimed in claims])
    return [claimed.document.id for claimed in claims]


def kill(queue: Queue, n: int = 1, error: str = "unreadable") -> list[str]:
    """Make documents dead and return their ids."""
    claims = claim(queue, n)
    queue.store.finish([Failed(claimed.fence, error) for claimed in claims])
    return [claimed.document.id for claimed in claims]


def hold(queue: Queue, service: str | None = "azure-ocr", *, retry_after_s: int = 25) -> None:
    """Let two documents of the kind `ocr` report a service as unavailable, while another one waits.
    None stands for a service that the kind does not name."""
    queue.sign_on("w", 2, ["ocr"], needs={"ocr": [] if service is None else [service]})
    for _ in range(3):
        queue.submit("acme", kind="ocr")
    claims = queue.claim(2, worker="w", lease_s=30, kinds=["ocr"]).claims
    retry_after_us = retry_after_s * SECOND_US
    queue.finish(
        [OutageReport(each.fence, "503 <busy>", retry_after_us, service) for each in claims]
    )
