"""A process that is stopped at any crash point blocks others for at most the busy timeout.

SIGSTOP stops a child at one point of its work on a queue in a file. Inside a transaction it holds
the write lock: calls of other processes raise `StoreBusy`, a worker obeys SIGTERM, and `doctor`
names the child. Everywhere else other processes continue and take over the documents of the child.
After SIGCONT nothing is recorded twice.

`make test` stops the child at a few points that a seed chooses; `-m long` at all of them.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from fairturn import Queue
from fairturn.clock import SECOND_US, ManualClock, stopwatch
from fairturn.errors import StoreBusy
from fairturn.maintenance.backup import back_up
from fairturn.maintenance.copy import copy_queue
from fairturn.maintenance.restore import restore
from fairturn.model import Completed, Failed, Fence, Settings, State
from fairturn.stores import crash
from fairturn.stores.conformance.steps import assert_numbers_are_exact
from fairturn.stores.sqlite import connection
from fairturn.stores.sqlite.connection import holder_of
from fairturn.worker.worker import Worker
from tests.commands import fairturn
from tests.servers.queues import Databases

ROOT = Path(__file__).parent.parent
START = 1_700_000_000 * SECOND_US
LEASE_S = 30
LEASE_US = LEASE_S * SECOND_US
LARGE = b"x" * 70_000  # too large for the row
KEYS = [f"key {n}" for n in range(7)]
WITHIN_S = 5.0
CHILD_S = 60

# Points inside a transaction that writes to the file.
LOCKED = tuple(
    name
    for name in crash.POINTS
    if name.endswith("-before-commit") and not name.startswith("copy-")
)
SEED = 18
SAMPLE = (
    Random(SEED).choice(LOCKED),
    Random(SEED).choice(
        [name for name in crash.POINTS if name not in LOCKED and "copy" not in name]
    ),
)


# ── The child ────────────────────────────────────────────────────────────────────────────────────


def say(what: str, value: Any = None) -> None:
    sys.stdout.write(json.dumps([what, value]) + "\n")
    sys.stdout.flush()


def work(path: str, url: str = "") -> None:
    """Reach every crash point once, and print what was recorded. Other processes may have taken
    over."""
    signal.alarm(CHILD_S)
    clock = ManualClock(START)
    queue = Queue(path, clock=clock)
    store = queue.store
    ids = [queue.submit("content", content=LARGE, key=KEYS[0]).id]
    ids += [queue.submit("abc"[n % 3], payload=n, key=key).id for n, key in enumerate(KEYS[1:])]
    say("submitted", ids)
    fences = [claim.fence for claim in store.claim(4, worker="child", lease_us=LEASE_US).claims]
    store.renew(fences, lease_us=LEASE_US)
    completed, failed = fences[:2], fences[2:]
    lost = store.finish([*map(Completed, completed), *(Failed(fence, "no") for fence in failed)])
    say("completed", [fence.document for fence in completed if fence not in lost])
    store.cancel(ids[-1:])
    store.retry([fence.document for fence in failed])
    store.configure(Settings(mode=store.settings().mode, completed_kept_s=3_600))
    clock.advance(3_601)
    queue.prune()
    back_up(queue, f"{path}.copy", overwrite=True)
    queue.close()
    restore(f"{path}.copy", f"{path}.restored")
    if url:
        copy_queue(path, url)
    say("end")


def stop_when_told(path: str) -> None:
    """Run a worker, and report when it waits for the lock of another process."""
    signal.alarm(CHILD_S)

    def watch() -> None:
        while not _waits_for_lock():
            os.sched_yield()
        say("waits")

    threading.Thread(target=watch, daemon=True).start()
    Worker(Queue(path), print, threads=True, concurrency=1).run()


def _waits_for_lock() -> bool:
    """Return whether a thread of this process waits for the lock: that of the worker's claims."""
    wait = connection._LockTimeout.wait.__code__
    return any(frame.f_code is wait for frame in sys._current_frames().values())


@contextmanager
def started(function: Callable[..., None], *arguments: str, **environment: str) -> Iterator[Any]:
    """Start a process that runs a function of this module."""
    call = f"from tests.test_frozen_sqlite import {function.__name__} as f; f(*{arguments!r})"
    with subprocess.Popen(
        [sys.executable, "-c", call],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


# ── The promise ──────────────────────────────────────────────────────────────────────────────────


class Survivors:
    """Other processes while the child is stopped, and after it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = ManualClock(START)
        self.completed: list[str] = []

    def opened(self) -> Queue:
        return Queue(self.path, clock=self.clock)

    def take_over(self) -> None:
        """Let the leases of the child expire, and complete everything that can be completed."""
        self.clock.advance(LEASE_S + 1)
        with self.opened() as queue:
            while claims := queue.store.claim(99, worker="w", lease_us=LEASE_US).claims:
                fences = [claim.fence for claim in claims]
                assert queue.store.finish(list(map(Completed, fences))) == []
                self.completed += [fence.document for fence in fences]

    def assert_each_call_is_busy(self) -> None:
        fence = Fence("0" * 15, 1)
        calls: dict[str, Callable[[Queue], object]] = {
            "submit": lambda queue: queue.submit("other"),
            "claim": lambda queue: queue.store.claim(1, worker="w", lease_us=LEASE_US),
            "renew": lambda queue: queue.store.renew([fence], lease_us=LEASE_US),
            "finish": lambda queue: queue.store.finish([Completed(fence)]),
        }
        for name, call in calls.items():
            begun_s = stopwatch()
            with pytest.raises(StoreBusy), self.opened() as queue:  # a new file cannot be opened
                call(queue)
            assert stopwatch() - begun_s < WITHIN_S, name


def assert_doctor_names(path: Path, pid: int) -> None:
    result = fairturn("doctor", "--json", "-d", path)
    findings = {line["check"]: line for line in map(json.loads, result.stdout.splitlines())}
    assert findings["lock"]["state"] == "wrong"
    assert findings["lock"]["finding"].startswith(f"process {pid} (")
    assert "is stopped) holds the write lock" in findings["lock"]["finding"]


def assert_a_worker_obeys_sigterm(path: Path) -> None:
    with started(stop_when_told, str(path)) as worker:
        assert json.loads(worker.stdout.readline()) == ["waits", None]
        begun_s = stopwatch()
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(CHILD_S) in (0, -signal.SIGTERM)  # while it opens the queue
        assert stopwatch() - begun_s < WITHIN_S


def freeze(path: Path, point: str, monkeypatch: pytest.MonkeyPatch, url: str = "") -> None:
    """Stop a child at a point, check that others continue or get an error, and resume it."""
    monkeypatch.setattr(connection, "BUSY_S", 0.1)
    survivors = Survivors(path)
    with started(work, str(path), url, FAIRTURN_FREEZE_AT=point) as child:
        _, status = os.waitpid(child.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), f"the point was not reached: {status}"
        if point in LOCKED:
            holder = holder_of(path)
            assert holder is not None
            assert holder.pid == child.pid
            survivors.assert_each_call_is_busy()
            assert_doctor_names(path, child.pid)
            if not point.startswith("migrate"):  # there is no queue yet that a worker could open
                assert_a_worker_obeys_sigterm(path)
        else:
            assert holder_of(path) is None
            if not point.startswith("copy"):  # a change would end the copy
                survivors.take_over()
            if point.startswith("backup"):
                with survivors.opened() as queue, pytest.raises(StoreBusy):
                    back_up(queue, f"{path}.copy", overwrite=True)
        child.send_signal(signal.SIGCONT)
        said = dict(json.loads(line) for line in child.stdout)
        assert child.wait(CHILD_S) == 0
    assert "end" in said
    survivors.take_over()
    assert_recorded_once(survivors, said)


def assert_recorded_once(survivors: Survivors, said: dict[str, Any]) -> None:
    times = Counter(said["completed"] + survivors.completed)
    with survivors.opened() as queue:
        documents = {document.id: document for document in queue.iterate()}
        for n, key in enumerate(KEYS[1:]):
            receipt = queue.submit("abc"[n % 3], payload=n, key=key)
            assert receipt.replayed
            assert receipt.id == said["submitted"][n + 1]
        assert_numbers_are_exact(queue.store)
        summary = queue.summary()
    assert times.most_common(1)[0][1] == 1
    assert times.keys() <= set(said["submitted"])
    for id in said["submitted"]:
        state = documents[id].state if id in documents else State.COMPLETED  # pruned
        assert state is (State.COMPLETED if id in times else State.CANCELLED)
    assert summary.completed == len(times)


@pytest.mark.parametrize("point", SAMPLE)
def test_a_process_that_is_stopped_holds_up_no_other_and_records_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    freeze(tmp_path / "documents.db", point, monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("point", crash.POINTS)
def test_a_process_that_is_stopped_at_any_point_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    if point.startswith("copy"):
        with Databases() as databases:
            freeze(tmp_path / "documents.db", point, monkeypatch, databases.new(empty=True))
    else:
        freeze(tmp_path / "documents.db", point, monkeypatch)
