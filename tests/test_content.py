"""Contents outside the row: written completely or not at all, checked when read, swept when
orphaned."""

import errno
import hashlib
import io
import os
import stat
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairturn import Queue
from fairturn.clock import ManualClock, SystemClock
from fairturn.contents.local import (
    CHUNK_BYTES,
    SWEEP_AGE_US,
    Folder,
    TemporaryFolder,
    chunks_of,
    open_file,
)
from fairturn.errors import ContentDamaged, StoreError, StoreFull
from fairturn.model import ContentRef

NOON = 1_800_000_000_000_000
HOUR_S = SWEEP_AGE_US / 1_000_000
NAME = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOON)


@pytest.fixture
def folder(tmp_path: Path, clock: ManualClock) -> Folder:
    return Folder(tmp_path / "documents.db.contents", clock=clock)


def files_in(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def read(folder: Folder, ref: ContentRef) -> bytes:
    with folder.open(ref) as stream:
        return stream.read()


def all_names(folder: Folder) -> list[str]:
    return sorted(folder.names(older_than=1 << 62))


# ── Writing and reading ──────────────────────────────────────────────────────────────────────────


@given(st.lists(st.binary(max_size=2_000), max_size=5))
def test_what_was_put_in_pieces_comes_back_whole(
    tmp_path_factory: pytest.TempPathFactory, chunks: list[bytes]
) -> None:
    folder = Folder(tmp_path_factory.getbasetemp() / "contents")
    whole = b"".join(chunks)

    ref = folder.put(chunks)

    assert read(folder, ref) == whole
    assert ref[1:] == (len(whole), hashlib.sha256(whole).digest())


def test_a_content_lies_under_a_made_up_name_that_only_its_owner_can_read(
    tmp_path: Path, folder: Folder
) -> None:
    ref = folder.put([b"secret"])

    (file,) = files_in(tmp_path)
    assert file == folder.path / ref.name[:2] / ref.name
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700


def test_names_come_from_the_randomness_that_was_handed_in(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "contents", new_name=lambda: NAME)

    assert folder.put([b"x"]).name == NAME


def test_a_content_is_synced_before_it_gets_its_name_and_its_folder_after(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.put([b"so that the folders are there"])
    calls: list[str] = []
    sync, rename = os.fsync, os.rename

    def note_sync(descriptor: int) -> None:
        kind = "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"
        calls.append(f"sync {kind}")
        sync(descriptor)

    def note_rename(old: str, new: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        calls.append("rename")
        rename(old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "rename", note_rename)

    folder.put([b"x"])

    assert calls[-3:] == ["sync file", "rename", "sync folder"]


def test_a_large_stream_is_never_whole_in_memory(folder: Folder) -> None:
    megabytes = 64

    def chunks() -> Iterator[bytes]:
        for _ in range(megabytes):
            yield bytes(CHUNK_BYTES)

    tracemalloc.start()
    try:
        ref = folder.put(chunks())
        with folder.open(ref) as stream:
            read_bytes = sum(len(chunk) for chunk in chunks_of(stream))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert read_bytes == ref.size_bytes == megabytes * CHUNK_BYTES
    assert most < 8 * CHUNK_BYTES


def test_the_reader_can_go_back_and_forth(folder: Folder) -> None:
    ref = folder.put([b"0123456789"])

    with folder.open(ref) as stream:
        stream.seek(7)
        end = stream.read()
        stream.seek(0)
        whole = stream.read()

    assert (end, whole) == (b"789", b"0123456789")


# ── Refusing ─────────────────────────────────────────────────────────────────────────────────────


def test_a_content_that_is_too_large_is_refused_by_its_counted_bytes_and_leaves_nothing(
    tmp_path: Path, folder: Folder
) -> None:
    with pytest.raises(ValueError, match="more than 1,000 bytes"):
        folder.put([b"x" * 600, b"x" * 401], size_bytes_max=1_000)

    assert files_in(tmp_path) == []
    assert folder.put([b"x" * 600, b"x" * 400], size_bytes_max=1_000).size_bytes == 1_000


def test_an_error_of_the_source_is_passed_on_and_leaves_nothing(
    tmp_path: Path, folder: Folder
) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"x"
        raise ConnectionResetError("the uploader went away")

    with pytest.raises(ConnectionResetError):
        folder.put(chunks())

    assert files_in(tmp_path) == []


@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_that_fails_is_one_of_our_errors_and_leaves_nothing(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    folder.put([b"so that the folders are there"])
    before = all_names(folder)

    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(StoreError) as failed:
        folder.put([b"x"])
    monkeypatch.undo()

    assert isinstance(failed.value, StoreFull) == (code != errno.EIO)
    assert str(folder.path) in str(failed.value)
    assert all_names(folder) == before
    assert folder.put([b"x"]).size_bytes == 1


# ── Damage ───────────────────────────────────────────────────────────────────────────────────────


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def lengthen(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"x")


def flip_one_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[5] ^= 1
    file.write_bytes(content)


def replace_by_a_link(file: Path) -> None:
    other = file.with_name("other")
    file.rename(other)
    file.symlink_to(other)


def replace_the_folder_by_a_link(file: Path) -> None:
    other = file.parent.with_name("other")
    file.parent.rename(other)
    file.parent.symlink_to(other)


@pytest.mark.parametrize(
    ("damage", "how"),
    [
        (truncate, "has 9 bytes; 10 were stored"),
        (lengthen, "has 11 bytes; 10 were stored"),
        (flip_one_bit, "has the SHA-256"),
        (Path.unlink, "is missing"),
        (replace_by_a_link, "is missing"),
        (replace_the_folder_by_a_link, "is missing"),
    ],
)
def test_a_damaged_content_gives_no_byte_and_says_what_is_wrong(
    folder: Folder, damage: Callable[[Path], None], how: str
) -> None:
    ref = folder.put([b"an invoice"])
    damage(folder.path / ref.name[:2] / ref.name)

    with pytest.raises(ContentDamaged, match=f"content {ref.name} {how}"):
        folder.open(ref)


def test_a_directory_in_place_of_a_content_is_damage_and_leaves_no_descriptor_open(
    folder: Folder,
) -> None:
    ref = folder.put([b"an invoice"])
    path = Path(folder.locate(ref.name))
    path.unlink()
    path.mkdir()
    descriptors = sorted(Path("/dev/fd").iterdir())

    with pytest.raises(ContentDamaged, match="cannot be read: Is a directory"):
        open_file(str(path), ref)
    assert sorted(Path("/dev/fd").iterdir()) == descriptors


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../../etc/passwd",
        "/etc/passwd",
        NAME.upper(),
        NAME + "\n",
        NAME[:-1],
        "ab/" + NAME,
    ],
)
def test_a_name_that_was_not_made_here_never_reaches_the_disk(folder: Folder, name: str) -> None:
    folder.put([b"x"])

    with pytest.raises(ValueError, match="not the name of a stored file"):
        folder.open(ContentRef(name, 1, b""))
    with pytest.raises(ValueError, match="not the name of a stored file"):
        folder.delete([name])


def test_new_contents_are_not_written_through_a_link(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    folder = Folder(tmp_path / "contents", new_name=lambda: NAME)
    folder.path.mkdir()
    (folder.path / NAME[:2]).symlink_to(elsewhere)

    with pytest.raises(StoreError):
        folder.put([b"x"])

    assert files_in(elsewhere) == []


# ── Deleting and sweeping ────────────────────────────────────────────────────────────────────────


def test_deleting_removes_contents_and_does_not_mind_those_that_are_gone(folder: Folder) -> None:
    kept, gone = folder.put([b"a"]), folder.put([b"b"])

    folder.delete([gone.name])
    folder.delete([gone.name, NAME])

    assert all_names(folder) == [kept.name]


def test_only_contents_older_than_a_moment_are_named(folder: Folder, clock: ManualClock) -> None:
    old = folder.put([b"old"])
    clock.advance(10)
    folder.put([b"new"])

    assert list(folder.names(older_than=NOON)) == []
    assert list(folder.names(older_than=NOON + 1)) == [old.name]


def test_files_of_others_in_the_folder_are_neither_named_nor_deleted(folder: Folder) -> None:
    ref = folder.put([b"x"])
    (folder.path / ref.name[:2] / "notes.txt").write_text("mine")
    (folder.path / "lost+found").mkdir()
    (folder.path / "zz").mkdir()
    (folder.path / "zz" / NAME).write_text("mine")

    assert all_names(folder) == [ref.name]


def test_a_folder_that_was_never_made_has_no_contents(folder: Folder) -> None:
    assert all_names(folder) == []
    folder.delete([NAME])


def test_a_temporary_folder_goes_when_it_is_closed() -> None:
    folder = TemporaryFolder()
    folder.put([b"x"])

    folder.close()
    folder.close()

    assert not folder.path.exists()


def test_a_sweep_spares_contents_of_documents_and_those_of_the_last_hour(
    tmp_path: Path, clock: ManualClock
) -> None:
    with Queue(tmp_path / "documents.db", clock=clock) as queue:
        receipt = queue.submit("acme", content=b"x" * 100_000)
        orphan = queue.contents.put([b"orphan"])
        clock.advance(HOUR_S)
        early = queue.sweep()
        clock.advance(1e-6)
        young = queue.contents.put([b"the submission is under way"])

        swept = queue.sweep()

        assert (early, swept) == (0, 1)
        left = set(queue.contents.names(older_than=1 << 62))
        assert left == {queue.get(receipt.id).content_name, young.name}
        assert orphan.name not in left


def test_a_sweep_looks_at_any_number_of_contents(tmp_path: Path, clock: ManualClock) -> None:
    with Queue(tmp_path / "documents.db", clock=clock) as queue:
        assert isinstance(queue.contents, Folder)
        (queue.contents.path / "00").mkdir(parents=True)
        for number in range(2_345):
            file = queue.contents.path / "00" / f"{number:032x}"
            file.touch()
            os.utime(file, ns=(0, 0))

        assert queue.sweep() == 2_345
        assert list(queue.contents.names(older_than=1 << 62)) == []


# ── Kills ────────────────────────────────────────────────────────────────────────────────────────

SUBMIT_A_LARGE_CONTENT = """
import sys
from fairturn import Queue
with Queue(sys.argv[1]) as queue:
    queue.submit("acme", content=b"before" * 20_000)
    queue.submit("acme", file=sys.argv[2], key="k")
"""
PRUNE = """
import sys
from fairturn import Queue
from fairturn.clock import ManualClock, SystemClock
clock = ManualClock(SystemClock().now())
clock.advance(8 * 86_400)
with Queue(sys.argv[1], clock=clock) as queue:
    queue.prune()
"""
PURGE = """
import sys
from fairturn import Queue
with Queue(sys.argv[1]) as queue:
    queue.purge("acme")
"""


def run(program: str, *arguments: str, crash_at: str | None = None) -> int:
    environment = {**os.environ, "FAIRTURN_CRASH_AT": crash_at or ""}
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], env=environment, check=False, timeout=60
    ).returncode


def contents_of_documents(queue: Queue) -> set[str]:
    return {d.content_name for d in queue.iterate() if d.content_name is not None}


def two_hours_later() -> ManualClock:
    """Killed processes use the real clock, so the sweep after them starts from it."""
    clock = ManualClock(SystemClock().now())
    clock.advance(2 * HOUR_S)
    return clock


@pytest.mark.parametrize(
    ("point", "documents"),
    [
        ("content-before-write:2", 1),
        ("content-before-rename:2", 1),
        ("content-after-rename:2", 1),
        ("submit-before-commit:2", 1),
        ("submit-after-commit:2", 2),
    ],
)
def test_a_killed_submitter_leaves_no_document_without_content_and_no_content_after_a_sweep(
    tmp_path: Path, point: str, documents: int
) -> None:
    database, file = tmp_path / "documents.db", tmp_path / "scan.pdf"
    file.write_bytes(b"after!" * 20_000)

    killed = run(SUBMIT_A_LARGE_CONTENT, str(database), str(file), crash_at=point)

    assert killed == -9
    with Queue(database, clock=two_hours_later()) as queue:
        found = list(queue.iterate())
        assert len(found) == documents
        assert {queue.read(document.id)[:6] for document in found} <= {b"before", b"after!"}
        queue.sweep()
        assert set(queue.contents.names(older_than=1 << 62)) == contents_of_documents(queue)
        # Submitting again with the same key is safe in any case.
        receipt = queue.submit("acme", file=file, key="k")
        assert queue.read(receipt.id) == file.read_bytes()
        assert len(list(queue.iterate())) == 2


@pytest.mark.parametrize("program", [PRUNE, PURGE], ids=["prune", "purge"])
@pytest.mark.parametrize(
    ("point", "documents"),
    [("prune-before-commit", 1), ("prune-after-commit", 0), ("prune-after-delete", 0)],
)
def test_who_forgets_documents_and_is_killed_leaves_no_document_without_content(
    tmp_path: Path, program: str, point: str, documents: int
) -> None:
    database = tmp_path / "documents.db"
    with Queue(database) as queue:
        queue.cancel(queue.submit("acme", content=b"x" * 100_000).id)

    killed = run(program, str(database), crash_at=point)

    assert killed == -9
    with Queue(database, clock=two_hours_later()) as queue:
        found = list(queue.iterate())
        assert len(found) == documents
        assert [queue.read(document.id) for document in found] == [b"x" * 100_000] * documents
        queue.sweep()
        assert set(queue.contents.names(older_than=1 << 62)) == contents_of_documents(queue)


def test_a_stream_that_gives_single_bytes_is_copied_whole(tmp_path: Path) -> None:
    class Piecemeal(io.RawIOBase):
        left = 70_000

        def readable(self) -> bool:
            return True

        def read(self, size: int = -1) -> bytes:
            give = min(self.left, 999)
            self.left -= give
            return b"x" * give

    with Queue(tmp_path / "documents.db") as queue:
        receipt = queue.submit("acme", content=Piecemeal())  # type: ignore[arg-type]

        assert queue.read(receipt.id) == b"x" * 70_000
