"""Every setting that `fairturn config` shows applies to every command that it concerns.

The tests compare observations with the list of settings: a setting that is added without an
observation here fails them.
"""

import json
import os
import signal
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import httpx
import pytest

from fairturn import Queue, State
from fairturn.cli.settings import (
    QUEUE,
    SERVICE,
    WORKER,
    known_settings,
    names_of,
    option_settings,
    variable_of,
)
from fairturn.worker.isolation import Isolation, has_namespaces, limits_processes
from tests.commands import SCRIPT
from tests.http_server import bearer, key_for
from tests.test_cli_docs import commands
from tests.test_cli_service import self_signed
from tests.wait import wait_until

SOON_S = 15  # well below the defaults of lease and grace, 30 s
HANDLERS = """
import os, pathlib, resource, threading

TOKEN = os.urandom(8).hex()

def run(document):
    do = document.payload["do"]
    if do == "tell":
        return {
            "passed": os.environ.get("PASSED"),
            "file": resource.getrlimit(resource.RLIMIT_FSIZE)[1],
            "processes": resource.getrlimit(resource.RLIMIT_NPROC)[1],
            "pids": int(pathlib.Path("/proc/sys/kernel/pid_max").read_text()),
            "namespace": os.readlink("/proc/self/ns/pid"),
            "process": TOKEN,
        }
    if do == "hang":
        pathlib.Path("begun").touch()
        threading.Event().wait(60)
    if do == "fail":
        raise ValueError("not now")
    if do == "eat":
        bytearray(1 << 30)
    return os.getpid()
"""
QUEUE_FLAGS = {
    "database", "schema", "synchronous", "allow_network", "contents", "contents_shared",
}  # fmt: skip
BACKOFF = {"retry_first_s": "0.01", "retry_factor": "20", "retry_most_s": "0.5"}
PLACE_FLAGS = QUEUE_FLAGS | {"url", "key_file"}
FLAGS: dict[str, set[str]] = {
    "work": QUEUE_FLAGS | set(names_of(WORKER)),
    "serve": QUEUE_FLAGS | set(names_of(SERVICE)),
    "up": QUEUE_FLAGS | set(names_of(WORKER)) | set(names_of(SERVICE)),
    "backup": QUEUE_FLAGS,
    "prune": QUEUE_FLAGS,
    "restore": {"allow_network", "contents_shared"},
    "restored": QUEUE_FLAGS,
    "doctor": QUEUE_FLAGS - {"synchronous", "contents_shared"},
    "migrate": {"database", "schema"},
    "rule": {"database", "url"},
    **{name: set() for name in ("completion", "copy", "demo", "replay", "simulate")},
}
# Options and arguments that share a name with a setting: of a rule without a queue, an idempotency
# key, the kind of a document, of a kind of work, of a simulated queue.
OTHERS = {
    "rule": {"reset", "bounds"},
    "submit": {"key", "kind"},
    **{name: {"kind"} for name in ("list", "cancel", "retry", "export")},
    "kinds set": {"attempts_max"},
    "restore": {"database"},  # the file that it creates
    "replay": {"mode", "reset", "costs", "bounds"},
    "simulate": {"mode", "reset", "costs", "bounds"},
    "copy": {
        "schema",
        "contents",
        "contents_shared",
    },  # of the queue that is written, for which there is no setting
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("FAIRTURN_")]:
        monkeypatch.delenv(name)
    (tmp_path / "observed.py").write_text(HANDLERS)
    return tmp_path


@pytest.fixture
def queue(folder: Path) -> Iterator[Queue]:
    with Queue("documents.db", attempts_max=1) as opened:
        yield opened


@contextmanager
def running(command: str, **settings: str) -> "Iterator[subprocess.Popen[bytes]]":
    """Run a command with settings in its environment, and check that `fairturn config` shows
    them."""
    if command == "up":
        settings = {"port": "0", **settings}
    given = {variable_of(name): value for name, value in settings.items()}
    environ = {**os.environ, **given}
    printed = subprocess.run(
        [SCRIPT, "config", "--json"], env=environ, capture_output=True, check=True
    )
    shown = {line["name"]: line["origin"] for line in map(json.loads, printed.stdout.splitlines())}
    assert {shown[name] for name in settings} == set(given)
    with subprocess.Popen([SCRIPT, command], env=environ, stdout=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("command", ["work", "up"])
def test_every_setting_of_the_worker_applies(
    queue: Queue, folder: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PASSED", "yes")
    limits = {
        **{"time_limit_s": "1", "memory_limit": "64MiB"},
        **{"process_limit": "50", "file_limit": "10MiB", "pass_env": "PASSED"},
    }
    applied = set()
    with running(
        command, handler="observed:run", concurrency="3", lease_s="0.5", **limits
    ) as program:
        done = queue.wait(queue.submit("acme", payload={"do": "report"}).id, timeout_s=60)
        if done.state is State.COMPLETED and queue.result(done.id) != program.pid:
            applied.add("handler")
        wait_until(lambda: [seen.slots for seen in queue.store.workers()] == [3], "it has 3 slots")
        applied.add("concurrency")
        for name, do in (("time_limit_s", "hang"), ("memory_limit", "eat")):
            ended = queue.wait(queue.submit("acme", payload={"do": do}).id, timeout_s=SOON_S)
            if (ended.error or "").startswith(name.removesuffix("_s").replace("_", " ")):
                applied.add(name)
        told = _tell(queue)
        if told["passed"] == "yes":
            applied.add("pass_env")
        if told["file"] == 10 * 1_048_576:
            applied.add("file_limit")
        if not _limits_processes() or told["processes"] == 52 or told["pids"] == 351:
            applied.add("process_limit")
        (folder / "begun").unlink()
        queue.configure(attempts_max=2)  # so that the document of a killed worker runs again
        queue.submit("acme", payload={"do": "hang"})
        wait_until((folder / "begun").exists, "a handler runs")
        program.kill()
        wait_until(lambda: _is_claimed(queue), "the lease expires", SOON_S)
        applied.add("lease_s")
    (folder / "begun").unlink()
    with running(command, handler="observed:run", threads="true", grace_s="0.1") as program:
        id = queue.submit("acme", payload={"do": "report"}).id
        queue.wait(id, timeout_s=60)
        if queue.result(id) == program.pid:
            applied.add("threads")
        queue.submit("acme", payload={"do": "hang"})
        wait_until((folder / "begun").exists, "a handler runs")
        program.send_signal(signal.SIGTERM)
        program.wait(SOON_S)
        applied.add("grace_s")

    with running(command, handler="observed:run", namespace="false", recycle_after="1"):
        told, again = _tell(queue), _tell(queue)
        if told["namespace"] == str(Path("/proc/self/ns/pid").readlink()):
            applied.add("namespace")
        if told["process"] != again["process"]:
            applied.add("recycle_after")

    queue.set_kind("ocr")
    other = queue.submit("acme", payload={"do": "report"}).id
    with running(command, handler="observed:run", kind="ocr"):
        queue.wait(queue.submit("acme", payload={"do": "report"}, kind="ocr").id, timeout_s=60)
        if queue.get(other).state is State.WAITING:
            applied.add("kind")

    assert applied == set(names_of(WORKER)) - BACKOFF.keys()


def _tell(queue: Queue) -> dict[str, Any]:
    id = queue.submit("acme", payload={"do": "tell"}).id
    queue.wait(id, timeout_s=60)
    told: dict[str, Any] = queue.result(id)
    return told


def _limits_processes() -> bool:
    return limits_processes(Isolation({}, has_namespaces(os.environ)))


@pytest.mark.parametrize("command", ["work", "up"])
def test_every_setting_of_the_backoff_applies(queue: Queue, command: str) -> None:
    queue.configure(attempts_max=4)
    queue.submit("acme", payload={"do": "fail"})
    settings = {"handler": "observed:run", "port": "0", **BACKOFF}
    environ = {**os.environ, **{variable_of(name): value for name, value in settings.items()}}

    with subprocess.Popen(
        [SCRIPT, command, "--json"], env=environ, stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            ended = map(json.loads, iter(process.stdout.readline, b""))
            delays = [line["retry_in_s"] for line, _ in zip(ended, range(3), strict=False)]
        finally:
            process.kill()

    first, grown, longest = delays
    assert 0.01 <= first <= 0.015  # with a jitter of up to a half
    assert 0.2 <= grown <= 0.3
    assert 0.5 <= longest <= 0.75


@pytest.mark.parametrize("command", ["serve", "up"])
def test_every_setting_of_the_service_applies(queue: Queue, folder: Path, command: str) -> None:
    certificate, private_key = self_signed(folder)
    with socket.create_server(("127.0.0.2", 0)) as free:
        port = free.getsockname()[1]
    acme, operator = bearer(key_for(queue, "acme")), bearer(key_for(queue))
    settings = {
        "host": "127.0.0.2",
        "port": str(port),
        "certificate": str(certificate),
        "private_key": str(private_key),
        "trusted_proxy": "127.0.0.1",
        "size_limit": "1KiB",
        "rate": "20/hour",
        "positions": "false",
        "customers_in_metrics": "1",
    }
    more = {"handler": "observed:run", "concurrency": "1"} if command == "up" else {}
    queue.submit("busy", payload={"do": "hang"})
    applied = set()
    with running(command, **settings, **more):
        client = httpx.Client(base_url=f"https://127.0.0.2:{port}", verify=False)
        with client:
            wait_until(lambda: _answers(client), "the service answers")
            applied |= {"host", "port"}
            if ssl.get_server_certificate(("127.0.0.2", port)) == certificate.read_text():
                applied |= {"certificate", "private_key"}
            forwarded = {"X-Forwarded-For": "203.0.113.9", "X-Forwarded-Proto": "http"}
            overheard = client.get("/v1/me", headers={**acme, **forwarded})
            if overheard.json()["code"] == "https_needed":
                applied.add("trusted_proxy")
            large = client.post("/v1/documents", content=bytes(2_000), headers=acme)
            if large.status_code == 413:
                applied.add("size_limit")
            if command == "up":
                wait_until((folder / "begun").exists, "the only slot is taken")
            id = queue.submit("acme", payload={}).id
            told = client.get(f"/v1/documents/{id}", params={"explain": True}, headers=acme)
            if told.json()["explanation"]["position"] is None:
                applied.add("positions")
            metrics = client.get("/metrics", headers=operator)
            if 'fairturn_customer_waiting_documents{customer="acme"} 1.0' in metrics.text:
                applied.add("customers_in_metrics")
            answers = {client.get("/v1/me", headers=acme).status_code for _ in range(20)}
            if answers == {200, 429}:
                applied.add("rate")

    assert applied == set(names_of(SERVICE))


def _is_claimed(queue: Queue) -> bool:
    return bool(queue.store.claim(1, worker="another", lease_us=30_000_000).claims)


def _answers(client: httpx.Client) -> bool:
    try:
        return client.get("/livez").status_code == 200
    except httpx.TransportError:
        return False


def flags_of(name: str, command: click.Command) -> set[str]:
    """Return the settings that a command accepts as options or arguments."""
    found = {parameter.name for parameter in command.params}
    return found & known_settings().keys() - OTHERS.get(name, set())


@pytest.mark.parametrize(("name", "command"), commands(), ids=[name for name, _ in commands()])
def test_a_command_accepts_the_settings_that_it_applies_and_no_others(
    name: str, command: click.Command
) -> None:
    top, *_ = name.split()

    assert flags_of(name, command) == FLAGS.get(top, PLACE_FLAGS)


def test_every_setting_belongs_to_a_command_that_applies_it() -> None:
    accepted = {flag for name, command in commands() for flag in flags_of(name, command)}

    # An access key is not an option, because other users can see the command line.
    assert option_settings().keys() - accepted == {"key", "listen_url"}
    of_a_queue = {name for name, known in known_settings().items() if known.table == QUEUE}
    assert of_a_queue.isdisjoint(accepted), "they are changed by config set"
