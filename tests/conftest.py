"""Settings of every test: which fairturn is tested, and how a failure is replayed."""

import gc
import os
import random
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings

from fairturn.stores.postgres import PostgresStore
from tests.servers.postgres import memory_folder
from tests.servers.queues import Databases

ROOT = Path(__file__).parent.parent

# `default` tries the same examples on every run, so that a failure is reproducible. `thorough`
# tries new ones from a seed; it has no example database, so that the seed alone decides. It sets
# `derandomize`, because hypothesis changes that default in CI.
settings.register_profile("default", derandomize=True, deadline=None, max_examples=50)
settings.register_profile(
    "thorough", derandomize=False, database=None, deadline=None, max_examples=2_000
)
PROFILE = os.environ.get("FAIRTURN_HYPOTHESIS", "default")
settings.load_profile(PROFILE)


# First, because hypothesis' plugin reads the seed in the same hook. pytest-xdist passes the options
# to its workers, so all of them have the same seed.
@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    problem = next(differences_from_the_wheel(), None)
    if problem is not None:
        raise pytest.UsageError(problem)
    write_to_memory()
    # A shell makes background processes ignore SIGINT, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if PROFILE == "thorough" and config.getoption("hypothesis_seed", None) is None:
        config.option.hypothesis_seed = str(random.SystemRandom().getrandbits(32))


def pytest_collection_finish() -> None:
    """Freeze imported and collected objects: their repeated garbage collection took a fifth of the
    time of CPU-bound tests."""
    gc.collect()
    gc.freeze()


def pytest_report_header(config: pytest.Config) -> str:
    return f"replay a failure: {replay_command(config)}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        report.sections.append(("replay", replay_command(item.config, f"'{item.nodeid}'")))
    return report


def replay_command(config: pytest.Config, node_id: str = "<test>") -> str:
    command = f"FAIRTURN_HYPOTHESIS={PROFILE} .venv/bin/python -m pytest {node_id}"
    seed = config.getoption("hypothesis_seed", None)
    return command if seed is None else f"{command} --hypothesis-seed={seed}"


def write_to_memory() -> None:
    """Make temporary files of this process, of pytest-xdist's workers and of their children files
    in memory, where an fsync takes no time: hundreds of tests wait for thousands of them. TMPDIR
    chooses another folder."""
    if "TMPDIR" not in os.environ and (folder := memory_folder()) is not None:
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder)


def differences_from_the_wheel() -> Iterator[str]:
    """Return why the installed package is not the wheel built from src/."""
    spec = find_spec("fairturn")
    if spec is None or spec.origin is None:
        yield "fairturn is not installed; run the tests with: make test"
        return
    installed = Path(spec.origin).resolve().parent
    if not installed.is_relative_to(Path(sysconfig.get_path("purelib")).resolve()):
        yield f"fairturn comes from {installed}, not from a wheel in {sys.prefix}; run: make test"
        return
    source = ROOT / "src" / "fairturn"
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source)
        if path.is_dir() or "__pycache__" in name.parts:
            continue
        copy = installed / name
        if not copy.is_file() or copy.read_bytes() != path.read_bytes():
            yield f"the installed fairturn/{name} is not the one in src; run: make test"


@pytest.fixture
def databases() -> Iterator[Databases]:
    """Databases on a PostgreSQL server."""
    with Databases() as made:
        yield made


@pytest.fixture
def url(databases: Databases) -> str:
    """The URL of a database with an empty queue."""
    return databases.new()


@pytest.fixture
def store(url: str) -> Iterator[PostgresStore]:
    """A store on PostgreSQL; modules about other stores override it."""
    opened = PostgresStore(url)
    yield opened
    opened.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 20 MiB; mounting it needs root."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(place)],
        capture_output=True,
        text=True,
        check=False,
    )
    if not mount or mount.returncode:
        reason = "a small disk cannot be mounted here: " + (mount.stderr if mount else "no mount")
        if os.environ.get("FAIRTURN_REQUIRE_SERVICES"):
            pytest.fail(reason)
        pytest.skip(reason)
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)
