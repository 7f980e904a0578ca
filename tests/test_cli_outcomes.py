"""Expiry, attempts and outages in commands, on a file and over a service."""

from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from fairturn import Completed, Failed, Queue
from fairturn.clock import SECOND_US, SystemClock, to_datetime
from fairturn.model import Advanced
from fairturn.wire import ATTEMPT, OUTAGE
from tests.commands import error_of, fairturn, hold, kill, lines_of
from tests.http_server import TOKEN, key_for, served
from tests.wait import wait_until


@pytest.fixture(autouse=True, params=["file", "service"])
def queue(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Queue]:
    """The queue of commands without options."""
    monkeypatch.chdir(tmp_path)
    if request.param == "file":
        with Queue("documents.db", kinds="open") as opened:
            yield opened
        return
    monkeypatch.setenv("FAIRTURN_KEY", TOKEN)
    with Queue(":memory:", kinds="open") as opened, served(opened) as url:
        monkeypatch.setenv("FAIRTURN_URL", url)
        yield opened


def expired(queue: Queue, n: int = 1) -> list[str]:
    """Return documents that have expired."""
    ids = [queue.submit("acme", expires_in_s=0.5).id for _ in range(n)]
    wait_until(lambda: queue.expire() >= 0 and queue.summary().expired == n, "they have expired")
    return ids


# ── submit ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("given", "seconds"),
    [("90", 90), ("90s", 90), ("1.5h", 5_400), ("30min", 1_800), ("7d", 7 * 86_400)],
)
def test_a_document_expires_after_the_time_given(queue: Queue, given: str, seconds: int) -> None:
    before = SystemClock().now()
    assert fairturn("submit", "acme", "--payload", "1", "--expires-in", given).exit_code == 0
    after = SystemClock().now()

    (document,) = queue.iterate()
    assert document.expires_at_us is not None
    assert before <= document.expires_at_us - seconds * SECOND_US <= after


def test_files_and_lines_take_an_expiry_as_a_timestamp_or_in_seconds(queue: Queue) -> None:
    Path("a.pdf").write_bytes(b"a")
    Path("many.ndjson").write_text(
        '{"customer": "acme", "expires_at": "2100-01-31T08:00Z"}\n'
        '{"customer": "acme", "expires_in_s": 60}\n'
    )

    assert fairturn("submit", "acme", "a.pdf", "--expires-at", "2100-01-31T08:00Z").exit_code == 0
    assert fairturn("submit", "--ndjson", "many.ndjson").exit_code == 0

    seconds, *timestamps = [document.expires_at for document in queue.iterate()]
    assert [str(each) for each in timestamps] == ["2100-01-31 08:00:00+00:00"] * 2
    assert seconds is not None


def test_a_document_that_would_have_expired_already_is_refused(queue: Queue) -> None:
    Path("many.ndjson").write_text('{"customer": "acme"}\n{"customer": "acme", "expires_at": 1}\n')

    one = error_of(
        fairturn("submit", "acme", "--payload", "1", "--expires-at", "2020-01-31T08:00Z"), 2
    )
    many = error_of(fairturn("submit", "--ndjson", "many.ndjson"), 2)

    assert one.startswith("expires_at is 2020-01-31T08:00:00+00:00, which has passed; use a later")
    assert many.startswith("many.ndjson, line 2: expires_at is 1970-01-01T00:00:00.000001+00:00")
    assert queue.summary().waiting == 1


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--expires-in", "soon"], "'soon' is not a duration, such as 90s, 30min, 2h or 7d"),
        (["--expires-in", "0"], "0 is not positive and at most"),
        (["--expires-in", "-2h"], "-2h is not positive and at most"),
        (["--expires-in", "nan"], "nan is not positive and at most"),
        (["--expires-in", "h"], "'h' is not a duration"),
        (["--expires-at", "2030-01-01"], "is not a timestamp with a time zone"),
        (
            ["--expires-at", "2100-01-01T00:00Z", "--expires-in", "1h"],
            "expires_at and expires_in_s were given; pass only one of them",
        ),
    ],
)
def test_a_wrong_expiry_is_a_usage_error_and_nothing_is_stored(
    queue: Queue, options: list[str], sentence: str
) -> None:
    assert sentence in error_of(fairturn("submit", "acme", "--payload", "1", *options), 2)
    assert queue.summary().waiting == 0


def test_show_has_the_expiry_only_while_it_applies_or_when_it_has_passed(queue: Queue) -> None:
    at = to_datetime(SystemClock().now()) + timedelta(days=1)
    waiting = queue.submit("acme", expires_at=at).id
    dead = queue.submit("acme", expires_at=at).id
    queue.cancel(dead)
    (late,) = expired(queue)

    def lines(id: str) -> dict[str, str]:
        shown = (line.partition(" ") for line in fairturn("show", id).stdout.splitlines())
        return {name: text.strip() for name, _, text in shown}

    assert datetime.fromisoformat(lines(waiting)["expires"]).astimezone() == at.replace(
        microsecond=0
    )
    assert "expires" not in lines(dead)
    assert lines(late)["state"] == "expired"
    assert "expired" in lines(late)
    assert [line["state"] for line in lines_of(fairturn("list", "--state", "expired", "--json"))]


# ── retry ────────────────────────────────────────────────────────────────────────────────────────


def test_expired_documents_are_retried_with_a_new_expiry_only(queue: Queue) -> None:
    one, two, three = expired(queue, 3)

    without = fairturn("retry", one)
    again = fairturn("retry", one, "--expires-in", "2h")
    rest = fairturn("retry", "--expired", "--expires-at", "2100-01-31T08:00Z", "--yes")

    assert error_of(without, 1) == "1 document not dead"
    assert f"{one}  expired; pass a new expiry with --expires-in or" in without.stdout
    assert again.stdout == f"{one}  waiting again\n"
    assert rest.stdout == "2 documents waiting again.\n"
    assert {queue.get(id).state for id in (one, two, three)} == {"waiting"}
    assert str(queue.get(two).expires_at) == "2100-01-31 08:00:00+00:00"


def test_dead_and_expired_documents_are_retried_by_filter(queue: Queue) -> None:
    (late,) = expired(queue)
    queue.submit("acme")
    (dead,) = kill(queue)

    alone = lines_of(fairturn("retry", "--dead", "--yes", "--json"))
    assert alone == [{"id": dead, "state": "waiting"}]
    kill(queue)
    both = fairturn("retry", "--dead", "--expired", "--expires-in", "2h", "--yes", "--json")
    assert {line["id"] for line in lines_of(both)} == {dead, late}
    assert queue.summary().waiting == 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--expired"], "--expired needs a new expiry; pass --expires-in or --expires-at"),
        (["0123456789abcde", "--expired", "--expires-in", "1h"], "ids and --expired cannot be"),
        (["--dead", "--expires-in", "0"], "0 is not positive"),
        (
            ["--dead", "--expires-in", "1h", "--expires-at", "2100-01-01T00:00Z"],
            "expires_at and expires_in_s were given",
        ),
        (["--dead", "--yes", "--expires-at", "2020-01-01T00:00Z"], "which has passed"),
    ],
)
def test_wrong_use_of_retry_ends_with_2_and_changes_nothing(
    queue: Queue, arguments: list[str], sentence: str
) -> None:
    queue.submit("acme")
    (dead,) = kill(queue)

    assert sentence in error_of(fairturn("retry", *arguments), 2)
    assert queue.get(dead).state == "dead"


# ── show: attempts ───────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def routed(queue: Queue) -> str:
    """A document that failed once, finished a step and was completed."""
    id = queue.submit("acme", kind="text").id
    for outcome in (
        lambda fence: Failed(fence, "unreadable", 0, "Traceback\n  line 2\x1b[2J"),
        lambda fence: Advanced(fence, "ocr", '{"pages":3}'),
        Completed,
    ):
        (claim,) = queue.claim(1, worker="gpu-7", lease_s=30).claims
        queue.finish([outcome(claim.fence)])
    return id


def test_show_prints_the_attempts_and_steps_of_a_document(
    routed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    plain = fairturn("show", routed).stdout
    detailed = fairturn("show", routed, "--details").stdout

    table = [line.split() for line in plain.partition("\n\n")[2].splitlines()]
    assert table[0] == ["began", "took", "step", "kind", "attempt", "worker", "outcome", "error"]
    assert [row[4:] for row in table[2:]] == [
        ["0", "text", "1", "gpu-7", "failed", "unreadable"],
        ["0", "text", "2", "gpu-7", "advanced"],
        ["1", "ocr", "1", "gpu-7", "completed"],
    ]
    assert "finished steps  1" in plain
    assert "Traceback" not in plain
    assert "\nstep 0, attempt 1:\n    Traceback\n      line 2\\x1b[2J\n" in detailed


def test_json_has_every_stored_attempt(routed: str) -> None:
    (shown,) = lines_of(fairturn("show", routed, "--json"))

    assert [list(each) for each in shown["timeline"]] == [[field.name for field in ATTEMPT]] * 2
    assert [each["outcome"] for each in shown["timeline"]] == ["failed", "advanced"]
    assert (shown["step"], shown["attempts"], shown["kind"]) == (1, 1, "ocr")


def test_a_document_that_completed_at_once_has_no_table_of_attempts(queue: Queue) -> None:
    id = queue.submit("acme").id
    (claim,) = queue.claim(1, worker="gpu-7", lease_s=30).claims
    queue.finish([Completed(claim.fence)])

    assert "outcome" not in fairturn("show", id, "--details").stdout


def test_a_customer_sees_its_attempts_without_workers_and_details(
    queue: Queue, routed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIRTURN_KEY", key_for(queue, "acme"))

    with served(queue) as url:
        shown = fairturn("show", routed, "--details", "--url", url).stdout

    assert "advanced" in shown
    assert "gpu-7" not in shown
    assert "Traceback" not in shown


# ── outages ──────────────────────────────────────────────────────────────────────────────────────


def test_outages_are_listed_with_their_kinds_and_the_next_attempt(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    none = fairturn("outages")
    hold(queue, retry_after_s=3_600)

    header, _, row = fairturn("outages").stdout.splitlines()
    (line,) = lines_of(fairturn("outages", "--json"))

    assert (none.exit_code, none.stdout) == (0, "No service is held.\n")
    assert header.split()[:2] == ["service", "kinds"]
    assert row.split()[:2] == ["azure-ocr", "ocr"]
    assert "in 60.0 minutes" in row or "in 59." in row
    assert row.endswith("0   503 <busy>")
    assert list(line) == [field.name for field in OUTAGE]
    assert (line["service"], line["kinds"], line["resumed_at"]) == ("azure-ocr", ["ocr"], None)


@pytest.mark.parametrize("service", ["azure/ocr v2", None])
def test_the_work_of_a_service_is_resumed(queue: Queue, service: str | None) -> None:
    hold(queue, service)
    name = service or "kind:ocr"
    assert queue.claim(1, worker="w", lease_s=30).claims == []

    resumed = fairturn("outages", "resume", name)

    assert (resumed.exit_code, resumed.stdout) == (0, f"{name}: work resumes.\n")
    assert len(queue.claim(1, worker="w", lease_s=30).claims) == 1
    assert "work resumes" in fairturn("outages").stdout
    assert f"no service {name!r} is held; outages() returns" in error_of(
        fairturn("outages", "resume", name), 3
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["resume"], "Missing argument 'SERVICE'"),
        (["resume", ""], "service is empty"),
        (["resume", "x" * 70], "service has 70 bytes; at most 69 are allowed"),
        (["end", "x"], "No such command"),
    ],
)
def test_wrong_use_of_outages_ends_with_2(arguments: list[str], sentence: str) -> None:
    assert sentence in error_of(fairturn("outages", *arguments), 2)
