"""The command line: its output for people and programs, and its exit codes."""

import csv
import os
import signal
import subprocess
import sys
from importlib import import_module
from io import StringIO
from pathlib import Path

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairturn import Queue
from fairturn.cli import COMMANDS
from fairturn.cli.commands import SECTIONS
from fairturn.priority import BOUNDS
from fairturn.simulator.measures import waits_by_customer, waits_in_all
from fairturn.simulator.replay import Replayed
from fairturn.simulator.trace import Trace
from tests.commands import SCRIPT, error_of, fairturn, lines_of, shown_on_a_terminal

VECTORS = Path(__file__).parent / "vectors"
ORDER = sorted((VECTORS / "order").glob("*.jsonl"))
HEADER = "at_s,customer,cost_s\n"


_SILENT = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]


def trace_in(folder: Path, text: str, name: str = "trace.csv") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


# ── The frame ────────────────────────────────────────────────────────────────────────────────────


def test_the_installed_program_tells_its_commands_and_its_version() -> None:
    help_ = subprocess.run([SCRIPT, "--help"], capture_output=True, text=True, check=True)
    version = subprocess.run([SCRIPT, "--version"], capture_output=True, text=True, check=True)

    assert all(f"  {command} " in help_.stdout for command in COMMANDS)
    assert version.stdout.startswith("fairturn 0.")


def test_help_answers_in_under_250_ms() -> None:
    def worked_s() -> float:
        """CPU seconds, because other tests may keep the machine busy."""
        process = os.posix_spawn(SCRIPT, [str(SCRIPT), "--help"], os.environ, file_actions=_SILENT)
        _, code, used = os.wait4(process, 0)
        assert code == 0
        return used.ru_utime + used.ru_stime

    assert min(worked_s() for _ in range(7)) < 0.25


def test_help_loads_neither_tables_nor_a_database() -> None:
    program = """
import sys
from click.testing import CliRunner
from fairturn.cli import main
assert CliRunner().invoke(main, ["--help"]).exit_code == 0
strange = ("rich", "apsw", "tomllib", "fairturn.simulator", "fairturn.model")
print([name for name in strange if name in sys.modules])
"""

    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert printed.stdout.strip() == "[]"


def test_the_help_lists_each_command_with_the_first_sentence_of_its_own() -> None:
    printed = fairturn("--help").stdout

    for commands in SECTIONS.values():
        for name, sentence in commands.items():
            command: click.Command = import_module(f"fairturn.cli.{name}").command
            assert command.name == name
            assert command.get_short_help_str(limit=1_000).rstrip(".") == sentence.rstrip(".")
            assert f"  {name} " in printed
            assert sentence in printed


def all_commands() -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for name in COMMANDS:
        command = import_module(f"fairturn.cli.{name}").command
        found.append((name,))
        if isinstance(command, click.Group):
            found += [(name, inner) for inner in command.commands]
    return found


@pytest.mark.parametrize("command", all_commands(), ids=" ".join)
def test_every_command_has_an_example_in_its_help(command: tuple[str, ...]) -> None:
    printed = fairturn(*command, "--help").stdout

    examples = [line for line in printed.splitlines() if line.strip().startswith("fairturn ")]
    assert any(" ".join(("fairturn", *command)) in line for line in examples)
    assert all(len(line) <= 80 for line in printed.splitlines())


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", ["--help", "rule", "rule --documents 9999", "replay --json"])
def test_a_full_disk_behind_standard_output_ends_with_75_and_one_line(
    arguments: str, unbuffered: str
) -> None:
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run(
            [SCRIPT, *arguments.split()],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            check=False,
        )

    said = "Error: standard output cannot be written: No space left on device\n"
    assert (ended.returncode, ended.stderr) == (75, said)


def test_a_misspelled_command_is_answered_with_the_one_that_was_meant() -> None:
    assert fairturn("sumbit").stderr.endswith("no command 'sumbit'; did you mean submit?\n")
    assert fairturn("xyz").stderr.endswith("no command 'xyz'\n")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_its_script_for_completion(shell: str) -> None:
    printed = fairturn("completion", shell).stdout

    assert f"_FAIRTURN_COMPLETE={shell}_complete" in printed


def test_commands_and_options_are_completed() -> None:
    def completed(*words: str) -> list[str]:
        printed = subprocess.run(
            [SCRIPT],
            env={
                **os.environ,
                "_FAIRTURN_COMPLETE": "bash_complete",
                "COMP_WORDS": " ".join(["fairturn", *words]),
                "COMP_CWORD": str(len(words)),
            },
            capture_output=True,
            text=True,
            check=True,
        )
        return [line.removeprefix("plain,") for line in printed.stdout.splitlines()]

    assert completed("can") == ["cancel"]
    assert completed("list", "--state", "wai") == ["waiting"]
    assert "--submitted-from" in completed("list", "--sub")


def test_a_key_press_of_ctrl_c_ends_with_130_and_one_line(tmp_path: Path) -> None:
    database = tmp_path / "documents.db"
    with Queue(database) as queue:
        id = queue.submit("acme").id
    with subprocess.Popen(
        [SCRIPT, "submit", "-d", database, "--ndjson", "-", "--json"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(b'{"customer":"acme"}\n')
        process.stdin.flush()
        process.stdout.readline()  # now it waits for more
        process.send_signal(signal.SIGINT)
        said = process.stderr.read().decode()

    assert process.returncode == 130
    assert len(said.splitlines()) == 1
    assert "the 1 document before it is stored" in said
    with Queue(database) as queue:
        assert len(queue.list().documents) == 2
        assert queue.get(id).state == "waiting"


@pytest.mark.parametrize(
    "arguments",
    [
        ["plead"],
        ["rule", "--bounds", "-2,-4"],
        ["rule", "--bounds", "a,b"],
        ["rule", "--bounds", "-2,-4,-6,-8,-10,-12,-14,-14"],
        ["rule", "--reset", "never"],
        ["rule", "--reset-interval", "0"],
        ["rule", "--reset-interval", "-1"],
        ["rule", "--reset-interval", "soon"],
        ["rule", "--reset-interval", "nan"],
        ["rule", "--reset-interval", "inf"],
        ["rule", "--documents", "0"],
        ["rule", "--documents", "3", "--every", "-1"],
        ["rule", "--every", "60"],
        ["replay", "absent.csv"],
        ["replay", "--bounds", "-2,-4"],
        ["replay", "--mode", "random"],
        ["replay", "--workers", "0"],
        ["replay", "--workers", "many"],
        ["replay", "--patience", "-1"],
        ["replay", "--costs", "guessed"],
        ["replay", "one.csv", "two.csv"],
    ],
    ids=" ".join,
)
def test_wrong_use_ends_with_2_and_one_error_on_standard_error(arguments: list[str]) -> None:
    result = fairturn(*arguments)

    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.splitlines()[-1].startswith("Error: ")


# ── The rule ─────────────────────────────────────────────────────────────────────────────────────


def test_the_rule_is_printed_as_the_texts_lay_it_out() -> None:
    lines = fairturn("rule").stdout.splitlines()

    assert any(line.startswith("Pending documents count: ") for line in lines)
    assert any(line.startswith("Reset interval: 1500 seconds (25 minutes).") for line in lines)
    assert [line.strip() for line in lines if "Priority " in line][-9:] == [
        "Priority 9: pending documents count less than -20",
        "Priority 8: pending documents count less than -14",
        "Priority 7: pending documents count less than -12",
        "Priority 6: pending documents count less than -10",
        "Priority 5: pending documents count less than -8",
        "Priority 4: pending documents count less than -6",
        "Priority 3: pending documents count less than -4",
        "Priority 2: pending documents count less than -2",
        "Priority 1: pending documents count greater than or equal to -2",
    ]


def test_the_rule_is_printed_from_the_settings_given() -> None:
    bounds = "-1,-2,-3,-4,-5,-6,-7,-80"

    printed = fairturn(
        "rule", "--bounds", bounds, "--reset", "periodic", "--reset-interval", "90.5"
    ).stdout

    assert "Priority 9: pending documents count less than -80" in printed
    assert "Priority 1: pending documents count greater than or equal to -1" in printed
    assert "Reset interval: 90.5 seconds" in printed
    assert "reset" in printed.split("90.5")[1]


def test_the_rule_is_printed_from_the_settings_of_a_queue(tmp_path: Path) -> None:
    database = tmp_path / "documents.db"
    Queue(database, reset_interval_s=10, bounds=range(-5, -13, -1)).close()

    printed = fairturn("rule", "--database", str(database)).stdout
    as_json = lines_of(fairturn("rule", "--database", str(database), "--json"))

    assert "Reset interval: 10 seconds." in printed
    assert "Priority 9: pending documents count less than -12" in printed
    assert as_json[0]["bounds"] == list(range(-5, -13, -1))


def test_asking_for_the_rule_makes_and_changes_no_database(tmp_path: Path) -> None:
    empty, letter = tmp_path / "empty.db", tmp_path / "letter.txt"
    empty.touch()
    letter.write_text("Dear Sir or Madam, this is a letter")

    of_empty = fairturn("rule", "--database", str(empty))
    of_letter = fairturn("rule", "--database", str(letter))
    of_none = fairturn("rule", "--database", str(tmp_path / "absent.db"))

    assert (of_empty.exit_code, of_letter.exit_code, of_none.exit_code) == (3, 1, 3)
    assert "is not a database" in of_letter.stderr
    assert {path.name: path.stat().st_size for path in tmp_path.iterdir()} == {
        "empty.db": 0,
        "letter.txt": 35,
    }


def test_a_queue_and_other_settings_are_not_asked_for_together(tmp_path: Path) -> None:
    database = tmp_path / "documents.db"
    Queue(database).close()

    result = fairturn("rule", "--database", str(database), "--reset", "periodic")

    assert result.exit_code == 2
    assert "leave out --reset" in result.stderr


def test_the_rule_for_programs() -> None:
    (rule,) = lines_of(fairturn("rule", "--json"))

    assert rule == {
        "reset": "idle",
        "reset_interval_s": 1500.0,
        "bounds": list(BOUNDS),
        "priorities": [
            *(
                {"priority": priority, "count_less_than": bound}
                for priority, bound in zip(range(9, 1, -1), reversed(BOUNDS), strict=True)
            ),
            {"priority": 1, "count_at_least": -2},
        ],
    }


def test_documents_a_minute_apart_each_have_a_count_and_a_priority() -> None:
    result = fairturn("rule", "--documents", "30", "--every", "60", "--json")

    lines = lines_of(result)
    assert result.stdout.startswith('{"document":1,"at_s":0.0,"count":0,"priority":1}\n')
    assert [line["count"] for line in lines] == list(range(0, -30, -1))
    assert [line["at_s"] for line in lines] == [60.0 * n for n in range(30)]
    assert [line["priority"] for line in lines] == (
        [1] * 3 + [2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7] + [8] * 6 + [9] * 9
    )


def test_a_burst_is_documents_with_nothing_between_them() -> None:
    lines = lines_of(fairturn("rule", "--documents", "22", "--json"))

    assert {line["at_s"] for line in lines} == {0.0}
    assert lines[-1] == {"document": 22, "at_s": 0.0, "count": -21, "priority": 9}


@pytest.mark.parametrize(("every", "counts"), [("1500", [0, -1, -2]), ("1500.000001", [0, 0, 0])])
def test_the_interval_must_be_exceeded_to_the_microsecond(every: str, counts: list[int]) -> None:
    lines = lines_of(fairturn("rule", "--documents", "3", "--every", every, "--json"))

    assert [line["count"] for line in lines] == counts


def test_the_two_readings_of_the_reset_differ_for_a_busy_customer() -> None:
    arguments = ["rule", "--documents", "4", "--every", "800", "--json"]

    idle = lines_of(fairturn(*arguments, "--reset", "idle"))
    periodic = lines_of(fairturn(*arguments, "--reset", "periodic"))

    assert [line["count"] for line in idle] == [0, -1, -2, -3]
    assert [line["count"] for line in periodic] == [0, -1, 0, -1]


def test_documents_are_a_table_for_people() -> None:
    printed = fairturn("rule", "--documents", "4", "--every", "60").stdout.splitlines()

    assert printed[0].split() == [
        "document",
        "after",
        "(s)",
        "pending",
        "documents",
        "count",
        "priority",
    ]
    assert printed[-1].split() == ["4", "180", "-3", "2"]


# ── Replaying, for programs ──────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("answers", ORDER, ids=lambda path: path.stem)
def test_replay_prints_the_lines_of_the_vectors(answers: Path) -> None:
    trace, mode, workers = answers.stem.split(".")
    arguments = ["--mode", mode, "--workers", workers.removeprefix("workers"), "--json"]

    result = fairturn("replay", str(VECTORS / "order" / f"{trace}.csv"), *arguments)

    assert result.exit_code == 0
    assert result.stdout.splitlines() == answers.read_text("utf-8").splitlines()


def test_the_installed_program_prints_the_lines_of_the_vectors_byte_for_byte() -> None:
    expected = (VECTORS / "order" / "dump.fair.workers2.jsonl").read_bytes()

    printed = subprocess.run(
        [SCRIPT, "replay", VECTORS / "order" / "dump.csv", "--workers", "2", "--json"],
        capture_output=True,
        check=True,
    )

    assert printed.stdout.rstrip() == expected.rstrip()
    assert printed.stderr == b""


def test_a_trace_can_come_from_standard_input() -> None:
    trace = HEADER + "0,a,1\n0,a,1.5\n"

    result = fairturn("replay", "-", "--json", stdin=trace)

    assert result.stdout == (
        '{"n":0,"customer":"a","at_s":0.0,"count":0,"priority":1'
        ',"started_at_s":0.0,"finished_at_s":1.0}\n'
        '{"n":1,"customer":"a","at_s":0.0,"count":-1,"priority":1'
        ',"started_at_s":1.0,"finished_at_s":2.5}\n'
    )


def test_a_trace_without_documents_prints_no_lines() -> None:
    assert fairturn("replay", "-", "--json", stdin=HEADER).stdout == ""
    assert "no documents" in fairturn("replay", "-", stdin=HEADER).stdout


@given(
    at=st.lists(st.integers(0, 4_000_000_000_000_000), min_size=1, max_size=5).map(sorted),
    name=st.text(
        st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), min_size=1, max_size=20
    ),
)
def test_names_and_moments_come_back_as_they_were_in_the_trace(at: list[int], name: str) -> None:
    trace = StringIO(newline="")
    writer = csv.writer(trace)
    writer.writerow(["at_s", "customer", "cost_s"])
    writer.writerows([f"{us // 1_000_000}.{us % 1_000_000:06}", name, "0"] for us in at)

    lines = lines_of(fairturn("replay", "-", "--json", stdin=trace.getvalue().encode()))

    assert [line["customer"] for line in lines] == [name] * len(at)
    assert [line["at_s"] for line in lines] == [us / 1_000_000 for us in at]


def test_more_lines_than_are_printed_at_once_are_all_there() -> None:
    trace = HEADER + "".join(f"{n},c{n % 7},0.5\n" for n in range(20_001))

    lines = lines_of(fairturn("replay", "-", "--json", stdin=trace))

    assert [line["n"] for line in lines] == list(range(20_001))
    assert all(line["at_s"] == float(str(line["n"])) for line in lines)


def test_the_options_of_replay_reach_the_rule_and_the_order() -> None:
    trace = "at_s,customer,cost_s,weight\n" + "".join(f"{800 * n},a,900,\n" for n in range(4))

    def column(name: str, *options: str) -> list[object]:
        return [
            line[name]
            for line in lines_of(fairturn("replay", "-", "--json", *options, stdin=trace))
        ]

    assert column("count") == [0, -1, -2, -3]
    assert column("count", "--reset", "periodic") == [0, -1, 0, -1]
    assert column("count", "--reset-interval", "799.5") == [0, 0, 0, 0]
    assert column("priority") == [1, 1, 1, 2]
    assert column("priority", "--bounds", "0,-1,-2,-3,-4,-5,-6,-7") == [1, 2, 3, 4]
    assert column("started_at_s") == [0.0, 900.0, 1800.0, 2700.0]
    assert column("started_at_s", "--workers", "2") == [0.0, 800.0, 1600.0, 2400.0]


@pytest.mark.parametrize(
    ("options", "kinds", "message"),
    [
        (["--workers", "0"], "", "workers is 0; it must be at least 1"),
        (
            ["--workers", "0", "--workers-for", "ocr=1"],
            "ocr text",
            "no worker serves kind 'text'; add workers for it, or workers that serve all kinds; "
            "see --workers-for",
        ),
        (
            ["--workers-for", "scan=1"],
            "ocr text",
            "no document is of kind 'scan'; kinds of the trace: ocr, text; see --workers-for",
        ),
    ],
)
def test_a_replay_without_a_worker_for_each_kind_is_wrong_use(
    options: list[str], kinds: str, message: str
) -> None:
    trace = HEADER + "0,a,1\n"
    if kinds:
        rows = "".join(f"0,a,1,{kind}\n" for kind in kinds.split())
        trace = "at_s,customer,cost_s,kind\n" + rows

    result = fairturn("replay", "-", *options, stdin=trace)

    assert error_of(result, 2) == message


def test_costs_and_patience_change_who_is_next() -> None:
    heavy = "".join(f"0,heavy,{cost}\n" for cost in [10] * 12)
    light = "".join("0,light,1\n" for _ in range(12))

    def order(*options: str) -> list[object]:
        result = fairturn(
            "replay", "-", "--json", "--mode", "equal", *options, stdin=HEADER + heavy + light
        )
        lines = sorted(lines_of(result), key=lambda line: float(str(line["started_at_s"])))
        return [line["customer"] for line in lines]

    equal = order("--costs", "equal", "--patience", "100000")

    assert order("--costs", "known", "--patience", "100000")[:12].count("heavy") == 2
    assert order("--costs", "learned", "--patience", "100000") != equal
    assert equal[:12].count("heavy") == 6
    assert order("--costs", "known", "--patience", "0") != order(
        "--costs", "known", "--patience", "100000"
    )


# ── Replaying, for people ────────────────────────────────────────────────────────────────────────


def test_without_a_file_the_example_shows_what_turns_do_for_quiet_customers() -> None:
    printed = fairturn("replay").stdout

    assert printed.startswith("Without FILE, this is the built-in example")
    rows = [line.split() for line in printed.splitlines()]
    quiet = [row for row in rows if len(row) == 6 and row[1].isdigit() and 3 < int(row[1]) < 300]
    (dump,) = [row for row in rows if len(row) == 6 and row[1] == "300"]
    assert len(quiet) == 4
    for _, _, levels_p50, levels_max, fair_p50, fair_max in quiet:
        assert float(levels_p50) > 20 * float(fair_p50)
        assert float(levels_max) > 10 * float(fair_max)
    assert float(dump[5]) < 2 * float(dump[3])
    assert len(printed.splitlines()) <= 24, "it should fit into one screen"


def test_the_example_is_a_trace_like_any_other() -> None:
    lines = lines_of(fairturn("replay", "--json"))
    tables = fairturn("replay", "--mode", "levels").stdout

    assert 400 < len(lines) < 700
    assert "mode levels" in tables


def test_a_trace_is_summed_up_for_each_customer(tmp_path: Path) -> None:
    trace = trace_in(tmp_path, HEADER + "0,acme,10\n" * 4 + "0,bolt,1\n")

    printed = fairturn("replay", trace, "--mode", "levels").stdout

    rows = [line.split() for line in printed.splitlines()]
    assert "5 documents of 2 customers, mode levels, 1 worker." in printed
    assert ["acme", "4", "1", "to", "2", "10.0", "31.0", "31.0"] in rows
    assert ["bolt", "1", "1", "30.0", "30.0", "30.0"] in rows
    assert ["all", "5", "1", "to", "2", "20.0", "31.0", "31.0"] in rows
    assert ["acme", "3", "0.0", "-3", "2", "31.0", "41.0"] in rows


def test_long_traces_show_the_largest_customers_and_the_first_and_last_documents() -> None:
    trace = HEADER + "".join(f"{n},c{n % 30},0.5\n" for n in range(1_000))

    printed = fairturn("replay", "-", stdin=trace).stdout

    assert "and 10 more" in printed
    assert len(printed.splitlines()) < 50
    assert printed.splitlines()[-1].split()[:2] == ["c9", "999"]


@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_tables_fit_the_terminal_and_cut_no_number(
    columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    trace = HEADER + f"0,{'n' * 100},1\n" * 5

    printed = fairturn("replay", "-", stdin=trace).stdout

    rows = [line for line in printed.splitlines() if line.startswith("nnn")]
    assert all(len(line) <= max(int(columns), 62) for line in printed.splitlines())
    assert len(rows) == 6
    assert rows[-1].split()[-2:] == ["4.0", "5.0"]


def test_no_heading_is_broken_inside_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")

    printed = fairturn("replay", "-", stdin=HEADER + "0,acme,1\n").stdout

    words = printed.split()
    assert all(word in words for word in ("documents", "priorities", "priority", "finished"))


def test_a_name_cannot_steer_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    name = "\x1b]52;c;ZXZpbA==\x07\x9b31m\u202e[bold]"

    printed = fairturn("replay", "-", stdin=f"{HEADER}0,{name},1\n".encode()).stdout

    assert not any(ord(c) < 32 and c != "\n" for c in printed)
    assert not any(c in printed for c in "\x9b\u202e")
    assert "[bold]" in printed


def test_no_color_prints_no_colour_even_to_a_terminal() -> None:
    printed = shown_on_a_terminal("stdout", "replay", NO_COLOR="1")

    assert "Megastore" in printed
    assert "\x1b[" not in printed  # neither colours nor bold and dim


# ── Faults ───────────────────────────────────────────────────────────────────────────────────────

BAD = {
    "wrong column": ("at_s,client,cost_s\n0,a,1\n", 1),
    "no header": ("0,a,1\n", 1),
    "negative time": (HEADER + "-1,a,1\n", 2),
    "time that goes back": (HEADER + "2,a,1\n1,a,1\n", 3),
    "no number": (HEADER + "0,a,1\n0,a,x\n", 3),
    "work without an end": (HEADER + "0,a,4000000000\n" * 3_000, 2_307),
}


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["table", "json"])
@pytest.mark.parametrize(("text", "line"), BAD.values(), ids=BAD.keys())
def test_a_trace_with_an_error_is_refused_with_file_and_line_and_prints_nothing(
    tmp_path: Path, text: str, line: int, options: list[str]
) -> None:
    trace = trace_in(tmp_path, text)

    result = fairturn("replay", trace, *options)

    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"Error: {trace}, line {line}: ")
    assert len(result.stderr.splitlines()) == 1


def test_an_error_on_standard_input_has_a_line_too() -> None:
    result = fairturn("replay", "-", stdin=HEADER + "0,a,oops\n")

    assert result.exit_code == 2
    assert result.stderr.startswith("Error: standard input, line 2: ")


def test_an_error_cannot_steer_the_terminal(tmp_path: Path) -> None:
    result = fairturn("replay", str(tmp_path / "\x1b[2J\r.csv"))

    assert result.exit_code == 2
    assert "\\x1b[2J\\r.csv: cannot be read" in result.stderr
    assert "\x1b" not in result.stderr


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["table", "json"])
def test_a_pipe_that_closes_early_is_no_noise(tmp_path: Path, options: list[str]) -> None:
    trace = trace_in(tmp_path, HEADER + "".join(f"{n},c{n},0\n" for n in range(30_000)))
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = subprocess.run(
            [SCRIPT, "replay", trace, *options], stdout=writer, stderr=subprocess.PIPE, check=False
        )
    finally:
        os.close(writer)

    assert ended.stderr == b""
    assert ended.returncode == 1


def test_progress_is_shown_on_a_terminal_and_only_there(tmp_path: Path) -> None:
    trace = trace_in(tmp_path, HEADER + "".join(f"{n},c{n % 9},0\n" for n in range(60_000)))

    progress = shown_on_a_terminal("stderr", "replay", trace, "--json")
    without = fairturn("replay", trace, "--json")

    assert "Replaying" in progress
    assert without.stderr == ""
    assert without.stdout.count("\n") == 60_000


# ── Waits ────────────────────────────────────────────────────────────────────────────────────────


@given(st.lists(st.integers(0, 1_000), min_size=1, max_size=300))
def test_a_percentile_is_the_smallest_wait_that_so_many_do_not_exceed(waits: list[int]) -> None:
    trace, replayed = Trace(), Replayed(len(waits))
    trace.names.append("acme")
    for n, wait in enumerate(waits):
        trace.at.append(7)
        trace.customer.append(0)
        replayed.started_at[n] = 7 + wait
        replayed.priority[n] = 1 + n % 9

    found = waits_in_all(trace, replayed)

    for percent, value in ((50, found.p50_us), (99, found.p99_us), (100, found.max_us)):
        assert value in waits
        assert sum(wait <= value for wait in waits) * 100 >= percent * len(waits)
        assert sum(wait < value for wait in waits) * 100 < percent * len(waits)
    assert waits_by_customer(trace, replayed) == {"acme": found}
    assert (found.best_priority, found.worst_priority) == (1, min(9, len(waits)))
