"""Child processes as a crew: who is given what, and what comes back."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fairturn import Queue
from fairturn.clock import stopwatch
from fairturn.worker.crew import STUCK_S, Ended, Held
from fairturn.worker.pacing import Pace
from fairturn.worker.processes import Limits, ProcessCrew
from tests.test_handlers import DEADLINE_S, until

TAKEN_BACK = 300  # times: more than a byte can count


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    with Queue(tmp_path / "documents.db", synchronous="NORMAL") as queue:
        yield queue


@pytest.fixture
def crew(queue: Queue, tmp_path: Path) -> Iterator[ProcessCrew]:
    """One child, whose handler is known to be fast."""
    pace = Pace()
    pace.add(0.1, 1_000)
    crew = ProcessCrew(
        "tests.test_worker:slow_if_told",
        None,
        concurrency=1,
        limits=Limits(None, None, 10_000, 1 << 40),
        contents=queue.contents,
        folder=tmp_path,
        pace=pace,
        output=lambda document, line: None,
    )
    over = stopwatch() + DEADLINE_S
    while not crew.free():
        assert stopwatch() < over, "the child did not start"
        crew.wait(0.1)
    yield crew
    crew.close()


def claim(queue: Queue, payloads: list[str | None]) -> list[Held]:
    for payload in payloads:
        queue.submit("acme", payload=payload)
    claims, _ = queue.store.claim(len(payloads), worker="w", lease_us=60_000_000)
    return [Held(one, stopwatch(), None) for one in claims]


def has_begun(folder: Path, held: Held) -> None:
    until((folder / f"began-{held.fence.document}-1").exists, "the slow one begins")


def collect(crew: ProcessCrew, n: int) -> list[Ended]:
    ended: list[Ended] = []
    over = stopwatch() + DEADLINE_S
    while len(ended) < n:
        assert stopwatch() < over, f"{len(ended)} of {n} have ended"
        crew.wait(0.1)
        ended += crew.collect()
    return ended


def test_a_child_never_runs_what_was_taken_back_however_often(
    queue: Queue, crew: ProcessCrew, tmp_path: Path
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
    queue: Queue, crew: ProcessCrew, tmp_path: Path
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
