"""`customers` and `purge`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fairturn import NotFound, Queue
from fairturn.wire import CUSTOMER, CUSTOMER_SETTINGS
from tests.commands import claim, error_of, fairturn, lines_of


@pytest.fixture(autouse=True)
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Queue]:
    monkeypatch.chdir(tmp_path)
    with Queue("documents.db") as opened:
        yield opened


def settings_in(line: dict[str, Any]) -> dict[str, Any]:
    return {field.name: line[field.name] for field in CUSTOMER_SETTINGS}


def test_customers_are_listed_by_name_with_the_fields_of_the_service(queue: Queue) -> None:
    for customer in ("bolt", "acme", "acme"):
        queue.submit(customer)
    queue.set_customer("bolt", weight=2, limit=4, paused=True)
    claim(queue)

    lines = lines_of(fairturn("customers", "--json"))
    printed = fairturn("customers").stdout

    assert [line["name"] for line in lines] == ["acme", "bolt"]
    assert list(lines[0]) == [field.name for field in (*CUSTOMER, *CUSTOMER_SETTINGS)]
    expected = {"weight": 2.0, "limit": 4, "paused": True, "bytes_max": None}
    assert settings_in(lines[1]) == expected
    assert (lines[0]["count"], lines[0]["waiting"], lines[0]["running"]) == (-1, 1, 1)
    rows = [line.split() for line in printed.splitlines()]
    assert ["bolt", "0", "1", "0", "0", "2", "4", "paused"] in rows
    assert ["acme", "-1", "1", "1", "0", "1"] in rows


def test_many_customers_come_in_pages(queue: Queue) -> None:
    names = [f"c{n:04}" for n in range(1_203)]
    for name in names:
        queue.set_customer(name, weight=1)

    def listed(*options: str) -> list[str]:
        return [line["name"] for line in lines_of(fairturn("customers", "--json", *options))]

    assert listed() == names[:100]
    assert listed("--after", names[99], "--limit", "5") == names[100:105]
    assert listed("--all") == names
    assert listed("--limit", "1100") == names[:1_100]
    assert "--after 'c0099'" in fairturn("customers").stdout


def test_no_customers_is_said() -> None:
    assert fairturn("customers").stdout == "There are no such customers.\n"


def test_weight_and_limit_are_set_and_the_rest_stays(queue: Queue) -> None:
    first = fairturn("customers", "set", "acme", "--weight", "2.5")
    second = lines_of(fairturn("customers", "set", "acme", "--limit", "4", "--json"))
    settings = queue.customer("acme").settings
    third = fairturn("customers", "set", "acme", "--no-limit")

    assert first.stdout.startswith("acme: weight 2.5, no limit. ")
    expected = {"weight": 2.5, "limit": 4, "paused": False, "bytes_max": None}
    assert settings_in(second[0]) == expected
    assert (settings.weight, settings.limit) == (2.5, 4)
    assert third.exit_code == 0
    assert queue.customer("acme").settings.limit is None


def test_a_paused_customer_is_not_claimed_until_it_is_resumed(queue: Queue) -> None:
    queue.submit("acme")

    paused = fairturn("customers", "pause", "acme")
    held = claim(queue)
    resumed = fairturn("customers", "resume", "acme")

    assert "paused" in paused.stdout
    assert held == []
    assert "paused" not in resumed.stdout
    assert len(claim(queue)) == 1


def test_a_slip_in_a_name_makes_no_customer(queue: Queue) -> None:
    assert error_of(fairturn("customers", "pause", "amce"), 3) == "there is no customer 'amce'"
    assert error_of(fairturn("customers", "resume", "amce"), 3)
    with pytest.raises(NotFound):
        queue.customer("amce")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["set", "acme"], "nothing to set; pass --weight"),
        (["set", "acme", "--weight", "0"], "weight is 0; it must be between 0.01 and 100"),
        (["set", "acme", "--weight", "nan"], "weight"),
        (["set", "acme", "--limit", "0"], "limit is 0; it must be from 1"),
        (["set", "acme", "--limit", "4", "--no-limit"], "contradict"),
        (["set", "", "--limit", "4"], "customer is empty"),
        (["--limit", "3", "--all"], "contradict"),
        (["fire", "acme"], "No such command"),
    ],
)
def test_wrong_use_ends_with_2(queue: Queue, arguments: list[str], sentence: str) -> None:
    assert sentence in error_of(fairturn("customers", *arguments), 2)
    assert queue.customers().customers == []


# ── purge ────────────────────────────────────────────────────────────────────────────────────────


def test_a_customer_is_deleted_when_its_name_is_typed_again(queue: Queue) -> None:
    for _ in range(3):
        queue.submit("acme", content=b"x" * 100_000)
    kept = queue.submit("bolt", content=b"y" * 100_000).id

    declined = fairturn("purge", "acme", stdin="yes\n")
    before = queue.customer("acme").waiting
    agreed = fairturn("purge", "acme", stdin="acme\n")

    assert error_of(declined, 2) == "'yes' is not 'acme'; nothing was deleted"
    assert "acme has 3 documents waiting and 0 running" in declined.stderr
    assert before == 3
    assert agreed.exit_code == 0
    with pytest.raises(NotFound):
        queue.customer("acme")
    assert queue.read(kept) == b"y" * 100_000
    assert len(list(Path("documents.db.contents").rglob("??/*"))) == 1


def test_with_yes_nobody_is_asked(queue: Queue) -> None:
    queue.submit("acme")

    assert fairturn("purge", "acme", "--yes").stdout == "Deleted acme with all its data.\n"
    assert queue.customers().customers == []
    queue.submit("acme")
    assert lines_of(fairturn("purge", "acme", "--yes", "--json")) == [{"customer": "acme"}]


def test_who_does_not_answer_deletes_nothing(queue: Queue) -> None:
    queue.submit("acme")

    assert fairturn("purge", "acme", stdin="").exit_code == 1
    assert queue.customer("acme").waiting == 1


def test_who_is_not_there_cannot_be_purged(queue: Queue) -> None:
    assert error_of(fairturn("purge", "amce", "--yes"), 3) == "there is no customer 'amce'"
