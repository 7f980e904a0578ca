"""`make audit` and `make sbom`: which packages they cover, and what they make of a report."""

from typing import Any

import pytest

from tests.supply_chain import runtime_lock, verdict_of


def test_the_bill_of_materials_has_what_users_run_and_nothing_else() -> None:
    locked = runtime_lock()

    for needed in ("apsw", "click", "rich", "psycopg", "psycopg-binary", "fastapi", "starlette"):
        assert needed in locked
    for extra in ("redis", "celery", "dramatiq", "taskiq", "httpx", "boto3", "opentelemetry-api"):
        assert extra in locked
    for tool in ("pytest", "hypothesis", "mypy", "ruff", "schemathesis", "moto", "playwright"):
        assert tool not in locked
    assert all("--hash=sha256:" in entry for entry in locked.values())


def test_a_vulnerable_package_fails_the_audit_and_is_named() -> None:
    report: list[dict[str, Any]] = [
        {"name": "good", "version": "1", "vulns": []},
        {"name": "bad", "version": "2", "vulns": [{"id": "CVE-1", "fix_versions": ["3"]}]},
        {"name": "unknown", "skip_reason": "not found"},
    ]

    lines, code = verdict_of(report)

    assert code == 1
    assert lines == [
        "bad 2: CVE-1, fixed in 3",
        "Audited 2 of 3 packages.",
        "NOT AUDITED: unknown",
    ]
    assert verdict_of(report[:1]) == (["Audited 1 of 1 packages."], 0)


@pytest.mark.parametrize(("required", "code"), [("", 0), ("1", 1)])
def test_an_audit_without_advisories_is_loud_and_no_success(
    monkeypatch: pytest.MonkeyPatch, required: str, code: int
) -> None:
    monkeypatch.setenv("FAIRTURN_REQUIRE_SERVICES", required)

    lines, found = verdict_of([{"name": "a", "skip_reason": "not found"}])

    assert found == code
    assert lines[0].startswith("SKIPPED: the dependencies were not audited")
