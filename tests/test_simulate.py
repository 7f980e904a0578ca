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


@pytest.mark.parametrize("workload", ["dump", "two-dumps", "weights", "routed", "outage"])
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


# ── Kinds of work and outages ────────────────────────────────────────────────────────────────────

KINDS_CSV = "at_s,customer,cost_s,kind\n" + "0,bulk,10,ocr\n" * 40 + "5,quiet,1,text\n" * 2


@pytest.fixture
def kinds_file(tmp_path: Path) -> Path:
    path = tmp_path / "kinds.csv"
    path.write_text(KINDS_CSV)
    return path


def test_people_get_a_table_for_each_kind_and_the_load_of_its_workers(kinds_file: Path) -> None:
    result = simulate(kinds_file, "--workers", 1, "--workers-for", "text=1", "--mode", "fair")

    assert result.exit_code == 0, result.output
    words = " ".join(result.stdout.split())
    assert "2 workers (1 for text, 1 for all kinds)" in words
    assert "Documents of kind ocr" in words
    assert "Documents of kind text" in words
    assert "workers were busy in fair: 0% for text, 100% for all kinds." in words


def test_programs_get_the_waits_of_each_kind_and_of_each_group_in_it(kinds_file: Path) -> None:
    found = answer(kinds_file, "--workers", 1, "--workers-for", "text=1")

    assert found["workers"] == 2
    assert found["worker_groups"] == [
        {"kinds": ["text"], "workers": 1},
        {"kinds": ["ocr", "text"], "workers": 1},
    ]
    assert [of["mode"] for of in found["modes"]] == ["fair", "equal", "levels", "fifo"]
    for mode in found["modes"]:
        ocr, text = mode["kinds"]
        assert (ocr["name"], ocr["documents"], text["documents"]) == ("ocr", 40, 2)
        assert text["wait_s"]["max"] <= 1
        assert [of["documents"] for of in text["groups"]] == [0, 2]
        assert [of["kinds"] for of in mode["workers"]] == [["text"], ["ocr", "text"]]
        assert mode["workers"][1]["busy"] == pytest.approx(1, abs=0.01)


def test_a_trace_without_kinds_has_one_kind_and_no_tables_of_kinds(csv_file: Path) -> None:
    found = answer(csv_file, "--mode", "fair")

    assert [of["name"] for of in found["modes"][0]["kinds"]] == ["default"]
    assert "kind" not in simulate(csv_file, "--mode", "fair").stdout
    assert answer(csv_file, "--mode", "fair", "--kind-limit", "default=1")["kind_limits"] == {
        "default": 1
    }


def test_a_limit_of_a_kind_holds_it_and_nothing_else(kinds_file: Path) -> None:
    found = answer(kinds_file, "--workers", 4, "--kind-limit", "ocr=2", "--mode", "fair")

    (fair,) = found["modes"]
    assert found["kind_limits"] == {"ocr": 2}
    assert fair["ends_at_s"] == 40 / 2 * 10
    assert fair["kinds"][1]["wait_s"]["max"] == 0


def test_workers_for_kinds_replace_those_of_a_workload() -> None:
    found = answer("routed", "--workers-for", "ocr=2", "--mode", "fair")

    groups = [(of["kinds"], of["workers"]) for of in found["worker_groups"]]
    assert groups == [(["ocr"], 2), (["text", "ocr", "export"], 4)]


def test_an_outage_is_told_with_its_requests_its_recovery_and_the_dead(kinds_file: Path) -> None:
    outage = ("--outage", "ocr=15..60", "--fails-after", 2, "--retry-after", 4)

    result = simulate(kinds_file, "--mode", "fair", *outage)
    found = answer(kinds_file, "--mode", "fair", *outage)

    words = " ".join(result.stdout.split())
    (passed,) = found["modes"][0]["outages"]
    assert (
        f"Outage of ocr from 15 s to 60 s. Requests to the service meanwhile: {passed['requests']}"
        in words
    )
    assert f"the full rate was back after {passed['recovery_s']:.1f} s in fair." in words
    assert "Dead documents: 0 in fair." in words
    assert "because of outages or concurrency limits" in words
    assert found["outages"] == [
        {"kinds": ["ocr"], "from_s": 15, "to_s": 60, "fails_after_s": 2, "retry_after_s": 4}
    ]


def test_an_outage_of_two_kinds_is_one_service(kinds_file: Path) -> None:
    found = answer(kinds_file, "--mode", "fair", "--outage", "text,ocr=0..60")

    assert [of["kinds"] for of in found["outages"]] == [["ocr", "text"]]


def test_dead_documents_are_counted_apart(kinds_file: Path) -> None:
    found = answer(kinds_file, "--mode", "levels", "--outage", "ocr=0..4000", "--workers", 2)

    (levels,) = found["modes"]
    bulk = levels["groups"][0]
    assert bulk["dead"] > 0
    assert bulk["documents"] + bulk["dead"] == 40
    assert (levels["all"]["dead"], levels["all"]["cancelled"]) == (bulk["dead"], 0)


def test_the_readings_are_compared_with_kinds_too(kinds_file: Path) -> None:
    result = simulate(kinds_file, "--readings", "--workers-for", "ocr=1")

    assert result.exit_code == 0, result.output


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
    (["dump", "--workers", "0"], "workers is 0; it must be at least 1"),
    (["dump", "--workers", "-1"], "-1 is not in the range"),
    (
        ["dump", "--workers-for", "ocr=1"],
        "no document is of kind 'ocr'; kinds of the trace: default",
    ),
    (["routed", "--workers", "0", "--workers-for", "ocr=1"], "no worker serves kind 'text'"),
    (["routed", "--workers-for", "ocr"], "'ocr' is not KIND=N, such as ocr=2"),
    (["routed", "--kind-limit", "ocr=0"], "0 documents are not from 1 to 100,000"),
    (["routed", "--kind-limit", "OCR=1"], "'OCR'"),
    (["routed", "--outage", "ocr"], "'ocr' is not KIND=FROM..TO in seconds"),
    (["routed", "--outage", "ocr=5-9"], "'ocr=5-9' is not KIND=FROM..TO in seconds"),
    (["routed", "--outage", "ocr=x..9"], "'x' is not a number of seconds"),
    (["routed", "--outage", "ocr=9..5"], "an outage ends before it begins"),
    (["routed", "--outage", "scan=5..9"], "no document is of kind 'scan'"),
    (["routed", "--fails-after", "1"], "--fails-after has no effect without --outage"),
    (["routed", "--retry-after", "1"], "--retry-after has no effect without --outage"),
    (["routed", "--mode", "ideal"], "mode ideal is an ideal for one kind of work"),
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
