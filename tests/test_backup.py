"""A backup of a queue in use is complete: it contains everything that it refers to."""

import json
import os
import shutil
import signal
import stat
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest

from fairturn import Completed, Queue
from fairturn.errors import StoreBusy, StoreError, StoreRefused, StoreUnavailable
from fairturn.maintenance.backup import Backup, back_up
from fairturn.maintenance.sqlite_file import write_copy
from fairturn.stores.conformance import snapshot
from fairturn.stores.conformance.steps import assert_numbers_are_exact
from fairturn.stores.sqlite import SqliteStore, query
from tests.commands import SCRIPT, claim, complete, error_of, fairturn, lines_of

SIZE = 70_000  # too large for the row


@pytest.fixture(autouse=True)
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Queue]:
    monkeypatch.chdir(tmp_path)
    with Queue("documents.db") as opened:
        yield opened


def submit(queue: Queue, customer: str = "acme") -> str:
    return queue.submit(customer, content=os.urandom(SIZE)).id


def contents(database: str) -> set[str]:
    return {path.name for path in Path(f"{database}.contents").rglob("??/*")}


def assert_whole(database: str = "copy.db") -> list[str]:
    """Assert that everything in the copy can be read; return the ids of its documents."""
    with Queue(database) as copy:
        documents = list(copy.iterate())
        for document in documents:
            if document.body_type == "content":
                assert len(copy.read(document.id)) == document.size_bytes
        assert_numbers_are_exact(copy.store)
        assert copy.store.unreferenced(sorted(contents(database))) == []
    connection = apsw.Connection(database)
    assert connection.pragma("integrity_check") == "ok"
    connection.close()
    return [document.id for document in documents]


# ── The copy ─────────────────────────────────────────────────────────────────────────────────────


def test_a_copy_is_a_queue_like_any_other(queue: Queue) -> None:
    for _ in range(5):
        submit(queue)
    (claimed,) = claim(queue)
    ref = queue.contents.put([b"r" * SIZE])
    queue.submit("bolt", payload={"large": "x" * 100_000}, key="k")
    queue.set_customer("bolt", weight=2, limit=1)
    queue.configure(patience_s=60)
    queue.store.finish([Completed(claimed.fence, "1", ref)])

    made = back_up(queue, "copy.db")

    with Queue("copy.db") as copy:
        assert snapshot(copy.store) == snapshot(queue.store)
        assert copy.submit("bolt", payload={"large": "x" * 100_000}, key="k").replayed
        assert len(claim(copy, 9)) == 5
    assert len(assert_whole()) == 6
    assert contents("copy.db") == contents("documents.db")
    assert made == Backup(Path("copy.db").absolute(), made.size_bytes, len(contents("copy.db")), ())
    assert not list(Path().glob("*.part*"))


def test_a_queue_without_contents_has_a_copy_without_a_folder(queue: Queue) -> None:
    queue.submit("acme")

    assert back_up(queue, "copy.db").contents == 0

    assert not Path("copy.db.contents").exists()
    assert len(assert_whole()) == 1


def test_a_copy_is_as_private_as_the_queue(queue: Queue) -> None:
    submit(queue)
    Path("documents.db").chmod(0o600)

    back_up(queue, "copy.db")

    assert stat.S_IMODE(Path("copy.db").stat().st_mode) == 0o600
    assert stat.S_IMODE(Path("copy.db.contents").stat().st_mode) == 0o700


def test_progress_rises_to_the_whole(queue: Queue) -> None:
    for _ in range(10):
        submit(queue)
    heard: list[tuple[int, int]] = []

    back_up(queue, "copy.db", progress=lambda done, total: heard.append((done, total)))

    done = [part for part, _ in heard]
    assert done == sorted(done)
    assert done[-1] == heard[-1][1]


# ── While it is in use ───────────────────────────────────────────────────────────────────────────


def test_what_is_written_after_the_moment_is_not_in_the_copy(queue: Queue) -> None:
    for _ in range(3):
        submit(queue)
    during: list[str] = []

    def write(done: int, total: int) -> None:
        if not during and done > 3 * SIZE:  # the pages are being copied
            during.append(submit(queue))

    back_up(queue, "copy.db", progress=write)

    assert len(during) == 1
    ids = assert_whole()
    assert len(ids) == 3
    assert during[0] not in ids


def test_a_moment_that_is_held_does_not_see_what_comes_later(queue: Queue) -> None:
    first = submit(queue)
    store = queue.store
    assert isinstance(store, SqliteStore)

    with store.read_transaction() as moment:
        submit(queue)
        seen = [ref.name for ref in query.contents(moment)]
        write_copy(moment, Path("copy.db"), lambda part: None)

    assert seen == [queue.get(first).content_name]
    with Queue("copy.db") as copy:
        assert [document.id for document in copy.iterate()] == [first]


def test_what_comes_while_contents_are_copied_is_in_the_copy_with_its_content(
    queue: Queue,
) -> None:
    first = [submit(queue) for _ in range(3)]
    during: list[str] = []

    def write(done: int, total: int) -> None:
        if not during:
            during.append(submit(queue))

    back_up(queue, "copy.db", progress=write)

    assert set(assert_whole()) == {*first, *during}


def test_a_customer_who_is_purged_meanwhile_is_not_in_the_copy(queue: Queue) -> None:
    kept = [submit(queue) for _ in range(3)]
    for _ in range(20):
        submit(queue, "leaving")
    purged: list[bool] = []

    def purge(done: int, total: int) -> None:
        if not purged:
            purged.append(True)
            queue.purge("leaving")

    back_up(queue, "copy.db", progress=purge)

    assert sorted(assert_whole()) == sorted(kept)
    assert len(contents("copy.db")) == 3, "nothing of it is left behind"


def test_a_moment_of_which_a_content_was_deleted_too_early_is_given_up_for_a_later_one(
    queue: Queue,
) -> None:
    submit(queue)
    late: list[str] = []
    purged: list[str] = []

    def interfere(done: int, total: int) -> None:
        if not late:  # while the first content is copied, three customers come
            late.extend(submit(queue, f"late{n}") for n in range(3))
        elif not purged and len(contents("copy.db")) == 2:
            # The snapshot is fixed, and one of the three is copied: delete the others.
            (copied,) = [id for id in late if queue.get(id).content_name in contents("copy.db")]
            for n, id in enumerate(late):
                if id != copied:
                    queue.purge(f"late{n}")
                    purged.append(id)

    back_up(queue, "copy.db", progress=interfere)

    assert len(purged) == 2
    assert len(assert_whole()) == 2
    assert not set(assert_whole()) & set(purged)


def test_who_deletes_faster_than_can_be_copied_is_told_to_try_again(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairturn.maintenance.backup.SNAPSHOTS_MAX", 1)
    submit(queue)
    state: list[int] = []

    def interfere(done: int, total: int) -> None:
        if not state:
            for n in range(3):
                submit(queue, f"late{n}")
        elif len(state) == 1:
            for n in range(3):
                queue.purge(f"late{n}")
        state.append(1)

    with pytest.raises(StoreUnavailable, match="retry later"):
        back_up(queue, "copy.db", progress=interfere)
    assert [path.name for path in Path().glob("copy.db*")] == []


def test_copies_taken_while_others_submit_work_and_prune_are_whole(queue: Queue) -> None:
    queue.configure(completed_kept_s=0)
    for _ in range(50):
        submit(queue)
    stop = threading.Event()
    errors: list[BaseException] = []

    def go_on(step: int) -> None:
        try:
            with Queue("documents.db", synchronous="NORMAL") as other:
                while not stop.is_set():
                    if step == 0:
                        submit(other, "busy")
                    elif step == 1:
                        complete(other, 3)
                    else:
                        other.prune()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=go_on, args=(step,)) for step in range(3)]
    for thread in threads:
        thread.start()
    try:
        for n in range(5):
            made = back_up(queue, f"copy{n}.db")
            assert made.damaged == ()
    finally:
        stop.set()
        for thread in threads:
            thread.join()

    assert errors == []
    for n in range(5):
        assert_whole(f"copy{n}.db")


# ── An older copy ────────────────────────────────────────────────────────────────────────────────


def test_an_older_copy_is_replaced_only_when_that_is_said(queue: Queue) -> None:
    old = submit(queue)
    back_up(queue, "copy.db")
    submit(queue)

    with pytest.raises(StoreRefused, match="copy.db and .*copy.db.contents exist already;"):
        back_up(queue, "copy.db")
    assert assert_whole() == [old]

    back_up(queue, "copy.db", overwrite=True)
    assert len(assert_whole()) == 2


def test_what_an_older_copy_shares_is_kept_and_the_rest_is_deleted(queue: Queue) -> None:
    submit(queue)
    submit(queue, "leaving")
    back_up(queue, "copy.db")
    (kept,) = [ref for ref in contents("documents.db") if ref == _name(queue, "acme")]
    before = _file(kept).stat()
    queue.purge("leaving")
    submit(queue, "new")

    back_up(queue, "copy.db", overwrite=True)

    assert _file(kept).stat().st_ino == before.st_ino, "it is not copied again"
    assert contents("copy.db") == contents("documents.db")
    assert len(assert_whole()) == 2


def test_what_is_damaged_in_an_older_copy_is_copied_again(queue: Queue) -> None:
    submit(queue)
    back_up(queue, "copy.db")
    _file(_name(queue, "acme")).write_bytes(b"y" * SIZE)

    back_up(queue, "copy.db", overwrite=True)

    assert len(assert_whole()) == 1


def _name(queue: Queue, customer: str) -> str:
    (document,) = queue.list(customer=customer).documents
    assert document.content_name is not None
    return document.content_name


def _file(content: str) -> Path:
    return Path("copy.db.contents") / content[:2] / content


@pytest.mark.parametrize("point", ["backup-before-rename", "backup-after-rename"])
@pytest.mark.parametrize("older", [True, False], ids=["over an older one", "new"])
def test_a_backup_that_is_killed_leaves_the_older_copy_or_the_new_one_and_can_be_run_again(
    queue: Queue, point: str, older: bool
) -> None:
    submit(queue)
    if older:
        back_up(queue, "copy.db")
    submit(queue)
    submit(queue)

    killed = subprocess.run(
        [SCRIPT, "backup", "copy.db", "--force"],
        env={**os.environ, "FAIRTURN_CRASH_AT": point},
        check=False,
    )

    assert killed.returncode == -signal.SIGKILL
    if point == "backup-after-rename":
        assert len(assert_whole_despite_strays()) == 3
    elif older:
        assert len(assert_whole_despite_strays()) == 1
    else:
        assert not Path("copy.db").exists()
    back_up(queue, "copy.db", overwrite=True)
    assert len(assert_whole()) == 3
    assert not list(Path().glob("*.part*"))


def test_what_a_backup_left_that_was_killed_while_it_copied_a_content_is_replaced(
    queue: Queue,
) -> None:
    submit(queue)
    killed = subprocess.run(
        [SCRIPT, "backup", "copy.db", "--force"],
        env={**os.environ, "FAIRTURN_CRASH_AT": "content-before-rename"},
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    assert [path.suffix for path in Path("copy.db.contents").rglob("??/*")] == [".part"]

    for _ in range(2):
        back_up(queue, "copy.db", overwrite=True)

    assert len(assert_whole()) == 1
    assert contents("copy.db") == contents("documents.db")
    assert {path.name for path in Path().glob("copy.db*")} == {"copy.db", "copy.db.contents"}


def test_a_backup_beside_another_one_to_the_same_place_is_refused_and_harms_neither(
    queue: Queue,
) -> None:
    for _ in range(3):
        submit(queue)
    refused: list[str] = []

    def back_up_again(done: int, total: int) -> None:
        with pytest.raises(StoreBusy) as busy:
            back_up(queue, "copy.db", overwrite=True)
        refused.append(str(busy.value))

    back_up(queue, "copy.db", progress=back_up_again)

    assert len(refused) > 3
    path = Path("copy.db").absolute()
    assert refused[0].startswith(f"another backup or restore is writing {path}; retry")
    assert len(assert_whole()) == 3
    back_up(queue, "copy.db", overwrite=True)


def test_a_copy_can_be_read_by_its_owner_alone_while_it_is_written(queue: Queue) -> None:
    queue.submit("acme")
    modes: set[int] = set()

    back_up(
        queue,
        "copy.db",
        progress=lambda done, total: modes.add(Path("copy.db.part").stat().st_mode & 0o777),
    )

    assert modes == {0o600}


def assert_whole_despite_strays() -> list[str]:
    with Queue("copy.db") as copy:
        return [document.id for document in copy.iterate() if copy.read(document.id)]


@pytest.mark.parametrize("phase", ["contents", "pages"])
def test_a_backup_that_is_interrupted_leaves_nothing_behind(queue: Queue, phase: str) -> None:
    for _ in range(3):
        submit(queue)

    def interrupt(done: int, total: int) -> None:
        if phase == "contents" or done > 3 * SIZE:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        back_up(queue, "copy.db", progress=interrupt)

    assert list(Path().glob("copy*")) == []
    assert queue.summary().waiting == 3


def test_a_backup_that_is_interrupted_after_it_has_its_name_keeps_its_contents(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(queue)
    sync = os.fsync

    def interrupt(descriptor: int) -> None:
        if Path("copy.db").exists():
            raise KeyboardInterrupt
        sync(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            back_up(queue, "copy.db")

    assert len(assert_whole()) == 1


# ── What is refused ──────────────────────────────────────────────────────────────────────────────


def test_the_queue_itself_is_never_overwritten(queue: Queue) -> None:
    submit(queue)
    Path("link.db").symlink_to("documents.db")
    os.link("documents.db", "hard.db")

    for target in ("documents.db", "link.db", "hard.db", "./documents.db"):
        with pytest.raises(StoreRefused, match="is the queue itself"):
            back_up(queue, target, overwrite=True)
    assert len(assert_whole("documents.db")) == 1


def test_what_is_no_copy_is_never_overwritten(queue: Queue) -> None:
    Path("letter.txt").write_text("Dear Sir or Madam")
    apsw.Connection("other.db").execute("CREATE TABLE t (a)")

    with pytest.raises(StoreRefused, match="is not a database"):
        back_up(queue, "letter.txt", overwrite=True)
    with pytest.raises(StoreRefused, match="of another program"):
        back_up(queue, "other.db", overwrite=True)
    with pytest.raises(StoreRefused, match="absent does not exist"):
        back_up(queue, "absent/copy.db")
    assert Path("letter.txt").read_text() == "Dear Sir or Madam"


def test_a_copy_that_somebody_uses_is_not_replaced(queue: Queue) -> None:
    submit(queue)
    back_up(queue, "copy.db")
    with Queue("copy.db") as copy:
        submit(copy)

        with pytest.raises(StoreRefused, match="is in use"):
            back_up(queue, "copy.db", overwrite=True)

        assert len(copy.list().documents) == 2


def test_a_folder_that_is_in_the_way_is_told_before_anything_is_copied(queue: Queue) -> None:
    submit(queue)
    Path("copy.db.contents").mkdir()

    with pytest.raises(StoreRefused, match="copy.db.contents exists already;"):
        back_up(queue, "copy.db")
    assert not Path("copy.db").exists()


def test_a_queue_in_memory_has_no_copy() -> None:
    with Queue(":memory:") as queue, pytest.raises(StoreRefused, match="ends with its process"):
        back_up(queue, "copy.db")


def test_a_damaged_file_is_not_taken_for_a_copy(queue: Queue) -> None:
    for _ in range(300):
        queue.submit("acme", payload="x" * 1_000)
    queue.close()
    with Path("documents.db").open("r+b") as file:
        file.seek(Path("documents.db").stat().st_size // 2)
        file.write(b"\xff" * 20_000)

    with Queue("documents.db") as damaged, pytest.raises(StoreError, match="damaged|malformed"):
        back_up(damaged, "copy.db")
    assert not Path("copy.db").exists()


# ── The command ──────────────────────────────────────────────────────────────────────────────────


def test_the_command_copies_and_says_what(queue: Queue) -> None:
    submit(queue)

    printed = fairturn("backup", "copy.db").stdout
    refused = error_of(fairturn("backup", "copy.db"), 1)
    (line,) = lines_of(fairturn("backup", "copy.db", "--force", "--json"))

    assert printed.startswith(f"Copied to {Path('copy.db').absolute()}: ")
    assert printed.endswith(", 1 stored file.\n")
    assert refused == "copy.db and copy.db.contents exist already; --force replaces an older copy"
    assert line["path"] == str(Path("copy.db").absolute())
    assert (line["contents"], line["damaged"]) == (1, [])
    assert len(lines_of(fairturn("list", "-d", "copy.db", "--json"))) == 1


def test_a_content_that_is_damaged_in_the_queue_is_told_and_the_rest_is_copied(
    queue: Queue,
) -> None:
    good = submit(queue)
    bad, missing = submit(queue, "bolt"), submit(queue, "cole")
    for customer, change in (("bolt", True), ("cole", False)):
        name = _name(queue, customer)
        path = Path("documents.db.contents") / name[:2] / name
        if change:
            path.write_bytes(b"y" * SIZE)
        else:
            path.unlink()

    result = fairturn("backup", "copy.db", "--json")

    assert "2 stored files could not be copied" in error_of(result, 1)
    assert len(json.loads(result.stdout)["damaged"]) == 2
    with Queue("copy.db") as copy:
        assert len(copy.read(good)) == SIZE
        assert {copy.get(bad).state, copy.get(missing).state} == {"waiting"}


def test_a_copy_is_restored_by_copying_it_back(queue: Queue) -> None:
    id = submit(queue)
    back_up(queue, "copy.db")
    queue.close()
    for path in Path().glob("documents.db*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    shutil.copy("copy.db", "documents.db")
    shutil.copytree("copy.db.contents", "documents.db.contents")

    assert assert_whole("documents.db") == [id]
