"""Commands against a service have the same output and effect as on the queue itself."""

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fairturn import Completed, Queue
from fairturn.cli.settings import SettingsFile, resolve
from tests.commands import claim, complete, error_of, fairturn, kill, lines_of, shown_on_a_terminal
from tests.http_server import TOKEN, served

LARGE = bytes(range(256)) * 1_024
FILE = "documents.db"
NOBODYS = "0123456789abcde"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def queue(folder: Path) -> Iterator[Queue]:
    with Queue(folder / FILE) as queue:
        yield queue


@pytest.fixture
def url(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A service without keys, and its token in the environment."""
    monkeypatch.setenv("FAIRTURN_KEY", TOKEN)
    with served(queue) as url:
        yield url


def by_both(url: str, *arguments: str) -> list[Any]:
    """Return the output of a command on the file; that on the service must be the same."""
    here = fairturn(*arguments, "--database", FILE, "--json")
    there = fairturn(*arguments, "--url", url, "--json")
    assert there.exit_code == here.exit_code == 0, there.output
    seen = [_seen(json.loads(line)) for line in here.stdout.splitlines()]
    assert [_seen(json.loads(line)) for line in there.stdout.splitlines()] == seen
    people = [fairturn(*arguments, *place).stdout for place in (("-d", FILE), ("--url", url))]
    file, service = (_without_ages(said) for said in people)
    assert file.replace(FILE, "") == service.replace(url, "")
    return seen


def _without_ages(said: str) -> str:
    """Remove ages, because time passes between the two commands."""
    return re.sub(r" +\d+ s\b", " some s", said)


def _seen(line: Any) -> Any:
    """Remove values that only the store has, and those that change with time."""
    gone = ("order", "content_name", "at")
    if isinstance(line, dict) and "origin" in line:
        return line if line["origin"] == "default" else line["name"]
    return {name: value for name, value in line.items() if name not in gone}


def some_documents(queue: Queue) -> list[str]:
    ids = [queue.submit("acme", payload={"n": 1}, metadata={"a": "ä"}, cost=2.5).id]
    complete(queue)
    ids.append(queue.submit("acme", content=LARGE, name="a.pdf").id)
    (claimed,) = claim(queue)
    file = queue.contents.put([b"the result"])
    queue.store.finish([Completed(claimed.fence, "1", file)])
    ids.append(queue.submit("other", payload=2).id)
    kill(queue)
    return [*ids, *(queue.submit("other", payload=n).id for n in range(3))]


def test_what_is_looked_at_is_the_same(queue: Queue, url: str) -> None:
    completed, with_file, dead, *waiting = some_documents(queue)

    assert len(by_both(url, "list")) == 6
    assert len(by_both(url, "list", "--customer", "other", "--state", "waiting")) == 3
    assert len(by_both(url, "list", "--limit", "2", "--after", dead)) == 2
    for id in (completed, with_file, dead, *waiting):
        by_both(url, "show", id)
    for said in ("--result", "--content"):
        for id in (completed, with_file):
            results = [
                fairturn("show", id, said, *place).stdout_bytes
                for place in (("-d", FILE), ("--url", url))
            ]
            assert results[0] == results[1] != b""
    assert len(by_both(url, "customers")) == 2
    assert by_both(url, "customers", "--limit", "1")[0]["name"] == "acme"
    rules = [fairturn("rule", *place).stdout for place in (("-d", FILE), ("--url", url), ())]
    assert rules[0] == rules[1] == rules[2]
    exported = [fairturn("export", *place).stdout for place in (("-d", FILE), ("--url", url))]
    assert exported[0] == exported[1]
    assert exported[0].count("\n") == 3
    told = [
        fairturn("explain", waiting[-1], "--lang", "de", "--for", "customer", *place).stdout
        for place in (("-d", FILE), ("--url", url))
    ]
    assert told[0].splitlines()[0] == told[1].splitlines()[0]
    settings = {line["name"] for line in lines_of(fairturn("config", "--url", url, "--json"))}
    assert {"url", "mode", "bounds"} <= settings


def test_documents_are_submitted_waited_for_cancelled_and_retried(
    queue: Queue, url: str, folder: Path
) -> None:
    (folder / "a.pdf").write_bytes(LARGE)
    (folder / "b.txt").write_bytes(b"b")

    first = lines_of(
        fairturn("submit", "acme", "a.pdf", "b.txt", "--metadata", "a=b", "--url", url, "--json")
    )
    piped = lines_of(
        fairturn("submit", "acme", "-", "--name", "c", "--url", url, "--json", stdin=LARGE)
    )
    keyed = [
        lines_of(
            fairturn("submit", "acme", "--payload", "1", "--key", "k", "--url", url, "--json")
        )[0]
        for _ in range(2)
    ]

    assert [queue.read(each["id"]) for each in first + piped] == [LARGE, b"b", LARGE]
    assert queue.get(first[0]["id"]).metadata == {"a": "b"}
    assert [each.pop("replayed") for each in keyed] == [False, True]
    assert keyed[0] == keyed[1]
    done = complete(queue)[0]
    assert lines_of(fairturn("wait", done, "--url", url, "--json"))[0]["state"] == "completed"
    late = fairturn("wait", keyed[0]["id"], "--timeout", "0.05", "--url", url)
    assert "had not ended" in error_of(late, 75)
    (dead,) = kill(queue)
    assert lines_of(fairturn("retry", dead, "--url", url, "--json"))[0]["state"] == "waiting"
    mixed = fairturn("cancel", dead, NOBODYS, done, "--url", url)
    assert "1 document not found" in error_of(mixed, 3)
    everything = fairturn("cancel", "--customer", "acme", "--yes", "--url", url)
    assert "2 documents cancelled" in everything.stdout
    assert queue.summary().waiting == 0


def test_lines_are_stored_in_batches_up_to_the_one_that_is_wrong(
    queue: Queue, url: str, folder: Path
) -> None:
    (folder / "large").write_bytes(bytes(20_000_000))
    lines = [{"customer": "acme", "payload": n, "key": f"k{n}"} for n in range(1_500)]
    files = [{"customer": "acme", "file": "large", "key": f"f{n}"} for n in range(2)]
    text = "\n".join(map(json.dumps, [*lines[:700], *files, *lines[700:]]))

    (folder / "all.ndjson").write_text(text)
    stored = lines_of(fairturn("submit", "--ndjson", "all.ndjson", "--url", url, "--json"))
    again = fairturn(
        "submit", "--ndjson", "-", "--url", url, "--json", stdin=text + '\n{"customer": 1}'
    )

    assert len(stored) == 1_502
    assert [queue.get(each["id"]).size_bytes for each in stored[700:702]] == [20_000_000] * 2
    assert "standard input, line 1503: customer must be a string" in error_of(again, 2)
    assert len(again.stdout.splitlines()) == 1_502
    assert queue.summary().waiting == 1_502


def test_a_full_queue_is_waited_for(queue: Queue, url: str) -> None:
    queue.configure(waiting_max=1)
    id = queue.submit("acme", payload=1).id

    full = fairturn("submit", "acme", "--payload", "2", "--url", url)
    assert "the queue has 1 document waiting and the limit waiting_max is 1" in error_of(full, 75)
    emptying = threading.Thread(target=queue.cancel, args=(id,))
    emptying.start()
    room = fairturn("submit", "acme", "--payload", "2", "--wait-for-room", "--url", url)
    emptying.join()
    assert room.exit_code == 0, room.output


def test_operators_run_the_queue_from_elsewhere(queue: Queue, url: str) -> None:
    assert "weight 2" in fairturn("customers", "set", "acme", "--weight", "2", "--url", url).stdout
    assert "paused" in fairturn("customers", "pause", "acme", "--url", url).stdout
    assert queue.customer("acme").settings.paused
    assert fairturn("customers", "resume", "acme", "--url", url).exit_code == 0
    changed = fairturn("config", "set", "mode=levels", "patience_s=60", "--url", url)
    assert "mode is levels now; it was fair." in changed.stdout
    assert (queue.settings.mode, queue.settings.patience_s) == ("levels", 60)
    assert fairturn("purge", "acme", "--yes", "--url", url).exit_code == 0
    assert "there is no customer 'acme'" in error_of(
        fairturn("purge", "acme", "--yes", "--url", url), 3
    )


def test_keys_are_made_and_used_from_elsewhere(
    queue: Queue, url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator = fairturn("keys", "make", "--role", "operator", "--url", url).stdout.strip()
    stale = fairturn("list", "--url", url)
    assert "is unknown at" in error_of(stale, 1)
    monkeypatch.delenv("FAIRTURN_KEY")
    none = fairturn("list", "--url", url)
    assert "requires an access key" in error_of(none, 1)

    monkeypatch.setenv("FAIRTURN_URL", url)
    monkeypatch.setenv("FAIRTURN_KEY", operator)
    made = lines_of(fairturn("keys", "make", "--customer", "acme", "--json"))[0]
    (folder / "acme.key").write_text(made["shown"] + "\n")
    assert len(lines_of(fairturn("keys", "--json"))) == 2
    config = fairturn("config").stdout
    assert operator not in config
    assert operator[:15] in config

    submitted = fairturn("submit", "acme", "--payload", "1", "--key-file", "acme.key")
    assert submitted.exit_code == 0, submitted.output
    (id,) = [document.id for document in queue.iterate()]
    shown = fairturn("show", id, "--key-file", "acme.key")
    assert "attempts   0\n" in shown.stdout
    assert "does not permit this" in error_of(fairturn("customers", "--key-file", "acme.key"), 1)
    assert fairturn("config", "--key-file", "acme.key").exit_code == 0
    new = fairturn("keys", "rotate", made["id"]).stdout.strip()
    gone = fairturn("list", "--key-file", "acme.key")
    assert "is unknown at" in error_of(gone, 1)
    assert made["shown"] not in gone.output
    assert fairturn("keys", "revoke", new[3:15]).exit_code == 0
    assert "cannot be read" in error_of(fairturn("list", "--key-file", "nowhere"), 2)
    (folder / "bad.key").write_text("nonsense")
    assert "does not have the form ft_ID_SECRET" in error_of(
        fairturn("list", "--key-file", "bad.key"), 2
    )


@pytest.mark.parametrize(
    "command",
    [
        ["work", "invoices:process", "--until-empty"],
        ["backup", "copy.db"],
        ["restored"],
        ["doctor"],
        ["migrate"],
        ["prune"],
        ["serve"],
        ["up", "invoices:process"],
    ],
)
def test_what_works_on_the_queue_itself_says_so(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIRTURN_URL", "http://localhost:1")

    said = error_of(fairturn(*command), 2)

    assert "direct access to a queue and does not work over HTTP (FAIRTURN_URL is set)" in said


def test_the_stronger_word_decides_between_a_service_and_a_database(
    queue: Queue, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.submit("acme", payload=1)
    nobody = "http://127.0.0.1:1"

    both = fairturn("list", "--url", nobody, "--database", FILE)
    assert "are both set; leave one of them out" in error_of(both, 2)
    monkeypatch.setenv("FAIRTURN_URL", nobody)
    assert len(lines_of(fairturn("list", "--json", "--database", FILE))) == 1
    monkeypatch.setenv("FAIRTURN_DATABASE", FILE)
    assert "are both set; leave one of them out" in error_of(fairturn("list"), 2)
    assert fairturn("doctor").exit_code == 0
    monkeypatch.delenv("FAIRTURN_URL")
    (folder / "fairturn.toml").write_text(f'url = "{nobody}"')
    assert len(lines_of(fairturn("list", "--json"))) == 1


def test_a_key_file_in_the_file_of_settings_lies_beside_it() -> None:
    file = SettingsFile(
        Path("/etc/fairturn/fairturn.toml"), {"url": "http://x", "key_file": "my.key"}
    )

    found = resolve({}, {}, file)

    assert found["key_file"].value == "/etc/fairturn/my.key"


def test_an_option_before_the_command_is_told_where_it_belongs(url: str) -> None:
    said = error_of(fairturn("--url", url, "list"), 2)

    assert said == "options come after the command: fairturn list --url …"


def test_a_wrong_address_ends_with_a_sentence(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "it must have the form http://" in error_of(fairturn("list", "--url", "localhost"), 2)
    monkeypatch.setattr("fairturn.cli.target.TRIES", 1)
    nobody = fairturn("list", "--url", "http://127.0.0.1:1")
    assert "no service responds at http://127.0.0.1:1" in error_of(nobody, 75)


def test_a_large_file_shows_how_much_of_it_is_sent(url: str, folder: Path) -> None:
    (folder / "large").write_bytes(bytes(30_000_000))

    shown = shown_on_a_terminal("stderr", "submit", "acme", "large", "--url", url)

    assert "Submitting" in shown
