"""`make test-long` resumes: a test that has passed is skipped until the sources change."""

import json
from pathlib import Path

import pytest

from tests import long_run


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "state.json"
    monkeypatch.setattr(long_run, "STATE", path)
    return path


def test_a_test_that_passed_with_these_sources_is_left_out(state: Path) -> None:
    state.write_text(json.dumps({"version": "1", "passed": ["tests/test_a.py::test_b"]}))

    assert long_run.passed_before("1") == {"tests/test_a.py::test_b"}


@pytest.mark.parametrize("content", ['{"version": "1", "passed": ["a::b"]}', "{", None])
def test_a_state_of_other_sources_or_none_leaves_no_test_out(
    state: Path, content: str | None
) -> None:
    if content is not None:
        state.write_text(content)

    assert long_run.passed_before("2") == set()


def test_another_source_is_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_run, "ROOT", tmp_path)
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.py").write_text("1")
    first = long_run.version()
    (tmp_path / "src" / "a.py").write_text("2")

    assert long_run.version() != first
