"""docs/rule.md: the code and the tests that it names exist, and its commands print its table."""

import os
import pkgutil
import re
import subprocess
from pathlib import Path

import pytest

import fairturn
from tests.commands import SCRIPT
from tests.test_readme import ROOT, programs_in, run

PAGE = (ROOT / "docs" / "rule.md").read_text(encoding="utf-8")
STATEMENTS = re.split(r"^\d+\. (?=\*\*)", PAGE, flags=re.MULTILINE)[1:]
PACKAGE = Path(fairturn.__file__).parent
SUITES = [*(ROOT / "tests").glob("test_*.py"), *(PACKAGE / "stores" / "conformance").glob("*.py")]

(COMMANDS,) = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
WORKLOADS = re.findall(r"for workload in ([^;]+);", COMMANDS)[0].split()


def named(what: str, text: str = PAGE) -> list[str]:
    """Return the names in the bullets `- Code: …` or `- Tests: …`, each once."""
    bullets = re.findall(rf"- {what}: ((?:`[^`]+`,?\s*)+)", text)
    return sorted(set(re.findall(r"`([^`]+)`", " ".join(bullets))))


def test_every_statement_names_its_code_and_its_tests() -> None:
    assert len(STATEMENTS) == 11
    for statement in STATEMENTS:
        assert named("Code", statement), statement
        assert named("Tests", statement), statement


@pytest.mark.parametrize("name", named("Code"))
def test_the_code_that_the_page_names_exists(name: str) -> None:
    if "/" in name:
        assert (PACKAGE / name).is_file()
    else:
        pkgutil.resolve_name(f"fairturn.{name}")


def test_the_tests_that_the_page_names_exist() -> None:
    sources = "\n".join(path.read_text(encoding="utf-8") for path in SUITES)

    missing = set(named("Tests")) - set(re.findall(r"def (test_\w+)\(", sources))

    assert not missing


def test_the_program_of_the_page_runs(tmp_path: Path) -> None:
    (program,) = programs_in(PAGE)

    assert run(program, tmp_path) == []


@pytest.mark.parametrize(
    "workloads",
    [
        ["invoices.csv", "every-20-minutes"],  # all take 30 s
        pytest.param(WORKLOADS, marks=pytest.mark.long),
    ],
    ids=["two", "all"],
)
def test_the_commands_of_the_page_print_the_p99_of_its_table(
    tmp_path: Path, workloads: list[str]
) -> None:
    commands = COMMANDS.replace(" ".join(WORKLOADS), " ".join(workloads))
    path = os.pathsep.join([str(SCRIPT.parent), os.environ["PATH"]])

    done = subprocess.run(
        ["bash", "-e", "-c", commands],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )

    printed: dict[tuple[str, str], list[str]] = {}
    workload = ""
    for line in done.stdout.splitlines():
        p99s = re.findall(r" / (\d\S*)", line)
        if p99s:
            printed.setdefault((workload, line.split()[0]), []).extend(p99s)
        elif line.strip():
            workload = line.strip()
    table = PAGE.partition("| workload | group |")[2].partition("\n\n")[0].splitlines()[2:]
    assert len(table) == 10
    rows = [row.strip("| ").split(" | ") for row in table]
    assert {name for name, *_ in rows} == set(WORKLOADS)
    for name, group, *p99s in rows:
        if name in workloads:
            assert printed[name, group] == p99s, (name, group)
