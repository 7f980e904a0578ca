"""`list`, `show`, `wait`, `cancel`, `retry`."""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import apsw
import pytest

from fairturn import Completed, Failed, Queue, Released
from fairturn.clock import SystemClock
from fairturn.model import ContentRef, Progress
from fairturn.wire import DOCUMENT
from tests.commands import (
    LEASE_US,
    SCRIPT,
    claim,
    complete,
    error_of,
    fairturn,
    kill,
    lines_of,
    shown_on_a_terminal,
)

ABSENT = "0" * 15


@pytest.fixture(autouse=True)
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Queue]:
    monkeypatch.chdir(tmp_path)
    with Queue("documents.db") as opened:
        yield opened


def submit(queue: Queue, n: int, customer: str = "acme") -> list[str]:
    return [queue.submit(customer, payload=k, name=f"{k}.pdf").id for k in range(n)]


def ids_of(*arguments: str) -> list[str]:
    return [line["id"] for line in lines_of(fairturn("list", *arguments, "--json"))]


# ── list ─────────────────────────────────────────────────────────────────────────────────────────


def test_documents_are_listed_the_newest_first_with_the_fields_of_the_service(queue: Queue) -> None:
    first = queue.submit("acme", content=b"abc", metadata={"pages": 3}, name="a.pdf")
    second = queue.submit("bolt")

    lines = lines_of(fairturn("list", "--json"))

    assert [line["id"] for line in lines] == [second.id, first.id]
    assert list(lines[0]) == [field.name for field in DOCUMENT]
    document = queue.get(first.id)
    assert document.sha256 is not None
    assert lines[1]["sha256"] == document.sha256.hex()
    assert lines[1]["metadata"] == {"pages": 3}
    for field in ("customer", "state", "priority", "count", "name", "body_type"):
        assert lines[1][field] == getattr(document, field)
    assert lines[1]["submitted_at"] == document.submitted_at_us


def test_a_list_is_a_table_for_people(queue: Queue) -> None:
    (id,) = submit(queue, 1)

    printed = fairturn("list").stdout

    assert printed.splitlines()[0].split()[:4] == ["id", "customer", "state", "priority"]
    assert printed.splitlines()[-1].split()[:5] == [id, "acme", "waiting", "1", "0"]
    assert printed.splitlines()[-1].split()[-1] == "0.pdf"


def test_filters_leave_what_they_say(queue: Queue) -> None:
    acme = submit(queue, 5)
    bolt = submit(queue, 2, "bolt")
    dead = kill(queue)

    assert ids_of("--customer", "bolt") == bolt[::-1]
    assert ids_of("--state", "dead") == dead
    assert set(ids_of("--state", "dead", "--state", "waiting")) == {*acme, *bolt}
    assert ids_of("--priority", "2") == [acme[4], acme[3]]
    assert ids_of("--name", "1.pdf") == [bolt[1], acme[1]]
    assert ids_of("--submitted-before", "2001-01-01T00:00Z") == []
    assert len(ids_of("--submitted-from", "2001-01-01T00:00Z")) == 7


def test_pages_follow_each_other_without_gap_or_repetition(queue: Queue) -> None:
    ids = submit(queue, 45)[::-1]

    first = ids_of()
    second = ids_of("--after", first[-1], "--limit", "10")

    assert first == ids[:20]
    assert second == ids[20:30]
    assert ids_of("--all") == ids
    assert ids_of("--limit", "2000") == ids
    assert f"--after {ids[19]}" in fairturn("list").stdout
    assert "--after" not in fairturn("list", "--all").stdout


def test_nothing_to_list_is_said() -> None:
    assert fairturn("list").stdout == "There are no such documents.\n"
    assert fairturn("list", "--json").stdout == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ["--limit", "0"],
        ["--limit", "3", "--all"],
        ["--state", "lost"],
        ["--priority", "10"],
        ["--after", "there"],
        ["--customer", ""],
        ["--submitted-from", "yesterday"],
    ],
    ids=" ".join,
)
def test_a_list_that_makes_no_sense_ends_with_2(arguments: list[str]) -> None:
    assert error_of(fairturn("list", *arguments), 2)


@pytest.mark.parametrize("columns", ["60", "80", "200"])
def test_no_id_is_cut_however_narrow_the_terminal(
    queue: Queue, columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    id = queue.submit("c" * 60, name="n" * 60).id

    printed = fairturn("list").stdout

    assert id in printed
    assert "waiting" in printed
    assert max(map(len, printed.splitlines())) <= max(80, int(columns))


def test_names_cannot_steer_the_terminal(queue: Queue) -> None:
    evil = "\x1b]52;c;ZXZpbA==\x07\x9b31m\r\n\u202e[bold]"
    id = queue.submit("acme\x1b[2J", payload=evil, name=evil, metadata={evil: evil}).id
    queue.submit("bolt")
    (dead,) = kill(queue, error=evil)

    printed = "".join(
        fairturn(*command).output
        for command in (
            ["list"],
            ["list", "--json"],
            ["show", id],
            ["show", id, "--json"],
            ["show", dead],
            ["wait", dead],
            ["customers"],
            ["cancel", evil],
            ["retry", evil],
            ["show", evil],
            ["list", "-d", evil],
        )
    )

    assert "ZXZpbA==" in printed
    assert not any((ord(c) < 32 and c != "\n") or c in "\x7f\x9b\u202e" for c in printed)


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["table", "json"])
def test_a_pipe_that_closes_early_is_no_noise(queue: Queue, options: list[str]) -> None:
    submit(queue, 500)
    with subprocess.Popen(
        [SCRIPT, "list", "--all", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        said = process.stderr.read()

    assert said == b""


def test_a_pipe_that_nobody_reads_is_no_noise_either(queue: Queue) -> None:
    submit(queue, 3)
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = subprocess.run(
            [SCRIPT, "list", "--json"],
            stdout=writer,
            stderr=subprocess.PIPE,
            env={name: v for name, v in os.environ.items() if name != "PYTHONUNBUFFERED"},
            check=False,
        )
    finally:
        os.close(writer)

    assert ended.stderr == b""
    assert ended.returncode == 1


def test_no_color_prints_no_colour_even_to_a_terminal(queue: Queue) -> None:
    submit(queue, 1)

    printed = shown_on_a_terminal("stdout", "list", NO_COLOR="1")

    assert "waiting" in printed
    assert "\x1b[3" not in printed


# ── show ─────────────────────────────────────────────────────────────────────────────────────────


def test_everything_about_a_document_is_shown(queue: Queue) -> None:
    queue.submit("acme", payload={"invoice": 17}, name="a.pdf", metadata={"pages": 3})
    (id,) = complete(queue)

    printed = fairturn("show", id).stdout
    (line,) = lines_of(fairturn("show", id, "--json"))

    for words in ("acme", "a.pdf", "completed", "1 (pending documents count 0)", "1 of 5"):
        assert words in printed
    assert '{"invoice": 17}' in printed
    assert '{"pages": 3}' in printed
    assert (line["payload"], line["result"]) == ({"invoice": 17}, {"pages": 3})


def test_an_error_is_shown(queue: Queue) -> None:
    submit(queue, 1)
    (id,) = kill(queue, error="no such page")

    assert "no such page" in fairturn("show", id).stdout


def rows_of(id: str) -> dict[str, str]:
    """Return the rows that are shown of a document, by name, without the table of attempts."""
    lines = takewhile(str.strip, fairturn("show", id).stdout.splitlines())
    return dict(re.split(r" {2,}", line, maxsplit=1) for line in lines)


def test_of_a_running_document_its_progress_and_its_worker_are_shown(queue: Queue) -> None:
    submit(queue, 2)
    first, second = claim(queue, 2)
    progress = {first.fence: Progress(3, 12), second.fence: Progress(2.5)}
    queue.store.renew([first.fence, second.fence], lease_us=LEASE_US, progress=progress)

    shown = [rows_of(each.document.id) for each in (first, second)]

    assert [rows["progress"] for rows in shown] == ["3 of 12 (25%)", "2.5"]
    assert [rows["worker"] for rows in shown] == ["w", "w"]


def test_a_due_time_is_shown_while_it_lies_ahead(queue: Queue) -> None:
    later = SystemClock().now() + 3_600_000_000
    delayed = queue.submit("acme", due_at=later).id
    past = queue.submit("acme", due_at=1_000_000).id
    failed = queue.submit("acme").id
    by_id = {each.document.id: each.fence for each in claim(queue, 2)}
    queue.store.finish([Failed(by_id[failed], "unreadable", retry_in_us=3_600_000_000)])

    assert "due" in rows_of(delayed)
    assert "due" not in rows_of(past)
    again = rows_of(failed)
    assert again["retry at"] > again["submitted"]
    assert "due" not in again
    assert "worker" not in again


def test_a_long_payload_is_shown_in_short_and_given_whole(queue: Queue) -> None:
    id = queue.submit("acme", payload="x" * 200_000).id

    assert len(fairturn("show", id).stdout) < 2_500
    assert json.loads(fairturn("show", id, "--content").stdout) == "x" * 200_000
    assert lines_of(fairturn("show", id, "--json"))[0]["payload"] == "x" * 200_000


def test_a_content_is_written_to_a_file_that_is_not_replaced_by_accident(queue: Queue) -> None:
    id = queue.submit("acme", content=b"\xff" * 200_000, name="../../escaped.pdf").id

    written = fairturn("show", id, "--content", "-o", "out.pdf")
    again = error_of(fairturn("show", id, "--content", "-o", "out.pdf"), 2)
    forced = fairturn("show", id, "--content", "-o", "out.pdf", "--force")
    printed = subprocess.run(
        [SCRIPT, "show", id, "--content", "-o", "-"], capture_output=True, check=True
    )

    assert (written.exit_code, forced.exit_code) == (0, 0)
    assert Path("out.pdf").read_bytes() == printed.stdout == b"\xff" * 200_000
    assert "out.pdf exists already" in again
    assert not list(Path().glob("*.part"))


def test_a_result_is_given_whole(queue: Queue) -> None:
    submit(queue, 1)
    (id,) = complete(queue)

    assert fairturn("show", id, "--result").stdout == '{"pages": 3}\n'


def test_a_result_that_is_a_file_is_written(queue: Queue) -> None:
    submit(queue, 1)
    (claimed,) = claim(queue)
    ref = queue.contents.put([b"\xff" * 70_000])
    queue.store.finish([Completed(claimed.fence, None, ContentRef(*ref))])
    id = claimed.document.id

    assert fairturn("show", id, "--result", "-o", "r.bin").exit_code == 0

    assert Path("r.bin").read_bytes() == b"\xff" * 70_000
    assert "a file of 68.4 KiB" in fairturn("show", id).stdout
    assert lines_of(fairturn("show", id, "--json"))[0]["result_size_bytes"] == 70_000


def test_bytes_are_not_thrown_at_a_terminal(queue: Queue) -> None:
    id = queue.submit("acme", content=b"\x1b[2J" * 50_000).id

    assert "\x1b[2J" not in shown_on_a_terminal("stdout", "show", id, "--content", code=2)


@pytest.mark.parametrize(
    "arguments",
    [["--result", "--content"], ["-o", "x"], ["--json", "--result"]],
    ids=" ".join,
)
def test_showing_two_things_at_once_ends_with_2(queue: Queue, arguments: list[str]) -> None:
    assert error_of(fairturn("show", submit(queue, 1)[0], *arguments), 2)


def test_what_is_not_there_cannot_be_shown(queue: Queue) -> None:
    (id,) = submit(queue, 1)

    assert error_of(fairturn("show", ABSENT), 3) == f"there is no document '{ABSENT}'"
    assert "only a completed document has a result" in error_of(fairturn("show", id, "--result"), 1)
    assert "cannot be written" in error_of(
        fairturn("show", id, "--content", "-o", "absent/out.json"), 1
    )


def test_a_damaged_content_is_told_and_nothing_is_written(queue: Queue) -> None:
    id = queue.submit("acme", content=b"x" * 100_000).id
    (file,) = Path("documents.db.contents").rglob("??/*")
    file.write_bytes(b"y" * 100_000)

    assert "SHA-256" in error_of(fairturn("show", id, "--content", "-o", "out"), 1)
    assert not Path("out").exists()


# ── wait ─────────────────────────────────────────────────────────────────────────────────────────


def test_waiting_ends_with_what_became_of_the_documents(queue: Queue) -> None:
    submit(queue, 3)
    (completed,) = complete(queue)
    (dead,) = kill(queue)
    (waiting,) = ids_of("--state", "waiting")

    done = fairturn("wait", completed)
    failed = fairturn("wait", completed, dead, waiting, "--timeout", "0")
    unfinished = fairturn("wait", completed, waiting, "--timeout", "0.01")
    absent = fairturn("wait", waiting, ABSENT, "--timeout", "0")

    assert (done.exit_code, done.stdout) == (0, f"{completed}  completed\n")
    assert error_of(failed, 1) == "1 document ended without being completed"
    assert failed.stdout.splitlines()[1] == f"{dead}  dead: unreadable"
    assert error_of(unfinished, 75) == "1 document had not ended after 0.01 s"
    assert error_of(absent, 3) == f"there is no document '{ABSENT}'"
    assert absent.stdout == "", "a wrong id is told before anything is waited for"


def test_a_document_that_ends_meanwhile_ends_the_wait(queue: Queue) -> None:
    ids = submit(queue, 2)
    with subprocess.Popen(
        [SCRIPT, "wait", *ids, "--json"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        complete(queue)
        first = json.loads(process.stdout.readline())
        complete(queue)
        second = json.loads(process.stdout.readline())

    assert [(line["id"], line["state"]) for line in (first, second)] == [
        (id, "completed") for id in ids
    ]
    assert process.returncode == 0


def test_a_cancelled_document_is_not_completed(queue: Queue) -> None:
    (id,) = submit(queue, 1)
    queue.cancel(id)

    assert fairturn("wait", id).exit_code == 1


def test_waiting_shows_progress_on_a_terminal(queue: Queue) -> None:
    (id,) = submit(queue, 1)

    assert "Waiting" in shown_on_a_terminal("stderr", "wait", id, "--timeout", "0.3", code=75)


# ── cancel ───────────────────────────────────────────────────────────────────────────────────────


def test_documents_are_cancelled_by_their_ids(queue: Queue) -> None:
    submit(queue, 3)
    (ended,) = complete(queue)
    (held,) = claim(queue)
    (other,) = ids_of("--state", "waiting")

    result = fairturn("cancel", other, held.document.id)
    late = fairturn("cancel", ended)
    absent = fairturn("cancel", ABSENT, ended, "--json")

    assert result.stdout.splitlines() == [
        f"{other}  cancelled",
        f"{held.document.id}  running; its worker will stop it",
    ]
    assert queue.get(held.document.id).cancel_requested
    assert error_of(late, 1) == "1 document had ended already"
    assert error_of(absent, 3) == "1 document not found"
    assert [json.loads(line)["state"] for line in absent.stdout.splitlines()] == [None, "completed"]
    assert "stopping" in fairturn("list").stdout


def test_documents_are_cancelled_by_filters_after_a_question(queue: Queue) -> None:
    submit(queue, 5)
    submit(queue, 2, "bolt")

    declined = fairturn("cancel", "--customer", "acme", stdin="n\n")
    unanswered = fairturn("cancel", "--customer", "acme", stdin="")
    still = queue.summary().waiting
    agreed = fairturn("cancel", "--customer", "acme", stdin="y\n")

    assert "Cancel 5 documents of acme? [y/N]" in declined.stderr
    assert (declined.exit_code, unanswered.exit_code, still) == (1, 1, 7)
    assert agreed.stdout == "5 documents cancelled, 0 running to be stopped.\n"
    assert queue.summary().waiting == 2


def test_with_yes_nobody_is_asked(queue: Queue) -> None:
    submit(queue, 2_500)

    lines = lines_of(fairturn("cancel", "--state", "waiting", "--yes", "--json"))

    assert len(lines) == 2_500
    assert {line["state"] for line in lines} == {"cancelled"}
    assert queue.summary().waiting == 0


def test_nothing_is_cancelled_without_saying_what(queue: Queue) -> None:
    (id,) = submit(queue, 1)

    assert "no documents were named; pass ids" in error_of(fairturn("cancel", "--yes"), 2)
    both = fairturn("cancel", id, "--customer", "acme")
    assert "ids and filters cannot be combined" in error_of(both, 2)
    assert queue.summary().waiting == 1


def test_filters_that_find_nothing_are_no_question(queue: Queue) -> None:
    result = fairturn("cancel", "--customer", "nobody")

    assert (result.exit_code, result.stderr) == (0, "")


# ── retry ────────────────────────────────────────────────────────────────────────────────────────


def test_dead_documents_are_tried_again(queue: Queue) -> None:
    submit(queue, 3)
    submit(queue, 1, "bolt")
    dead = kill(queue, 3)
    (waiting,) = ids_of("--state", "waiting")

    one = fairturn("retry", dead[0])
    again = fairturn("retry", dead[0])
    (claim,) = queue.store.claim(1, worker="w", lease_us=10**9).claims
    alive = fairturn("retry", claim.document.id, waiting)
    queue.store.finish([Released(claim.fence)])
    absent = fairturn("retry", ABSENT, "--json")
    rest = fairturn("retry", "--dead", "--yes")

    assert one.stdout == f"{dead[0]}  waiting again\n"
    assert (again.stdout, again.exit_code) == (f"{dead[0]}  waiting already\n", 0)
    assert error_of(alive, 1) == "1 document not dead"
    assert error_of(absent, 3) == "1 document not found"
    assert rest.stdout == "2 documents waiting again.\n"
    assert queue.summary().waiting == 4


def test_dead_documents_of_one_customer_are_tried_again_after_a_question(queue: Queue) -> None:
    submit(queue, 2)
    submit(queue, 2, "bolt")
    kill(queue, 4)

    lines = fairturn("retry", "--dead", "--customer", "acme", "--json", stdin="y\n")

    assert "Retry 2 documents of acme?" in lines.stderr
    assert [json.loads(line)["state"] for line in lines.stdout.splitlines()] == ["waiting"] * 2
    assert len(ids_of("--state", "dead", "--customer", "bolt")) == 2


def test_only_the_dead_can_be_tried_again(queue: Queue) -> None:
    (id,) = submit(queue, 1)

    assert "no documents were named; pass ids" in error_of(fairturn("retry"), 2)
    assert "no documents were named; pass ids" in error_of(
        fairturn("retry", "--customer", "acme"), 2
    )
    assert "cannot be combined; pass one of them" in error_of(fairturn("retry", id, "--dead"), 2)
    assert "only dead documents" in error_of(fairturn("retry", "--dead", "--state", "waiting"), 2)


# ── A store that is busy ─────────────────────────────────────────────────────────────────────────


def test_a_store_that_stays_busy_ends_with_75(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    (id,) = submit(queue, 1)
    holder = apsw.Connection("documents.db")
    holder.execute("BEGIN IMMEDIATE")
    monkeypatch.setattr("fairturn.stores.sqlite.connection.BUSY_S", 0.001)  # instead of 30 s
    try:
        assert "try again" in error_of(fairturn("cancel", id), 75)
    finally:
        holder.execute("ROLLBACK")
        holder.close()
