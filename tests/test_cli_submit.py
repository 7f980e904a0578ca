"""`fairturn submit`: all kinds of input, and where exactly it stopped after an error."""

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from fairturn import Queue
from fairturn.cli import batches as handing
from fairturn.cli import ndjson
from fairturn.cli.batches import BatchEntry
from fairturn.model import Submission
from fairturn.wire import RECEIPT
from tests.commands import SCRIPT, complete, error_of, fairturn, lines_of, shown_on_a_terminal


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def queue(alone: None) -> Iterator[Queue]:
    with Queue("documents.db") as opened:
        yield opened


def ndjson_of(*lines: Any) -> str:
    return "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)


def payloads(queue: Queue) -> list[Any]:
    """Return the payloads of all documents, oldest first."""
    return [queue.payload(document.id) for document in queue.iterate()][::-1]


# ── Files, payloads, standard input ──────────────────────────────────────────────────────────────


def test_files_are_copied_in_under_their_names(queue: Queue) -> None:
    Path("a.pdf").write_bytes(b"one")
    Path("b.pdf").write_bytes(b"two" * 100_000)

    lines = lines_of(fairturn("submit", "acme", "a.pdf", "b.pdf", "--metadata", "x=1=2", "--json"))

    first, second = (queue.get(line["id"]) for line in lines)
    assert (first.name, second.name) == ("a.pdf", "b.pdf")
    assert (queue.read(first.id), queue.read(second.id)) == (b"one", b"two" * 100_000)
    assert first.metadata == second.metadata == {"x": "1=2"}
    assert [(line["count"], line["priority"]) for line in lines] == [(0, 1), (-1, 1)]
    assert list(lines[0]) == [*(field.name for field in RECEIPT), "replayed"]


def test_a_payload_with_everything(queue: Queue) -> None:
    parent = queue.submit("acme").id
    options = ["--name", "n", "--key", "k", "--cost", "2.5", "--parent", parent]
    due = ["--due-at", "2100-01-01T00:00+01:00"]

    (line,) = lines_of(
        fairturn("submit", "acme", "--payload", '{"a":[1]}', *options, *due, "--json")
    )
    (again,) = lines_of(
        fairturn("submit", "acme", "--payload", '{"a":[1]}', *options, *due, "--json")
    )

    document = queue.get(line["id"])
    assert queue.payload(line["id"]) == {"a": [1]}
    assert (document.name, document.cost, document.parent) == ("n", 2_500_000, parent)
    assert document.due_at_us == 4_102_441_200 * 1_000_000
    assert (again["id"], again["replayed"]) == (line["id"], True)


def test_a_content_comes_from_standard_input(queue: Queue) -> None:
    for options in ([], ["--wait-for-room"]):
        (line,) = lines_of(
            fairturn(
                "submit", "acme", "-", "--name", "s.pdf", "--json", *options, stdin=b"\xff" * 99_999
            )
        )
        assert queue.read(line["id"]) == b"\xff" * 99_999
        assert queue.get(line["id"]).name == "s.pdf"


def test_submitting_makes_the_queue_and_tells_people_count_and_priority() -> None:
    for _ in range(3):
        assert fairturn("submit", "acme", "--payload", "1").exit_code == 0
    printed = fairturn("submit", "acme", "--payload", "1").stdout

    assert "pending documents count" in printed
    assert printed.splitlines()[-1].split()[1:] == ["acme", "-3", "2"]


def test_many_documents_are_summed_up_for_people() -> None:
    lines = ndjson_of(*({"customer": f"c{n % 2}", "key": str(n)} for n in range(44)))

    printed = fairturn("submit", "--ndjson", "-", stdin=lines).stdout
    again = fairturn("submit", "--ndjson", "-", stdin=lines).stdout

    assert printed.startswith("44 documents of 2 customers accepted: 6 of priority 1, ")
    assert "44 of them were stored before" in again


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "CUSTOMER is missing"),
        (["acme"], "no document; pass a FILE"),
        (["acme", "absent.pdf"], "absent.pdf does not exist; nothing was stored"),
        (["acme", "a.pdf", "absent.pdf"], "absent.pdf does not exist; nothing was stored"),
        (["acme", "."], ". is not a regular file"),
        (["acme", "a.pdf", "--payload", "1"], "files and --payload cannot be combined"),
        (["acme", "--payload", "{"], "--payload is not JSON"),
        (["acme", "--payload", "text"], "quote a string twice"),
        (["acme", "a.pdf", "a.pdf", "--key", "k"], "--key is for one document"),
        (["acme", "a.pdf", "a.pdf", "--name", "k"], "--name is for one document"),
        (["acme", "-", "-"], "standard input can be read only once"),
        (["acme", "a.pdf", "--metadata", "k"], "it must be KEY=VALUE"),
        (["acme", "a.pdf", "--due-at", "tomorrow"], "not a timestamp with a time zone"),
        (["acme", "a.pdf", "--due-at", "2030-01-01T00:00"], "not a timestamp with a time zone"),
        (["acme", "a.pdf", "--cost", "-1"], "a.pdf: cost is -1.0; it must be between 0"),
        (["", "a.pdf"], "CUSTOMER is empty"),
        (["", "--payload", "1"], "CUSTOMER is empty"),
        (["acme", "--payload", "1", "--key", ""], "key is empty"),
        (["--ndjson", "absent.ndjson"], "absent.ndjson cannot be read"),
        (["--ndjson", "-", "--key", "k"], "leave out --key"),
        (["--ndjson", "-", "--due-at", "2030-01-01T00:00Z"], "leave out --due-at"),
        (["acme", "a.pdf", "--ndjson", "-"], "leave out files"),
    ],
)
def test_wrong_use_ends_with_2_and_stores_nothing(arguments: list[str], sentence: str) -> None:
    Path("a.pdf").write_bytes(b"one")

    refused = error_of(fairturn("submit", *arguments), 2)

    assert sentence in refused
    assert "--payload: " not in refused
    if Path("documents.db").exists():
        with Queue("documents.db") as queue:
            assert queue.list().documents == []


def test_an_option_is_named_as_it_was_given() -> None:
    refused = error_of(fairturn("submit", "--ndjson", "-", "--tag", "scan"), 2)

    assert refused.endswith("leave out --tag")


# ── Lines ────────────────────────────────────────────────────────────────────────────────────────


def test_each_line_is_a_document_in_the_order_of_the_file(queue: Queue) -> None:
    Path("a.pdf").write_bytes(b"one")
    full = {
        "customer": "bolt",
        "payload": {"é": None},
        "name": "n",
        "metadata": {"pages": 3},
        "key": "k",
        "cost": 1.5,
        "due_at": "2100-01-01T00:00Z",
    }
    moment = {"customer": "bolt", "due_at": 4_102_444_800_000_000}
    lines = ndjson_of({"customer": "acme", "file": "a.pdf"}, "", full, {"payload": 1}, moment)

    receipts = lines_of(fairturn("submit", "acme", "--ndjson", "-", "--json", stdin=lines))

    documents = [queue.get(receipt["id"]) for receipt in receipts]
    assert [document.customer for document in documents] == ["acme", "bolt", "acme", "bolt"]
    assert queue.read(documents[0].id) == b"one"
    assert queue.payload(documents[1].id) == {"é": None}
    assert (documents[1].name, documents[1].metadata) == ("n", {"pages": 3})
    assert documents[1].due_at_us == documents[3].due_at_us == 4_102_444_800_000_000


def test_a_file_of_lines_may_lack_its_last_newline_and_have_carriage_returns(queue: Queue) -> None:
    Path("d.ndjson").write_bytes(b'{"customer":"a"}\r\n\r\n{"customer":"b"}')

    assert len(lines_of(fairturn("submit", "--ndjson", "d.ndjson", "--json"))) == 2


def test_lines_longer_than_one_read_are_put_together() -> None:
    long = json.dumps({"customer": "a", "payload": "x" * 3_000_000})
    stream = BytesIO(f'{long}\n{{"customer":"b"}}\n{long}'.encode())

    groups = list(ndjson.groups_of(stream, "f", None))

    given = [each for group in groups for each in group]
    assert [each.where for each in given] == ["f, line 1", "f, line 2", "f, line 3"]
    assert len(given[2].submission.payload) == 3_000_000


def test_a_line_without_an_end_is_refused_before_it_fills_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ndjson, "LINE_BYTES_MAX", 1_000)

    with pytest.raises(handing.SubmissionRejected, match="f: a line has more than 1,000 bytes"):
        list(ndjson.groups_of(BytesIO(b"x" * 1_001), "f", None))


BAD_LINES = {
    "no JSON": ("{", "the line is not JSON"),
    "no UTF-8": (b"\xff", "the line is not"),
    "no object": ("[1]", "the line is not a JSON object"),
    "no customer": ('{"payload":1}', "the line has no customer"),
    "unknown field": ('{"customer":"a","paylod":1}', "'paylod' is not a field"),
    "wrong customer": ('{"customer":7}', "customer must be a string, not int"),
    "wrong due time": ('{"customer":"a","due_at":"soon"}', "'soon' is not a timestamp"),
    "wrong cost": ('{"customer":"a","cost":"x"}', "cost is 'x'; it must be a number"),
    "two bodies": ('{"customer":"a","payload":1,"file":"x"}', "payload and file were given"),
    "absent file": ('{"customer":"a","file":"absent.pdf"}', "absent.pdf: No such file"),
    "no file": ('{"customer":"a","file":"."}', "is not a regular file"),
    "deep": ('{"customer":"a","payload":' + "[" * 99_999 + "}", "nested too deeply"),
}


@pytest.mark.parametrize(("bad", "sentence"), BAD_LINES.values(), ids=BAD_LINES.keys())
def test_a_bad_line_is_named_and_all_before_it_are_stored(
    bad: str | bytes, sentence: str, queue: Queue
) -> None:
    good = b"".join(b'{"customer":"acme","payload":%d}\n' % n for n in range(1_200))
    line = bad if isinstance(bad, bytes) else bad.encode()
    Path("d.ndjson").write_bytes(good + line + b'\n{"customer":"acme","payload":-1}\n')

    result = fairturn("submit", "--ndjson", "d.ndjson", "--json")

    refused = error_of(result, 2)
    assert refused.startswith("d.ndjson, line 1201: ")
    assert sentence in refused
    assert "submission" not in refused
    assert "the 1,200 documents before it are stored" in refused
    assert "safe only if every document has a key" in refused
    assert payloads(queue) == list(range(1_200))
    assert len(result.stdout.splitlines()) == 1_200


def test_a_first_line_that_is_wrong_makes_no_queue() -> None:
    refused = error_of(fairturn("submit", "--ndjson", "-", stdin='\n{"payload":1}\n'), 2)

    assert refused.endswith(
        "the line has no customer; add one, or pass CUSTOMER; nothing was stored"
    )
    assert not Path("documents.db").exists()


def test_one_document_that_was_there_is_not_one_of_them(queue: Queue) -> None:
    arguments = ("submit", "acme", "--payload", "1", "--key", "k")
    fairturn(*arguments)

    assert fairturn(*arguments).stdout.endswith("It was stored before, with the same key.\n")


def test_running_it_again_with_keys_stores_each_document_once(queue: Queue) -> None:
    good = [{"customer": "acme", "payload": n, "key": f"k{n}"} for n in range(30)]

    refused = error_of(
        fairturn("submit", "--ndjson", "-", stdin=ndjson_of(*good[:20], "oops", *good[20:])), 2
    )
    again = lines_of(fairturn("submit", "--ndjson", "-", "--json", stdin=ndjson_of(*good)))

    assert "standard input, line 21" in refused
    assert "every document had a key, so running it again is safe" in refused
    assert [line["replayed"] for line in again] == [True] * 20 + [False] * 10
    assert payloads(queue) == list(range(30))


def test_a_key_that_was_used_for_another_document_is_found_among_a_thousand(queue: Queue) -> None:
    queue.submit("acme", payload="first", key="k700")
    lines = [{"customer": "acme", "payload": n, "key": f"k{n}"} for n in range(1_000)]

    refused = error_of(fairturn("submit", "--ndjson", "-", stdin=ndjson_of(*lines)), 1)

    assert refused.startswith("standard input, line 701: ")
    assert "the 700 documents before it are stored" in refused
    assert payloads(queue) == ["first", *range(700)]


def test_a_parent_that_does_not_exist_ends_with_3(queue: Queue) -> None:
    refused = error_of(fairturn("submit", "acme", "--payload", "1", "--parent", "0" * 15), 3)

    assert "0" * 15 in refused
    assert "nothing was stored" in refused


# ── A full queue ─────────────────────────────────────────────────────────────────────────────────


def test_a_full_queue_ends_with_75_and_takes_what_there_is_room_for(queue: Queue) -> None:
    queue.configure(waiting_per_customer_max=7)
    lines = ndjson_of(*({"customer": "acme", "payload": n} for n in range(20)))

    refused = error_of(fairturn("submit", "--ndjson", "-", stdin=lines), 75)

    assert refused.startswith("standard input, line 8: ")
    assert "waiting_per_customer_max is 7" in refused
    assert "the 7 documents before it are stored" in refused
    assert payloads(queue) == list(range(7))


def test_with_wait_for_room_a_full_queue_is_waited_for(queue: Queue) -> None:
    queue.configure(waiting_max=3)
    Path("d.ndjson").write_text(ndjson_of(*({"customer": "acme", "payload": n} for n in range(20))))
    served: list[str] = []
    ended = threading.Event()

    def serve() -> None:
        with Queue("documents.db") as other:
            while not (ended.is_set() and other.summary().waiting == 0):
                version = other.store.version()
                done = complete(other, 2)
                served.extend(done)
                if not done:
                    other.store.wait(version, 0.05)

    worker = threading.Thread(target=serve)
    worker.start()
    try:
        receipts = lines_of(fairturn("submit", "--ndjson", "d.ndjson", "--wait-for-room", "--json"))
    finally:
        ended.set()
        worker.join()

    assert [receipt["id"] for receipt in receipts] == served
    assert [queue.payload(id) for id in served] == list(range(20))


# ── Streams ──────────────────────────────────────────────────────────────────────────────────────


def test_who_writes_slowly_into_a_pipe_is_answered_at_once(tmp_path: Path) -> None:
    with subprocess.Popen(
        [SCRIPT, "submit", "--ndjson", "-", "--json"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        late = threading.Timer(60, process.kill)
        late.start()
        for n in range(3):
            process.stdin.write(ndjson_of({"customer": "acme", "payload": n}))
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["count"] == -n
        process.stdin.close()
        late.cancel()

    assert process.returncode == 0


def test_large_files_are_stored_in_smaller_batches() -> None:
    given = [BatchEntry(str(n), Submission(customer="a"), 100 * 1_048_576) for n in range(7)]

    batches = list(handing._batches(given, handing.BATCH_BYTES))

    assert [len(batch) for batch in batches] == [2, 2, 2, 1]


def test_progress_is_shown_on_a_terminal_and_keeps_out_of_the_output() -> None:
    Path("d.ndjson").write_text(ndjson_of(*({"customer": "acme"} for _ in range(3_000))))

    progress = shown_on_a_terminal("stderr", "submit", "--ndjson", "d.ndjson")
    silent = fairturn("submit", "--ndjson", "d.ndjson", "--json")

    assert "Submitting" in progress
    assert silent.stderr == ""
    assert len(silent.stdout.splitlines()) == 3_000


def test_lines_reach_standard_output_also_while_progress_is_shown(tmp_path: Path) -> None:
    Path("d.ndjson").write_text(ndjson_of(*({"customer": "acme"} for _ in range(2_000))))
    with Path("out.jsonl").open("wb") as out:
        screen, terminal = os.openpty()
        ended = subprocess.run(
            [SCRIPT, "submit", "--ndjson", "d.ndjson", "--json"],
            stdout=out,
            stderr=terminal,
            env={**os.environ, "TERM": "xterm-256color"},
            timeout=60,
            check=False,
        )
        os.close(terminal)
        os.close(screen)

    assert ended.returncode == 0
    assert len([json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]) == 2_000


def test_a_name_cannot_steer_the_terminal() -> None:
    printed = fairturn("submit", "evil\x1b[2J", "--payload", "1").stdout
    refused = fairturn("submit", "acme", "evil\x1b[2J.pdf").stderr

    assert "evil\\x1b[2J" in printed
    assert "\x1b" not in printed + refused


# ── Receipts that nobody reads ───────────────────────────────────────────────────────────────────


def test_a_reader_who_has_read_enough_receipts_does_not_end_the_submission(
    queue: Queue, tmp_path: Path
) -> None:
    lines = tmp_path / "lines.ndjson"
    lines.write_text('{"customer": "acme"}\n' * 3_000, encoding="utf-8")
    with subprocess.Popen(
        [SCRIPT, "submit", "--ndjson", str(lines), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        said = process.stderr.read()

    assert process.returncode == 0
    assert queue.summary().waiting == 3_000
    assert "3,000 documents are stored" in said


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["table", "json"])
def test_receipts_that_nobody_reads_are_no_failure(queue: Queue, options: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = subprocess.run(
            [SCRIPT, "submit", "acme", "--payload", "1", *options],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(writer)

    assert ended.returncode == 0
    assert "1 document is stored" in ended.stderr


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["table", "json"])
def test_a_full_disk_behind_the_receipts_ends_with_75_and_says_what_is_stored(
    queue: Queue, options: list[str]
) -> None:
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run(
            [SCRIPT, "submit", "acme", "--payload", "1", *options],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )

    assert ended.returncode == 75
    assert "1 document is stored" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert queue.summary().waiting == 1
