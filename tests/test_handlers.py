"""No handler can harm a worker. Each of these runs in a real child process."""

import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fairturn import Backoff, ClaimedDocument, Document, Queue, State, Worker
from fairturn.clock import stopwatch
from fairturn.worker.events import Event, LinePrinted
from tests import handlers

DEADLINE_S = 20.0
AT_ONCE = Backoff(first_s=0, most_s=0)


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    with Queue(tmp_path / "documents.db", synchronous="NORMAL", attempts_max=2) as queue:
        yield queue


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait until the condition holds."""
    over = stopwatch() + DEADLINE_S
    while not condition():
        assert stopwatch() < over, f"{what}: not within {DEADLINE_S:g} s"
        handlers.FOREVER.wait(0.005)


def is_gone(mark: Path) -> bool:
    """Return whether the process that locked this file with `handlers.hold` has ended, and all that
    it forked."""
    with mark.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def run(
    queue: Queue,
    handler: Callable[[ClaimedDocument], Any],
    payload: Any = None,
    *,
    documents: int = 1,
    **options: Any,
) -> list[Document]:
    """Submit documents, work until all have ended, and return them."""
    receipts = [queue.submit("acme", payload=payload) for _ in range(documents)]
    settings: dict[str, Any] = {"concurrency": 1, "retry": AT_ONCE} | options
    Worker(queue, handler, **settings).run(until_empty=True)
    return [queue.get(receipt.id) for receipt in receipts]


CRASHES = [
    (handlers.exit_at_once, "exited with code 3 without an outcome"),
    (handlers.exit_with_success, "exited with code 0 without an outcome"),
    (handlers.exit_politely, "the handler called sys.exit(4)"),
    (handlers.segfault, "killed by signal 11 (SIGSEGV)"),
    (handlers.kill_itself, "killed by signal 9 (SIGKILL)"),
    (handlers.kill_its_group, "killed by signal 9 (SIGKILL)"),
    (handlers.close_every_descriptor, "exited with code 1 without an outcome"),
    (handlers.close_descriptors_and_hang, "closed its connection to the worker"),
    (handlers.write_nonsense_to_every_descriptor, "the child sent an invalid reply"),
]


@pytest.mark.parametrize(
    "handler, reason", CRASHES, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_handler_that_crashes_costs_an_attempt_and_the_reason_is_kept(
    queue: Queue, handler: Callable[[ClaimedDocument], Any], reason: str
) -> None:
    (document,) = run(queue, handler)

    assert (document.state, document.attempts) == (State.DEAD, 2)
    assert document.error is not None
    assert reason in document.error


@pytest.mark.parametrize("options", [{}, {"threads": True}], ids=["process", "thread"])
def test_a_handler_cannot_assign_to_an_attribute_that_a_document_does_not_have(
    queue: Queue, options: dict[str, Any]
) -> None:
    (document,) = run(queue, handlers.misspell_an_attribute, **options)

    assert document.state is State.DEAD
    assert document.error is not None
    assert "AttributeError: 'ClaimedDocument' object has no attribute 'pririty'" in document.error


def test_a_crash_does_not_touch_the_documents_beside_it(queue: Queue) -> None:
    bad = queue.submit("acme", payload="crash")
    good = [queue.submit("acme", payload="fine") for _ in range(50)]

    done = Worker(queue, crash_if_told, concurrency=2, retry=AT_ONCE).run(until_empty=True)

    assert queue.get(bad.id).state is State.DEAD
    assert {queue.get(one.id).attempts for one in good} == {1}
    assert (done.completed, done.failed) == (50, 2)


def crash_if_told(document: ClaimedDocument) -> None:
    if document.payload == "crash":
        handlers.segfault(document)


@pytest.mark.parametrize(
    "handler", [handlers.hang, handlers.hang_and_refuse_to_end, handlers.hold_the_interpreter]
)
def test_a_handler_that_hangs_is_ended_at_its_time_limit(
    queue: Queue, tmp_path: Path, handler: Callable[[ClaimedDocument], Any]
) -> None:
    (document,) = run(queue, handler, str(tmp_path), time_limit_s=0.2)

    assert (document.state, document.attempts) == (State.DEAD, 2)
    assert document.error == "time limit of 0.2 s"
    for mark in tmp_path.glob("began-*"):
        assert is_gone(mark)


def test_a_handler_that_holds_the_interpreter_keeps_its_lease(queue: Queue, tmp_path: Path) -> None:
    (document,) = run(queue, handlers.hold_the_interpreter, str(tmp_path), lease_s=0.3)

    assert (document.state, document.attempts) == (State.COMPLETED, 1)


@pytest.mark.parametrize("handler", [handlers.eat_memory, handlers.eat_memory_bit_by_bit])
def test_a_handler_that_eats_memory_is_stopped_at_its_limit(
    queue: Queue, handler: Callable[[ClaimedDocument], Any]
) -> None:
    limit_bytes = 128 * 1_048_576

    (document,) = run(queue, handler, memory_limit_bytes=limit_bytes)

    assert document.state is State.DEAD
    assert document.error is not None
    assert document.error.startswith("memory limit of 134,217,728 bytes")


def test_a_handler_that_forks_answers_once(queue: Queue, capfd: pytest.CaptureFixture[str]) -> None:
    first, second = run(queue, handlers.fork_and_return_twice, documents=2)

    assert [queue.result(one.id) for one in (first, second)] == ["parent", "parent"]
    assert [one.attempts for one in (first, second)] == [1, 1]
    assert capfd.readouterr().err == ""


def test_what_a_handler_forks_answers_nowhere(queue: Queue, tmp_path: Path) -> None:
    run(queue, handlers.fork_and_open_files, str(tmp_path))

    opened = list(tmp_path.glob("opened *"))
    assert [file.read_bytes() for file in opened] == [b""] * 100


def test_what_a_handler_forks_has_no_pipe_to_the_worker(queue: Queue) -> None:
    (document,) = run(queue, handlers.pipes_of_a_fork)

    assert queue.result(document.id) == ["1", "2"]


@pytest.mark.parametrize("handler", [handlers.leave_a_process, handlers.leave_a_daemon])
def test_what_a_handler_leaves_behind_is_ended_with_its_attempt(
    queue: Queue, tmp_path: Path, handler: Callable[[ClaimedDocument], Any]
) -> None:
    receipt = queue.submit("acme", payload=str(tmp_path))
    seen: list[bool] = []

    def look(event: Event) -> None:
        if not seen and queue.get(receipt.id).ended:
            until(lambda: is_gone(tmp_path / "left"), "the process ends")
            seen.append(True)
            worker.stop()

    worker = Worker(queue, handler, concurrency=1, on_event=look)
    worker.run(until_empty=True)

    assert queue.get(receipt.id).state is State.COMPLETED
    assert is_gone(tmp_path / "left")


@pytest.mark.parametrize(
    "handler, options",
    [
        (handlers.leave_a_daemon_and_hang, {"time_limit_s": 1.0}),
        (handlers.leave_a_daemon_and_crash, {}),
    ],
)
def test_what_a_handler_leaves_behind_is_ended_when_it_hangs_or_crashes(
    tmp_path: Path, handler: Callable[[ClaimedDocument], Any], options: dict[str, Any]
) -> None:
    with Queue(tmp_path / "documents.db", attempts_max=1) as queue:
        (document,) = run(queue, handler, str(tmp_path), **options)

    assert document.state is State.DEAD
    assert is_gone(tmp_path / "left")


def test_a_handler_that_prints_megabytes_neither_blocks_nor_floods(queue: Queue) -> None:
    heard: list[LinePrinted] = []

    def hear(event: Event) -> None:
        if isinstance(event, LinePrinted):
            heard.append(event)

    (document,) = run(queue, handlers.print_megabytes, on_event=hear)

    assert document.state is State.COMPLETED
    assert sum(len(line) for _, line in heard) < 200_000
    assert heard[-1].line.endswith("more bytes were printed)")


def test_what_handlers_print_comes_with_the_document_and_cannot_move_the_terminal(
    queue: Queue, capfd: pytest.CaptureFixture[str]
) -> None:
    ids = [queue.submit("acme", payload=number).id for number in range(100)]

    Worker(queue, handlers.print_lines, concurrency=2).run(until_empty=True)

    lines = set(capfd.readouterr().err.splitlines())
    assert lines == {f"{id}: out {number}" for number, id in enumerate(ids)} | {
        f"{id}: red \ufffd[31m" for id in ids
    }


def test_what_a_handler_opens_in_place_of_its_output_is_left_alone(
    queue: Queue, tmp_path: Path
) -> None:
    documents = run(queue, handlers.close_its_output_and_open_a_file, str(tmp_path), documents=2)

    assert [(one.state, one.attempts) for one in documents] == [(State.COMPLETED, 1)] * 2
    assert [(tmp_path / one.id).read_bytes() for one in documents] == [b"", b""]


def test_a_child_knows_nothing_of_the_database(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIRTURN_DATABASE", "postgresql://user:secret@host/db")
    monkeypatch.setenv("OTHER", "passes")

    (document,) = run(queue, handlers.environment, pass_env=["OTHER"])

    seen = queue.result(document.id)
    assert "OTHER" in seen["names"]
    assert not [name for name in seen["names"] if name.startswith("FAIRTURN_DATABASE")]
    assert not {"apsw", "fairturn.queue", "fairturn.config", "fairturn.stores"} & set(
        seen["modules"]
    )
    assert not [path for path in seen["descriptors"] if "documents.db" in path]


def test_a_child_is_replaced_after_so_many_documents(queue: Queue, tmp_path: Path) -> None:
    documents = run(queue, handlers.name_its_process, str(tmp_path), documents=30, recycle_after=10)

    processes = [queue.result(document.id) for document in documents]
    assert len(set(processes)) == 3
    assert all(is_gone(tmp_path / process) for process in processes)


def test_a_worker_leaves_no_process_and_no_descriptor_behind(queue: Queue, tmp_path: Path) -> None:
    before = sum(1 for _ in Path("/proc/self/fd").iterdir())

    documents = run(queue, handlers.name_its_process, str(tmp_path), documents=8, concurrency=4)

    assert all(is_gone(tmp_path / queue.result(document.id)) for document in documents)
    assert sum(1 for _ in Path("/proc/self/fd").iterdir()) <= before


def test_the_traceback_of_a_handler_goes_into_no_file_that_it_opened_in_place_of_its_output(
    queue: Queue, tmp_path: Path
) -> None:
    heard: list[Event] = []

    run(
        queue, open_in_place_of_its_output_and_fail, str(tmp_path / "opened"), on_event=heard.append
    )

    assert (tmp_path / "opened").read_bytes() == b""
    lines = [event.line for event in heard if isinstance(event, LinePrinted)]
    assert lines.count("ValueError: page 3 is torn") == 2


def open_in_place_of_its_output_and_fail(document: ClaimedDocument) -> None:
    os.close(2)
    os.open(document.payload, os.O_WRONLY | os.O_CREAT)
    raise ValueError("page 3 is torn")
