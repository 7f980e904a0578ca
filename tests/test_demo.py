"""`demo`: the traffic, the picture, and the whole in a few seconds."""

import json
from io import StringIO

import pytest
from rich.console import Console

from fairturn.cli.lanes import Picture, Watched
from fairturn.clock import microseconds
from fairturn.demo.traffic import (
    BULK,
    DOCUMENT_S,
    PAUSING,
    QUIET,
    RESET_INTERVAL_S,
    SECONDS,
    schedule,
)
from fairturn.model import Customer, CustomerSettings, Document, Fence, Kind, State
from fairturn.priority import Count, Rule
from fairturn.worker.events import DocumentClaimed
from tests.commands import fairturn, lines_of


def test_the_quiet_customers_sink_to_level_9_and_one_pauses_and_is_reset() -> None:
    rule = Rule(reset_interval_us=microseconds(RESET_INTERVAL_S))
    priorities: dict[str, list[int]] = {}
    counts: dict[str, Count] = {}
    for at_s, name, documents in schedule():
        for _ in range(documents):
            counts[name] = rule.check(counts.get(name), microseconds(at_s))
            priorities.setdefault(name, []).append(rule.priority(counts[name].value))

    assert len(priorities[BULK]) == 2_000
    for name in QUIET:
        assert 0.8 * SECONDS < len(priorities[name]) < 1.3 * SECONDS or name == PAUSING
        assert (priorities[name][-1] == 9) is (name != PAUSING)
    resets = [n for n in range(1, len(priorities[PAUSING])) if priorities[PAUSING][n] == 1]
    assert any(priorities[PAUSING][n - 1] > 1 for n in resets)


def test_the_same_seed_gives_the_same_traffic_and_the_work_takes_about_half_a_minute() -> None:
    assert schedule(seed=3) == schedule(seed=3) != schedule(seed=4)
    work_s = sum(sending.documents for sending in schedule()) * DOCUMENT_S / 2
    assert 20 < work_s < 30


def customer(name: str, waiting: dict[int, int]) -> Customer:
    return Customer(
        name=name,
        settings=CustomerSettings(),
        count=-1_999,
        count_updated_at=0,
        waiting=sum(waiting.values()),
        waiting_by_priority=tuple(waiting.get(level, 0) for level in range(1, 10)),
        running=0,
        delayed=0,
    )


def test_the_picture_fits_a_small_terminal_and_shows_everybody_who_waits() -> None:
    customers = {name: customer(name, {9: 1}) for name in QUIET}
    customers[BULK] = customer(BULK, {1: 3, 9: 1_980})
    watched = Watched()
    for n in range(300):
        document = claimed((*QUIET, BULK)[n % 11], 99_900_000)
        watched.add(DocumentClaimed(document, Fence(document.id, n)))
    printed = StringIO()

    picture = Picture(QUIET, BULK).draw("title", customers, watched, 80)
    Console(file=printed, width=80).print(picture)
    lines = printed.getvalue().splitlines()

    assert len(lines) < 24
    assert max(map(len, lines)) <= 80
    (first,) = (line for line in lines if line.startswith("priority 1"))
    assert first.split() == ["priority", "1", "ZZZ", "3"]
    (last,) = (line for line in lines if line.startswith("priority 9"))
    assert all(name[0].upper() in last for name in (*QUIET, BULK))
    assert last.split()[-1] == "1,990"


def claimed(name: str, wait_us: int) -> Document:
    values = dict.fromkeys(Document._fields)
    values |= {"id": "0" * 15, "customer": name, "state": State.RUNNING, "kind": Kind.PAYLOAD}
    values |= {"submitted_at": 0, "claimed_at": wait_us}
    return Document(**values)  # type: ignore[arg-type]


def test_a_short_demo_ends_with_the_waits_in_three_orders() -> None:
    lines = lines_of(fairturn("demo", "--documents", "100", "--seconds", "2", "--json"))

    assert [(line["order"], line["simulated"]) for line in lines] == [
        ("first come first served", True),
        ("nine levels alone", True),
        ("fair", False),
    ]
    assert all(0 <= line["wait_s_p50"] <= line["wait_s_p99"] for line in lines)
    first_come, _, fair = lines
    assert fair["wait_s_p99"] < first_come["wait_s_p99"], json.dumps(lines)


@pytest.mark.parametrize("option", ["--documents=0", "--seconds=0"])
def test_a_demo_without_traffic_is_refused(option: str) -> None:
    assert fairturn("demo", option).exit_code == 2
