"""A contents folder that several users of the operating system share through its group."""

import hashlib
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from fairturn import Queue
from fairturn.config import open_contents
from fairturn.contents.local import Folder
from fairturn.errors import StoreError
from fairturn.maintenance.copy import copy_queue
from fairturn.model import ContentRef
from tests.commands import fairturn
from tests.forks import Forks, forks_of

# Ids without names: two users with one common group.
GROUP, FIRST, SECOND = 54_320, "54321", "54322"
NAMES = tuple(f"ab{number:030x}" for number in range(3))  # all in one subfolder
LARGE = b"x" * 100_000


@pytest.fixture
def umask() -> Iterator[Callable[[int], int]]:
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def named(path: Path, name: str, *, shared: bool = True) -> Folder:
    return Folder(path, shared=shared, new_name=partial(str, name))


def path_of(folder: Path, name: str) -> Path:
    return folder / name[:2] / name


# ── Modes ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("mask", "of_files"), [(0o002, 0o660), (0o022, 0o640), (0o077, 0o600)])
def test_folders_are_open_to_the_group_whatever_the_umask_and_files_follow_it(
    tmp_path: Path, umask: Callable[[int], int], mask: int, of_files: int
) -> None:
    umask(mask)

    named(tmp_path / "contents", NAMES[0]).put([b"shared"])

    file = path_of(tmp_path / "contents", NAMES[0])
    assert mode_of(tmp_path / "contents") == mode_of(file.parent) == 0o2770
    assert mode_of(file) == of_files


def test_a_folder_is_private_unless_it_is_to_be_shared(
    tmp_path: Path, umask: Callable[[int], int]
) -> None:
    umask(0)

    named(tmp_path / "contents", NAMES[0], shared=False).put([b"private"])

    file = path_of(tmp_path / "contents", NAMES[0])
    assert [mode_of(path) for path in (tmp_path / "contents", file.parent, file)] == [
        0o700,
        0o700,
        0o600,
    ]


def test_a_folder_that_exists_is_not_opened_to_its_group_unasked(tmp_path: Path) -> None:
    folder = tmp_path / "contents"
    folder.mkdir(mode=0o700)

    for _ in range(2):
        with pytest.raises(StoreError, match=f"has mode 0700.*run: chmod 2770 {folder}"):
            Folder(folder, shared=True).check()
    assert mode_of(folder) == 0o700

    folder.chmod(0o2770)
    Folder(folder, shared=True).check()


def test_a_subfolder_whose_maker_was_killed_before_it_was_shared_is_shared_by_the_next(
    tmp_path: Path, umask: Callable[[int], int]
) -> None:
    folder = tmp_path / "contents"
    named(folder, NAMES[0]).put([b"x"])
    (folder / "ab").chmod(0o700)

    named(folder, NAMES[1]).put([b"x"])

    assert mode_of(folder / "ab") == 0o2770


# ── Users ────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def common() -> Iterator[Path]:
    """A folder of the group that both users can reach; pytest's own is closed to them."""
    if os.geteuid() != 0:
        pytest.skip("NOT TESTED: only root can act as other users")
    folder = Path(tempfile.mkdtemp(prefix="fairturn-shared-"))
    os.chown(folder, 0, GROUP)
    folder.chmod(0o2770)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with forks_of(__name__) as forks:
        yield forks


def become(uid: str) -> None:
    """Continue as another user with a typical umask; for a child process."""
    os.setgroups([GROUP])
    os.setgid(int(uid))  # a primary group of its own, as Debian gives each user
    os.setuid(int(uid))
    os.umask(0o022)


def put_as(uid: str, folder: str, name: str, shared: str) -> None:
    become(uid)
    named(Path(folder), name, shared=shared == "shared").put([name.encode()])


def read_as(uid: str, folder: str, name: str) -> None:
    become(uid)
    ref = ContentRef(name, len(name), hashlib.sha256(name.encode()).digest())
    with Folder(folder, shared=True).open(ref) as stream:
        sys.stdout.write(stream.read().decode())


def delete_as(uid: str, folder: str, name: str) -> None:
    become(uid)
    Folder(folder, shared=True).delete([name])


def test_users_of_one_group_read_add_and_delete_each_other_s_contents(
    common: Path, forks: Forks
) -> None:
    folder = common / "contents"

    ended = [
        forks.run("put_as", FIRST, str(folder), NAMES[0], "shared"),
        forks.run("put_as", FIRST, str(folder), NAMES[1], "shared"),
        forks.run("put_as", SECOND, str(folder), NAMES[2], "shared"),
        forks.run("read_as", SECOND, str(folder), NAMES[0]),
        forks.run("delete_as", SECOND, str(folder), NAMES[0]),
    ]

    assert [each.stderr for each in ended] == [""] * 5
    assert ended[3].stdout == NAMES[0]
    assert sorted(Folder(folder).names(1 << 62)) == [NAMES[1], NAMES[2]]
    owners = [path_of(folder, name).stat() for name in NAMES[1:]]
    assert [(str(file.st_uid), file.st_gid) for file in owners] == [(FIRST, GROUP), (SECOND, GROUP)]
    assert (folder.stat().st_gid, mode_of(folder)) == (GROUP, 0o2770)


def test_a_user_that_cannot_use_the_folder_of_another_is_told_what_to_set(
    common: Path, forks: Forks
) -> None:
    folder = str(common / "contents")
    assert forks.run("put_as", FIRST, folder, NAMES[0], "private").code == 0

    refused = forks.run("put_as", SECOND, folder, NAMES[1], "private")

    assert refused.code != 0
    assert "cannot write content: Permission denied; if several users share" in refused.stderr


# ── Where it is set ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("said", ["flag", "environment", "file"])
def test_the_folder_beside_a_file_is_shared_where_a_setting_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scan.pdf").write_bytes(LARGE)
    if said == "environment":
        monkeypatch.setenv("FAIRTURN_CONTENTS_SHARED", "true")
    elif said == "file":
        (tmp_path / "fairturn.toml").write_text("contents_shared = true\n")
    flags = ["--contents-shared"] if said == "flag" else []

    assert fairturn("submit", *flags, "acme", "scan.pdf").exit_code == 0

    assert mode_of(tmp_path / "documents.db.contents") == 0o2770


def test_the_folder_of_contents_is_shared_where_a_setting_says_so(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scan.pdf").write_bytes(LARGE)
    place = ["--database", url, "--contents", str(tmp_path / "shared")]

    assert fairturn("submit", *place, "--contents-shared", "acme", "scan.pdf").exit_code == 0

    assert mode_of(tmp_path / "shared") == 0o2770


def test_a_queue_that_is_copied_can_have_a_shared_folder(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with Queue("documents.db") as queue:
        receipt = queue.submit("acme", content=LARGE)

    copy_queue("documents.db", url, contents=tmp_path / "shared", contents_shared=True)

    assert mode_of(tmp_path / "shared") == 0o2770
    with Queue(url, contents=Folder(tmp_path / "shared", shared=True)) as copy:
        assert copy.read(receipt.id) == LARGE


def test_what_cannot_be_shared_by_a_group_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="contents_shared does not apply to a bucket"):
        open_contents("s3://documents", shared=True)
    with pytest.raises(ValueError, match=r"use contents=Folder\(\.\.\., shared=True\)"):
        Queue(tmp_path / "documents.db", contents=Folder(tmp_path), contents_shared=True)
