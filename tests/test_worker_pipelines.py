"""Pipelines: steps, delays, outages and checkpoints, from the handler to the store."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fairturn import Queue, State, Submission, Worker
from fairturn.clock import stopwatch
from fairturn.contents.local import Folder
from fairturn.model import (
    DETAILS_BYTES_MAX,
    STEPS_MAX,
    Advanced,
    AttemptOutcome,
    Document,
    KindPolicy,
    OutageReport,
    Released,
    Settings,
    Snoozed,
)
from fairturn.stores.memory import MemoryStore
from fairturn.worker.events import DocumentEnded, DocumentLost, Event
from fairturn.worker.outcomes import ended_document
from fairturn.worker.output import OutputTails, tail_of
from tests import handlers, pipelines
from tests.test_handlers import AT_ONCE, until
from tests.test_worker import KINDS as PLACES
from tests.test_worker import InBackground, drain, has_begun

OPEN = Settings(kinds=KindPolicy.OPEN)


@pytest.fixture(params=["memory", "file"])
def queue(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Queue]:
    database = ":memory:" if request.param == "memory" else tmp_path / "documents.db"
    with Queue(database, attempts_max=3) as queue:
        for kind in pipelines.outcomes.kinds:
            queue.set_kind(kind)
        yield queue


def run(queue: Queue, kind: str, payload: Any = None, **options: Any) -> Document:
    """Submit a document, work until all have ended, and return it."""
    id = queue.submit("acme", kind=kind, payload=payload).id
    settings: dict[str, Any] = {"concurrency": 2, "retry": AT_ONCE} | options
    Worker(queue, pipelines.outcomes, **settings).run(until_empty=True)
    return queue.get(id)


def run_once(
    queue: Queue, kind: str, payload: Any = None, **options: Any
) -> tuple[Document, DocumentEnded]:
    """Submit a document, work until its first attempt has ended, and return both."""
    id = queue.submit("acme", kind=kind, payload=payload).id
    settings: dict[str, Any] = {"concurrency": 2, "retry": AT_ONCE} | options
    with InBackground(queue, pipelines.outcomes, **settings) as background:
        until(lambda: bool(ended_in(background.events)), "the attempt ends")
        document = queue.get(id)
    return document, ended_in(background.events)[0]


def ended_in(events: list[Event]) -> list[DocumentEnded]:
    return [event for event in events if isinstance(event, DocumentEnded)]


# ── Steps ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "handler", [pipelines.pipeline, "tests.pipelines:pipeline"], ids=["object", "name"]
)
def test_a_document_passes_values_and_files_through_its_steps(tmp_path: Path, handler: Any) -> None:
    with Queue(":memory:", kinds="open") as queue:
        receipts = queue.submit_many(Submission("acme", payload=n, kind="text") for n in range(20))

        done = Worker(queue, handler).run(until_empty=True)

        assert (done.advanced, done.completed, done.failed) == (40, 20, 0)
        for n, receipt in enumerate(receipts):
            result, document = queue.result(receipt.id), queue.get(receipt.id)
            assert result["file"] == f"{n} pages"
            assert result["steps"] == ["text", "ocr"]
            assert (result["step"], result["attempt"], result["kind"]) == (2, 1, "export")
            assert (document.priority, document.count) == (receipt.priority, receipt.count)
            assert (document.step, document.kind, document.cost) == (2, "export", 3_000_000)


@PLACES
@pytest.mark.parametrize("kind", ["pass-on", "pass-on-later"])
@pytest.mark.parametrize("value", [None, 0, {"é": ["\ud800", 1.5]}], ids=str)
def test_the_value_of_a_step_reaches_the_next(
    queue: Queue, kind: str, value: Any, threads: bool
) -> None:
    document = run(queue, kind, value, threads=threads)

    assert queue.result(document.id) == {"previous": value, "file": None, "step": 1}
    (step,) = queue.attempts(document.id)
    assert (step.outcome, step.kind, step.details) == (AttemptOutcome.ADVANCED, kind, None)


def test_a_first_step_has_no_previous_one(queue: Queue) -> None:
    document = run(queue, "done")

    assert queue.result(document.id) == {"previous": None, "file": None, "step": 0}
    assert queue.attempts(document.id) == []


@PLACES
def test_the_file_of_a_step_is_stored_and_can_be_the_result(queue: Queue, threads: bool) -> None:
    document = run(queue, "file-and-value", threads=threads)

    with queue.open_result(document.id) as stream:
        assert stream.read() == b"page " * 20_000
    value, folder = queue.result(document.id)
    assert value == "first"
    assert not Path(folder).exists()


def test_a_damaged_file_of_a_step_fails_the_attempt_and_not_the_worker(
    queue: Queue, tmp_path: Path
) -> None:
    id = queue.submit("acme", kind="file-and-value").id
    Worker(queue, pipelines.outcomes, kinds=["file-and-value"]).run(until_empty=True)
    (step,) = queue.attempts(id)
    assert step.content is not None
    Path(queue.contents.locate(step.content.name)).write_bytes(b"x" * step.content.size_bytes)

    drain(queue, pipelines.outcomes, retry=AT_ONCE)

    assert queue.get(id).state is State.DEAD
    assert "ContentDamaged" in (queue.get(id).error or "")


WRONG_STEPS = {
    "to-an-invalid-kind": "ValueError: kind 'Done!' is not valid; a kind has 1 to 64 characters",
    "too-large-a-value": "ValueError: the value of the step has 1,048,578 bytes; at most 1,048,576",
    "no-json": "TypeError: the value of the step is not JSON",
    "no-such-file": "FileNotFoundError: the result ",
    "negative-cost": "ValueError: cost is -1; it must be from 0 to 1,000,000",
    "negative-delay": "ValueError: after_s is -1; it must be from 0 to 31,622,400",
    "no-delay": "TypeError: after_s is None; it must be a number",
    "negative-probe": "ValueError: retry_after_s is -1; it must be from 0",
    "invalid-service": "ValueError: service has 100 bytes; at most 64 are allowed",
    "too-large-a-checkpoint": "ValueError: the checkpoint has 65,538 bytes; at most 65,536",
    "checkpoint-no-json": "TypeError: the checkpoint is not JSON",
}


@PLACES
@pytest.mark.parametrize("kind", WRONG_STEPS)
def test_a_wrong_outcome_fails_the_attempt_with_a_clear_error_and_leaves_the_worker_up(
    queue: Queue, kind: str, threads: bool
) -> None:
    document = run(queue, kind, threads=threads)

    assert (document.state, document.attempts, document.step) == (State.DEAD, 3, 0)
    assert (document.error or "").startswith(WRONG_STEPS[kind])


@PLACES
def test_a_step_to_a_kind_that_the_queue_does_not_have_is_dead_and_says_so(
    queue: Queue, threads: bool
) -> None:
    id = queue.submit("acme", kind="to-an-unknown-kind").id

    (ended,) = ended_in(drain(queue, pipelines.outcomes, threads=threads))

    assert isinstance(ended.outcome, Advanced)
    assert (ended.document.state, queue.get(id).state) == (State.DEAD, State.DEAD)
    assert "unserved" in (ended.document.error or "")


def test_a_document_has_a_limit_of_steps(queue: Queue) -> None:
    document = run(queue, "round-and-round", threads=True)

    assert (document.state, document.step) == (State.DEAD, STEPS_MAX)


def test_a_retry_resumes_a_pipeline_at_the_step_that_failed(queue: Queue) -> None:
    document = run(queue, "pass-on", 7)  # completes; the next one dies in its second step
    id = queue.submit("acme", kind="pass-on", payload=7).id
    Worker(queue, pipelines.outcomes, kinds=["pass-on"]).run(until_empty=True)
    drain(queue, handlers.never_again, kinds=["done"])
    assert (queue.get(id).state, queue.get(id).step) == (State.DEAD, 1)

    queue.retry(id)
    drain(queue, pipelines.outcomes)

    assert queue.result(id) == queue.result(document.id)


# ── Later and Unavailable ────────────────────────────────────────────────────────────────────────


@PLACES
def test_a_document_that_is_postponed_uses_no_attempt(
    queue: Queue, tmp_path: Path, threads: bool
) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()

    document = run(queue, "later", str(marks), threads=threads)

    assert len(list(marks.iterdir())) == 3
    assert queue.result(document.id) == "attempt 1"
    assert document.attempts == 1
    assert queue.attempts(document.id) == []


@PLACES
@pytest.mark.parametrize("kind", ["return-later", "later-async"])
def test_a_handler_returns_or_raises_a_delay(queue: Queue, kind: str, threads: bool) -> None:
    document, ended = run_once(queue, kind, threads=threads)

    assert isinstance(ended.outcome, Snoozed)
    assert ended.outcome.delay_us == 3_600_000_000
    assert (document.state, document.attempts) == (State.DELAYED, 0)
    assert ended.document.state is State.DELAYED


@PLACES
def test_a_service_that_is_unavailable_uses_no_attempt_and_holds_its_kinds(
    queue: Queue, threads: bool
) -> None:
    submissions = [Submission("acme", kind="unavailable") for _ in range(20)]
    ids = [receipt.id for receipt in queue.submit_many(submissions)]

    with InBackground(queue, pipelines.outcomes, threads=threads, concurrency=1) as background:
        until(lambda: bool(queue.outages()), "the service is held")
        until(lambda: queue.summary().running == 0, "no attempt is left")

    (outage,) = queue.outages()
    reports = [event.outcome for event in ended_in(background.events)]
    assert (outage.kinds, outage.error) == (("unavailable",), "connection refused")
    assert 2 <= len(reports) <= 3
    assert all(isinstance(report, OutageReport) for report in reports)
    documents = [queue.get(id) for id in ids]
    assert {(one.attempts, one.state in (State.WAITING, State.DELAYED)) for one in documents} == {
        (0, True)
    }


def test_an_outage_holds_every_kind_whose_handler_needs_the_service(queue: Queue) -> None:
    with InBackground(queue, pipelines.services, threads=True):
        until(lambda: bool(queue.store.workers()), "it signs on")
    queue.submit("acme", kind="unavailable")
    ocr = queue.submit("acme", kind="ocr").id

    with InBackground(queue, pipelines.dependent, concurrency=1):
        until(lambda: bool(queue.outages()), "the service is held")
    (outage,) = queue.outages()
    with InBackground(queue, pipelines.services) as background:
        until(lambda: len(queue.store.workers()) == 1, "it signs on")
        text = queue.submit("acme", kind="text").id
        queue.wait(text, 10)

    assert (outage.service, outage.kinds) == ("azure-ocr", ("ocr", "unavailable"))
    assert [event.document.id for event in ended_in(background.events)] == [text]
    assert queue.get(ocr).attempts == 0


# ── Checkpoints ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["checkpoint-and-crash", "checkpoint-and-fail"])
def test_a_checkpoint_survives_the_attempt_that_made_it(queue: Queue, kind: str) -> None:
    document = run(queue, kind)

    assert queue.result(document.id) == {
        "page": 3,
        "before": {"page": 2, "before": {"page": 1, "before": None}},
    }


def test_a_checkpoint_of_a_thread_survives_the_attempt_that_made_it(queue: Queue) -> None:
    document = run(queue, "checkpoint-and-fail", threads=True)

    assert queue.result(document.id)["before"]["page"] == 2


def test_a_checkpoint_ends_with_its_step(queue: Queue) -> None:
    document = run(queue, "checkpoint-and-advance")

    assert queue.result(document.id) is None


@PLACES
def test_a_checkpoint_survives_the_worker_that_stops(
    queue: Queue, tmp_path: Path, threads: bool
) -> None:
    id = queue.submit("acme", kind="checkpoint-and-wait", payload=str(tmp_path)).id
    with InBackground(queue, pipelines.outcomes, threads=threads, concurrency=1):
        has_begun(tmp_path, id)
    assert (queue.get(id).state, queue.get(id).attempts) == (State.WAITING, 0)

    (tmp_path / "go on").touch()
    drain(queue, pipelines.outcomes, threads=threads, concurrency=1)

    assert queue.result(id) == {"page": 7}


@PLACES
def test_a_checkpoint_is_stored_within_about_a_second_while_the_handler_runs(
    queue: Queue, tmp_path: Path, threads: bool
) -> None:
    """The lease is lost before the handler ends, so nothing but a renewal can have stored it."""
    id = queue.submit("acme", kind="checkpoint-and-wait", payload=str(tmp_path)).id
    options: dict[str, Any] = {"threads": threads, "concurrency": 1}
    with InBackground(queue, pipelines.outcomes, lease_s=60, **options) as background:
        has_begun(tmp_path, id)
        over_s = stopwatch() + 1.5
        until(lambda: stopwatch() > over_s, "a renewal stores it")
        (held,) = background.worker._dispatcher.running()  # type: ignore[union-attr]
        assert held.saved == '{"page":7}'
        queue.finish([Released(held.fence)])
        (tmp_path / "go on").touch()
        until(lambda: queue.get(id).state is State.COMPLETED, "the next attempt ends")

    assert queue.result(id) == {"page": 7}


# ── Details of failures ──────────────────────────────────────────────────────────────────────────


def test_a_failed_attempt_keeps_the_end_of_its_output_and_traceback(queue: Queue) -> None:
    first, *_ = queue.attempts(run(queue, "print-and-fail").id)

    lines = (first.details or "").splitlines()
    assert lines[:3] == ["page 1", "page 2 \ufffd[31m", "Traceback (most recent call last):"]
    assert lines[-1] == "ValueError: page 3 is torn"
    assert (first.outcome, first.attempt) == (AttemptOutcome.FAILED, 1)


def test_a_crash_keeps_the_end_of_its_output(queue: Queue) -> None:
    first, *_ = queue.attempts(run(queue, "print-and-crash").id)

    assert first.details == "page 1"
    assert "SIGSEGV" in (first.error or "")


def test_of_much_output_the_end_is_kept(queue: Queue) -> None:
    first, *_ = queue.attempts(run(queue, "print-much-and-fail").id)

    assert first.details is not None
    assert first.details.endswith("ValueError: page 3 is torn")
    assert len(first.details.encode()) <= DETAILS_BYTES_MAX


def test_a_failure_in_a_thread_keeps_its_traceback(queue: Queue) -> None:
    first, *_ = queue.attempts(run(queue, "print-and-fail", threads=True).id)

    assert (first.details or "").startswith("Traceback (most recent call last):")
    assert (first.details or "").endswith("ValueError: page 3 is torn")


def test_details_have_the_output_of_their_own_document_alone(queue: Queue) -> None:
    kinds = ["print-and-succeed", "print-and-fail", "done"] * 20
    ids = [queue.submit("acme", kind=kind, payload=n).id for n, kind in enumerate(kinds)]

    drain(queue, pipelines.outcomes, concurrency=1, retry=AT_ONCE)

    failed = [queue.get(id) for id, kind in zip(ids, kinds, strict=True) if kind == kinds[1]]
    for document in failed:
        for attempt in queue.attempts(document.id):
            assert (attempt.details or "").count("page 1") == 1


def test_a_tail_begins_with_a_complete_line_and_has_no_control_characters() -> None:
    assert tail_of("") is None
    assert tail_of("\n\n") is None
    assert tail_of("a\x00b\x1b\nc\n") == "a\ufffdb\ufffd\nc"
    assert tail_of("x" * 10 + "\n" + "é" * (DETAILS_BYTES_MAX // 2)) == "é" * 4_096
    assert tail_of("é" * DETAILS_BYTES_MAX) == "é" * 4_096
    tails = OutputTails()
    tails.feed("a", b"x\n" * DETAILS_BYTES_MAX)
    tails.feed("", b"outside")
    assert tails.take("a") == "x\n" * 4_095 + "x"
    assert tails.take("a") is None


# ── Leases, events and stops ─────────────────────────────────────────────────────────────────────


@PLACES
def test_the_file_of_a_step_whose_lease_was_lost_is_deleted(tmp_path: Path, threads: bool) -> None:
    names: list[str] = []

    def new_name() -> str:
        names.append(f"{len(names):032x}")
        return names[-1]

    contents = Folder(tmp_path / "contents", new_name=new_name)
    options: dict[str, Any] = {"threads": threads, "concurrency": 1, "lease_s": 60}
    with Queue(MemoryStore(settings=OPEN), contents=contents) as queue:
        id = queue.submit("acme", kind="file-when-told", payload=str(tmp_path)).id
        with InBackground(queue, pipelines.outcomes, **options) as background:
            has_begun(tmp_path, id)
            queue.purge("acme")
            (tmp_path / "go on").touch()
            until(lambda: any(isinstance(e, DocumentLost) for e in background.events), "it is lost")
            until(lambda: not Path(contents.locate(names[0])).exists(), "its file is deleted")


def test_a_step_that_ends_after_sigterm_is_recorded_and_its_next_one_waits(
    queue: Queue, tmp_path: Path
) -> None:
    id = queue.submit("acme", kind="file-when-told", payload=str(tmp_path)).id
    worker = Worker(queue, pipelines.outcomes, concurrency=1)
    thread = threading.Thread(target=worker.run)
    thread.start()
    has_begun(tmp_path, id)

    worker.stop()
    (tmp_path / "go on").touch()
    thread.join(20)

    document = queue.get(id)
    assert (document.state, document.step, document.kind) == (State.WAITING, 1, "done")


@PLACES
def test_fast_steps_that_are_claimed_ahead_lose_no_document(queue: Queue, threads: bool) -> None:
    ids = [
        receipt.id
        for receipt in queue.submit_many(
            Submission(f"c{n % 7}", payload=n, kind="pass-on") for n in range(300)
        )
    ]

    done = Worker(queue, pipelines.outcomes, threads=threads).run(until_empty=True)

    assert (done.advanced, done.completed, done.lost, done.failed) == (300, 300, 0, 0)
    assert [queue.result(id)["previous"] for id in ids] == list(range(300))


def test_a_document_that_expires_is_recorded_while_all_slots_are_busy(
    queue: Queue, tmp_path: Path
) -> None:
    busy = queue.submit("acme", payload=str(tmp_path)).id
    with InBackground(queue, handlers.finish_when_told, concurrency=1):
        has_begun(tmp_path, busy)
        id = queue.submit("acme", expires_in_s=0.5).id
        begun_s = stopwatch()
        until(lambda: queue.get(id).state is State.EXPIRED, "it expires")
        took_s = stopwatch() - begun_s
        (tmp_path / "go on").touch()
        queue.wait(busy, 10)

    assert took_s < 3


def test_a_step_whose_next_one_failed_before_it_was_read_has_advanced(queue: Queue) -> None:
    id = queue.submit("acme", kind="pass-on").id
    (claim,) = queue.claim(1, worker="w", lease_s=60).claims
    advanced = Advanced(claim.fence, "done")
    died = claim.document._replace(state=State.DEAD, step=1, error="elsewhere")

    assert claim.document.id == id
    assert ended_document(advanced, claim.document, died).state is State.WAITING
    assert ended_document(advanced, claim.document, None).state is State.WAITING
    refused = died._replace(step=0)
    assert ended_document(advanced, claim.document, refused).error == "elsewhere"
