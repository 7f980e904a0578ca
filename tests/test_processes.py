"""The process executor: what its children get and return."""

import errno
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from fairturn import Backoff, Queue, State, Worker
from fairturn.clock import stopwatch
from fairturn.worker.executor import (
    ActiveClaim,
    AttemptResult,
    ExecutorResources,
    WakeupPipe,
)
from fairturn.worker.isolation import Isolation
from fairturn.worker.kinds import KindOptions
from fairturn.worker.messages import ChildLimits, FrameError
from fairturn.worker.output import Output
from fairturn.worker.prefetch import PrefetchPolicy
from fairturn.worker.process_executor import STUCK_S, ProcessExecutor
from tests.test_handlers import AT_ONCE, DEADLINE_S, until

TAKEN_BACK = 300  # times: more than a byte can count


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    with Queue(tmp_path / "documents.db", synchronous="NORMAL") as queue:
        yield queue


@pytest.fixture
def crew(queue: Queue, tmp_path: Path) -> Iterator[ProcessExecutor]:
    """One child, whose handler has proved fast."""
    pace = PrefetchPolicy()
    pace.add(0.1, 1_000)
    with one_child(queue, tmp_path, "tests.test_worker:slow_if_told", pace) as crew:
        wait_until(crew, lambda: crew.free() == 1, "the child starts")
        yield crew


@contextmanager
def one_child(
    queue: Queue,
    folder: Path,
    handler: str,
    pace: PrefetchPolicy,
    output: Output = lambda document, line: None,
) -> Iterator[ProcessExecutor]:
    wakeup = WakeupPipe()
    crew = ProcessExecutor(
        handler,
        None,
        slots=1,
        limits=ChildLimits(None, 10_000, 1 << 40),
        isolation=Isolation(os.environ, namespace=False),
        resources=ExecutorResources(queue.contents, folder, pace, wakeup, output),
    )
    try:
        yield crew
    finally:
        assert crew.close()
        wakeup.close()


def claim(queue: Queue, payloads: list[str | None]) -> list[ActiveClaim]:
    for payload in payloads:
        queue.submit("acme", payload=payload)
    claims, *_ = queue.store.claim(len(payloads), worker="w", lease_us=60_000_000)
    options = KindOptions(1, False, None, None, Backoff())
    return [ActiveClaim(one, stopwatch(), options) for one in claims]


def wait_until(crew: ProcessExecutor, condition: Callable[[], bool], what: str) -> None:
    over = stopwatch() + DEADLINE_S
    while not condition():
        assert stopwatch() < over, f"not within {DEADLINE_S} s: {what}"
        crew._wakeup.wait(0.1)


def has_begun(folder: Path, held: ActiveClaim) -> None:
    until((folder / f"began-{held.fence.document}-1").exists, "the slow one begins")


def collect(crew: ProcessExecutor, n: int) -> list[AttemptResult]:
    ended: list[AttemptResult] = []
    over = stopwatch() + DEADLINE_S
    while len(ended) < n:
        assert stopwatch() < over, f"{len(ended)} of {n} have ended"
        crew._wakeup.wait(0.1)
        ended += crew.take_done()
    return ended


def test_a_crew_that_cannot_be_completed_leaves_no_process_and_no_descriptor(
    queue: Queue, tmp_path: Path
) -> None:
    descriptors = set(Path("/proc/self/fd").iterdir())
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (400, allowed[1]))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(40):  # enough for some children
            os.close(taken.pop())
        with pytest.raises(OSError, match="Too many open files"):
            Worker(queue, "tests.handlers:nothing", concurrency=20).run(until_empty=True)
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, allowed)

    assert set(Path("/proc/self/fd").iterdir()) == descriptors
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


@pytest.mark.parametrize("error", [OSError(errno.ENOSYS, "no such call"), AttributeError()])
def test_a_worker_does_without_descriptors_of_processes_where_there_are_none(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(pid: int) -> int:
        raise error

    monkeypatch.setattr("os.pidfd_open", refuse)
    crashed = queue.submit("acme")

    Worker(queue, "tests.handlers:exit_at_once", retry=AT_ONCE).run(until_empty=True)

    assert queue.get(crashed.id).state is State.DEAD


def test_a_child_never_runs_what_was_taken_back_however_often(
    queue: Queue, crew: ProcessExecutor, tmp_path: Path
) -> None:
    slow, taken, kept = claim(queue, [str(tmp_path), None, None])
    (slot,) = crew._slots
    crew.give([slow])
    has_begun(tmp_path, slow)
    for _ in range(TAKEN_BACK):
        slot.give([taken])
        assert slot.take_back() == [taken]

    slot.give([kept])
    (tmp_path / "go on").touch()

    assert [(one.held, one.answer[0]) for one in collect(crew, 2)] == [
        (slow, "done"),
        (kept, "done"),
    ]


def test_nothing_is_given_to_a_child_whose_document_turned_out_slow(
    queue: Queue, crew: ProcessExecutor, tmp_path: Path
) -> None:
    slow, fast = claim(queue, [str(tmp_path), None])
    crew.give([slow])
    has_begun(tmp_path, slow)
    slow_since = stopwatch()
    until(lambda: stopwatch() > slow_since + STUCK_S, "it is slow")

    crew.give([fast])

    assert crew.unstarted_since_s() == fast.claimed_s
    (tmp_path / "go on").touch()
    assert [one.held for one in collect(crew, 2)] == [slow, fast]


def test_a_child_that_cannot_be_replaced_is_replaced_when_there_is_room_again(
    queue: Queue, tmp_path: Path
) -> None:
    said: list[str] = []

    def note(document: str, line: str) -> None:
        said.append(line)

    pace = PrefetchPolicy()
    with one_child(queue, tmp_path, "tests.handlers:exit_at_once", pace, note) as crew:
        wait_until(crew, lambda: crew.free() == 1, "the child starts")
        crew.give(claim(queue, [None]))
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, allowed[1]))
        try:
            wait_until(crew, lambda: bool(said), "it cannot be replaced")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, allowed)
        (ended,) = crew.take_done()
        assert ended.answer[0] == "retry"
        assert "cannot be started (Too many open files); 0 of 1 are running" in said[0]
        assert not crew.free()
        again_at = crew.due_s()
        assert again_at is not None

        crew.tend(again_at)

        wait_until(crew, lambda: crew.free() == 1, "it is replaced")


@pytest.mark.parametrize(
    "message",
    [
        ["progress", 10**400, None],
        ["progress", 1, float("inf")],
        ["answer", "done", None, None, None, None, None, float("inf"), False],
        ["answer", "retry", "no", None, float("nan"), None, None, 0.1, False],
        ["answer", "next", None, None, None, "ocr", float("inf"), 0.1, False],
    ],
)
def test_a_child_that_says_senseless_numbers_is_ended(
    queue: Queue, crew: ProcessExecutor, tmp_path: Path, message: list[object]
) -> None:
    (held,) = claim(queue, [str(tmp_path)])
    (slot,) = crew._slots
    crew.give([held])
    has_begun(tmp_path, held)
    said = [held.fence.document if part == "answer" else part for part in message]

    with pytest.raises(FrameError, match="a number is .* out of range"):
        slot._understand(said, [])


ANSWERS: list[list[object]] = [
    ["answer", "nonsense", None, None, None, None, None, 0.1, False],
    ["answer", "done", "x" * (16 * 1_048_576 + 1), None, None, None, None, 0.1, False],
    ["answer", "done", "\0", None, None, None, None, 0.1, False],
    ["answer", "next", None, None, None, None, None, 0.1, False],
    ["answer", "next", None, None, None, "Not a kind", None, 0.1, False],
    ["answer", "next", "1" * (1_048_576 + 1), None, None, "ocr", None, 0.1, False],
    ["answer", "next", None, None, None, "ocr", -1, 0.1, False],
    ["answer", "later", None, None, -1, None, None, 0.1, False],
    ["answer", "later", None, None, 1e9, None, None, 0.1, False],
    ["answer", "unavailable", "no", None, -1, None, None, 0.1, False],
    ["answer", "unavailable", "no", None, None, "x" * 65, None, 0.1, False],
    ["checkpoint", "1" * 65_537],
    ["checkpoint", "\0"],
]


@pytest.mark.parametrize("message", ANSWERS, ids=lambda message: f"{message[0]} {message[1]:.10}")
def test_a_child_whose_answer_cannot_be_recorded_is_ended_and_its_document_is_kept(
    queue: Queue, crew: ProcessExecutor, tmp_path: Path, message: list[object]
) -> None:
    (held,) = claim(queue, [str(tmp_path)])
    (slot,) = crew._slots
    crew.give([held])
    has_begun(tmp_path, held)
    said = [held.fence.document if part == "answer" else part for part in message]

    with pytest.raises(FrameError):
        slot._understand(said, [])

    assert list(slot.given) == [held]
    assert held.checkpoint is None


def test_an_attempt_whose_child_sends_an_invalid_answer_fails(
    queue: Queue, crew: ProcessExecutor, tmp_path: Path
) -> None:
    (held,) = claim(queue, [str(tmp_path)])
    (slot,) = crew._slots
    crew.give([held])
    has_begun(tmp_path, held)

    slot.kill("the child sent an invalid reply")

    (ended,) = collect(crew, 1)
    assert (ended.held, ended.answer.type) == (held, "retry")
    assert ended.answer.text == "the child sent an invalid reply"
