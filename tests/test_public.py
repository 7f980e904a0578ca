"""The names that `import fairturn` provides, and the modules that they load."""

import subprocess
import sys
from importlib.metadata import version

import pytest

import fairturn
from fairturn.errors import FairturnError


def loaded_by(program: str) -> set[str]:
    """Return the modules that a new process has loaded after this code."""
    printed = subprocess.run(
        [sys.executable, "-c", f"{program}\nimport sys\nprint(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(printed.stdout.split())


def test_importing_fairturn_loads_nothing_of_it() -> None:
    assert {name for name in loaded_by("import fairturn") if name.startswith("fairturn")} == {
        "fairturn"
    }


def test_a_value_is_loaded_without_the_queue_and_its_database() -> None:
    loaded = loaded_by("from fairturn import Document, NotFound")

    assert {"fairturn.model", "fairturn.errors"} <= loaded
    assert not {"fairturn.queue", "fairturn.config", "apsw"} & loaded


def test_what_speaks_http_is_loaded_with_the_first_client_and_not_before() -> None:
    assert "httpx" not in loaded_by("from fairturn import AsyncClient, Client, Queue")


@pytest.mark.parametrize("threads", [False, True], ids=["processes", "threads"])
def test_a_worker_that_was_made_has_loaded_what_it_runs_with(threads: bool) -> None:
    made = f"""
from fairturn import Queue, Worker
worker = Worker(Queue(":memory:"), "json:loads", concurrency=1, threads={threads})"""

    more = loaded_by(f"{made}\nworker.run(until_empty=True)") - loaded_by(made)

    assert not {name for name in more if name.startswith("fairturn.worker")}


@pytest.mark.parametrize("name", fairturn.__all__)
def test_every_public_name_is_there_and_is_listed(name: str) -> None:
    assert getattr(fairturn, name).__name__ == name
    assert name in dir(fairturn)


def test_every_error_is_importable_from_the_package() -> None:
    tree = [FairturnError]
    for error in tree:
        tree += error.__subclasses__()

    ours = {error.__name__ for error in tree if error.__module__ == "fairturn.errors"}
    assert ours <= set(fairturn.__all__)


def test_the_version_is_that_of_the_installed_distribution() -> None:
    assert fairturn.__version__ == version("fairturn")


def test_a_name_that_does_not_exist_is_an_error_like_any_other() -> None:
    with pytest.raises(AttributeError, match="module 'fairturn' has no attribute 'Task'"):
        fairturn.Task  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'Task'"):
        from fairturn import Task  # type: ignore[attr-defined]  # noqa: F401
