"""`kinds`, and the option --kind of other commands, on a file and over a service."""

import csv
import json
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest

from fairturn import Completed, Queue
from fairturn.model import KINDS_MAX, KindSettings
from fairturn.wire import KIND, KIND_SETTINGS
from tests.commands import LEASE_US, error_of, fairturn, kill, lines_of
from tests.http_server import TOKEN, served

UNKNOWN = (
    "the queue has no kind 'orc'; start a worker that serves it, create it with 'fairturn kinds "
    "set orc', or configure the queue with kinds=open"
)


@pytest.fixture(autouse=True, params=["file", "service"])
def queue(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Queue]:
    """The queue of commands without options."""
    monkeypatch.chdir(tmp_path)
    if request.param == "file":
        with Queue("documents.db") as opened:
            yield opened
        return
    monkeypatch.setenv("FAIRTURN_KEY", TOKEN)
    with Queue(":memory:") as opened, served(opened) as url:
        monkeypatch.setenv("FAIRTURN_URL", url)
        yield opened


# ── kinds ────────────────────────────────────────────────────────────────────────────────────────


def test_kinds_are_listed_by_name_with_their_documents_and_live_workers(queue: Queue) -> None:
    queue.set_kind("ocr", limit=2, attempts_max=3)
    queue.set_kind("export", paused=True, expires_in_s=90)
    queue.submit("acme", kind="ocr")
    queue.submit("acme")
    queue.sign_on("gpu", 2, ["ocr"])
    queue.sign_on("every", 4)
    queue.claim(1, worker="gpu", lease_s=30, kinds=["ocr"])

    lines = lines_of(fairturn("kinds", "--json"))
    rows = [line.split() for line in fairturn("kinds").stdout.splitlines()]

    assert [list(line) for line in lines] == [
        [field.name for field in (*KIND, *KIND_SETTINGS)] for _ in range(3)
    ]
    assert [list(line.values()) for line in lines] == [
        ["default", 1, 0, 1, None, False, None, None],
        ["export", 0, 0, 1, None, True, None, 90],
        ["ocr", 0, 1, 2, 2, False, 3, None],
    ]
    assert ["default", "1", "0", "1"] in rows
    assert ["export", "0", "0", "1", "90.0", "s", "paused"] in rows
    assert ["ocr", "0", "1", "2", "2", "3"] in rows


def test_a_kind_is_created_and_its_settings_change_one_by_one(queue: Queue) -> None:
    created = fairturn("kinds", "set", "ocr").stdout
    given = ("--limit", "2", "--attempts-max", "1", "--expires-in", "2h")
    limited = fairturn("kinds", "set", "ocr", *given).stdout
    (paused,) = lines_of(fairturn("kinds", "set", "ocr", "--pause", "--json"))
    kept = queue.kind("ocr").settings
    removed = ("--resume", "--no-limit", "--no-attempts-max", "--no-expires-in")
    resumed = fairturn("kinds", "set", "ocr", *removed).stdout

    assert created == "ocr (new): no limit. 0 documents waiting, 0 running, 0 workers.\n"
    assert limited.startswith(
        "ocr: at most 2 running, 1 attempt, documents expire after 2.0 hours. "
    )
    assert (paused["limit"], paused["paused"], paused["attempts_max"]) == (2, True, 1)
    assert kept == KindSettings(limit=2, paused=True, attempts_max=1, expires_in_s=7_200)
    assert resumed.startswith("ocr: no limit. ")
    assert queue.kind("ocr").settings == KindSettings()


def test_a_paused_kind_is_not_claimed_until_it_is_resumed(queue: Queue) -> None:
    fairturn("kinds", "set", "default", "--pause")
    queue.submit("acme")

    held = queue.claim(1, worker="w", lease_s=30).claims
    fairturn("kinds", "set", "default", "--resume")

    assert held == []
    assert len(queue.claim(1, worker="w", lease_s=30).claims) == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["set", "ocr", "--limit", "0"], "limit is 0; it must be from 1 to 1,000,000 (to stop a"),
        (["set", "ocr", "--attempts-max", "0"], "attempts_max is 0; it must be from 1"),
        (["set", "ocr", "--limit", "2", "--no-limit"], "--limit and --no-limit contradict"),
        (["set", "ocr", "--expires-in", "0"], "0 is not positive and at most"),
        (["set", "ocr", "--expires-in", "2 weeks"], "'2 weeks' is not a duration, such as 90s"),
        (
            ["set", "ocr", "--expires-in", "2h", "--no-expires-in"],
            "--expires-in and --no-expires-in contradict",
        ),
        (["set", "OCR"], "kind 'OCR' is not valid; a kind has 1 to 64 characters: a to z"),
        (["set", "x" * 65], "is not valid"),
        (["set", "fairturn.x"], "kind 'fairturn.x' is reserved"),
        (["set", ""], "kind '' is not valid"),
        (["pause", "ocr"], "No such command"),
    ],
)
def test_wrong_use_of_kinds_ends_with_2(queue: Queue, arguments: list[str], sentence: str) -> None:
    assert sentence in error_of(fairturn("kinds", *arguments), 2)
    assert [kind.name for kind in queue.kinds()] == ["default"]


def test_one_kind_too_many_is_refused(queue: Queue) -> None:
    for n in range(1, KINDS_MAX):
        queue.set_kind(f"kind-{n}")

    error = error_of(fairturn("kinds", "set", "more"), 2)

    assert error.startswith("the kind 'more' cannot be created: the queue has 100 kinds already")


# ── submit ───────────────────────────────────────────────────────────────────────────────────────


def test_files_payloads_and_lines_are_submitted_with_a_kind(queue: Queue) -> None:
    queue.set_kind("ocr")
    Path("a.pdf").write_bytes(b"a")
    Path("many.ndjson").write_text('{"customer": "acme", "kind": "ocr"}\n{"customer": "acme"}\n')

    for arguments in (
        ["acme", "a.pdf", "--kind", "ocr"],
        ["acme", "--payload", "1", "--kind", "ocr"],
        ["--ndjson", "many.ndjson"],
    ):
        assert fairturn("submit", *arguments).exit_code == 0

    assert [document.kind for document in queue.iterate()] == ["default", "ocr", "ocr", "ocr"]


def test_an_unknown_kind_is_refused_with_the_command_that_creates_it(queue: Queue) -> None:
    Path("many.ndjson").write_text('{"customer": "acme"}\n{"customer": "acme", "kind": "orc"}\n')

    one = error_of(fairturn("submit", "acme", "--payload", "1", "--kind", "orc"), 2)
    many = error_of(fairturn("submit", "--ndjson", "many.ndjson"), 2)

    assert one == f"{UNKNOWN}; nothing was stored"
    assert many.startswith(f"many.ndjson, line 2: {UNKNOWN}; the 1 document before it is stored")
    assert [document.kind for document in queue.iterate()] == ["default"]
    assert [kind.name for kind in queue.kinds()] == ["default"]
    assert fairturn("kinds", "set", "orc").exit_code == 0
    assert fairturn("submit", "acme", "--payload", "1", "--kind", "orc").exit_code == 0


def test_a_queue_that_is_open_creates_the_kinds_of_submissions(queue: Queue) -> None:
    assert fairturn("config", "set", "kinds=open").stdout == "kinds is open now; it was known.\n"
    assert fairturn("submit", "acme", "--payload", "1", "--kind", "ocr").exit_code == 0

    assert queue.kind("ocr").waiting == 1
    assert "it must be one of: known, open" in error_of(fairturn("config", "set", "kinds=any"), 2)


def test_an_invalid_kind_is_a_usage_error_before_anything_is_stored(queue: Queue) -> None:
    Path("many.ndjson").write_text('{"customer": "acme", "kind": 7}\n')

    one = error_of(fairturn("submit", "acme", "--payload", "1", "--kind", "Ocr"), 2)
    many = error_of(fairturn("submit", "--ndjson", "many.ndjson"), 2)

    assert "kind 'Ocr' is not valid" in one
    assert "many.ndjson, line 1: kind must be a string, not int" in many
    assert queue.summary().waiting == 0


# ── Filters ──────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def three(queue: Queue) -> list[str]:
    """A document of each of three kinds."""
    kinds = ("text", "ocr", "default")
    for kind in kinds:
        queue.set_kind(kind)
    return [queue.submit("acme", name=f"{kind}.pdf", kind=kind).id for kind in kinds]


def test_documents_are_listed_by_kind(three: list[str]) -> None:
    text, ocr, plain = three

    def listed(*options: str) -> list[str]:
        return [line["id"] for line in lines_of(fairturn("list", "--json", *options))]

    assert listed("--kind", "ocr") == [ocr]
    assert listed("--kind", "ocr", "--kind", "text") == [ocr, text]
    assert listed("--kind", "default") == [plain]
    assert listed("--kind", "orc") == []
    assert "kind 'OCR' is not valid" in error_of(fairturn("list", "--kind", "OCR"), 2)


def test_cancel_and_retry_apply_to_the_documents_of_a_kind(queue: Queue, three: list[str]) -> None:
    text, ocr, plain = three
    kill(queue, 3)

    retried = fairturn("retry", "--dead", "--kind", "ocr", "--kind", "text", "--yes")
    cancelled = fairturn("cancel", "--kind", "ocr", "--yes")

    assert (retried.exit_code, cancelled.exit_code) == (0, 0)
    assert [queue.get(id).state for id in (text, ocr, plain)] == ["waiting", "cancelled", "dead"]


@pytest.mark.parametrize("columns", ["60", "80", "90", "105", "200"])
def test_the_kind_is_a_column_only_where_there_is_another_than_the_default(
    queue: Queue, three: list[str], columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)

    header, _, *rows = fairturn("list").stdout.splitlines()
    plain = fairturn("list", "--kind", "default").stdout

    assert "kind" in header.split()
    assert [line.split()[3] for line in rows] == ["default", "ocr", "text"]
    assert max(map(len, [header, *rows])) <= max(80, int(columns))
    assert "kind" not in plain
    assert fairturn("show", three[1]).stdout.count("\nkind ") == 1
    assert "kind" not in fairturn("show", three[2]).stdout


def test_the_kinds_of_completed_documents_are_exported(queue: Queue, three: list[str]) -> None:
    for _ in three:
        (claim,) = queue.store.claim(1, worker="w", lease_us=LEASE_US).claims
        queue.store.finish([Completed(claim.fence, real_cost=2_000_000)])

    def exported(*options: str) -> list[dict[str, str]]:
        result = fairturn("export", *options)
        assert result.exit_code == 0, result.output
        return list(csv.DictReader(StringIO(result.stdout)))

    assert [row["kind"] for row in exported()] == ["text", "ocr", "default"]
    assert [row["kind"] for row in exported("--kind", "ocr")] == ["ocr"]
    assert "kind" not in exported("--kind", "default")[0]
    assert "kind 'OCR' is not valid" in error_of(fairturn("export", "--kind", "OCR"), 2)
    Path("history.csv").write_text(fairturn("export").stdout)
    replayed = lines_of(fairturn("replay", "history.csv", "--workers-for", "ocr=1", "--json"))
    assert {line["kind"] for line in replayed} == {"text", "ocr", "default"}
    assert fairturn("simulate", "history.csv", "--mode", "fair").exit_code == 0


def test_json_has_the_kind_of_every_document(three: list[str]) -> None:
    shown = json.loads(fairturn("show", three[0], "--json").stdout)

    assert shown["kind"] == "text"
    assert [line["kind"] for line in lines_of(fairturn("list", "--json"))] == [
        "default",
        "ocr",
        "text",
    ]
