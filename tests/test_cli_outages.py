"""Long-running commands while PostgreSQL stops or does not answer."""

import fcntl
import os
import select
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import apsw
import httpx
import pytest

from fairturn import Queue
from fairturn.cli.deadline import ENDING_S
from fairturn.clock import stopwatch
from tests.commands import SCRIPT
from tests.http_server import bearer, key_for
from tests.servers import postgres
from tests.servers.proxy import through
from tests.servers.queues import Databases
from tests.test_http_docs import free_port
from tests.wait import wait_until

GRACE_S = 1
HANDLER = """
import pathlib, threading

def run(document):
    pathlib.Path("begun").touch()
    threading.Event().wait(document.payload["s"])
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slow.py").write_text(HANDLER)
    return tmp_path


@contextmanager
def running(*arguments: str, **more: Any) -> "Iterator[subprocess.Popen[bytes]]":
    with subprocess.Popen([SCRIPT, *arguments], **more) as process:
        try:
            yield process
        finally:
            process.kill()


def is_listening(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True


def status_of(client: httpx.Client, path: str = "/v1/summary") -> int:
    return client.get(path).status_code


def full_pipe() -> tuple[int, int]:
    """Return a full pipe: a process that writes to it blocks until it is read."""
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4_096)
    os.write(write, bytes(4_096))
    return read, write


def stop(server: postgres.Server) -> None:
    """Stop a server at once, and wait until it has stopped."""
    assert server.pid is not None
    ended = os.pidfd_open(server.pid)
    os.kill(server.pid, signal.SIGQUIT)
    assert select.select([ended], [], [], 30)[0], "the server does not end"
    os.close(ended)


@contextmanager
def frozen(server: postgres.Server) -> Iterator[None]:
    """Freeze a server: it keeps its connections and answers nothing, as after a network failure."""
    assert server.pid is not None
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    family = [server.pid, *map(int, children)]
    for pid in family:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in family:
            os.kill(pid, signal.SIGCONT)


def test_a_service_whose_database_ends_as_it_begins_to_listen_serves_on_and_ends_well() -> None:
    port = free_port()
    read, write = full_pipe()  # it listens, but cannot report that before the server has stopped
    arguments = ("serve", "--port", str(port), "--database")
    with (
        postgres.started() as server,
        running(*arguments, server.url(tcp=True), stderr=write) as program,
        os.fdopen(read, "rb") as said,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
    ):
        os.close(write)
        wait_until(lambda: is_listening(port), "the service listens")
        stop(server)
        said.read(4_096)

        answers = [status_of(client, path) for path in ("/livez", "/readyz", "/v1/summary")]
        program.send_signal(signal.SIGTERM)
        code = program.wait(30)
        lines = said.read().decode().splitlines()

    assert answers == [200, 503, 503]
    assert code == 0
    assert [line.split()[0] for line in lines[:2]] == ["Serving", "There"], lines
    assert not any("Traceback" in line for line in lines), lines


def test_a_service_answers_503_while_the_database_is_away_and_as_before_when_it_is_back() -> None:
    port = free_port()
    with Databases() as databases:
        name = databases.new().rpartition("/")[2].partition("?")[0]
        with Queue(postgres.of_this_run().url(name)) as queue:
            operator = bearer(key_for(queue))
        with (
            through(postgres.of_this_run().url(name, tcp=True)) as proxy,
            running("serve", "--port", str(port), "--database", proxy.url) as program,
            httpx.Client(
                base_url=f"http://127.0.0.1:{port}", headers=operator, timeout=60
            ) as client,
        ):
            wait_until(lambda: is_listening(port), "the service listens")
            before = status_of(client)
            proxy.cut()
            away = status_of(client)
            proxy.mend()
            wait_until(lambda: status_of(client) == 200, "the service answers again")
            program.send_signal(signal.SIGTERM)
            code = program.wait(30)

    assert (before, away, code) == (200, 503, 0)


@pytest.mark.parametrize("command", ["work", "up"])
def test_a_command_ends_soon_after_its_grace_period_while_the_database_does_not_answer(
    folder: Path, command: str
) -> None:
    options = ("--port", "0") if command == "up" else ()
    with postgres.started() as server:
        url = server.url(tcp=True)
        with Queue(url) as queue:
            queue.submit("acme", payload={"s": 60})
        with running(
            command, "slow:run", "--grace", str(GRACE_S), "--database", url, *options
        ) as program:
            wait_until((folder / "begun").exists, "a handler runs")
            with frozen(server):
                asked_s = stopwatch()
                program.send_signal(signal.SIGTERM)
                program.wait(GRACE_S + ENDING_S + 10)
                took_s = stopwatch() - asked_s
            with Queue(url) as queue:
                ended = queue.summary()

    assert took_s >= GRACE_S
    assert ended.completed == 0


def test_up_ends_soon_after_its_grace_period_while_another_process_holds_the_file(
    folder: Path,
) -> None:
    with Queue("documents.db") as queue:
        queue.submit("acme", payload={"s": 1})
    with running("up", "slow:run", "--grace", str(GRACE_S), "--port", "0") as program:
        wait_until((folder / "begun").exists, "a handler runs")
        with closing(apsw.Connection("documents.db")) as holder:
            holder.execute("BEGIN IMMEDIATE")  # the outcome waits up to 30 s for this
            program.send_signal(signal.SIGTERM)
            program.wait(GRACE_S + ENDING_S + 10)


def test_a_second_signal_ends_a_service_at_once_while_the_database_does_not_answer() -> None:
    port = free_port()
    with (
        postgres.started() as server,
        running("serve", "--port", str(port), "--database", server.url(tcp=True)) as program,
    ):
        wait_until(lambda: is_listening(port), "the service listens")
        # Before its first answer, it may not yet have handlers of signals.
        httpx.get(f"http://127.0.0.1:{port}/livez", timeout=60).raise_for_status()
        with frozen(server):
            program.send_signal(signal.SIGTERM)
            program.send_signal(signal.SIGINT)
            code = program.wait(ENDING_S + 10)

    assert code in (0, 75), "0 if no call of the queue was under way"


def test_up_gives_running_handlers_their_grace_period(folder: Path) -> None:
    with Queue("documents.db") as queue:
        id = queue.submit("acme", payload={"s": 1}).id
        with running("up", "slow:run", "--port", "0") as program:
            wait_until((folder / "begun").exists, "a handler runs")
            program.send_signal(signal.SIGTERM)
            assert program.wait(30) == 0
        assert queue.get(id).state == "completed"
