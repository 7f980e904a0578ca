"""A hostile handler finds nothing of another customer and leaves nothing running.

Each attack runs as root, if the tests do, and as an ordinary user; in a PID namespace and without
one, as on a system that allows none.
"""

import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fairturn import Queue, Worker
from fairturn.worker import reaper
from fairturn.worker.events import Event, LinePrinted
from fairturn.worker.isolation import (
    Isolation,
    child_environment,
    has_namespaces,
    limits_processes,
)
from fairturn.worker.worker import NO_NAMESPACE
from tests import handlers, ordinary_user
from tests.hostile import ancestry, parent_of, pids
from tests.hostile_worker import NAMES
from tests.test_handlers import is_gone, run, until

ROOT = Path(__file__).parent.parent
LIMIT = 50  # of processes
ENDS_S = 120


class WorkerUnderAttack:
    """`tests.hostile_worker` as root or as an ordinary user, with the folder that it works in."""

    def __init__(self, user: str) -> None:
        self.python = [sys.executable] if user == "root" else ordinary_user.command()
        self.folder = ordinary_user.folder()
        self.secret = secrets.token_hex(24)

    @contextmanager
    def running(self, *attacks: str, **options: Any) -> "Iterator[subprocess.Popen[str]]":
        """Run the attacks; yield the process when it works."""
        arguments = (str(self.folder), *map(json.dumps, (self.secret[::-1], options, attacks)))
        with subprocess.Popen(
            [*self.python, "-m", "tests.hostile_worker", *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(self.folder)},
        ) as process:
            assert process.stdout is not None
            assert int(process.stdout.readline()) == process.pid
            try:
                yield process
            finally:
                process.kill()

    def attack(self, *attacks: str, **options: Any) -> list[Any]:
        """Return the outcome of each attack. The victim must not notice any of them."""
        with self.running(*attacks, **options) as process:
            out, _ = process.communicate(timeout=ENDS_S)
        assert process.returncode == 0
        outcomes: list[Any]
        *outcomes, victim = json.loads(out)
        assert victim == ["completed", None]
        return outcomes


@pytest.fixture(params=["root", "ordinary"])
def attacked(request: pytest.FixtureRequest) -> Iterator[WorkerUnderAttack]:
    if request.param == "root" and os.geteuid():
        pytest.skip("NOT TESTED AS ROOT: the tests run as an ordinary user")
    worker = WorkerUnderAttack(request.param)
    yield worker
    shutil.rmtree(worker.folder)


def can_scope_signals() -> bool:
    """Whether Landlock of this kernel scopes signals."""
    return sys.platform == "linux" and bool(reaper.libc().syscall(444, None, 0, 1) >= 6)


NAMESPACES = pytest.mark.parametrize(
    "namespace",
    [
        pytest.param(
            True,
            marks=pytest.mark.skipif(
                not has_namespaces(os.environ), reason="NOT TESTED: no PID namespaces here"
            ),
        ),
        pytest.param(
            False,
            marks=pytest.mark.skipif(
                not can_scope_signals(), reason="NOT TESTED: Landlock scopes no signals here"
            ),
        ),
    ],
    ids=["namespace", "no namespace"],
)


# ── Reads ────────────────────────────────────────────────────────────────────────────────────────


@NAMESPACES
def test_a_handler_finds_no_secret_in_environment_descriptors_processes_and_network(
    attacked: WorkerUnderAttack, namespace: bool
) -> None:
    environment, descriptors, processes, network = attacked.attack(
        "environment", "descriptors", "processes", "network", namespace=namespace
    )

    assert not set(NAMES) & set(environment[1])
    assert attacked.secret not in str(environment)
    assert environment[1]["PATH"]
    assert not [found for found in descriptors[1] if "documents.db" in found]
    assert attacked.secret not in str(descriptors)
    assert not [found for found in descriptors[1] if found.endswith("/secret")]
    assert (processes[1]["secrets"], processes[1]["traced"]) == ([], [])
    assert list(network[1].values()) == [[401, False]]


@NAMESPACES
def test_a_child_cannot_gain_privileges_and_shows_its_memory_to_no_other(
    attacked: WorkerUnderAttack, namespace: bool
) -> None:
    ((_, status),) = attacked.attack("status", namespace=namespace)

    assert (status["NoNewPrivs"], status["dumpable"]) == ("1", 0)
    kept = reaper._KEPT if attacked.python == [sys.executable] and not os.geteuid() else 0
    for name in ("CapPrm", "CapEff"):
        assert not int(status[name], 16) & ~kept, f"{name} is {status[name]}"
    assert (int(status["CapInh"], 16), int(status["CapAmb"], 16)) == (0, 0)
    if kept or namespace:
        assert not int(status["CapBnd"], 16) & ~kept


@NAMESPACES
def test_no_process_of_a_worker_shows_its_memory_environment_and_descriptors(
    attacked: WorkerUnderAttack, namespace: bool
) -> None:
    with attacked.running("stay", namespace=namespace) as process:
        until((attacked.folder / "acted").exists, "the daemon runs")
        until((attacked.folder / "victim").exists, "the victim runs")
        shown = tree_of(process.pid)
        owners = {Path(f"/proc/{pid}/environ").stat().st_uid for pid in shown}

    assert len(shown) >= 7  # the worker, and two children of three processes each
    assert owners == {0}  # also of processes of an ordinary user: only root may read it


def test_a_handler_in_a_namespace_sees_only_its_own_processes(attacked: WorkerUnderAttack) -> None:
    if not has_namespaces(os.environ):
        pytest.skip("NOT TESTED: no PID namespaces here")
    ((_, processes),) = attacked.attack("processes")

    assert processes["others"] == 1  # the init of the namespace


def tree_of(pid: int) -> list[int]:
    parents = {one: parent_of(one) for one in pids()}
    return [one for one in parents if pid in ancestry(one, parents)]


# ── Processes ────────────────────────────────────────────────────────────────────────────────────


@NAMESPACES
@pytest.mark.parametrize("attack", ["kill_parent", "kill_all"])
def test_a_daemon_that_kills_its_parents_is_ended_and_the_worker_works_on(
    attacked: WorkerUnderAttack, namespace: bool, attack: str
) -> None:
    *_, after = attacked.attack(attack, "environment", namespace=namespace)

    assert after[0] == "completed"
    assert is_gone(attacked.folder / "daemon")


@NAMESPACES
@pytest.mark.parametrize("killed", ["reaper", "init", "worker"])
def test_killing_a_reaper_an_init_or_the_worker_ends_the_daemon_too(
    attacked: WorkerUnderAttack, namespace: bool, killed: str
) -> None:
    with attacked.running("stay", namespace=namespace) as process:
        until((attacked.folder / "acted").exists, "the daemon runs")
        until((attacked.folder / "victim").exists, "the victim runs")
        reapers = [pid for pid in tree_of(process.pid) if parent_of(pid) == process.pid]
        inits = [pid for pid in tree_of(process.pid) if parent_of(pid) in reapers]
        for pid in {"reaper": reapers, "init": inits, "worker": [process.pid]}[killed]:
            os.kill(pid, 9)

        until(lambda: is_gone(attacked.folder / "daemon"), "the daemon ends")
        until(lambda: is_gone(attacked.folder / "victim"), "the other child ends")


def test_a_fork_bomb_stops_at_the_process_limit_and_leaves_nothing_running(
    attacked: WorkerUnderAttack,
) -> None:
    if not limits_processes(Isolation({}, has_namespaces(os.environ))):
        pytest.skip("NOT TESTED: the process limit does not apply here")
    (_, forked), (_, again) = attacked.attack("fork_bomb", "fork_bomb", process_limit=LIMIT)

    assert LIMIT // 2 < forked <= LIMIT
    assert LIMIT // 2 < again <= LIMIT
    assert is_gone(attacked.folder / "bomb")


@NAMESPACES
def test_a_fork_bomb_without_end_is_ended_with_the_worker(
    attacked: WorkerUnderAttack, namespace: bool
) -> None:
    with attacked.running("fork_for_ever", namespace=namespace) as process:
        until((attacked.folder / "bomb").exists, "the bomb runs")
        process.kill()

        until(lambda: is_gone(attacked.folder / "bomb"), "the bomb ends")


# ── Limits ───────────────────────────────────────────────────────────────────────────────────────


def test_a_file_cannot_grow_above_the_limit(attacked: WorkerUnderAttack) -> None:
    ((_, error),) = attacked.attack("write", file_limit_bytes=1_000_000)

    assert error == "File too large"
    assert (attacked.folder / "large").stat().st_size == 1_000_000


def test_the_memory_limit_does_not_count_reserved_address_space(
    attacked: WorkerUnderAttack,
) -> None:
    ((state, reserved),) = attacked.attack("reserve", memory_limit_bytes=64 * 1_048_576)

    assert (state, reserved) == ("completed", 1 << 36)


def test_a_worker_has_limits_unless_they_are_lifted(tmp_path: Path) -> None:
    with Queue(tmp_path / "documents.db", synchronous="NORMAL") as queue:
        (limited,) = run(queue, handlers.limits)
        lifted: dict[str, Any] = dict.fromkeys(
            ("memory_limit_bytes", "process_limit", "file_limit_bytes")
        )
        (free,) = run(queue, handlers.limits, **lifted)

        found, without = queue.result(limited.id), queue.result(free.id)

    assert 4 << 30 <= found["memory"] < 5 << 30
    assert found["file"] == 8 << 30
    assert without["memory"] == without["file"] == -1


# ── Environment ──────────────────────────────────────────────────────────────────────────────────


def test_a_child_gets_what_programs_need_and_no_credentials() -> None:
    needed = {
        *("HOME", "PATH", "LANG", "LC_ALL", "TZ", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV"),
        *("LD_LIBRARY_PATH", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "TESSDATA_PREFIX"),
        *("HTTPS_PROXY", "SSL_CERT_FILE", "AWS_CA_BUNDLE", "TRACEPARENT", "OTEL_SERVICE_NAME"),
    }
    credentials = {
        *("PGPASSWORD", "PGHOST", "PGSERVICEFILE", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"),
        *("FAIRTURN_DATABASE", "FAIRTURN_KEY", "FAIRTURN_CONFIG", "OTEL_EXPORTER_OTLP_HEADERS"),
        *("DATABASE_URL", "HF_TOKEN", "SSH_AUTH_SOCK", "NOTIFY_SOCKET", "KUBECONFIG"),
    }

    assert set(child_environment(dict.fromkeys(needed | credentials, ""), ())) == needed


@pytest.mark.parametrize(
    "pass_env, passed",
    [
        (["HF_TOKEN"], {"HF_TOKEN"}),
        (["HF_*"], {"HF_TOKEN", "HF_HOME"}),
        (["FAIRTURN_KEY", "HF_HOME"], {"FAIRTURN_KEY", "HF_HOME"}),
    ],
)
def test_pass_env_adds_names(pass_env: list[str], passed: set[str]) -> None:
    environ = dict.fromkeys(("HF_TOKEN", "HF_HOME", "FAIRTURN_KEY", "OTHER"), "")

    assert set(child_environment(environ, pass_env)) == passed


# ── Systems without namespaces ───────────────────────────────────────────────────────────────────


def test_a_worker_says_once_that_the_system_allows_no_namespace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairturn.worker.isolation.PROBE_S", 0)  # as if it never answered
    events: list[Event] = []
    with Queue(tmp_path / "documents.db", synchronous="NORMAL") as queue:
        queue.submit("acme")
        Worker(queue, handlers.nothing, on_event=events.append).run(until_empty=True)
        Worker(queue, handlers.nothing, on_event=events.append, namespace=False).run(
            until_empty=True
        )

    lines = [event.line for event in events if isinstance(event, LinePrinted)]
    assert lines == [NO_NAMESPACE]
