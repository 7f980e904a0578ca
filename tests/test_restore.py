"""A restored queue equals the backup, whatever was there before and whenever the restore is
killed."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import apsw
import pytest

from fairturn import Queue
from fairturn.errors import NoQueue, StoreBusy, StoreError, StoreRefused, StoreUnavailable
from fairturn.maintenance.backup import back_up
from fairturn.maintenance.restore import Restored, restore
from fairturn.maintenance.sqlite_file import exclusive
from fairturn.stores.conformance.steps import assert_numbers_are_exact
from fairturn.stores.ids import IdKey, encode_all
from fairturn.stores.sqlite import SqliteStore
from fairturn.stores.sqlite.schema import migrations
from tests.commands import SCRIPT, claim, error_of, fairturn, lines_of
from tests.downgrades import TO_SCHEMA_14

SIZE = 70_000  # too large for the row


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def backed_up() -> list[str]:
    """A queue of two documents, one of them outside the file, and its backup."""
    with Queue("documents.db") as queue:
        queue.submit("acme", payload=1)
        queue.submit("acme", content=b"x" * SIZE)
        back_up(queue, "copy.db")
        return ids_of(queue)


def columns_of(connection: apsw.Connection) -> set[str]:
    rows = connection.execute("SELECT name FROM pragma_table_info('documents')")
    return {name for (name,) in rows}


def ids_of(queue: Queue) -> list[str]:
    return [document.id for document in queue.iterate()]


def contents(database: str) -> set[str]:
    return {path.name for path in Path(f"{database}.contents").rglob("??/*")}


def assert_whole(database: str = "documents.db") -> list[str]:
    """Assert that everything in the queue can be read; return the ids of its documents."""
    with Queue(database) as queue:
        found = ids_of(queue)
        for document in queue.iterate():
            if document.body_type == "content":
                assert len(queue.read(document.id)) == document.size_bytes
        assert_numbers_are_exact(queue.store)
        assert queue.store.unreferenced(sorted(contents(database))) == []
    connection = apsw.Connection(database)
    assert connection.pragma("integrity_check") == "ok"
    connection.close()
    return found


# The work of a process that is then killed: its last documents are only in the WAL.
_LEAVE_A_LOG = """
import os, signal
from fairturn import Queue
queue = Queue("documents.db")
for n in range(50):
    queue.submit("late", payload="x" * 1_000)
queue.submit("late", content=b"y" * 70_000)
os.kill(os.getpid(), signal.SIGKILL)
"""


def leave_a_log() -> None:
    subprocess.run([sys.executable, "-c", _LEAVE_A_LOG], check=False)
    assert Path("documents.db-wal").stat().st_size > 50_000


def files() -> set[str]:
    return {path.name for path in Path().iterdir()}


# ── What is restored ─────────────────────────────────────────────────────────────────────────────


def test_a_backup_becomes_a_queue_and_stays_as_it_is(backed_up: list[str]) -> None:
    before = Path("copy.db").read_bytes()

    made = restore("copy.db", "new.db")

    assert assert_whole("new.db") == backed_up
    assert made == Restored(Path("new.db").absolute(), made.size_bytes, 1, (), replaced=False)
    assert made.size_bytes > SIZE
    assert Path("copy.db").read_bytes() == before
    assert contents("new.db") == contents("copy.db")
    assert Path("new.db").stat().st_mode & 0o777 == 0o600
    assert not [name for name in files() if name.endswith((".part", ".lock", "-wal", "-shm"))]


def test_a_queue_with_a_log_of_its_own_is_replaced_and_the_log_is_not_applied(
    backed_up: list[str],
) -> None:
    leave_a_log()

    made = restore("copy.db", "documents.db", replace=True)

    assert made.replaced
    assert assert_whole() == backed_up
    assert contents("documents.db") == contents("copy.db")


def test_a_log_that_was_left_without_its_queue_is_not_applied(backed_up: list[str]) -> None:
    leave_a_log()
    Path("documents.db").unlink()
    shutil.rmtree("documents.db.contents")

    restore("copy.db", "documents.db")

    assert assert_whole() == backed_up


def test_a_damaged_queue_is_replaced(backed_up: list[str]) -> None:
    leave_a_log()
    with Path("documents.db").open("r+b") as file:
        file.seek(100)
        file.write(b"\xff" * 8_000)
    Path("documents.db-wal").write_bytes(b"\xff" * 8_000)

    restore("copy.db", "documents.db", replace=True)

    assert assert_whole() == backed_up


@pytest.mark.parametrize("marked", [True, False], ids=["a backup", "a copied file"])
def test_a_restored_queue_gives_out_no_id_and_no_fence_again(
    backed_up: list[str], marked: bool
) -> None:
    if not marked:
        shutil.copy("documents.db", "copy.db")
    with Queue("documents.db") as queue:
        lost = queue.submit("acme", payload=2).id
        fences = {claimed.fence for claimed in claim(queue, 9)}

    for name in ("first.db", "second.db"):
        restore("copy.db", name)

    given: list[str] = []
    for name in ("first.db", "second.db"):
        with Queue(name) as queue:
            given.append(queue.submit("acme", payload=2).id)
            assert not {claimed.fence for claimed in claim(queue, 9)} & fences
    assert len({lost, *given, *backed_up}) == 5


def test_what_a_backup_has_in_its_own_log_is_restored_too(backed_up: list[str]) -> None:
    shutil.copy("copy.db", "used.db")
    shutil.copytree("copy.db.contents", "used.db.contents")
    with Queue("used.db") as used:
        late = used.submit("acme", payload=3).id
        for beside in ("", "-wal"):
            shutil.copy(f"used.db{beside}", f"killed.db{beside}")
    shutil.copytree("used.db.contents", "killed.db.contents")

    restore("killed.db", "new.db")

    assert set(assert_whole("new.db")) == {late, *backed_up}


def test_a_backup_in_a_folder_that_cannot_be_written_is_restored(backed_up: list[str]) -> None:
    Path("medium").mkdir()
    Path("copy.db").rename("medium/copy.db")
    Path("copy.db.contents").rename("medium/copy.db.contents")
    before = sorted(Path("medium").rglob("*"))
    Path("medium").chmod(0o500)
    try:
        restore("medium/copy.db", "new.db")
        assert sorted(Path("medium").rglob("*")) == before
    finally:
        Path("medium").chmod(0o700)

    assert assert_whole("new.db") == backed_up


ADDED_SINCE_SCHEMA_10 = [
    f"{table} DROP COLUMN {column}"
    for table, columns in {
        "documents": ("tags",),
        "queue": ("id_secret", "ids_from", "is_erased", "probed_at"),
        "customers": ("stored_bytes", "bytes_max"),
        "levels": ("kind_time", "last_claim", "level_time"),
        "customer_states": ("costs_by_kind",),
        "workers": ("kinds",),
        "leases": ("supports_kinds",),
    }.items()
    for column in columns
]


def test_a_backup_of_an_earlier_version_is_restored(backed_up: list[str]) -> None:
    baseline = apsw.Connection(":memory:")
    baseline.execute(migrations()[0].script)
    connection = apsw.Connection("copy.db")
    ((key, *_),) = connection.execute("SELECT id_key FROM queue")
    numbers = [n for (n,) in connection.execute("SELECT number FROM documents ORDER BY 1 DESC")]
    assert len(numbers) == len(backed_up)
    connection.execute(
        f"{TO_SCHEMA_14}"
        "DROP TRIGGER queue_of_schema_11; DROP TRIGGER new_queue; DROP TRIGGER new_epoch; "
        "DROP TRIGGER claim_of_schema_13; DROP TRIGGER level_of_schema_13; DROP TABLE kinds; "
        + "".join(f"ALTER TABLE {column}; " for column in ADDED_SINCE_SCHEMA_10)
        + "DELETE FROM migrations WHERE number > 10; PRAGMA user_version = 10"
    )
    connection.close()
    baseline.close()

    restore("copy.db", "new.db")

    # Schema 10 has ids of the earlier form only.
    earlier = IdKey(b"", key, legacy_below=max(numbers) + 1)
    assert assert_whole("new.db") == encode_all(numbers, earlier)


def test_contents_that_the_queue_and_the_backup_share_are_not_copied_again(
    backed_up: list[str],
) -> None:
    (name,) = contents("documents.db")
    kept = Path("documents.db.contents", name[:2], name).stat().st_ino

    restore("copy.db", "documents.db", replace=True)

    assert Path("documents.db.contents", name[:2], name).stat().st_ino == kept
    assert assert_whole() == backed_up


# ── What interrupts it ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "point", ["content-before-rename", "restore-before-rename", "restore-after-rename"]
)
def test_a_restore_that_is_killed_leaves_the_queue_before_or_the_restored_one(
    backed_up: list[str], point: str
) -> None:
    leave_a_log()
    (name,) = contents("copy.db")
    Path("documents.db.contents", name[:2], name).unlink()  # so that it has to be copied
    restoring = [str(SCRIPT), "restore", "copy.db", "documents.db", "--replace"]

    killed = subprocess.run(restoring, env={**os.environ, "FAIRTURN_CRASH_AT": point}, check=False)

    assert killed.returncode == -signal.SIGKILL
    with Queue("documents.db") as queue:
        late = [document for document in queue.iterate() if document.customer == "late"]
        assert len(late) == (0 if point == "restore-after-rename" else 51)
        assert all(queue.read(d.id) for d in late if d.body_type == "content")
        assert_numbers_are_exact(queue.store)
    assert subprocess.run(restoring, check=False).returncode == 0
    assert assert_whole() == backed_up
    assert contents("documents.db") == contents("copy.db")
    assert not [name for name in files() if name.endswith((".part", ".lock"))]


def test_a_restore_that_fails_leaves_nothing_behind(
    backed_up: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = files()

    def fail(path: Path, mode: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copymode", fail)
    with pytest.raises(StoreUnavailable, match="is full"):
        restore("copy.db", "new.db")

    assert files() == before


# ── What is refused ──────────────────────────────────────────────────────────────────────────────


def test_a_queue_that_is_there_is_replaced_only_when_that_is_said(backed_up: list[str]) -> None:
    with Queue("documents.db") as queue:
        queue.submit("acme", payload=2)

    with pytest.raises(StoreRefused, match=r"documents.db and .*contents exist already; --replace"):
        restore("copy.db", "documents.db")

    assert len(assert_whole()) == 3


_USE = """
import sys
from fairturn import Queue
queue = Queue("documents.db")
print("open", flush=True)
sys.stdin.read()
queue.submit("acme", payload=2)
"""


def test_a_queue_that_another_process_has_open_is_left_alone(backed_up: list[str]) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _USE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as user:
        assert user.stdout is not None
        assert user.stdout.readline() == "open\n"  # and idle

        result = fairturn("restore", "copy.db", "documents.db", "--replace")

        said = error_of(result, 75)
        assert f"documents.db is in use by process {user.pid} (python" in said
        assert said.endswith("; stop every process that uses it")
        with pytest.raises(StoreBusy), exclusive(Path("documents.db")):
            pass
    assert user.returncode == 0
    assert len(assert_whole()) == 3


def test_a_process_that_opens_a_file_while_it_is_replaced_does_not_use_the_old_one(
    backed_up: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy("copy.db", "other.db")
    connect = apsw.Connection

    def opened(name: str) -> apsw.Connection:
        """Return a connection without a lock."""
        connection = connect(name)
        if Path("other.db").exists():
            Path("other.db").replace("documents.db")
        return connection

    with monkeypatch.context() as patched:
        patched.setattr("fairturn.stores.sqlite.connection.apsw.Connection", opened)
        with pytest.raises(StoreUnavailable, match="was replaced while it was opened; try again"):
            SqliteStore("documents.db")

    assert assert_whole() == backed_up


def test_what_is_no_backup_or_no_queue_is_refused_and_left_alone(backed_up: list[str]) -> None:
    Path("letter.txt").write_text("Dear Sir or Madam")
    Path("empty.db").touch()
    Path("link.db").symlink_to("documents.db")
    os.link("copy.db", "hard.db")
    before = files()

    for backup, to, sentence in (
        ("absent.db", "new.db", "there is no backup .*absent.db"),
        ("empty.db", "new.db", "empty.db is empty: it contains no queue"),
        ("letter.txt", "new.db", "letter.txt is not a database"),
        ("copy.db", "letter.txt", "letter.txt is not a database"),
        ("copy.db", "link.db", "link.db is a symbolic link"),
        ("copy.db", "copy.db", "copy.db is the backup itself"),
        ("copy.db", "hard.db", "hard.db is the backup itself"),
        ("copy.db", "absent/new.db", "absent does not exist"),
    ):
        with pytest.raises(StoreRefused, match=sentence):
            restore(backup, to, replace=True)

    assert files() == before
    assert Path("letter.txt").read_text() == "Dear Sir or Madam"
    with pytest.raises(NoQueue):
        restore("absent.db", "new.db")


def test_a_damaged_backup_is_refused_and_the_queue_stays(backed_up: list[str]) -> None:
    with Queue("documents.db") as queue:
        for _ in range(300):
            queue.submit("acme", payload="x" * 1_000)
        back_up(queue, "copy.db", overwrite=True)
    with Path("copy.db").open("r+b") as file:
        file.seek(Path("copy.db").stat().st_size // 2)
        file.write(b"\xff" * 20_000)

    with pytest.raises(StoreError, match="copy.db is damaged"):
        restore("copy.db", "documents.db", replace=True)

    assert len(assert_whole()) == 302


def test_a_backup_of_a_newer_version_is_refused(backed_up: list[str]) -> None:
    connection = apsw.Connection("copy.db")
    connection.execute("PRAGMA user_version = 99")
    connection.close()

    with pytest.raises(StoreRefused, match="copy.db has schema 99, and this release"):
        restore("copy.db", "new.db")


# ── The command ──────────────────────────────────────────────────────────────────────────────────


def test_the_command_restores_and_says_what(backed_up: list[str]) -> None:
    made = fairturn("restore", "copy.db", "new.db")
    refused = error_of(fairturn("restore", "copy.db", "new.db"), 1)
    (line,) = lines_of(fairturn("restore", "copy.db", "new.db", "--replace", "--json"))

    path = Path("new.db").absolute()
    assert made.stdout.startswith(f"Created {path} from copy.db: ")
    assert made.stdout.endswith(", 1 stored file. A new epoch has begun.\n")
    assert refused == f"{path} and {path}.contents exist already; --replace replaces a queue"
    assert (line["path"], line["contents"]) == (str(path), 1)
    assert (line["damaged"], line["replaced"]) == ([], True)
    assert assert_whole("new.db") == backed_up
    assert "no backup" in error_of(fairturn("restore", "absent.db", "other.db"), 3)
    assert "pg_restore" in error_of(fairturn("restore", "copy.db", "postgresql://host/x"), 2)


def test_a_content_that_is_missing_in_the_backup_is_told_and_the_rest_is_restored(
    backed_up: list[str],
) -> None:
    shutil.rmtree("copy.db.contents")

    result = fairturn("restore", "copy.db", "new.db", "--json")

    assert "1 stored file could not be restored" in error_of(result, 1)
    assert len(json.loads(result.stdout)["damaged"]) == 1
    with Queue("new.db") as queue:
        assert ids_of(queue) == backed_up
