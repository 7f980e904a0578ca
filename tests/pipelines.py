"""Handlers by kind of work, for the tests of the worker. A child process imports this module."""

import os
from pathlib import Path
from typing import Any

from fairturn import (
    Backoff,
    ClaimedDocument,
    Handlers,
    Later,
    Next,
    ResultFile,
    Retry,
    Unavailable,
)
from tests.handlers import (
    FOREVER,
    TOKEN,
    began,
    finish_when_told,
    limits,
    print_megabytes,
    segfault,
    wait_for,
)

MEBIBYTE = 1_048_576

# ── A pipeline: text, ocr and export, in as many places ──────────────────────────────────────────

pipeline = Handlers()


@pipeline("text")
def extract_text(document: ClaimedDocument) -> Next:
    return Next("ocr", {"pages": document.payload}, cost=3)


@pipeline("ocr", concurrency=1, memory_limit_bytes=512 * MEBIBYTE)
async def recognise(document: ClaimedDocument) -> Next:
    file = document.folder / "text"
    file.write_text(f"{document.previous['pages']} pages")
    return Next("export", {"process": TOKEN}, file=file)


@pipeline("export", threads=True)
def export(document: ClaimedDocument) -> dict[str, Any]:
    assert document.previous_file is not None
    return {
        "previous": document.previous,
        "file": document.previous_file.read_text(),
        "step": document.step,
        "attempt": document.attempt,
        "kind": document.kind,
        "steps": [step.kind for step in document.steps],
        "process": TOKEN,
    }


# ── What a worker does with each kind ────────────────────────────────────────────────────────────

fast = Handlers()


@fast("text")
def name_kind(document: ClaimedDocument) -> str:
    return f"{document.kind} {document.step}"


@fast("ocr", concurrency=1)
def name_kind_too(document: ClaimedDocument) -> str:
    return name_kind(document)


held = Handlers()


@held("text")
def finish_at_once(document: ClaimedDocument) -> None:
    began(document)


@held("ocr", concurrency=1)
def finish_ocr_when_told(document: ClaimedDocument) -> None:
    finish_when_told(document)


limited = Handlers()


@limited("small", memory_limit_bytes=256 * MEBIBYTE)
def small(document: ClaimedDocument) -> dict[str, Any]:
    return {**limits(document), "process": TOKEN}


@limited("large", memory_limit_bytes=1_024 * MEBIBYTE)
def large(document: ClaimedDocument) -> dict[str, Any]:
    return small(document)


@limited("unlimited", memory_limit_bytes=None)
def unlimited(document: ClaimedDocument) -> dict[str, Any]:
    return small(document)


timed = Handlers()


@timed("slow", time_limit_s=0.2)
def hang_until_the_limit(document: ClaimedDocument) -> None:
    FOREVER.wait()


@timed("patient")
def take_longer_than_the_other_limit(document: ClaimedDocument) -> None:
    FOREVER.wait(0.4)


backoffs = Handlers()


@backoffs("text", retry=Backoff(first_s=100, factor=1))
def fail_for_long(document: ClaimedDocument) -> None:
    raise ValueError("page 3 is torn")


@backoffs("ocr")
def fail_as_the_worker(document: ClaimedDocument) -> None:
    raise ValueError("page 3 is torn")


services = Handlers()


@services("ocr", needs={"azure-ocr", "storage"})
def need_services(document: ClaimedDocument) -> None: ...


@services("text")
def need_nothing(document: ClaimedDocument) -> None: ...


dependent = Handlers()


@dependent("unavailable", needs={"azure-ocr"})
def find_a_service_unavailable(document: ClaimedDocument) -> None:
    raise Unavailable("connection refused", retry_after_s=1_000, service="azure-ocr")


# ── Outcomes: each kind ends in its own way ──────────────────────────────────────────────────────

outcomes = Handlers()


def outcome(handler: Any) -> Any:
    """Register a handler for the kind of its name."""
    return outcomes(handler.__name__.replace("_", "-"))(handler)


@outcome
def done(document: ClaimedDocument) -> dict[str, Any]:
    return {"previous": document.previous, "file": document.previous_file, "step": document.step}


@outcome
def pass_on(document: ClaimedDocument) -> Next:
    return Next("done", document.payload)


@outcome
async def pass_on_later(document: ClaimedDocument) -> Next:
    return Next("done", document.payload)


@outcome
def to_an_unknown_kind(document: ClaimedDocument) -> Next:
    return Next("unserved")


@outcome
def to_an_invalid_kind(document: ClaimedDocument) -> Next:
    return Next("Done!")


@outcome
def too_large_a_value(document: ClaimedDocument) -> Next:
    return Next("done", "x" * MEBIBYTE)


@outcome
def no_json(document: ClaimedDocument) -> Next:
    return Next("done", {1, 2})


@outcome
def no_such_file(document: ClaimedDocument) -> Next:
    return Next("done", file=document.folder / "missing")


@outcome
def negative_cost(document: ClaimedDocument) -> Next:
    return Next("done", cost=-1)


@outcome
def round_and_round(document: ClaimedDocument) -> Next:
    return Next("round-and-round")


@outcome
def later(document: ClaimedDocument) -> str:
    marks = Path(document.payload)
    if len(list(marks.iterdir())) < 3:
        (marks / str(document.fence)).touch()
        raise Later(after_s=0.01)
    return f"attempt {document.attempt}"


@outcome
def return_later(document: ClaimedDocument) -> Any:
    return Later(3_600)


@outcome
async def later_async(document: ClaimedDocument) -> None:
    raise Later(3_600)


@outcome
def negative_delay(document: ClaimedDocument) -> None:
    raise Later(after_s=-1)


@outcome
def no_delay(document: ClaimedDocument) -> None:
    class Someday(Later):
        def __init__(self) -> None:
            pass

    raise Someday


@outcome
def unavailable(document: ClaimedDocument) -> None:
    raise Unavailable("connection refused", retry_after_s=1_000, service="azure-ocr")


@outcome
def negative_probe(document: ClaimedDocument) -> None:
    raise Unavailable("connection refused", retry_after_s=-1)


@outcome
def invalid_service(document: ClaimedDocument) -> None:
    class Down(Unavailable):
        service = "x" * 100

    raise Down("connection refused")


@outcome
def checkpoint_and_crash(document: ClaimedDocument) -> Any:
    document.checkpoint({"page": document.attempt, "before": document.last_checkpoint})
    if document.attempt < 3:
        os._exit(3)
    return document.last_checkpoint


@outcome
def checkpoint_and_fail(document: ClaimedDocument) -> Any:
    document.checkpoint({"page": document.attempt, "before": document.last_checkpoint})
    if document.attempt < 3:
        raise Retry("not yet")
    return document.last_checkpoint


@outcome
def checkpoint_and_advance(document: ClaimedDocument) -> Next:
    document.checkpoint(1)
    return Next("tell-checkpoint")


@outcome
def tell_checkpoint(document: ClaimedDocument) -> Any:
    return document.last_checkpoint


@outcome
def checkpoint_and_wait(document: ClaimedDocument) -> Any:
    before = document.last_checkpoint
    document.checkpoint({"page": 7})
    began(document)
    wait_for(document, "go on")
    return before


@outcome
def too_large_a_checkpoint(document: ClaimedDocument) -> None:
    document.checkpoint("x" * 65_536)


@outcome
def checkpoint_no_json(document: ClaimedDocument) -> None:
    document.checkpoint({1, 2})


@outcome
def print_and_fail(document: ClaimedDocument) -> None:
    os.write(1, b"page 1\npage 2 \x1b[31m\n")
    raise ValueError("page 3 is torn")


@outcome
def print_and_crash(document: ClaimedDocument) -> None:
    os.write(1, b"page 1\n")
    segfault(document)


@outcome
def print_much_and_fail(document: ClaimedDocument) -> None:
    print_megabytes(document)
    raise ValueError("page 3 is torn")


@outcome
def print_and_succeed(document: ClaimedDocument) -> None:
    os.write(1, b"page 1\n")


@outcome
def file_when_told(document: ClaimedDocument) -> Next:
    file = document.folder / "result"
    file.write_text("page")
    finish_when_told(document)
    return Next("done", file=file)


@outcome
def file_and_value(document: ClaimedDocument) -> Next:
    file = document.folder / "result"
    file.write_bytes(b"page " * 20_000)
    return Next("copy-file", "first", file=file)


@outcome
def copy_file(document: ClaimedDocument) -> ResultFile:
    assert document.previous_file is not None
    return ResultFile(document.previous_file, [document.previous, str(document.folder)])
