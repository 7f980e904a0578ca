"""`work`: a worker from the command line."""

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from textwrap import dedent

import pytest

from fairturn import Queue, State
from fairturn.cli.work import EventPrinter
from fairturn.model import Advanced, Fence, OutageReport, Outcome, Released, Snoozed
from fairturn.worker.events import DocumentEnded, StoreFailed, StoreRecovered, WorkerStopping
from tests.commands import SCRIPT, error_of, fairturn, lines_of

FENCE = Fence("0" * 28, 1)
HANDLERS = """
from fairturn import GiveUp

def extract(document):
    print("reading", document.customer)
    return {"pages": 3}

def fail(document):
    raise ValueError("page 3 is torn")

def hang(document):
    import pathlib, threading
    pathlib.Path("begun").touch()
    threading.Event().wait()

def refuse(document):
    raise GiveUp("not a\\x1b[2J PDF")
"""
PIPELINE = """
from fairturn import Handlers, Next

handlers = Handlers()

@handlers("text")
def text(document):
    return Next("ocr", 3)

@handlers("ocr")
def ocr(document):
    return document.previous
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # restores the path that `work` extends
    (tmp_path / "invoices.py").write_text(HANDLERS)
    (tmp_path / "pipeline.py").write_text(PIPELINE)
    return tmp_path


@pytest.fixture
def queue(folder: Path) -> Iterator[Queue]:
    with Queue("documents.db") as opened:
        yield opened


@contextmanager
def working(*arguments: str) -> "Iterator[subprocess.Popen[str]]":
    """Run the program, and kill it at the end if it has not exited."""
    with subprocess.Popen(
        [SCRIPT, "work", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as worker:
        over = threading.Timer(30, worker.kill)  # so that reading a line cannot block forever
        over.start()
        try:
            yield worker
        finally:
            over.cancel()
            worker.kill()


def test_a_real_store_serves_in_the_order_of_a_replay_of_the_same_documents(folder: Path) -> None:
    customers = "aaaaaaaaaaaaaaaaaaaaaaaaaabbbbccccccccccccccccccccccda"
    rows = [f'{{"customer": "{name}", "payload": {n}}}\n' for n, name in enumerate(customers)]
    Path("documents.ndjson").write_text("".join(rows))
    Path("trace.csv").write_text(
        "at_s,customer,cost_s\n" + "".join(f"0,{name},1\n" for name in customers)
    )
    receipts = lines_of(fairturn("submit", "--ndjson", "documents.ndjson", "--json"))
    replayed = lines_of(fairturn("replay", "trace.csv", "--json"))

    worked = lines_of(
        fairturn("work", "invoices:extract", "--until-empty", "--concurrency", "1", "--json")
    )

    assert [(r["count"], r["priority"]) for r in receipts] == [
        (line["count"], line["priority"]) for line in replayed
    ]
    in_order = sorted(replayed, key=lambda line: line["started_at_s"])
    assert [line["id"] for line in worked] == [receipts[line["n"]]["id"] for line in in_order]
    assert [line["claim"] for line in worked] == list(range(1, len(customers) + 1))
    assert {line["outcome"] for line in worked} == {"completed"}


def test_a_handler_of_this_folder_runs_on_each_document_and_its_result_is_kept(
    queue: Queue,
) -> None:
    id = queue.submit("acme", payload={}).id

    result = fairturn("work", "invoices:extract", "--until-empty", "--concurrency", "1")

    assert queue.result(id) == {"pages": 3}
    (line,) = result.stdout.splitlines()
    assert line.startswith(f"{id}  priority 1  waited ")
    assert line.endswith("acme  completed")
    assert f"{id}: reading acme" in result.stderr
    assert "Attempts: 1 completed." in result.stderr


@pytest.mark.parametrize("command", ["work", "up"])
def test_without_a_handler_nothing_is_completed_and_the_example_that_is_printed_works(
    queue: Queue, folder: Path, command: str
) -> None:
    id = queue.submit("acme", content=b"12345").id
    with_payload = queue.submit("acme", payload={"pages": 3}).id
    queue.configure(attempts_max=1)

    refused = fairturn(command)

    assert refused.exit_code == 2
    assert "Error: no handler: pass the function" in refused.stderr
    assert (queue.get(id).state, queue.get(id).attempts) == (State.WAITING, 0)
    assert fairturn(command, "--database", "new.db").exit_code == 2
    assert not (folder / "new.db").exists()
    example = refused.stderr.partition("Error: ")[2]
    program, run = re.findall(r"(?:^    .+\n)+", example, re.MULTILINE)
    (folder / "invoices.py").write_text(dedent(program))
    name, *arguments = run.split()
    assert (name, arguments[0]) == ("fairturn", command)
    worked = fairturn("work", *arguments[1:], "--until-empty", "--concurrency", "1")
    assert worked.exit_code == 0
    assert queue.result(id) == {"bytes": 5}
    assert queue.result(with_payload) == {"received": {"pages": 3}}


def test_the_handler_and_all_else_can_be_settings(queue: Queue) -> None:
    id = queue.submit("acme", payload={}).id
    Path("fairturn.toml").write_text(
        '[worker]\nhandler = "invoices:extract"\nthreads = true\nconcurrency = 2\n'
    )

    result = fairturn("work", "--until-empty", "--json")

    assert lines_of(result)[0]["id"] == id
    assert queue.result(id) == {"pages": 3}


def test_a_registry_serves_its_kinds_and_options_or_settings_restrict_them(folder: Path) -> None:
    work = ("work", "pipeline:handlers", "--until-empty", "--concurrency", "1")
    with Queue("documents.db", kinds="open") as queue:
        id = queue.submit("acme", payload={}, kind="text").id
        other = queue.submit("acme", payload={}).id

        (text,) = lines_of(fairturn(*work, "--kind", "text", "--json"))
        Path("fairturn.toml").write_text('[worker]\nkind = ["ocr", "text"]\n')
        (ocr,) = lines_of(fairturn(*work, "--json"))

        assert queue.result(id) == 3
        assert queue.get(other).state is State.WAITING
    names = ("id", "kind", "step", "outcome", "state", "next_kind")
    assert [text[name] for name in names] == [id, "text", 0, "advanced", "waiting", "ocr"]
    assert [ocr[name] for name in names] == [id, "ocr", 1, "completed", "completed", None]


@pytest.mark.parametrize("options", [(), ("--threads",)], ids=["processes", "threads"])
@pytest.mark.parametrize("command", ["work", "up"])
def test_a_kind_that_the_registry_does_not_have_is_wrong_use(
    queue: Queue, command: str, options: tuple[str, ...]
) -> None:
    port = ("--port", "0") if command == "up" else ()
    given = (command, "pipeline:handlers", "--kind", "orc", *options, *port)
    # A process of its own: when `up` stops, it sets a deadline for the whole process.
    result = subprocess.run([SCRIPT, *given], capture_output=True, text=True, check=False)

    assert result.returncode == 2
    assert "the registered kinds are: text, ocr" in result.stderr


ENDED = [
    (Advanced(FENCE, "ocr"), State.WAITING, None, "advanced to ocr", None),
    (
        Advanced(FENCE, "orc"),
        State.DEAD,
        "there is no kind 'orc'",
        "dead: there is no kind 'orc'",
        None,
    ),
    (Snoozed(FENCE, 60_000_000), State.DELAYED, None, "snoozed, retry in 60.0 s", 60.0),
    (Snoozed(FENCE, 60_000_000), State.DEAD, "snoozed 1,000 times", "dead: snoozed 1,000", None),
    (
        OutageReport(FENCE, "refused\x1b[2J", service="azure"),
        State.DELAYED,
        None,
        "azure unavailable: refused\\x1b[2J",
        None,
    ),
    (OutageReport(FENCE, "refused"), State.DELAYED, None, "text unavailable: refused", None),
]


@pytest.mark.parametrize(("outcome", "state", "error", "ending", "retry_in_s"), ENDED)
def test_each_outcome_has_a_line_for_people_and_one_for_programs(
    *,
    capsys: pytest.CaptureFixture[str],
    outcome: Outcome,
    state: State,
    error: str | None,
    ending: str,
    retry_in_s: float | None,
) -> None:
    with Queue(":memory:", kinds="open") as queue:
        id = queue.submit("acme", kind="text").id
        (claimed,) = queue.claim(1, worker="w", lease_s=30).claims
    document = claimed.document._replace(state=state, error=error)
    ended = DocumentEnded(document, outcome, 0.5)

    EventPrinter(nothing, as_json=False).add(ended)
    for_people = capsys.readouterr().out
    EventPrinter(nothing, as_json=True).add(ended)
    line = json.loads(capsys.readouterr().out)

    assert for_people.startswith(f"{id}  priority 1, text  waited ")
    assert f", took 500 ms  acme  {ending}" in for_people
    assert (line["state"], line["retry_in_s"], line["kind"]) == (state, retry_in_s, "text")
    assert line["outcome"] in ("advanced", "snoozed", "unavailable")
    assert line["error"] == (outcome.error if isinstance(outcome, OutageReport) else error)


def test_a_failure_is_told_with_its_reason_and_cannot_steer_a_terminal(queue: Queue) -> None:
    id = queue.submit("acme", payload={}).id

    work = ("work", "invoices:refuse", "--until-empty", "--concurrency", "1")
    shown = fairturn(*work).stdout
    queue.retry(id)
    (line,) = lines_of(fairturn(*work, "--json"))

    assert queue.get(id).state is State.DEAD
    assert "acme  dead: not a\\x1b[2J PDF" in shown
    assert (line["outcome"], line["state"]) == ("failed", "dead")
    assert line["retry_in_s"] is None


def test_a_line_says_whether_a_failure_is_tried_again_or_was_the_last(folder: Path) -> None:
    shown = {}
    for options in ((), ("--json",)):
        for attempts_max in (1, 2):
            name = f"{attempts_max}{len(options)}.db"
            work = ("invoices:fail", "--concurrency", "1", "-d", name, *options)
            with Queue(name, attempts_max=attempts_max) as queue:
                queue.submit("acme", payload={})
                with working(*work) as worker:
                    assert worker.stdout is not None
                    shown[options, attempts_max] = worker.stdout.readline()

    assert "acme  dead: ValueError: page 3 is torn (invoices.py, line " in shown[(), 1]
    assert re.search(r"acme  failed, retry in [23]\d\.\d s: ValueError: page 3", shown[(), 2])
    last, again = (json.loads(shown[("--json",), n]) for n in (1, 2))
    assert (last["outcome"], last["state"], last["retry_in_s"]) == ("failed", "dead", None)
    assert (again["outcome"], again["state"]) == ("failed", "delayed")
    assert again["retry_in_s"] >= 5


def test_a_worker_that_waits_for_the_last_documents_says_once_what_for(queue: Queue) -> None:
    paused = queue.submit("acme", payload={}).id
    queue.set_customer("acme", paused=True)
    delayed = queue.submit("later", payload={}, due_at=datetime(2100, 1, 1, tzinfo=UTC)).id

    with working("invoices:extract", "--until-empty", "--concurrency", "1") as worker:
        assert worker.stderr is not None
        said = worker.stderr.readline()
        queue.cancel(delayed)
        queue.set_customer("acme", paused=False)
        _, rest = worker.communicate(timeout=30)

    assert said == (
        "No document can start now; waiting for: 1 of customers or kinds that are paused, held or "
        "at their limit, 1 delayed. Press Ctrl-C to stop.\n"
    )
    assert rest == f"{paused}: reading acme\nAttempts: 1 completed.\n"


def test_what_had_started_is_told_to_people_when_it_is_given_back(
    queue: Queue, folder: Path
) -> None:
    id = queue.submit("acme", payload={}).id

    with working("invoices:hang", "--concurrency", "1", "--grace", "0.01") as worker:
        until((folder / "begun").exists)
        worker.send_signal(signal.SIGTERM)
        printed, _ = worker.communicate(timeout=30)

    (line,) = printed.splitlines()
    assert line.startswith(id)
    assert line.endswith("acme  released")


def test_what_was_claimed_ahead_and_given_back_is_told_to_programs_alone(
    queue: Queue, capsys: pytest.CaptureFixture[str]
) -> None:
    id = queue.submit("acme", payload={}).id
    (claimed,) = queue.store.claim(1, worker="w", lease_us=30_000_000).claims
    queue.store.finish([Released(claimed.fence)])
    ended = DocumentEnded(queue.get(id), Released(claimed.fence), 0.0)

    EventPrinter(nothing, as_json=False).add(ended)
    for_people = capsys.readouterr().out
    EventPrinter(nothing, as_json=True).add(ended)
    (line,) = capsys.readouterr().out.splitlines()

    assert for_people == ""
    assert (json.loads(line)["id"], json.loads(line)["state"]) == (id, "waiting")


def test_a_document_that_is_cancelled_while_it_waits_has_a_line(queue: Queue) -> None:
    work = ("work", "invoices:extract", "--until-empty")
    shown = {}
    for options in ((), ("--json",)):
        id = queue.submit("acme", payload={}).id
        queue.cancel(id)
        shown[options] = id, fairturn(*work, *options).stdout

    id, line = shown[()]
    assert re.fullmatch(rf"{id}  priority \d  waited \d+ ms  acme  cancelled\n", line)
    id, line = shown[("--json",)]
    fields = json.loads(line)
    assert (fields["id"], fields["state"], fields["attempts"]) == (id, "cancelled", 0)
    assert (fields["claim"], fields["outcome"], fields["seconds"]) == (None, None, None)


def test_a_queue_that_does_not_answer_is_told_once_and_when_it_is_back(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = EventPrinter(nothing, as_json=False)
    failed = StoreFailed("the server is away; try again later", 0.05)

    for event in (failed, failed, StoreRecovered(12.0), failed, WorkerStopping(False, 1, 2)):
        lines.add(event)

    away = "the server is away. The worker keeps retrying."
    first, back, again, stopping = capsys.readouterr().err.splitlines()
    assert first == again == away
    assert back == "The queue answers again, after 12.0 s."
    assert stopping.startswith("Stopping: finishing 1 document. The queue does not")
    assert "2 outcomes not recorded yet" in stopping


def nothing(done: int, total: int | None = None) -> None:
    pass


def until(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds."""
    over = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < over


def test_a_standard_output_that_takes_nothing_leaves_no_document_running(queue: Queue) -> None:
    for _ in range(8):
        queue.submit("acme", payload={})

    with Path("/dev/full").open("w") as full:
        worker = subprocess.run(
            [SCRIPT, "work", "invoices:extract", "--until-empty"],
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=30,
            check=False,
        )

    assert worker.returncode != 0
    assert queue.summary().running == 0


def test_a_handler_that_cannot_be_loaded_ends_the_worker_and_leaves_the_documents(
    queue: Queue,
) -> None:
    id = queue.submit("acme", payload={}).id

    result = fairturn("work", "absent:extract", "--until-empty", "--concurrency", "1")

    assert "absent:extract cannot be loaded" in error_of(result, 1)
    document = queue.get(id)
    assert (document.state, document.attempts) == (State.WAITING, 0)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("invoices",), "it must be a function, written as module:function"),
        (("invoices:extract", "--threads", "--time-limit", "5"), "do not apply to threads"),
        (("--memory-limit", "12 MB"), "a size, such as 512MiB"),
        (("invoices:extract", "--lease", "0.01"), "lease_s is 0.01"),
    ],
)
def test_wrong_use_is_told_before_anything_is_claimed(
    queue: Queue, options: tuple[str, ...], sentence: str
) -> None:
    id = queue.submit("acme", payload={}).id

    assert sentence in error_of(fairturn("work", *options), 2)
    assert queue.get(id).state is State.WAITING


def test_a_queue_that_is_not_there_cannot_be_emptied(folder: Path) -> None:
    assert "there is no queue" in error_of(fairturn("work", "invoices:extract", "--until-empty"), 3)
    assert not Path("documents.db").exists()


def test_a_worker_makes_the_queue_waits_for_documents_and_ends_well_with_sigterm(
    folder: Path,
) -> None:
    with subprocess.Popen(
        [SCRIPT, "work", "invoices:extract", "--concurrency", "1", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "FAIRTURN_DATABASE": "mine.db"},
        text=True,
    ) as worker:
        until = time.monotonic() + 30
        while not (folder / "mine.db").exists():
            assert time.monotonic() < until
            assert worker.poll() is None
        with Queue("mine.db") as queue:
            id = queue.submit("acme", payload={}).id
            assert queue.wait(id, timeout_s=30).state is State.COMPLETED
        worker.send_signal(signal.SIGTERM)
        printed, said = worker.communicate(timeout=30)

    assert worker.returncode == 0
    assert f'"id":"{id}"' in printed
    assert "Stopping: finishing" in said
