"""`fairturn simulate`: its output for people and programs, and rejected input."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from fairturn.cli.simulate import DEFAULT_MODES, MODES
from fairturn.simulator import workloads
from fairturn.simulator.comparison import Discipline
from fairturn.simulator.readings import Reading
from fairturn.simulator.workloads import WORKLOADS
from tests.commands import fairturn, shown_on_a_terminal
from tests.test_trace_files import record

ROOT = Path(__file__).parent.parent
CSV = "at_s,customer,cost_s\n" + "0,dump,1\n" * 40 + "5,quiet,1\n9,quiet,1\n"


def simulate(*arguments: object) -> Result:
    return fairturn("simulate", *map(str, arguments))


def answer(*arguments: object) -> dict[str, Any]:
    result = simulate(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def p99_of(found: dict[str, Any], mode: str, group: str) -> float:
    (of_mode,) = [of for of in found["modes"] if of["mode"] == mode]
    (of_group,) = [of for of in of_mode["groups"] if of["name"] == group]
    value: float = of_group["wait_s"]["p99"]
    return value


@pytest.fixture
def csv_file(tmp_path: Path) -> Path:
    path = tmp_path / "arrivals.csv"
    path.write_text(CSV)
    return path


# ── What it prints ───────────────────────────────────────────────────────────────────────────────


def test_the_list_has_every_workload_in_one_sentence() -> None:
    result = simulate("--list")

    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(WORKLOADS)
    assert all(
        line.endswith(workload.title)
        for line, workload in zip(lines, WORKLOADS.values(), strict=True)
    )


def test_every_mode_has_its_name_on_the_command_line() -> None:
    assert list(MODES) == list(Discipline)
    assert set(DEFAULT_MODES) < set(MODES)


def test_people_get_a_table_for_each_group_and_what_happened_in_words(csv_file: Path) -> None:
    result = simulate(csv_file, "--mode", "fair", "--mode", "levels", "--workers", 1)

    assert result.exit_code == 0, result.output
    assert "42 documents of 2 customers, 1 worker," in result.stdout.replace("\n", " ")
    assert "dump (1 customer)" in result.stdout
    assert "quiet (1 customer)" in result.stdout
    assert "No worker was idle while a document waited" in result.stdout.replace("\n", " ")


@pytest.mark.parametrize("workload", ["dump", "two-dumps", "weights"])
def test_the_tables_of_a_workload_fit_80_columns(
    workload: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")

    assert max(map(len, simulate(workload).stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    ("modes", "said"),
    [
        (("fair", "levels", "fifo"), "No group waits longer on average in fair than in levels or"),
        (("fair", "levels"), "No group waits longer on average in fair than in levels."),
        (("fair", "equal"), None),
    ],
)
def test_no_mode_is_named_that_was_not_simulated(
    tmp_path: Path, modes: tuple[str, ...], said: str | None
) -> None:
    path = tmp_path / "arrivals.csv"
    path.write_text("at_s,customer,cost_s\n0,acme,1\n", encoding="utf-8")

    printed = simulate(path, *(part for mode in modes for part in ("--mode", mode))).stdout

    words = printed.replace("\n", " ").replace("  ", " ")
    assert said in words if said is not None else "Nobody" not in words


def test_programs_get_one_object_with_every_measure(csv_file: Path) -> None:
    found = answer(csv_file, "--workers", 1)

    assert (found["documents"], found["customers"], found["workers"]) == (42, 2, 1)
    assert [of["mode"] for of in found["modes"]] == list(DEFAULT_MODES)
    fair = found["modes"][0]
    (dump, quiet) = fair["groups"]
    assert (dump["name"], dump["documents"]) == ("dump", 40)
    assert set(quiet["wait_s"]) == {"mean", "p50", "p95", "p99", "max"}
    assert set(quiet["lag_documents"]) == {"ideal-levels", "ideal"}
    assert fair["idle_while_waiting_s"] == 0
    assert set(fair["jain"]) == {"windows", "mean", "least"}
    assert p99_of(found, "fair", "quiet") < p99_of(found, "fifo", "quiet")


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    runs: list[tuple[str, bytes]] = []
    for seed in (7, 7, 8):
        report = tmp_path / f"{len(runs)}.html"
        result = simulate("weights", "--seed", seed, "--json", "--report", report)
        runs.append((result.stdout, report.read_bytes()))

    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_a_progress_bar_is_shown_on_a_terminal() -> None:
    modes = [word for mode in MODES for word in ("--mode", mode)]

    shown = shown_on_a_terminal("stderr", "simulate", "weights", *modes)

    assert "Simulating" in shown


def test_nothing_but_the_tables_is_printed_where_nobody_looks(csv_file: Path) -> None:
    assert simulate(csv_file).stderr == ""


# ── Settings ─────────────────────────────────────────────────────────────────────────────────────


def test_a_periodic_reset_helps_customers_who_send_one_document_every_20_minutes() -> None:
    modes = ["--mode", "levels"]

    idle = answer("every-20-minutes", *modes)
    periodic = answer("every-20-minutes", *modes, "--reset", "periodic")

    assert p99_of(idle, "levels", "regular") > 900
    assert p99_of(periodic, "levels", "regular") < 10


def test_weights_and_limits_of_customers_count(csv_file: Path) -> None:
    plain = answer(csv_file, "--workers", 2, "--mode", "equal")
    heavy = answer(csv_file, "--workers", 2, "--mode", "equal", "--weights", "quiet=100")
    limited = answer(csv_file, "--workers", 2, "--mode", "equal", "--limit", "dump=1")

    assert p99_of(heavy, "equal", "quiet") <= p99_of(plain, "equal", "quiet")
    assert p99_of(limited, "equal", "dump") > p99_of(plain, "equal", "dump")
    assert limited["modes"][0]["idle_while_waiting_s"] > 10


def test_a_limit_without_a_name_is_everybodys(csv_file: Path) -> None:
    found = answer(csv_file, "--workers", 50, "--mode", "fair", "--limit", 1)

    assert found["modes"][0]["ends_at_s"] == 40


def test_the_costs_and_the_patience_are_those_that_were_asked_for() -> None:
    found = answer("heavy-known", "--mode", "equal", "--costs", "equal", "--patience", 60)

    assert (found["costs"], found["patience_s"]) == ("equal", 60)
    assert p99_of(found, "equal", "light") > p99_of(
        answer("heavy-known", "--mode", "equal"), "equal", "light"
    )


def test_without_patience_a_stream_of_new_customers_starves_the_others() -> None:
    patient, never = (
        answer("newcomers", "--mode", "fair", "--patience", s)["modes"][0]["groups"][0]
        for s in (120, 1e6)
    )

    assert patient["name"] == "regular"
    assert patient["gap_s"] < 1_000
    assert never["gap_s"] > 5_000


def test_a_workload_log_is_scaled_and_cut(tmp_path: Path) -> None:
    path = tmp_path / "log.swf"
    path.write_text("".join(record(n, 10 * n, 100, n % 3) for n in range(9)) + record(9, 90, -1, 1))
    arguments = (path, "--mode", "fifo", "--time-scale", 0.1, "--max-cost", 20, "--workers", 1)

    result = simulate(*arguments, "--json")

    assert json.loads(result.stdout)["modes"][0]["ends_at_s"] == 9 * 20
    assert result.stderr == "Skipped, without a run time or a user: 1.\n"


def test_a_file_named_like_a_workload_is_meant_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "dump"
    path.write_text(CSV)

    assert answer(path, "--mode", "fifo")["documents"] == 42


def test_a_trace_without_documents_is_told_so(tmp_path: Path) -> None:
    path = tmp_path / "empty.csv"
    path.write_text("at_s,customer,cost_s\n")

    result = simulate(path, "--report", tmp_path / "empty.html")

    assert result.exit_code == 0, result.output
    assert "0 documents" in result.stdout
    assert "There are no documents." in (tmp_path / "empty.html").read_text()


# ── Readings of the rule ─────────────────────────────────────────────────────────────────────────


def test_the_readings_of_the_rule_are_compared_group_by_group(csv_file: Path) -> None:
    result = simulate(csv_file, "--readings", "--workers", 1)

    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[0] == ["Mode", "levels.", "Waits", "in", "seconds:", "p50", "/", "p99."]
    assert ["idle", "periodic", "outstanding", "re-evaluated"] in lines
    assert [line[0] for line in lines if "/" in line[2:3]] == ["dump", "quiet"]


@pytest.fixture(
    params=[
        ("two-dumps", "every-20-minutes"),  # the widest cells and the longest name
        pytest.param(tuple(WORKLOADS), marks=pytest.mark.long),
    ],
    ids=["two", "all"],
)
def named(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The named workloads. All of them take 20 s with each reading."""
    names: tuple[str, ...] = request.param
    monkeypatch.setattr(workloads, "WORKLOADS", {name: WORKLOADS[name] for name in names})
    return list(names)


def test_programs_get_the_readings_of_every_named_workload(named: list[str]) -> None:
    found = answer("--readings", "--mode", "fair")

    assert found["mode"] == "fair"
    assert [of["name"] for of in found["workloads"]] == named
    for workload in found["workloads"]:
        assert [of["reading"] for of in workload["readings"]] == list(Reading)


def test_the_table_of_readings_has_every_named_workload_and_fits_80_columns(
    named: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")

    lines = simulate("--readings").stdout.splitlines()

    assert max(map(len, lines)) <= 80
    assert [line.strip() for line in lines if line.strip() in WORKLOADS] == named


# ── What it refuses ──────────────────────────────────────────────────────────────────────────────

WRONG = [
    ([], "no target; pass a workload of --list, or a file"),
    (["absent.csv"], "no file absent.csv, and no workload"),
    (["dump", "--mode", "random"], "'random' is not one of"),
    (["dump", "--workers", "0"], "0 is not in the range"),
    (["dump", "--seed", "-1"], "-1 is not in the range"),
    (["dump", "--reset-interval", "0"], "must be positive"),
    (["dump", "--bounds", "-2,-4"], "it must have 8"),
    (["dump", "--weights", "quiet-01"], "'quiet-01' is not a customer and a number"),
    (["dump", "--weights", "quiet-01=many"], "'many' in 'quiet-01=many' is not a number"),
    (["dump", "--weights", "nobody=2"], "dump has no customer 'nobody'"),
    (["dump", "--weights", "quiet-01=0"], "weight is 0"),
    (["dump", "--weights", "quiet-01=nan"], "weight is nan"),
    (["dump", "--limit", "0"], "a limit is 0"),
    (["dump", "--limit", "1.5"], "a limit is 1.5"),
    (["dump", "--limit", "inf"], "a limit is inf"),
    (["dump", "--limit", "nan"], "a limit is nan"),
    (["dump", "--time-scale", "2"], "--time-scale is for files"),
    (["dump", "--max-cost", "2"], "--max-cost is for files"),
    (["lost-workers", "--workers", "5"], "all 5 workers are lost"),
    (["dump", "--readings", "--reset", "idle"], "--reset cannot be combined with --readings"),
    (["dump", "--readings", "--mode", "ideal"], "--readings cannot be combined with --mode ideal"),
    (["--readings", "--mode", "fair", "--mode", "fifo"], "pass --mode once"),
    (["FILE", "--seed", "1"], "--seed is for workloads"),
    (["FILE", "--time-scale", "0"], "time scale is 0"),
    (["FILE", "--max-cost", "-1"], "-1 is not between 0"),
    (["BAD"], "line 2: at_s 'x'"),
    (["FILE", "--report", "absent/x.html"], "absent/x.html"),
]


@pytest.mark.parametrize(("arguments", "why"), WRONG, ids=str)
def test_wrong_use_ends_with_an_error_that_says_what_is_wrong(
    csv_file: Path, arguments: list[str], why: str
) -> None:
    bad = csv_file.with_name("bad.csv")
    bad.write_text("at_s,customer,cost_s\nx,a,1\n")
    places = {"FILE": str(csv_file), "BAD": str(bad)}

    result = simulate(*(places.get(argument, argument) for argument in arguments))

    assert result.exit_code == (1 if "--report" in arguments else 2)
    assert result.stdout == ""
    message = " ".join(result.stderr.split())
    assert "Error: " in message
    assert why.lower() in message.lower()


# ── The documentation ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_workload_stands_in_the_documentation(name: str) -> None:
    page = (ROOT / "docs" / "simulate.md").read_text(encoding="utf-8")

    assert f"| `{name}` |" in page


@pytest.mark.parametrize("mode", Discipline)
def test_every_mode_stands_in_the_documentation(mode: Discipline) -> None:
    page = (ROOT / "docs" / "simulate.md").read_text(encoding="utf-8")

    assert f"| `{mode}` |" in page
