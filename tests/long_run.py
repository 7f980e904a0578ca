"""`make test-long`: the tests marked `long`, resumable, at most 60 minutes.

A state file under build/ lists the tests that passed with the present commit and sources; the next
run skips those. `--fresh` runs all of them again; other arguments go to pytest. This module is also
the pytest plugin that writes the state file, test by test, so that an interrupted run counts.
"""

import hashlib
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
LIMIT_S = 60 * 60
STATE = ROOT / "build" / "test-long.json"
ARGUMENTS = ROOT / "build" / "test-long.args"
_PYTEST = [sys.executable, "-m", "pytest", "-m", "long"]
_SOURCES = ("src", "tests")


# ── The command ──────────────────────────────────────────────────────────────────────────────────


def main(arguments: list[str]) -> int:
    """Run the long tests that have not passed yet and return the exit code."""
    given = [each for each in arguments if each != "--fresh"]
    key = version()
    passed = set() if "--fresh" in arguments else passed_before(key)
    STATE.parent.mkdir(exist_ok=True)
    STATE.write_text(json.dumps({"version": key, "passed": sorted(passed)}))
    wanted = _collect(given)
    left = [test for test in wanted if test not in passed]
    _print(f"{len(wanted)} long tests, {len(wanted) - len(left)} of them passed before.")
    if not left:
        return 0
    ARGUMENTS.write_text("\n".join(left))
    command = [
        *_PYTEST,
        "-p",
        "tests.long_run",
        "-n",
        "auto",
        "--dist",
        "worksteal",
        *_options(given),
    ]
    with subprocess.Popen([*command, f"@{ARGUMENTS}"], cwd=ROOT) as run:
        try:
            return run.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            run.send_signal(signal.SIGINT)
            _print(f"stopped after {LIMIT_S // 60} minutes; run make test-long to resume.")
            return 1
        except KeyboardInterrupt:
            run.wait()
            _print("interrupted; run make test-long to resume.")
            return 130


def version() -> str:
    """Return the commit and a hash of the present sources and tests."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    digest = hashlib.sha256()
    for folder in _SOURCES:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(f"{path.relative_to(ROOT)}\0".encode())
                digest.update(hashlib.sha256(path.read_bytes()).digest())
    return f"{commit.stdout.strip() or 'no commit'} {digest.hexdigest()}"


def passed_before(key: str) -> set[str]:
    """Return the tests that passed with this version."""
    try:
        state = json.loads(STATE.read_text())
    except (FileNotFoundError, ValueError):
        return set()
    return set(state["passed"]) if state["version"] == key else set()


def _collect(given: list[str]) -> list[str]:
    listed = subprocess.run(
        [*_PYTEST, "--collect-only", "-q", "-p", "no:xdist", *given],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    tests = [line for line in listed.stdout.splitlines() if "::" in line]
    if not tests:
        raise SystemExit(listed.stdout + listed.stderr)
    return tests


def _options(given: list[str]) -> list[str]:
    """Return the options without files and tests: the remaining tests are named one by one."""
    return [each for each in given if not each.startswith("tests")]


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


# ── The plugin ───────────────────────────────────────────────────────────────────────────────────


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # only in the process that receives all reports
        config.pluginmanager.register(_StateFile(), "long-run-state")


class _StateFile:
    """Adds each test that has passed, its teardown included, to the state file."""

    def __init__(self) -> None:
        self._state: dict[str, Any] = json.loads(STATE.read_text())
        self._called: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self._called.add(report.nodeid)
        elif report.when == "teardown" and report.passed and report.nodeid in self._called:
            self._state["passed"].append(report.nodeid)
            written = STATE.with_suffix(".part")
            written.write_text(json.dumps(self._state))
            written.replace(STATE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
