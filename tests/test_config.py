"""What `Queue(...)` opens, and settings that contradict each other."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fairturn
from fairturn import Queue
from fairturn.clock import ManualClock
from fairturn.config import open_store
from fairturn.contents.local import Folder
from fairturn.errors import SettingsConflict, StoreRefused
from fairturn.model import SETTING_NAMES, SettingChanges, Settings
from fairturn.scheduling.flows import Mode
from fairturn.stores.memory import MemoryStore
from fairturn.stores.urls import is_address, without_password


def test_a_file_name_is_the_whole_wiring(tmp_path: Path) -> None:
    path = tmp_path / "documents.db"

    with Queue(str(path)) as queue:
        receipt = queue.submit("acme", content=b"x" * 100_000)
    with Queue(path) as queue:
        found = queue.read(receipt.id)

    assert found == b"x" * 100_000
    assert (tmp_path / "documents.db.contents").is_dir()


def test_small_documents_need_no_folder(tmp_path: Path) -> None:
    with Queue(tmp_path / "documents.db") as queue:
        queue.submit("acme", payload={"small": True})

    assert not (tmp_path / "documents.db.contents").exists()


def test_a_queue_is_a_queue_however_it_was_opened(tmp_path: Path) -> None:
    with (
        Queue(":memory:") as in_memory,
        Queue(tmp_path / "documents.db") as in_a_file,
        Queue(MemoryStore()) as of_a_store,
        Queue(MemoryStore(), contents=Folder(tmp_path / "contents")) as by_hand,
    ):
        assert all(
            isinstance(queue, Queue) for queue in (in_memory, in_a_file, of_a_store, by_hand)
        )


def test_a_queue_in_memory_leaves_nothing_behind() -> None:
    with Queue(":memory:") as queue:
        receipt = queue.submit("acme", content=b"x" * 100_000)
        assert queue.read(receipt.id) == b"x" * 100_000
        assert isinstance(queue.contents, Folder)
        folder = queue.contents.path
        assert folder.is_dir()

    assert not folder.exists()


def test_a_queue_in_memory_that_nobody_closes_leaves_nothing_behind_either(tmp_path: Path) -> None:
    program = (
        "import fairturn; queue = fairturn.Queue(':memory:');"
        "queue.submit('acme', content=b'x' * 100_000)"
    )

    subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "TMPDIR": str(tmp_path)}, check=True
    )

    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_leaves_its_parents_contents_alone() -> None:
    program = """
import os, fairturn
queue = fairturn.Queue(":memory:")
id = queue.submit("acme", content=b"x" * 100_000).id
child = os.fork()
if child:
    os.waitpid(child, 0)
    assert queue.read(id) == b"x" * 100_000
"""

    subprocess.run([sys.executable, "-c", program], check=True)


def test_an_outside_store_is_not_given_a_folder_that_would_vanish(tmp_path: Path) -> None:
    class Outside:
        def __init__(self) -> None:
            self._inner = MemoryStore()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

    with pytest.raises(TypeError, match="Outside has no default contents; pass contents="):
        Queue(Outside())

    with Queue(Outside(), contents=Folder(tmp_path / "contents")) as queue:
        receipt = queue.submit("acme", content=b"x" * 100_000)
        assert queue.read(receipt.id) == b"x" * 100_000


# ── Addresses ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("scheme", ["mysql", "sqlite", "redis", "https"])
def test_an_address_of_something_else_is_refused_and_no_password_is_repeated(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(StoreRefused, match=f"{scheme}:// URLs are not supported") as refused:
        Queue(f"{scheme}://user:hunter2@host/db")

    assert "hunter2" not in str(refused.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "meant",
    [
        "postgresql:/user:hunter2@host/db",
        "postgres//user:hunter2@host/db",
        "PostgreSQL://user:hunter2@host/db",
        "host=host user=user password=hunter2 colour=red",
    ],
)
def test_what_was_meant_as_an_address_of_postgresql_is_no_file(
    meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(
        StoreRefused, match="is not a valid PostgreSQL URL; write postgresql://role"
    ) as no:
        Queue(meant)

    assert "hunter2" not in str(no.value) + without_password(meant)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "file", ["postgres/documents.db", "mypostgres:x", "a=b.db", "documents.db"]
)
def test_other_names_are_files(file: str) -> None:
    assert not is_address(file)
    assert without_password(file) == file


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("postgresql://u:p@h/d", "postgresql://u:***@h/d"),
        (" postgresql://u:p@q/r@h/d", " postgresql://u:***@h/d"),
        ("postgresql://u@h/d?sslpassword=p&x=1", "postgresql://u@h/d?sslpassword=***&x=1"),
        ("host=h password='p q' dbname=d", "host=h password=*** dbname=d"),
        ("postgresql://h/d", "postgresql://h/d"),
    ],
)
def test_an_address_is_shown_without_its_password(address: str, shown: str) -> None:
    assert without_password(address) == shown


def test_an_empty_name_is_refused() -> None:
    with pytest.raises(ValueError, match="the database name is empty"):
        Queue("")


def test_a_file_that_is_not_a_database_is_left_untouched(tmp_path: Path) -> None:
    path = tmp_path / "letter.txt"
    path.write_text("Dear Sir or Madam")

    with pytest.raises(StoreRefused, match="is not a database; it was left untouched"):
        Queue(path)

    assert path.read_text() == "Dear Sir or Madam"
    assert list(tmp_path.iterdir()) == [path]


# ── Settings ─────────────────────────────────────────────────────────────────────────────────────


def test_settings_given_to_a_new_queue_are_kept_in_it(tmp_path: Path) -> None:
    path = tmp_path / "documents.db"
    with Queue(path, mode="levels", reset_interval_s=60):
        pass

    with Queue(path) as queue:
        settings = queue.settings

    assert (settings.mode, settings.reset_interval_s) == (Mode.LEVELS, 60)
    assert settings.waiting_max == Settings().waiting_max


def test_settings_that_agree_are_no_conflict(tmp_path: Path) -> None:
    path = tmp_path / "documents.db"
    bounds = [-1, -2, -3, -4, -5, -6, -7, -8]
    with Queue(path, mode="equal", bounds=bounds):
        pass

    with Queue(path, mode=Mode.EQUAL, bounds=tuple(bounds)) as queue:
        assert queue.settings.bounds == tuple(bounds)


def test_settings_that_differ_are_refused_with_both_values_and_the_way_to_change_them(
    tmp_path: Path,
) -> None:
    path = tmp_path / "documents.db"
    with Queue(path, reset_interval_s=60):
        pass

    with pytest.raises(SettingsConflict) as conflict:
        Queue(path, mode="levels", reset_interval_s=90, attempts_max=5)

    message = str(conflict.value)
    assert "mode is 'fair' and 'levels' was given" in message
    assert "queue.configure(mode='levels')" in message
    assert "reset_interval_s is 60 and 90 was given" in message
    assert "attempts_max" not in message
    with Queue(path) as queue:
        queue.configure(mode="levels", reset_interval_s=90)
    with Queue(path, mode="levels", reset_interval_s=90):
        pass


def test_settings_that_differ_from_those_of_a_store_leave_it_open() -> None:
    store = MemoryStore()

    with pytest.raises(SettingsConflict):
        Queue(store, mode="levels")

    assert Queue(store).submit("acme").count == 0


@pytest.mark.parametrize(
    ("given", "kind", "sentence"),
    [
        ({"mode": "random"}, ValueError, "mode is 'random'"),
        ({"speed": 1}, TypeError, "'speed' is not a setting"),
        ({"synchronous": "OFF"}, ValueError, "synchronous is 'OFF'"),
    ],
)
def test_wrong_settings_make_no_file(
    tmp_path: Path, given: dict[str, Any], kind: type[Exception], sentence: str
) -> None:
    with pytest.raises(kind, match=sentence):
        Queue(tmp_path / "documents.db", **given)

    assert list(tmp_path.iterdir()) == []


def test_every_setting_can_be_given_by_its_name() -> None:
    assert tuple(SettingChanges.__annotations__) == SETTING_NAMES


def test_the_clock_that_was_handed_in_is_the_clock_of_everything(tmp_path: Path) -> None:
    clock = ManualClock(5_000_000)

    with Queue(tmp_path / "documents.db", clock=clock) as queue:
        receipt = queue.submit("acme", content=b"x" * 100_000)
        (name,) = queue.contents.names(older_than=5_000_001)

    assert receipt.submitted_at_us == 5_000_000
    assert name


def test_a_store_can_be_opened_alone(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "documents.db"), Settings(mode=Mode.EQUAL))
    try:
        assert store.settings().mode is Mode.EQUAL
    finally:
        store.close()


def test_the_public_names_are_all_there() -> None:
    assert all(hasattr(fairturn, name) for name in fairturn.__all__)
    values = [getattr(fairturn, name) for name in fairturn.__all__]
    errors = [each for each in values if issubclass(each, fairturn.FairturnError)]
    assert len(values) - len(errors) <= 27, (
        "programs import few names: a queue, its clients, its values, a worker with Handlers, and "
        "what a handler returns or raises (Next, Later and Unavailable among them); keep others in "
        "their modules"
    )
    ours = {
        each
        for each in vars(fairturn.errors).values()
        if isinstance(each, type) and issubclass(each, fairturn.FairturnError)
    }
    assert set(errors) == ours
