"""The claims of README.md and docs/ that a program can check."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fairturn import Completed, Queue, Submission
from fairturn.clock import SECOND_US, ManualClock
from fairturn.explain.sentences import tell
from fairturn.model import SETTING_NAMES, Settings
from fairturn.priority import Rule
from fairturn.validation.filters import FILTERS
from fairturn.wire import DOCUMENT, SUBMISSION
from tests.commands import SCRIPT

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON_PAGE = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
DOCUMENTS_PAGE = (ROOT / "docs" / "documents.md").read_text(encoding="utf-8")


def programs_in(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page, re.DOTALL)


def run(program: str, folder: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def test_the_program_on_the_first_screen_runs_as_written_and_prints_what_it_says(
    tmp_path: Path,
) -> None:
    first_screen = "\n".join(README.splitlines()[:40])
    (program,) = programs_in(first_screen)
    script = tmp_path / "program.py"
    script.write_text(program)

    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=True
    )

    assert done.stdout.splitlines() == ["0 1", "1 {'pages': 3}"]


def test_the_commands_of_the_readme_run_one_after_the_other_in_the_folder_of_its_program(
    tmp_path: Path,
) -> None:
    """All except long-running ones, in an otherwise empty folder."""
    first, *_ = programs_in(README)
    (tmp_path / "program.py").write_text(first)
    blocks = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    sessions = [b for b in blocks if "make run" not in b and "fairturn up" not in b]
    assert len(sessions) == len(blocks) - 2 == 2
    path = os.pathsep.join([str(SCRIPT.parent), os.environ["PATH"]])

    done = subprocess.run(
        ["bash", "-e", "-c", "\n".join(["python program.py", *sessions])],
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert '{"bytes": 11}\n' in done.stdout
    acme = re.findall(r"^acme +50 .* ([\d,.]+)$", done.stdout, re.MULTILINE)
    assert acme == ["1,880.0", "20.0"]


def test_the_programs_of_the_python_page_run_one_after_the_other(tmp_path: Path) -> None:
    assert run("\n".join(programs_in(PYTHON_PAGE)), tmp_path) == []


def test_the_explanation_on_the_first_page_is_what_a_queue_in_that_state_says() -> None:
    shown = README.partition("## Why a document waits")[2].partition("```text\n")[2]
    clock = ManualClock(1_700_000_000 * SECOND_US)
    with Queue(":memory:", clock=clock) as queue:
        dump = queue.submit_many(Submission(customer="bulk") for _ in range(100))
        for _ in range(5):
            claims = queue.store.claim(4, worker="w", lease_us=60 * SECOND_US).claims
            clock.advance(2)
            queue.store.finish([Completed(claimed.fence) for claimed in claims])
        queue.submit_many(Submission(customer=c) for c in ["acme", "beta"] * 2 + ["acme"] * 22)
        queue.store.claim(4, worker="w", lease_us=60 * SECOND_US)
        clock.advance(1)

        _, *sentences = tell(queue.explain(dump[49].id, "customer"))

    assert shown.partition("```")[0].splitlines()[1:] == sentences


@pytest.mark.parametrize("name", ["celery.md", "integrations.md"])
def test_the_programs_of_the_pages_about_other_systems_run(name: str, tmp_path: Path) -> None:
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    given = """
from celery import Celery
app = Celery(broker="redis://localhost")
"""

    for program in programs_in(page):
        if "prometheus_client" not in program:  # not one of our dependencies
            assert run(given + program, tmp_path) == []


def test_the_table_of_thresholds_is_the_rule() -> None:
    rows = [line.strip("|").split("|") for line in README.splitlines() if line.startswith("| ")]
    ((_, *counts),) = [row for row in rows if row[0].strip() == "pending documents count"]
    rule = Rule()

    for priority, cell in enumerate(counts, start=1):
        for count in map(int, re.findall(r"-?\d+", cell.replace("below -20", "-21"))):
            assert rule.priority(count) == priority


def rows_of(title: str) -> list[list[str]]:
    """Return the rows of the first table below a heading of docs/documents.md, as cells."""
    section = DOCUMENTS_PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    first, *_ = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in first.splitlines()[2:]]


def test_every_field_of_a_submission_stands_in_the_page_of_documents_with_its_option() -> None:
    rows = {field: option for field, option, _ in rows_of("Submission")}

    assert list(rows) == [f"`{field.name}`" for field in SUBMISSION]
    for field in SUBMISSION:
        option = f"--{(field.option or field.name).replace('_', '-')}"
        assert rows[f"`{field.name}`"].startswith(f"`{option}"), field.name


def test_every_field_of_a_document_stands_in_its_page_and_those_of_the_csv_are_marked() -> None:
    names = ", ".join(name for name, _ in rows_of("Fields"))

    assert set(re.findall(r"`(\w+)`", names)) == {field.name for field in DOCUMENT}
    assert set(re.findall(r"`(\w+)`\\\*", names)) == {f.name for f in DOCUMENT if f.in_csv}


def test_every_filter_stands_in_the_page_of_documents_with_its_names() -> None:
    named = [[cell.strip("`") for cell in row[:4]] for row in rows_of("Filters")]

    assert named == [
        [
            each.name,
            f"--{each.parameter.replace('_', '-')}" if each.is_option else "",
            each.parameter,
            each.on_page,
        ]
        for each in FILTERS
    ]


@pytest.mark.parametrize("name", SETTING_NAMES)
def test_every_setting_stands_in_the_python_page_with_its_default(name: str) -> None:
    (row,) = [
        line for line in PYTHON_PAGE.splitlines() if line.startswith("|") and f"`{name}`" in line
    ]

    default = getattr(Settings(), name)

    if isinstance(default, str):
        assert f'`"{default}"`' in row
    elif isinstance(default, int):
        assert f"{default:,}" in row
    elif name.endswith("_kept_s"):
        assert f"{default / 86_400:g}" in row
    elif isinstance(default, float):
        assert f"{default:g}" in row
    else:
        assert ", ".join(map(str, default)) in row
