"""The history of a queue as a trace: the output of `fairturn export`, and its replay."""

import csv
import subprocess
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fairturn import Completed, Failed, Queue
from fairturn.clock import ManualClock
from fairturn.model import CUSTOMER_BYTES_MAX
from fairturn.simulator import history, trace
from fairturn.simulator.replay import replay
from fairturn.simulator.trace import Trace
from tests.commands import SCRIPT, claim, error_of, fairturn

DAY_US = 86_400 * 1_000_000
START = 1_780_000_000 * 1_000_000
LEASE_US = 3_600 * 1_000_000


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START)


@pytest.fixture
def database(tmp_path: Path, clock: ManualClock) -> Path:
    """A queue in which acme and zeta have completed documents, one failed and one waiting."""
    path = tmp_path / "documents.db"
    with Queue(path, clock=clock) as queue:
        queue.set_customer("zeta", weight=2.5)
        queue.submit("acme")
        clock.advance(1.5)
        queue.submit("zeta")
        queue.submit("acme")
        clock.advance(1)
        for run_s in (2, 0.25):
            (claim,) = queue.store.claim(1, worker="w", lease_us=LEASE_US).claims
            clock.advance(run_s)
            queue.store.finish([Completed(claim.fence)])
        (claim,) = queue.store.claim(1, worker="w", lease_us=LEASE_US).claims
        queue.store.finish([Failed(claim.fence, "no")])
        queue.submit("acme")
    return path


def test_completed_documents_are_written_oldest_first_from_0_on(database: Path) -> None:
    result = fairturn("export", "--database", database)

    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [
        "at_s,customer,cost_s,weight",
        "0,acme,2,",
        "1.500000,zeta,0.250000,2.5",
    ]


def test_anonymous_numbers_stand_in_the_place_of_names(database: Path) -> None:
    result = fairturn("export", "--database", database, "--anonymous")

    assert "acme" not in result.stdout
    rows = list(csv.DictReader(StringIO(result.stdout)))
    assert [row["customer"] for row in rows] == ["customer-1", "customer-2"]


def test_an_export_to_a_file_can_be_simulated_and_replayed(database: Path, tmp_path: Path) -> None:
    path = tmp_path / "yesterday.csv"

    exported = fairturn("export", "--database", database, "--output", path)

    assert exported.exit_code == 0, exported.output
    assert exported.stdout == ""
    assert exported.stderr == "Wrote 2 documents of 2 customers.\n"
    assert fairturn("simulate", path, "--mode", "fair").exit_code == 0
    assert fairturn("replay", path).exit_code == 0


def test_only_what_was_submitted_in_a_span_is_written(database: Path) -> None:
    first, second = "2026-05-28T20:26:40Z", "2026-05-28T22:26:41+02:00"

    def lines(*options: str) -> list[str]:
        return fairturn("export", "--database", database, *options).stdout.splitlines()

    assert lines("--submitted-before", second)[1:] == ["0,acme,2"]
    assert lines("--submitted-from", second)[1:] == ["0,zeta,0.250000,2.5"]
    assert lines("--submitted-before", first) == ["at_s,customer,cost_s"]


def test_a_file_that_is_there_is_replaced_only_if_asked_for(database: Path, tmp_path: Path) -> None:
    path = tmp_path / "kept.csv"
    path.write_text("mine")

    refused = fairturn("export", "--database", database, "--output", path)
    kept = path.read_text()
    replaced = fairturn("export", "--database", database, "--output", path, "--force")

    assert "exists already; --force replaces it" in error_of(refused, 2)
    assert kept == "mine"
    assert replaced.exit_code == 0
    assert path.read_text().startswith("at_s,")


@pytest.mark.parametrize(
    ("arguments", "code", "why"),
    [
        (["--database", "absent.db"], 3, "there is no queue absent.db"),
        (["--submitted-from", "yesterday"], 2, "'yesterday' is not a timestamp"),
        (["--submitted-before", "2026-07-01"], 2, "is not a timestamp with a time zone"),
        (["--output", "absent/x.csv"], 1, "absent/x.csv cannot be written"),
    ],
)
def test_wrong_use_ends_with_an_error_and_writes_nothing(
    database: Path, arguments: list[str], code: int, why: str
) -> None:
    result = fairturn("export", "--database", database, *arguments)

    assert why in error_of(result, code)
    assert result.stdout == ""


def test_an_empty_file_is_left_empty(tmp_path: Path) -> None:
    path = tmp_path / "empty.db"
    path.touch()

    assert "is empty" in error_of(fairturn("export", "--database", path), 3)
    assert path.stat().st_size == 0


def test_a_pipe_that_closes_early_ends_the_export_without_a_traceback(database: Path) -> None:
    with subprocess.Popen(
        [SCRIPT, "export", "--database", database], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        told = process.stderr.read()

    assert b"Traceback" not in told


# ── The trace ────────────────────────────────────────────────────────────────────────────────────


def test_a_clock_that_stepped_back_counts_as_no_time_passed(clock: ManualClock) -> None:
    with Queue(":memory:", clock=clock) as queue:
        for step_s in (0, 10, -7, 1):
            clock.step(step_s)
            queue.submit("a")
        claims = queue.store.claim(4, worker="w", lease_us=LEASE_US).claims
        clock.step(-100)
        queue.store.finish([Completed(claim.fence) for claim in claims])

        made = history.trace_of(queue.iterate())

    assert [at // 1_000_000 for at in made.at] == [0, 10, 10, 10]
    assert list(made.cost) == [0, 0, 0, 0]


def test_progress_hears_of_every_ten_thousand(clock: ManualClock) -> None:
    with Queue(":memory:", clock=clock) as queue:
        queue.submit("a")
        (claim,) = queue.store.claim(1, worker="w", lease_us=LEASE_US).claims
        queue.store.finish([Completed(claim.fence)])
        (document,) = queue.iterate()
    heard: list[int] = []

    made = history.trace_of((document for _ in range(20_001)), progress=heard.append)
    history.write(made, StringIO(), progress=heard.append)

    assert heard == [10_000, 20_000, 10_000, 20_000, 20_001]


names = st.text(
    st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), min_size=1, max_size=20
).filter(lambda name: len(name.encode()) <= CUSTOMER_BYTES_MAX)
rows = st.lists(
    st.tuples(st.integers(0, DAY_US), names, st.integers(0, DAY_US), st.sampled_from([0, 10, 2500]))
)


@given(rows, st.lists(st.sampled_from(["default", "ocr", "a.b_c-1"]), min_size=1) | st.none())
@example([(0, "\r", 0, 0), (1, "plain", 2, 0)], None)
@example([(0, "\r", 0, 10), (1, "plain", 2, 0)], ["ocr", "default"])
def test_what_is_written_is_read_back_as_it_was(
    lines: list[tuple[int, str, int, int]], kinds: list[str] | None
) -> None:
    growing = trace.Growing()
    now = 0
    for n, (step, customer, cost, weight) in enumerate(lines):
        now += step
        growing.add(now, customer, cost, None if kinds is None else kinds[n % len(kinds)])
        if weight:
            growing.trace.weight[n] = weight
    out = StringIO(newline="")

    history.write(growing.trace, out)

    found = trace.read_stream(out.getvalue().encode().splitlines(keepends=True), "t.csv")
    assert _columns(found) == _columns(growing.trace)


def _columns(made: Trace) -> tuple[object, ...]:
    return made.names, made.at, made.customer, made.cost, made.weight, made.kinds, made.kind


def test_a_replayed_history_is_the_history_of_as_many_workers(clock: ManualClock) -> None:
    """One worker that was never idle: the replay has the same starts and ends."""
    with Queue(":memory:", clock=clock) as queue:
        for n in range(30):
            queue.submit("ab"[n % 2])
        for _ in range(30):
            (claim,) = queue.store.claim(1, worker="w", lease_us=LEASE_US).claims
            clock.advance(2)
            queue.store.finish([Completed(claim.fence)])
        documents = list(queue.iterate())

    replayed = replay(history.trace_of(documents), rule=queue.settings.rule)

    ended = [document.ended_at_us or 0 for document in reversed(documents)]
    assert [START + at for at in replayed.finished_at] == ended


def test_a_history_has_kinds_if_a_document_has_another_than_the_default(
    clock: ManualClock,
) -> None:
    with Queue(":memory:", clock=clock, kinds="open") as queue:
        for kind in ("default", "ocr", "text", "ocr"):
            queue.submit("a", kind=kind)
        claims = queue.store.claim(4, worker="w", lease_us=LEASE_US).claims
        queue.store.finish([Completed(claim.fence) for claim in claims])

        every, plain = (history.trace_of(queue.iterate(kinds=k)) for k in (None, "default"))

    assert [every.kinds[number] for number in every.kind] == ["default", "ocr", "text", "ocr"]
    assert (plain.kinds, list(plain.kind)) == ([], [])
    assert len(plain) == 1


def test_the_cost_is_what_the_worker_measured_and_not_the_time_claimed_ahead(
    tmp_path: Path,
) -> None:
    clock = ManualClock(1_800_000_000_000_000)
    with Queue(tmp_path / "measured.db", clock=clock) as queue:
        for _ in range(2):
            queue.submit("acme", payload={})
        measured, unmeasured = claim(queue, 2)
        clock.advance(1)
        outcomes = [Completed(measured.fence, real_cost=20_000), Completed(unmeasured.fence)]
        queue.store.finish(outcomes)

        found = history.trace_of(queue.iterate(states=["completed"]))

    assert list(found.cost) == [20_000, 1_000_000]
