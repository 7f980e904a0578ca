"""`demo`: the traffic, the picture, and a complete run in a few seconds."""

import json
import os
import signal
import subprocess
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from fairturn.cli.demo import closing_words
from fairturn.cli.lanes import LanesPicture, WorkerProgress
from fairturn.clock import microseconds
from fairturn.model import BodyType, Customer, CustomerSettings, Document, Fence, State
from fairturn.priority import Count, Rule
from fairturn.simulator.demo.traffic import (
    BULK,
    DOCUMENT_S,
    PAUSING,
    QUIET,
    RESET_INTERVAL_S,
    SECONDS,
    schedule,
)
from fairturn.worker.events import DocumentClaimed
from tests.commands import SCRIPT, fairturn, lines_of


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
        count_updated_at_us=0,
        waiting=sum(waiting.values()),
        waiting_by_priority=tuple(waiting.get(level, 0) for level in range(1, 10)),
        running=0,
        delayed=0,
    )


def drawn(
    customers: dict[str, Customer], watched: WorkerProgress, *, now: int, width: int
) -> list[str]:
    printed = StringIO()
    picture = LanesPicture(QUIET, BULK).draw("title", customers, watched, now=now, width=width)
    Console(file=printed, width=width).print(picture)
    return printed.getvalue().splitlines()


def test_the_picture_fits_a_small_terminal_and_shows_everybody_who_waits() -> None:
    customers = {name: customer(name, {9: 1}) for name in QUIET}
    customers[BULK] = customer(BULK, {1: 3, 9: 1_980})
    watched = WorkerProgress()
    for n in range(300):
        document = claimed((*QUIET, BULK)[n % 11], 99_900_000)
        watched.add(DocumentClaimed(document, Fence(document.id, n)))

    lines = drawn(customers, watched, now=200_000_000, width=80)

    assert len(lines) < 24
    assert max(map(len, lines)) <= 80
    (first,) = (line for line in lines if line.startswith("priority 1"))
    assert first.split() == ["priority", "1", "ZZZ", "3"]
    (last,) = (line for line in lines if line.startswith("priority 9"))
    assert all(name[0].upper() in last for name in (*QUIET, BULK))
    assert last.split()[-1] == "1,990"


def test_in_a_narrow_terminal_customers_stand_below_each_other_and_nothing_is_cut() -> None:
    customers = {name: customer(name, {9: 1}) for name in (*QUIET, BULK)}
    watched = WorkerProgress()
    document = claimed(BULK, 99_900_000)
    watched.add(DocumentClaimed(document, Fence(document.id, 1)))

    lines = drawn(customers, watched, now=200_000_000, width=60)

    assert len(lines) < 24
    assert max(map(len, lines)) <= 60
    assert [line.split()[0] for line in lines[-11:]] == [*QUIET, BULK]
    assert lines[-1].split() == [BULK, "-1,999", "1", "99.9", "s", "99.9", "s"]


def test_a_document_that_was_served_at_once_is_seen_in_its_lane_for_a_moment() -> None:
    customers = {"oak": customer("oak", {2: 1})}
    watched = WorkerProgress()
    document = claimed("elm", 1_000_000)._replace(priority=2)
    watched.add(DocumentClaimed(document, Fence(document.id, 1)))

    def lane(now: int) -> list[str]:
        return drawn(customers, watched, now=now, width=80)[3].split()

    assert lane(1_599_999) == ["priority", "2", "Oe", "1"]
    assert lane(1_600_000) == ["priority", "2", "O", "1"]


def claimed(name: str, wait_us: int) -> Document:
    values = dict.fromkeys(Document._fields)
    values |= {
        "id": "0" * 15,
        "customer": name,
        "state": State.RUNNING,
        "body_type": BodyType.PAYLOAD,
    }
    values |= {"submitted_at_us": 0, "claimed_at_us": wait_us, "priority": 9}
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


SAYINGS = ("First come, first served", "The nine levels help only", "In turns, no customer waits")
LITTLE = "The orders differ little"


@pytest.mark.parametrize(
    ("waits_ms", "said"),
    [
        (((9_000, 20_000), (7, 3_600), (10, 40)), SAYINGS),
        (((8_300, 10_300), (4, 18), (8, 41)), (SAYINGS[0], SAYINGS[2])),
        (((0, 950), (0, 22), (4, 131)), (SAYINGS[2],)),
        (((0, 950), (0, 22), (4, 400)), (LITTLE,)),
    ],
)
def test_the_closing_words_say_what_the_numbers_show(
    waits_ms: tuple[tuple[int, int], ...], said: tuple[str, ...]
) -> None:
    orders = ("first come first served", "nine levels alone", "fair")
    found = {
        order: {50: p50 * 1_000, 99: p99 * 1_000}
        for order, (p50, p99) in zip(orders, waits_ms, strict=True)
    }

    words = closing_words(found)

    assert tuple(saying for saying in (*SAYINGS, LITTLE) if saying in words) == said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_demo_that_is_stopped_leaves_nothing_behind(
    tmp_path: Path, number: signal.Signals
) -> None:
    with subprocess.Popen(
        [SCRIPT, "demo"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert "wait" in process.stdout.readline()
        process.send_signal(number)
        said = process.stderr.read()

    assert (process.returncode, said) == (130, "Error: interrupted\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["--documents=0", "--seconds=0"])
def test_a_demo_without_traffic_is_refused(option: str) -> None:
    assert fairturn("demo", option).exit_code == 2
