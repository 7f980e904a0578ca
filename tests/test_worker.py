"""The worker: its promises about claims, leases, outcomes and signals."""

import fcntl
import gc
import json
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from fairturn import Backoff, GiveUp, Queue, State, Submission, Worker
from fairturn.clock import stopwatch
from fairturn.errors import HandlerNotLoaded, NotFound, StoreUnavailable, WrongState
from fairturn.explain.reasons import Code
from fairturn.model import (
    CANCELS_REPORTED_MAX,
    Claimed,
    Completed,
    Failed,
    Fence,
    Outcome,
    Progress,
    Released,
    Renewed,
)
from fairturn.stores.sqlite import SqliteStore
from fairturn.worker.events import (
    DocumentCancelled,
    DocumentClaimed,
    DocumentEnded,
    DocumentLost,
    Event,
    LinePrinted,
    StoreFailed,
    StoreRecovered,
)
from tests import handlers
from tests.test_handlers import AT_ONCE, is_gone, until

ROOT = Path(__file__).parent.parent
SLACK_S = 0.5  # for a busy machine
KINDS = pytest.mark.parametrize("threads", [False, True], ids=["processes", "threads"])


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    with Queue(tmp_path / "documents.db", synchronous="NORMAL") as queue:
        yield queue


def drain(queue: Queue, handler: Any, **options: Any) -> list[Event]:
    """Work until the queue is empty and return the events."""
    events: list[Event] = []
    Worker(queue, handler, on_event=events.append, **options).run(until_empty=True)
    return events


class InBackground:
    """A worker that runs in a thread until the end of a `with`."""

    def __init__(self, queue: Queue, handler: Any, **options: Any) -> None:
        self.events: list[Event] = []
        self.worker = Worker(queue, handler, on_event=self.events.append, **options)
        self._thread = threading.Thread(target=self.worker.run)

    def __enter__(self) -> "InBackground":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.worker.stop(now=True)
        self._thread.join()


class WorkerProcess:
    """A worker in a process that is killed at the end of a `with`."""

    def __init__(self, queue: Queue, handler: str, **options: Any) -> None:
        assert isinstance(queue.store, SqliteStore)
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.worker_process"),
                *(str(queue.store.path), f"tests.handlers:{handler}", json.dumps(options)),
            ],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> "WorkerProcess":
        self.hear("working")
        return self

    def hear(self, line: str) -> None:
        """Wait until it prints this."""
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == f"{line}\n"

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal and wait until the worker reports that it stops."""
        self.process.send_signal(number)
        self.hear("stopping")

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def end(self) -> dict[str, int]:
        """Wait until it has exited by itself and return what it did."""
        out, _ = self.process.communicate(timeout=20)
        done: dict[str, int] = json.loads(out)
        return done


def has_begun(folder: Path, id: str, attempt: int = 1) -> Path:
    """Wait until an attempt has begun and return the mark of its process, for `is_gone`."""
    mark = folder / f"began-{id}-{attempt}"
    until(mark.exists, f"attempt {attempt} begins")
    return mark


# ── Documents get done ───────────────────────────────────────────────────────────────────────────


@KINDS
def test_every_document_is_run_once_and_its_result_is_kept(queue: Queue, threads: bool) -> None:
    receipts = queue.submit_many([Submission(customer=f"c{n % 7}", payload=n) for n in range(300)])

    done = Worker(queue, handlers.double, threads=threads).run(until_empty=True)

    assert (done.completed, done.failed, done.lost, done.released) == (300, 0, 0, 0)
    assert [queue.result(one.id)["doubled"] for one in receipts] == [2 * n for n in range(300)]
    assert {queue.get(one.id).attempts for one in receipts} == {1}


@KINDS
def test_a_handler_can_be_a_coroutine(queue: Queue, threads: bool) -> None:
    receipts = queue.submit_many([Submission(customer="acme", payload=n) for n in range(20)])

    drain(queue, handlers.double_later, threads=threads, concurrency=2)

    results = [queue.result(one.id) for one in receipts]
    assert [result["doubled"] for result in results] == [2 * n for n in range(20)]
    assert len({result["loop"] for result in results}) <= 2


@KINDS
def test_a_handler_learns_everything_about_its_document(queue: Queue, threads: bool) -> None:
    receipt = queue.submit(
        "acme", content=b"12345", name="é\x00.pdf", metadata={"pages": [1, "\ud800"]}
    )

    drain(queue, handlers.tell_everything, threads=threads)

    document = queue.get(receipt.id)
    assert queue.result(receipt.id) == {
        "id": receipt.id,
        "customer": "acme",
        "name": document.name,
        "metadata": document.metadata,
        "priority": receipt.priority,
        "count": receipt.count,
        "attempt": 1,
        "size_bytes": 5,
        "submitted_at": receipt.submitted_at.isoformat(),
        "submitted_at_us": receipt.submitted_at_us,
        "fence": f"{receipt.id}-1",
    }


@KINDS
@pytest.mark.parametrize("size_bytes", [10, 300_000], ids=["in the row", "in the folder"])
def test_a_handler_reads_a_content_as_bytes_stream_and_file(
    queue: Queue, threads: bool, size_bytes: int
) -> None:
    receipt = queue.submit("acme", content=b"\x00\xff" * (size_bytes // 2))

    drain(queue, handlers.size_of_content, threads=threads)

    sizes = {"streamed": size_bytes, "read": size_bytes, "file": size_bytes}
    assert queue.result(receipt.id) == sizes


def test_a_large_payload_reaches_a_handler(queue: Queue) -> None:
    small = queue.submit("acme", payload="é" * 60_000)
    large = queue.submit("acme", payload="é" * 2_000_000)

    drain(queue, handlers.size_of_payload)

    assert [queue.result(one.id) for one in (small, large)] == [60_000, 2_000_000]


def test_a_damaged_content_fails_the_attempt_and_not_the_worker(queue: Queue) -> None:
    receipt = queue.submit("acme", content=b"x" * 300_000)
    name = queue.get(receipt.id).content_name
    assert name is not None
    Path(queue.contents.locate(name)).write_bytes(b"y" * 300_000)

    drain(queue, handlers.size_of_content, retry=AT_ONCE)

    assert "ContentDamaged" in (queue.get(receipt.id).error or "")


@KINDS
def test_a_file_as_a_result_is_kept_with_its_value(queue: Queue, threads: bool) -> None:
    receipt = queue.submit("acme")

    drain(queue, handlers.write_file, threads=threads)

    with queue.open_result(receipt.id) as stream:
        assert stream.read() == b"page " * 100_000
    value = queue.result(receipt.id)
    assert value["pages"] == 3
    assert not Path(value["folder"]).exists()
    assert not Path(value["folder"]).parent.exists()


def test_a_result_that_is_no_file_fails_the_attempt(queue: Queue) -> None:
    receipt = queue.submit("acme")

    drain(queue, handlers.name_no_file, retry=AT_ONCE)

    assert "is not a file" in (queue.get(receipt.id).error or "")
    with pytest.raises(WrongState):
        queue.open_result(receipt.id)


def test_a_document_without_a_file_has_no_result_to_open(queue: Queue) -> None:
    receipt = queue.submit("acme")

    drain(queue, handlers.nothing)

    with pytest.raises(NotFound, match="has no result file"):
        queue.open_result(receipt.id)


@KINDS
def test_the_folder_of_an_attempt_is_gone_after_it(queue: Queue, threads: bool) -> None:
    receipt = queue.submit("acme")

    drain(queue, handlers.use_folder, threads=threads)

    assert not Path(queue.result(receipt.id)).exists()


@KINDS
def test_folders_that_are_nested_too_deep_to_follow_are_gone_too(
    queue: Queue, threads: bool
) -> None:
    receipt = queue.submit("acme")

    drain(queue, handlers.nest_folders, threads=threads)

    assert not Path(queue.result(receipt.id)).exists()


def test_nested_folders_that_a_crash_left_are_removed_by_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    with Queue(tmp_path / "documents.db", attempts_max=1) as queue:
        queue.submit("acme")

        drain(queue, handlers.nest_folders_and_exit)

    assert list(temporary.iterdir()) == []


def test_a_folder_that_is_removed_before_it_is_locked_is_made_anew(
    queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    lock = fcntl.flock
    removed: list[Path] = []

    def remove_first(descriptor: int, operation: int) -> None:
        """Like another worker that starts at this moment."""
        if not removed:
            removed.extend(temporary.iterdir())
            shutil.rmtree(removed[0])
        lock(descriptor, operation)

    monkeypatch.setattr("fcntl.flock", remove_first)
    receipt = queue.submit("acme")

    drain(queue, handlers.use_folder, concurrency=1)

    assert queue.get(receipt.id).state is State.COMPLETED
    assert len(removed) == 1
    assert list(temporary.iterdir()) == []


def test_a_folder_that_a_killed_worker_left_is_removed_by_the_next(
    queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.setenv("TMPDIR", str(temporary))
    receipt = queue.submit("acme", payload=str(tmp_path))
    with WorkerProcess(queue, "use_folder_and_hang", concurrency=1, lease_s=0.2) as worker:
        child = has_begun(tmp_path, receipt.id)
        (in_use,) = temporary.iterdir()
        with InBackground(queue, handlers.use_folder):
            until(lambda: len(list(temporary.iterdir())) == 2, "the other has its own folder")
        assert list(temporary.iterdir()) == [in_use]
        worker.process.kill()
        until(lambda: is_gone(child), "the child ends")

    drain(queue, handlers.use_folder)

    assert list(temporary.iterdir()) == []


@KINDS
def test_progress_can_be_seen_while_the_handler_runs(
    queue: Queue, tmp_path: Path, threads: bool
) -> None:
    receipt = queue.submit("acme", payload=str(tmp_path))

    with InBackground(queue, handlers.report_progress, threads=threads):
        until((tmp_path / "reported").exists, "the handler reports")
        begun_s = stopwatch()
        until(lambda: queue.get(receipt.id).progress == Progress(3, 10), "progress is kept")
        took_s = stopwatch() - begun_s
        (tmp_path / "go on").touch()
        document = queue.wait(receipt.id, 10)

    assert (document.state, document.progress) == (State.COMPLETED, Progress(3, 10))
    assert took_s < 3


def hang_a_moment_and_exit(document: Any) -> None:
    handlers.FOREVER.wait(0.15)
    handlers.exit_at_once(document)


# ── Failures and retries ─────────────────────────────────────────────────────────────────────────


@KINDS
def test_an_error_is_tried_again_until_the_attempts_are_used_up(
    queue: Queue, threads: bool
) -> None:
    receipt = queue.submit("acme")

    events = drain(queue, handlers.fail, threads=threads, retry=AT_ONCE)

    document = queue.get(receipt.id)
    assert (document.state, document.attempts) == (State.DEAD, 5)
    assert document.error is not None
    assert document.error.startswith("ValueError: page 3 is torn (handlers.py, line ")
    assert sum(isinstance(event, DocumentEnded) for event in events) == 5


@KINDS
def test_a_handler_asks_for_a_delay_that_is_at_least_the_backoff(
    queue: Queue, threads: bool
) -> None:
    receipt = queue.submit("acme")

    events = drain(queue, handlers.try_again_at_first, threads=threads, retry=Backoff(0.02, 1))

    assert queue.result(receipt.id) == 3
    failed = [event.outcome for event in events if isinstance(event, DocumentEnded)][:2]
    delays = [one.retry_in_us for one in failed if isinstance(one, Failed) and one.retry_in_us]
    assert len(delays) == 2
    assert min(delays) >= 20_000  # the handler requested 10 ms


@KINDS
def test_a_handler_says_that_no_attempt_can_succeed(queue: Queue, threads: bool) -> None:
    receipt = queue.submit("acme")

    drain(queue, handlers.never_again, threads=threads)

    document = queue.get(receipt.id)
    assert (document.state, document.attempts) == (State.DEAD, 1)
    assert document.error == "this is not a PDF"


def read_a_page(document: Any) -> None:
    try:
        document.payload["pages"]
    except KeyError as error:
        raise ValueError("there are no pages") from error


async def read_a_page_later(document: Any) -> None:
    read_a_page(document)


@KINDS
@pytest.mark.parametrize("handler", [read_a_page, read_a_page_later])
def test_the_traceback_of_an_error_is_printed_with_its_document_from_the_handler_on(
    tmp_path: Path, threads: bool, handler: Any
) -> None:
    with Queue(tmp_path / "documents.db", attempts_max=1) as queue:
        id = queue.submit("acme", payload={}).id

        events = drain(queue, handler, threads=threads, concurrency=1)

    printed = [event for event in events if isinstance(event, LinePrinted)]
    assert {event.document for event in printed} == {id}
    lines = [event.line for event in printed]
    assert lines[-1] == "ValueError: there are no pages"
    assert '    document.payload["pages"]' in lines
    places = [line for line in lines if line.startswith("  File ")]
    assert len(places) == (3 if handler is read_a_page_later else 2)
    assert all(f'"{__file__}", line ' in place for place in places)
    kinds = [type(event) for event in events]
    assert kinds.index(LinePrinted) < kinds.index(DocumentEnded)


@KINDS
def test_an_error_names_the_handlers_line_and_not_one_of_fairturn(
    tmp_path: Path, threads: bool
) -> None:
    with Queue(tmp_path / "documents.db", attempts_max=1) as queue:
        wrong_kind = queue.submit("acme", payload=1).id
        drain(queue, read_content, threads=threads, concurrency=1)
        no_json = queue.submit("acme").id
        events = drain(queue, handlers.answer_with_a_set, threads=threads, concurrency=1)

        assert (queue.get(wrong_kind).error or "").endswith(", in read_content)")
        assert (queue.get(no_json).error or "").endswith("is not JSON serializable")
    assert not any(isinstance(event, LinePrinted) for event in events)


def read_content(document: Any) -> None:
    document.read()


@KINDS
def test_a_handler_that_says_what_to_do_prints_no_traceback(queue: Queue, threads: bool) -> None:
    queue.submit("acme")

    events = drain(queue, handlers.never_again, threads=threads)

    assert not any(isinstance(event, LinePrinted) for event in events)


@KINDS
@pytest.mark.parametrize(
    "handler, error",
    [
        (handlers.fail_with_strange_text, "ValueError: NUL \ufffd and half a character \ufffd xxx"),
        (handlers.fail_without_text, "SilentError: (str() of the error failed)"),
        (handlers.try_again_at_no_time, "the server is busy"),
        (handlers.try_again_in_its_own_way, "503"),
        (handlers.answer_with_a_set, "TypeError: the handler's result is not JSON"),
        (handlers.answer_with_too_much, "ValueError: the handler's result has 17,825,794 bytes"),
    ],
)
def test_no_error_and_no_result_can_spoil_the_recording(
    tmp_path: Path, threads: bool, handler: Any, error: str
) -> None:
    with Queue(tmp_path / "documents.db", attempts_max=1) as queue:
        receipt = queue.submit("acme")

        drain(queue, handler, threads=threads, concurrency=1)

        assert (queue.get(receipt.id).error or "").startswith(error)


@KINDS
def test_a_result_with_strange_text_comes_back_as_it_was(queue: Queue, threads: bool) -> None:
    receipt = queue.submit("acme")

    drain(queue, handlers.answer_with_strange_text, threads=threads)

    assert queue.result(receipt.id) == "NUL \x00 and half a character \ud800"


@pytest.mark.parametrize("handler", [handlers.hang, hang_a_moment_and_exit])
def test_an_attempt_that_hits_a_limit_or_crashes_says_how_long_it_ran(
    tmp_path: Path, handler: Any
) -> None:
    with Queue(tmp_path / "documents.db", attempts_max=1) as queue:
        queue.submit("acme", payload=str(tmp_path))

        events = drain(queue, handler, concurrency=1, time_limit_s=0.3)

    (ended,) = [event for event in events if isinstance(event, DocumentEnded)]
    assert 0.1 <= ended.seconds < 5


# ── Leases and fences ────────────────────────────────────────────────────────────────────────────


@KINDS
def test_a_handler_that_takes_longer_than_the_lease_runs_once(
    queue: Queue, tmp_path: Path, threads: bool
) -> None:
    receipt = queue.submit("acme", payload=str(tmp_path))

    with (
        InBackground(queue, handlers.finish_when_told, threads=threads, lease_s=0.3),
        InBackground(queue, handlers.finish_when_told, threads=True, lease_s=0.3),
    ):
        has_begun(tmp_path, receipt.id)
        over_s = stopwatch() + 1.2
        until(lambda: stopwatch() > over_s, "four leases pass")
        (tmp_path / "go on").touch()
        document = queue.wait(receipt.id, 10)

    assert (document.state, document.attempts) == (State.COMPLETED, 1)
    assert len(list(tmp_path.glob("began-*"))) == 1


def test_a_worker_that_was_overtaken_records_nothing_and_ends_its_child(
    queue: Queue, tmp_path: Path
) -> None:
    receipt = queue.submit("acme", payload=str(tmp_path))
    with WorkerProcess(queue, "finish_when_told", lease_s=0.5, concurrency=1) as first:
        child = has_begun(tmp_path, receipt.id)
        first.process.send_signal(signal.SIGSTOP)
        with InBackground(queue, handlers.finish_when_told, concurrency=1):
            has_begun(tmp_path, receipt.id, 2)
            first.process.send_signal(signal.SIGCONT)
            begun_s = stopwatch()
            until(lambda: is_gone(child), "the overtaken child ends")
            took_s = stopwatch() - begun_s
            (tmp_path / "go on").touch()
            document = queue.wait(receipt.id, 10)
        first.stop()
        done = first.end()

    assert (document.attempts, queue.result(receipt.id)) == (2, 2)
    assert (done["lost"], done["completed"]) == (1, 0)
    assert took_s < 1.0 + SLACK_S


def test_the_process_of_a_lost_lease_is_ended_within_a_third_of_the_lease_and_a_second(
    queue: Queue, tmp_path: Path
) -> None:
    receipt = queue.submit("acme", payload=str(tmp_path))
    lease_s = 1.5
    with InBackground(queue, handlers.hang, lease_s=lease_s, concurrency=1) as background:
        child = has_begun(tmp_path, receipt.id)
        begun_s = stopwatch()
        queue.purge("acme")
        until(lambda: is_gone(child), "the child ends")
        took_s = stopwatch() - begun_s

    assert took_s < lease_s / 3 + 1.0 + SLACK_S
    assert [type(event) for event in background.events[1:2]] == [DocumentLost]


def test_a_document_of_a_killed_worker_waits_for_a_free_slot_and_then_starts_within_a_second(
    queue: Queue, tmp_path: Path
) -> None:
    lost, busy = tmp_path / "lost", tmp_path / "busy"
    lost.mkdir()
    busy.mkdir()
    receipt = queue.submit("acme", payload=str(lost))
    lease_s = 0.5
    with WorkerProcess(queue, "finish_when_told", lease_s=lease_s, concurrency=1) as killed:
        has_begun(lost, receipt.id)
        other = queue.submit("other", payload=str(busy))
        with InBackground(queue, handlers.finish_when_told, concurrency=1):
            has_begun(busy, other.id)
            killed.process.kill()
            over_s = stopwatch() + lease_s + 1.0
            until(lambda: stopwatch() > over_s, "the lease and a second pass")
            started_without_a_slot = (lost / f"began-{receipt.id}-2").exists()
            begun_s = stopwatch()
            (busy / "go on").touch()
            has_begun(lost, receipt.id, 2)
            took_s = stopwatch() - begun_s
            (lost / "go on").touch()
            queue.wait(receipt.id, 10)

    assert not started_without_a_slot
    assert took_s < 1.0 + SLACK_S


def test_documents_of_a_killed_worker_run_again_within_its_lease_and_a_second(
    queue: Queue, tmp_path: Path
) -> None:
    receipt = queue.submit("acme", payload=str(tmp_path))
    lease_s = 1.0
    with WorkerProcess(queue, "finish_when_told", lease_s=lease_s, concurrency=1) as killed:
        child = has_begun(tmp_path, receipt.id)
        with InBackground(queue, handlers.finish_when_told, concurrency=1):
            killed.process.kill()
            begun_s = stopwatch()
            has_begun(tmp_path, receipt.id, 2)
            took_s = stopwatch() - begun_s
            until(lambda: is_gone(child), "the child of the killed worker ends")
            (tmp_path / "go on").touch()
            queue.wait(receipt.id, 10)

    assert took_s < lease_s + 1.0 + 0.3
    assert queue.get(receipt.id).attempts == 2


def test_nothing_is_left_behind_by_a_worker_that_was_killed(queue: Queue, tmp_path: Path) -> None:
    receipt = queue.submit("acme", payload=str(tmp_path))
    with WorkerProcess(queue, "leave_a_daemon_and_hang", concurrency=1) as worker:
        child = has_begun(tmp_path, receipt.id)
        left = tmp_path / "left"
        worker.process.kill()

        until(lambda: is_gone(child), "the child ends")
        until(lambda: is_gone(left), "what it left ends")


@KINDS
def test_cancelling_a_running_document_reaches_it_at_the_next_renewal(
    queue: Queue, tmp_path: Path, threads: bool
) -> None:
    receipt = queue.submit("acme", payload=str(tmp_path))
    handler = handlers.finish_when_told

    with InBackground(queue, handler, threads=threads, lease_s=0.6, concurrency=1) as background:
        child = has_begun(tmp_path, receipt.id)
        assert queue.cancel(receipt.id) is State.RUNNING
        document = queue.wait(receipt.id, 10)
        if not threads:
            until(lambda: is_gone(child), "the child ends")
        (tmp_path / "go on").touch()

    assert (document.state, queue.get(receipt.id).state) == (State.CANCELLED, State.CANCELLED)
    (ended,) = [event for event in background.events if isinstance(event, DocumentEnded)]
    assert ended.seconds > 0


# ── Events ───────────────────────────────────────────────────────────────────────────────────────


def fail_as_told(document: Any) -> None:
    if document.payload == "never":
        raise GiveUp("broken")
    if document.payload == "again":
        raise ValueError("not now")


@KINDS
def test_the_document_of_an_ended_attempt_has_the_state_that_the_outcome_led_to(
    tmp_path: Path, threads: bool
) -> None:
    with Queue(tmp_path / "documents.db", attempts_max=2, synchronous="NORMAL") as queue:
        for payload in ("done", "never", "again"):
            queue.submit(payload, payload=payload)

        events = drain(queue, fail_as_told, threads=threads, retry=AT_ONCE)

    states = [
        (event.document.customer, event.document.attempts, event.document.state)
        for event in events
        if isinstance(event, DocumentEnded)
    ]
    assert sorted(states) == [
        ("again", 1, State.DELAYED),
        ("again", 2, State.DEAD),
        ("done", 1, State.COMPLETED),
        ("never", 1, State.DEAD),
    ]


def test_a_released_document_that_was_to_be_cancelled_is_reported_as_cancelled(
    queue: Queue, tmp_path: Path
) -> None:
    receipts = [queue.submit("acme", payload=str(tmp_path)) for _ in range(2)]
    with InBackground(queue, handlers.hang, concurrency=2) as background:
        for receipt in receipts:
            has_begun(tmp_path, receipt.id)
        queue.cancel(receipts[0].id)  # the next renewal is 10 s away

    states = {
        event.document.id: (type(event.outcome), event.document.state)
        for event in background.events
        if isinstance(event, DocumentEnded)
    }
    assert states == {
        receipts[0].id: (Released, State.CANCELLED),
        receipts[1].id: (Released, State.WAITING),
    }


def test_a_document_that_is_cancelled_while_it_waits_is_reported_to_one_worker(
    queue: Queue,
) -> None:
    waiting = queue.submit("acme")
    delayed = queue.submit("acme", due_at=queue.get(waiting.id).submitted_at_us + 10**12)

    assert queue.cancel([waiting.id, delayed.id]) == [State.CANCELLED] * 2

    cancelled = [DocumentCancelled(queue.get(each.id)) for each in (waiting, delayed)]
    assert drain(queue, handlers.nothing) == cancelled
    assert drain(queue, handlers.nothing) == []
    assert queue.wait(waiting.id, 0).state is State.CANCELLED


def test_an_idle_worker_reports_a_document_that_is_cancelled(queue: Queue) -> None:
    queue.set_customer("paused", paused=True)
    waiting = queue.submit("paused")
    with InBackground(queue, handlers.nothing) as background:
        until(lambda: bool(queue.store.workers()), "the worker claims")
        queue.cancel(waiting.id)

        until(lambda: bool(background.events), "the worker reports the cancelled document")

        assert background.events == [DocumentCancelled(queue.get(waiting.id))]


def test_a_worker_that_ends_with_the_queue_reports_the_last_cancelled_document(
    queue: Queue,
) -> None:
    queue.set_customer("paused", paused=True)
    waiting = queue.submit("paused")
    events: list[Event] = []
    worker = Worker(queue, handlers.nothing, threads=True, on_event=events.append)
    thread = threading.Thread(target=worker.run, kwargs={"until_empty": True})
    thread.start()
    until(lambda: bool(queue.store.workers()), "the worker claims")

    queue.cancel(waiting.id)
    thread.join(30)

    assert events == [DocumentCancelled(queue.get(waiting.id))]


def test_a_worker_reports_more_cancelled_documents_than_fit_in_a_claim(queue: Queue) -> None:
    submissions = [Submission("acme")] * (3 * CANCELS_REPORTED_MAX + 1)
    ids = [receipt.id for receipt in queue.submit_many(submissions)]
    queue.cancel(ids)

    events = drain(queue, handlers.nothing, threads=True)

    assert [event.document.id for event in events if isinstance(event, DocumentCancelled)] == ids


@KINDS
def test_a_worker_that_has_stopped_is_counted_by_no_explanation(
    queue: Queue, threads: bool
) -> None:
    drain(queue, handlers.nothing, threads=threads)
    receipt = queue.submit("acme")

    assert queue.store.workers() == []
    assert Code.NO_WORKER in {reason.code for reason in queue.explain(receipt.id).reasons}


@KINDS
def test_a_fast_worker_is_listed_with_its_slots_and_not_with_what_it_claims_ahead(
    queue: Queue, threads: bool
) -> None:
    queue.submit_many(Submission(customer="acme", payload=1) for _ in range(500))

    with InBackground(queue, handlers.nothing, concurrency=3, threads=threads):
        until(lambda: not queue.summary().waiting, "it works on the documents")
        until(lambda: not queue.summary().running, "it has nothing more to do")
        slots = [seen.slots for seen in queue.store.workers()]

    assert slots == [3]


def test_a_worker_whose_slots_are_all_busy_is_seen_again_and_again(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairturn.worker.upkeep.SIGN_ON_S", 0.02)
    queue.submit("acme")

    with InBackground(queue, handlers.hang, concurrency=1):
        until(lambda: queue.summary().running == 1, "its only slot is busy")
        (before,) = queue.store.workers()
        until(lambda: queue.store.workers()[0].seen_at > before.seen_at, "it is seen again")


# ── Signals ──────────────────────────────────────────────────────────────────────────────────────


def test_after_sigterm_what_runs_is_finished_and_nothing_more_is_claimed(
    queue: Queue, tmp_path: Path
) -> None:
    receipts = [queue.submit("acme", payload=str(tmp_path)) for _ in range(3)]
    with WorkerProcess(queue, "finish_when_told", concurrency=1) as worker:
        has_begun(tmp_path, receipts[0].id)
        worker.stop()
        (tmp_path / "go on").touch()
        done = worker.end()

    assert (done["completed"], worker.process.returncode) == (1, 0)
    assert [queue.get(one.id).state for one in receipts[1:]] == [State.WAITING] * 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once_and_gives_back_attempt_and_document(
    queue: Queue, tmp_path: Path, number: signal.Signals
) -> None:
    receipt = queue.submit("acme", payload=str(tmp_path))
    with WorkerProcess(queue, "hang", concurrency=1) as worker:
        child = has_begun(tmp_path, receipt.id)
        worker.stop(number)
        worker.process.send_signal(number)
        until(lambda: queue.get(receipt.id).state is State.WAITING, "the document is given back")
        done = worker.end()

    assert done["released"] == 1
    assert queue.get(receipt.id).attempts == 0
    assert is_gone(child)


@KINDS
def test_when_the_grace_is_over_the_rest_is_given_back(
    queue: Queue, tmp_path: Path, threads: bool
) -> None:
    receipt = queue.submit("acme", payload=str(tmp_path))
    ended: list[float] = []

    def note(event: Event) -> None:
        if isinstance(event, DocumentEnded):
            ended.append(event.seconds)

    worker = Worker(
        queue,
        handlers.finish_when_told,
        threads=threads,
        grace_s=0.2,
        concurrency=1,
        on_event=note,
    )

    def stop_once_begun() -> None:
        has_begun(tmp_path, receipt.id)
        worker.stop()

    begun = threading.Thread(target=stop_once_begun)
    begun.start()

    done = worker.run()

    begun.join()
    (tmp_path / "go on").touch()
    assert (done.released, done.completed) == (1, 0)
    assert (queue.get(receipt.id).state, queue.get(receipt.id).attempts) == (State.WAITING, 0)
    assert ended[0] >= 0.2


# ── Pace ─────────────────────────────────────────────────────────────────────────────────────────


def test_documents_are_claimed_in_the_order_of_service_one_by_one(queue: Queue) -> None:
    receipts = queue.submit_many([Submission(customer=f"c{n % 3}") for n in range(30)])

    events = drain(queue, handlers.nothing, concurrency=1)

    claimed = [event.document.id for event in events if isinstance(event, DocumentClaimed)]
    assert len(claimed) == 30
    with Queue(":memory:") as other:
        other.submit_many([Submission(customer=f"c{n % 3}") for n in range(30)])
        order = [
            claim.document.customer
            for _ in range(30)
            for claim in other.store.claim(1, worker="w", lease_us=10**9).claims
        ]
    customer_of = {receipt.id: receipt.customer for receipt in receipts}
    assert [customer_of[id] for id in claimed] == order


@KINDS
def test_a_better_turn_waits_behind_50_ms_of_claimed_work_at_most(
    queue: Queue, threads: bool
) -> None:
    """1,000 documents of 20 ms keep the worker busy when a quiet customer submits."""
    queue.submit_many([Submission(customer="busy") for _ in range(1_000)])
    claimed: list[str] = []

    def note(event: Event) -> None:
        if isinstance(event, DocumentClaimed):
            claimed.append(event.document.customer)

    worker = Worker(
        queue, handlers.take_20_ms, threads=threads, on_event=note, grace_s=0, concurrency=4
    )
    thread = threading.Thread(target=worker.run)
    thread.start()
    until(lambda: len(claimed) > 40, "the worker is at work")
    before = len(claimed)
    receipt = queue.submit("quiet")
    running = queue.summary().running
    queue.wait(receipt.id, 10)
    worker.stop()
    thread.join()

    assert running <= 4 + 2
    assert claimed.index("quiet") - before <= 4


@pytest.fixture
def fast_and_slow(queue: Queue, tmp_path: Path) -> str:
    """Fast documents, which make a worker prefetch, then a slow one, then fast ones again."""
    queue.submit_many([Submission(customer="acme", payload=None) for _ in range(500)])
    slow = queue.submit("acme", payload=str(tmp_path))
    queue.submit_many([Submission(customer="acme", payload=None) for _ in range(500)])
    return slow.id


@KINDS
def test_what_was_claimed_ahead_does_not_wait_behind_a_slow_document(
    queue: Queue, tmp_path: Path, fast_and_slow: str, threads: bool
) -> None:
    with InBackground(queue, slow_if_told, threads=threads, concurrency=2) as worker:
        has_begun(tmp_path, fast_and_slow)
        until(
            lambda: (queue.summary().waiting, queue.summary().running) == (0, 1),
            "all others are done",
        )
        (tmp_path / "go on").touch()
        queue.wait(fast_and_slow, 10)

    completed = [event for event in worker.events if isinstance(event, DocumentEnded)]
    assert {queue.result(event.document.id) for event in completed} == {
        str(event.outcome.fence) for event in completed if isinstance(event.outcome, Completed)
    }


@KINDS
def test_what_was_claimed_ahead_and_cannot_start_is_given_back(
    queue: Queue, tmp_path: Path, fast_and_slow: str, threads: bool
) -> None:
    with InBackground(queue, slow_if_told, threads=threads, concurrency=1) as worker:
        has_begun(tmp_path, fast_and_slow)
        until(lambda: queue.summary().running == 1, "only the slow one is held")
        waiting = queue.summary().waiting
        (tmp_path / "go on").touch()
        until(lambda: queue.summary().waiting == 0, "the others run")
        queue.wait(fast_and_slow, 10)

    assert waiting > 0
    assert queue.get(fast_and_slow).attempts == 1
    for event in worker.events:
        if isinstance(event, DocumentEnded) and isinstance(event.outcome, Completed):
            assert queue.result(event.document.id) == str(event.outcome.fence)


@KINDS
def test_a_worker_that_stops_gives_back_at_once_what_it_claimed_ahead(
    queue: Queue, tmp_path: Path, fast_and_slow: str, threads: bool
) -> None:
    with InBackground(queue, slow_if_told, threads=threads, concurrency=1) as background:
        has_begun(tmp_path, fast_and_slow)
        background.worker.stop()
        until(lambda: queue.summary().running == 1, "only the slow one is held")
        waiting = queue.summary().waiting
        (tmp_path / "go on").touch()
        queue.wait(fast_and_slow, 10)

    assert waiting > 0
    assert queue.summary().waiting == waiting


def slow_if_told(document: Any) -> str:
    if document.payload is not None:
        handlers.finish_when_told(document)
    return str(document.fence)


@KINDS
def test_a_document_that_is_submitted_to_an_idle_worker_starts_soon(
    queue: Queue, threads: bool
) -> None:
    with InBackground(queue, handlers.nothing, threads=threads):
        queue.wait(queue.submit("acme").id, 10)  # the worker has started
        took_s = []
        for _ in range(20):
            begun_s = stopwatch()
            queue.wait(queue.submit("acme").id, 10)
            took_s.append(stopwatch() - begun_s)

    assert sorted(took_s)[10] < 0.05


# ── When the store fails ─────────────────────────────────────────────────────────────────────────


class FailingStore(SqliteStore):
    """A store that rejects writes for a while."""

    down = threading.Event()
    refused = 0

    def _refuse(self) -> None:
        if self.down.is_set():
            self.refused += 1
            raise StoreUnavailable("the disk is away")

    def claim(self, *args: Any, **options: Any) -> Claimed:
        self._refuse()
        return super().claim(*args, **options)

    def finish(self, outcomes: Sequence[Outcome]) -> list[Fence]:
        self._refuse()
        return super().finish(outcomes)


@KINDS
def test_an_outcome_is_recorded_once_the_store_is_back(tmp_path: Path, threads: bool) -> None:
    store = FailingStore(tmp_path / "documents.db")
    with Queue(store) as queue:
        receipts = [queue.submit("acme", payload=str(tmp_path)) for _ in range(8)]
        handler = handlers.finish_when_told
        with InBackground(queue, handler, threads=threads, lease_s=0.5, concurrency=4) as worker:
            for receipt in receipts[:4]:
                has_begun(tmp_path, receipt.id)
            store.down.set()
            (tmp_path / "go on").touch()
            until(lambda: store.refused >= 4, "recording is tried again and again")
            assert queue.get(receipts[0].id).state is State.RUNNING
            store.down.clear()
            documents = [queue.wait(receipt.id, 10) for receipt in receipts]

    assert {(one.state, one.attempts) for one in documents} == {(State.COMPLETED, 1)}
    assert any(isinstance(event, StoreFailed) for event in worker.events)
    assert not any(isinstance(event, DocumentLost) for event in worker.events)
    assert len(list(tmp_path.glob("began-*"))) == 8


@pytest.mark.parametrize("kind", [StoreFailed, StoreRecovered])
def test_an_error_in_on_event_about_the_store_loses_no_outcome(
    tmp_path: Path, kind: type[Event]
) -> None:
    store = FailingStore(tmp_path / "documents.db")
    with Queue(store) as queue:
        receipt = queue.submit("acme", payload=str(tmp_path))

        def refuse(event: Event) -> None:
            store.down.clear()
            if isinstance(event, kind):
                raise Deaf

        def go_on() -> None:
            has_begun(tmp_path, receipt.id)
            store.down.set()
            (tmp_path / "go on").touch()

        begun = threading.Thread(target=go_on)
        begun.start()
        with pytest.raises(Deaf):
            Worker(
                queue, handlers.finish_when_told, threads=True, concurrency=1, on_event=refuse
            ).run(until_empty=True)
        begun.join()

        assert queue.get(receipt.id).state is State.COMPLETED


class SilentStore(SqliteStore):
    """A store that records an outcome and loses its reply, once."""

    silent = False

    def _answer(self) -> None:
        if self.silent:
            self.silent = False
            raise StoreUnavailable("the connection was lost")

    def claim(self, *args: Any, **options: Any) -> Claimed:
        claimed = super().claim(*args, **options)
        if options.get("outcomes"):
            self._answer()
        return claimed

    def finish(self, outcomes: Sequence[Outcome]) -> list[Fence]:
        lost = super().finish(outcomes)
        self._answer()
        return lost


def test_a_file_stays_the_result_if_only_the_answer_to_its_recording_was_lost(
    tmp_path: Path,
) -> None:
    store = SilentStore(tmp_path / "documents.db")
    store.silent = True
    with Queue(store) as queue:
        receipt = queue.submit("acme")
        drain(queue, handlers.write_file, lease_s=1)

        assert not store.silent
        assert queue.get(receipt.id).state is State.COMPLETED
        with queue.open_result(receipt.id) as file:
            assert file.read() == b"page " * 100_000


# ── When the store does not return ───────────────────────────────────────────────────────────────


class StuckStore(SqliteStore):
    """A store in which one kind of call blocks until released, like a frozen server."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.stuck: str | None = None
        self.arrived = threading.Event()  # such a call was made
        self.go_on = threading.Event()  # and waits for this

    def _stick(self, kind: str) -> None:
        if self.stuck == kind:
            self.arrived.set()
            assert self.go_on.wait(30)

    def claim(self, *args: Any, **options: Any) -> Claimed:
        self._stick("claim")
        return super().claim(*args, **options)

    def finish(self, outcomes: Sequence[Outcome]) -> list[Fence]:
        self._stick("finish")
        return super().finish(outcomes)

    def renew(self, *args: Any, **options: Any) -> Renewed:
        self._stick("renew")
        return super().renew(*args, **options)


@pytest.fixture
def stuck(tmp_path: Path) -> Iterator[StuckStore]:
    store = StuckStore(tmp_path / "documents.db", synchronous="NORMAL")
    yield store
    store.go_on.set()
    store.close()


GRACE_S = 0.3
STOPS_WITHIN_S = GRACE_S + 1.0


@KINDS
def test_leases_are_renewed_while_a_claim_does_not_return(
    stuck: StuckStore, tmp_path: Path, threads: bool
) -> None:
    queue = Queue(stuck)
    receipt = queue.submit("acme", payload=str(tmp_path))
    with (
        InBackground(
            queue, handlers.finish_when_told, threads=threads, lease_s=0.6, concurrency=2
        ) as background,
        Queue(stuck.path) as elsewhere,
    ):
        has_begun(tmp_path, receipt.id)
        stuck.stuck = "claim"
        assert stuck.arrived.wait(10)
        over_s = stopwatch() + 1.5
        until(lambda: stopwatch() > over_s, "more than two leases pass")
        assert not elsewhere.store.claim(1, worker="another", lease_us=10**6).claims
        stuck.go_on.set()
        (tmp_path / "go on").touch()
        document = queue.wait(receipt.id, 10)

    assert (document.state, document.attempts) == (State.COMPLETED, 1)
    assert not any(isinstance(event, DocumentLost) for event in background.events)


def test_a_worker_stops_while_a_claim_does_not_return_and_releases_its_late_reply(
    stuck: StuckStore,
) -> None:
    queue = Queue(stuck)
    stuck.stuck = "claim"
    receipt = queue.submit("acme")
    worker = Worker(queue, handlers.nothing, threads=True, grace_s=60)
    thread = threading.Thread(target=worker.run)
    thread.start()
    assert stuck.arrived.wait(10)

    begun_s = stopwatch()
    worker.stop()
    thread.join(20)
    took_s = stopwatch() - begun_s
    summary = queue.summary()
    stuck.go_on.set()
    until(lambda: queue.get(receipt.id).claimed_at_us is not None, "the claim returns late")
    until(lambda: queue.get(receipt.id).state is State.WAITING, "its document is released")

    assert took_s < 1.0 + SLACK_S  # claiming alone does not justify the grace period
    assert (summary.waiting, summary.running) == (1, 0)
    assert queue.get(receipt.id).attempts == 0


@KINDS
@pytest.mark.parametrize("kind", ["finish", "renew"])
def test_a_worker_stops_while_an_outcome_or_a_renewal_does_not_return(
    stuck: StuckStore, tmp_path: Path, threads: bool, kind: str
) -> None:
    queue = Queue(stuck)
    receipt = queue.submit("acme", payload=str(tmp_path))
    stuck.stuck = kind
    worker = Worker(
        queue,
        handlers.finish_when_told,
        threads=threads,
        grace_s=GRACE_S,
        lease_s=0.6,
        concurrency=1,
    )
    ended: list[object] = []

    def run() -> None:
        try:
            ended.append(worker.run())
        except StoreUnavailable as error:
            ended.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    child = has_begun(tmp_path, receipt.id)
    if kind == "renew":
        assert stuck.arrived.wait(10)

    begun_s = stopwatch()
    worker.stop()
    thread.join(20)
    took_s = stopwatch() - begun_s
    (tmp_path / "go on").touch()

    assert took_s < STOPS_WITHIN_S + SLACK_S
    assert threads or is_gone(child)
    if kind == "renew":
        assert (queue.get(receipt.id).state, queue.get(receipt.id).attempts) == (State.WAITING, 0)
    else:
        assert ended == [
            "the store did not record the outcomes of 1 attempts before the worker stopped; "
            "their documents run again when their leases have expired"
        ]
        stuck.go_on.set()
        until(lambda: queue.get(receipt.id).state is State.WAITING, "the outcome comes late")


def test_a_worker_obeys_sigterm_while_another_process_holds_the_lock_of_the_file(
    queue: Queue,
) -> None:
    assert isinstance(queue.store, SqliteStore)
    with WorkerProcess(queue, "nothing", grace_s=GRACE_S, concurrency=1) as worker:
        queue.wait(queue.submit("acme").id, 10)
        with queue.store._database.holding():
            over_s = stopwatch() + 1.2
            until(lambda: stopwatch() > over_s, "the idle worker looks once more, and waits")
            begun_s = stopwatch()
            worker.stop()
            assert worker.process.stdout is not None
            done = json.loads(worker.process.stdout.readline())
            took_s = stopwatch() - begun_s

    assert done["completed"] == 1
    assert took_s < STOPS_WITHIN_S + SLACK_S


# ── When nobody can be told ──────────────────────────────────────────────────────────────────────


class Deaf(Exception):
    """Raised by `on_event`, as by a closed standard output."""


@pytest.mark.parametrize("threads", [False, True], ids=["processes", "threads"])
@pytest.mark.parametrize("kind", [DocumentClaimed, DocumentEnded])
@pytest.mark.parametrize("concurrency", [1, 4])
def test_an_error_in_on_event_ends_the_worker_and_no_document_stays_running(
    queue: Queue, threads: bool, kind: type[Event], concurrency: int
) -> None:
    receipts = [queue.submit("acme") for _ in range(12)]

    def refuse(event: Event) -> None:
        if isinstance(event, kind):
            raise Deaf

    with pytest.raises(Deaf):
        Worker(
            queue, handlers.nothing, threads=threads, concurrency=concurrency, on_event=refuse
        ).run(until_empty=True)

    documents = [queue.get(one.id) for one in receipts]
    assert {(one.state, one.attempts) for one in documents} <= {
        (State.WAITING, 0),
        (State.COMPLETED, 1),
    }


def test_an_error_in_on_event_about_a_line_ends_the_worker_and_gives_back_everything(
    queue: Queue,
) -> None:
    receipts = [queue.submit("acme") for _ in range(4)]
    heard: set[str] = set()

    def refuse(event: Event) -> None:
        if isinstance(event, LinePrinted):
            heard.add(event.document)
            if len(heard) == 4:
                raise Deaf

    with pytest.raises(Deaf):
        Worker(queue, print_for_ever, concurrency=4, on_event=refuse).run(until_empty=True)

    documents = [queue.get(one.id) for one in receipts]
    assert {(one.state, one.attempts) for one in documents} == {(State.WAITING, 0)}


def print_for_ever(document: Any) -> None:
    while not handlers.FOREVER.wait(0.001):
        sys.stdout.write("here\n")
        sys.stdout.flush()


# ── The host process ─────────────────────────────────────────────────────────────────────────────


def test_a_worker_leaves_the_garbage_collector_and_the_switch_interval_of_its_host_alone(
    queue: Queue,
) -> None:
    queue.submit("acme")
    before = gc.get_threshold(), gc.get_freeze_count(), sys.getswitchinterval()
    during: list[object] = []

    def note(document: Any) -> None:
        during.append((gc.get_threshold(), gc.get_freeze_count(), sys.getswitchinterval()))

    drain(queue, note, threads=True)

    assert during == [before]


# ── Wrong use ────────────────────────────────────────────────────────────────────────────────────


@KINDS
@pytest.mark.parametrize(
    "handler", ["tests.no_such_module:process", "tests.handlers:no_such_function"]
)
def test_a_handler_that_cannot_be_loaded_ends_the_worker_and_touches_no_document(
    queue: Queue, handler: str, threads: bool
) -> None:
    receipt = queue.submit("acme")

    printed: list[Event] = []
    with pytest.raises(HandlerNotLoaded, match="no_such_[a-z]+'$"):
        Worker(queue, handler, threads=threads, on_event=printed.append).run(until_empty=True)

    assert printed == []
    assert (queue.get(receipt.id).state, queue.get(receipt.id).attempts) == (State.WAITING, 0)


@KINDS
@pytest.mark.parametrize(
    "source, why, lines",
    [
        ("import json\njson.loads('[')\n", "JSONDecodeError: Expecting value: line 1", 8),
        ("def process(document)\n", r"SyntaxError: .* \(broken_[a-z]+\.py, line 1\)$", 4),
    ],
    ids=["error", "syntax"],
)
def test_a_module_that_fails_is_told_once_from_its_own_file_on(
    *,
    queue: Queue,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    threads: bool,
    source: str,
    why: str,
    lines: int,
) -> None:
    module = f"broken_{'threads' if threads else 'processes'}"
    (tmp_path / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    events: list[Event] = []
    worker = Worker(queue, f"{module}:process", threads=threads, on_event=events.append)

    with pytest.raises(HandlerNotLoaded, match=why):
        worker.run()

    printed = [event.line for event in events if isinstance(event, LinePrinted)]
    assert sum(f'File "{tmp_path / module}.py", line' in line for line in printed) == 1
    assert not [line for line in printed if "importlib" in line or "fairturn" in line]
    assert len(printed) >= lines


def test_a_module_that_ends_its_process_is_not_tried_for_ever(
    queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ending.py").write_text("import os\nos._exit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(HandlerNotLoaded, match="3 child processes in a row ended before"):
        Worker(queue, "ending:process", concurrency=1).run()


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (lambda document: None, {}, "a lambda or was defined inside a function"),
    ("no colon", {}, "module:function"),
    ("no colon", {"threads": True}, "module:function"),
    ("invoices.py:extract", {}, "leave out .py, as in invoices:extract"),
    ("./paid/invoices.py:extract", {"threads": True}, "leave out .py, as in paid.invoices:extract"),
    ("tests.handlers:nothing", {"concurrency": 0}, "concurrency is 0"),
    ("tests.handlers:nothing", {"lease_s": 0.01}, "lease_s is 0.01"),
    ("tests.handlers:nothing", {"grace_s": -1}, "grace_s is -1"),
    ("tests.handlers:nothing", {"name": "a\0"}, "name 'a.*' has a NUL"),
    ("tests.handlers:nothing", {"recycle_after": 0}, "recycle_after is 0"),
    ("tests.handlers:nothing", {"threads": True, "time_limit_s": 1}, "not apply to threads"),
    ("tests.handlers:nothing", {"threads": True, "memory_limit_bytes": 1}, "not apply to threads"),
    ("tests.handlers:nothing", {"threads": True, "process_limit": 10}, "not apply to threads"),
    ("tests.handlers:nothing", {"threads": True, "file_limit_bytes": 1}, "not apply to threads"),
    ("tests.handlers:nothing", {"threads": True, "pass_env": ["A"]}, "not apply to threads"),
    ("tests.handlers:nothing", {"process_limit": 9}, "process_limit is 9"),
    ("tests.handlers:nothing", {"file_limit_bytes": 0}, "file_limit_bytes is 0"),
    ("tests.handlers:nothing", {"pass_env": ["*"]}, r"pass_env contains '\*'; it must be a name"),
    ("tests.handlers:nothing", {"pass_env": ["A=1"]}, "pass_env contains 'A=1'"),
]  # fmt: skip


@pytest.mark.parametrize("handler, options, message", WRONG)
def test_wrong_use_is_refused_in_a_sentence(
    queue: Queue, handler: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Worker(queue, handler, **options)


def test_a_worker_runs_once_at_a_time(queue: Queue, tmp_path: Path) -> None:
    receipt = queue.submit("acme", payload=str(tmp_path))
    with InBackground(queue, handlers.hang, concurrency=1) as background:
        has_begun(tmp_path, receipt.id)

        with pytest.raises(RuntimeError, match="already running"):
            background.worker.run()


def test_a_worker_that_was_stopped_before_it_ran_does_nothing_once(queue: Queue) -> None:
    receipt = queue.submit("acme")
    worker = Worker(queue, handlers.nothing, threads=True)
    worker.stop()

    assert worker.run().completed == 0
    assert worker.run(until_empty=True).completed == 1
    assert queue.get(receipt.id).attempts == 1


SCRIPT = """
import sys
from fairturn import Queue, Worker

def process(document):
    return __name__

{guard}
with Queue(sys.argv[1]) as queue:
    receipt = queue.submit("acme")
    Worker(queue, process, concurrency=1).run(until_empty=True)
    print(queue.result(receipt.id))
"""


def run_script(tmp_path: Path, guard: str) -> "subprocess.CompletedProcess[str]":
    lines = SCRIPT.format(guard=guard).splitlines()
    if guard:
        start = lines.index(guard) + 1
        lines[start:] = [f"    {line}" for line in lines[start:]]
    script = tmp_path / "work.py"
    script.write_text("\n".join(lines) + "\n")
    command = [sys.executable, str(script), str(tmp_path / "documents.db")]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def test_a_handler_in_a_script_is_loaded_without_running_the_script(tmp_path: Path) -> None:
    ran = run_script(tmp_path, 'if __name__ == "__main__":')

    assert (ran.returncode, ran.stdout) == (0, "__fairturn_main__\n"), ran.stderr


def test_a_script_without_a_guard_is_told_what_is_missing(tmp_path: Path) -> None:
    ran = run_script(tmp_path, "")

    assert ran.returncode != 0
    assert 'start it below: if __name__ == "__main__":' in ran.stderr


def test_a_handler_in_a_script_from_standard_input_is_refused_in_a_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-", str(tmp_path / "documents.db")]

    ran = subprocess.run(
        command,
        input=SCRIPT.format(guard=""),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )

    *_, last = ran.stderr.splitlines()
    assert "handler process was entered interactively or read from standard input" in last
