"""`make audit` and `make sbom`: known vulnerabilities, and a bill of materials of the releases.

Both use tools in build/audit, which fairturn itself does not need.
"""

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any, NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
LOCK = ROOT / "requirements.txt"
TOOLS = ROOT / "build" / "audit" / "bin"
RUNTIME = ROOT / "build" / "audit" / "runtime.txt"
AUDIT_S_MAX = 600.0
_ENTRY = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==.*(?:\n[ \t]+--hash=.*)+", re.MULTILINE)


class Verdict(NamedTuple):
    """What an audit has found, and the exit code of the command."""

    lines: list[str]
    code: int


# ── Audit ────────────────────────────────────────────────────────────────────────────────────────


def audit() -> Verdict:
    """Compare every locked version with the published advisories."""
    command = ["--require-hashes", "--disable-pip", "--progress-spinner=off", "--format=json"]
    try:
        done = subprocess.run(
            [TOOLS / "pip-audit", *command, "-r", LOCK],
            capture_output=True,
            text=True,
            check=False,
            timeout=AUDIT_S_MAX,
        )
    except subprocess.TimeoutExpired:
        return _skipped(f"no answer within {AUDIT_S_MAX:.0f} s")
    try:
        report = json.loads(done.stdout)["dependencies"]
    except (ValueError, LookupError, TypeError):
        return _skipped((done.stderr.strip().splitlines() or ["no reason was given"])[-1])
    return verdict_of(report)


def verdict_of(report: Iterable[Mapping[str, Any]]) -> Verdict:
    """Return the verdict on a report of pip-audit. Packages without advisories are named, and an
    audit in which that is all of them counts as skipped."""
    packages = list(report)
    unknown = [each["name"] for each in packages if "skip_reason" in each]
    vulnerable = [
        f"{each['name']} {each['version']}: {one['id']}, fixed in "
        f"{', '.join(one.get('fix_versions') or ['no version yet'])}"
        for each in packages
        for one in each.get("vulns", ())
    ]
    if len(unknown) == len(packages):
        return _skipped(f"advisories were found for none of {len(packages)} packages")
    lines = [*vulnerable, f"Audited {len(packages) - len(unknown)} of {len(packages)} packages."]
    if unknown:
        lines.append(f"NOT AUDITED: {', '.join(unknown)}")
    return Verdict(lines, 1 if vulnerable else 0)


def _skipped(why: str) -> Verdict:
    """Return the verdict on an audit that did not take place: an error only where everything must
    be there, as in continuous integration."""
    required = bool(os.environ.get("FAIRTURN_REQUIRE_SERVICES"))
    return Verdict([f"SKIPPED: the dependencies were not audited: {why}"], 1 if required else 0)


# ── Bill of materials ────────────────────────────────────────────────────────────────────────────


def write_sbom() -> Verdict:
    """Write a CycloneDX document of the locked runtime dependencies into dist/."""
    RUNTIME.write_text("".join(f"{entry}\n" for entry in runtime_lock().values()))
    output = ROOT / "dist" / f"fairturn-{version('fairturn')}.cdx.json"
    options = ["--mc-type=library", "--output-reproducible", "--validate", "--of=JSON"]
    subprocess.run(
        [
            TOOLS / "cyclonedx-py",
            "requirements",
            *options,
            f"--pyproject={ROOT / 'pyproject.toml'}",
            f"--output-file={output}",
            RUNTIME,
        ],
        check=True,
        timeout=AUDIT_S_MAX,
        # Without a graph of dependencies, which a lock file does not have, it warns.
        env={**os.environ, "PYTHONWARNINGS": "ignore::UserWarning"},
    )
    components = json.loads(output.read_text())["components"]
    return Verdict([f"Wrote {output.relative_to(ROOT)}: {len(components)} components."], 0)


def runtime_lock() -> dict[str, str]:
    """Return the entries of requirements.txt, by name, that fairturn or one of its extras needs
    at run time."""
    locked = {canonicalize_name(m["name"]): m[0] for m in _ENTRY.finditer(LOCK.read_text())}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = sorted(set(project["optional-dependencies"]) - {"dev"})
    wanted = [Requirement(f"fairturn[{','.join(extras)}]")]
    seen: set[tuple[str, str]] = set()
    needed: set[str] = set()
    while wanted:
        requirement = wanted.pop()
        name = canonicalize_name(requirement.name)
        if name != "fairturn":
            needed.add(name)
        for extra in ("", *requirement.extras):
            if (name, extra) not in seen:
                seen.add((name, extra))
                wanted += _requirements(name, extra)
    return {name: entry for name, entry in locked.items() if name in needed}


def _requirements(name: str, extra: str) -> list[Requirement]:
    """Return what an installed package, or one of its extras, requires on this Python."""
    try:
        required = map(Requirement, distribution(name).requires or ())
    except PackageNotFoundError:
        return []  # for another platform or Python
    return [
        each for each in required if each.marker is None or each.marker.evaluate({"extra": extra})
    ]


def main(arguments: list[str]) -> int:
    lines, code = {"audit": audit, "sbom": write_sbom}[arguments[0]]()
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
