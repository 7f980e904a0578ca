"""Where the bytes of a document live when they are too many for its row.

`Contents` is the seam; `Folder` keeps them beside the database, `bucket.Bucket` in object storage.
A content is written and synced before its row and deleted after it, so that a crash can leave a
content without a document, which a sweep removes, but never a document without its content.
"""

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from fairturn import crash
from fairturn.clock import Clock, SystemClock
from fairturn.errors import ContentDamaged, StoreError, StoreFull, StoreRefused
from fairturn.model import CONTENT_BYTES_MAX, INLINE_BYTES_MAX, ContentRef, Document, Kind

CHUNK_BYTES = 1_048_576
# A content without a document may belong to a submission under way. After this time it does not.
SWEEP_AGE_US = 3_600 * 1_000_000
# How long a call waits for transactions in flight before it leaves its contents to the sweep.
DISCARD_S = 0.25

_NAME = re.compile(r"[0-9a-f]{32}", re.ASCII)
UNFINISHED = ".part"  # after the name of what is not whole
_FULL = (errno.ENOSPC, errno.EDQUOT)
_NOTHING = (errno.ENOENT, errno.ELOOP, errno.ENOTDIR)  # or a symbolic link, which is not ours
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class Writing(Protocol):
    """A content that is being written, piece by piece: for bytes that come when they come."""

    def write(self, chunk: bytes) -> None:
        """Add bytes. More than allowed raise `ValueError`, a full disk `StoreFull`."""
        ...

    def finish(self) -> ContentRef:
        """The content; it is on stable storage when this returns."""
        ...

    def abandon(self) -> None:
        """Keep nothing. After `finish`, or twice, it does no harm and changes nothing."""
        ...


class Contents(Protocol):
    """Bytes under names that are made here: no name from outside is ever part of a path."""

    def put(
        self, chunks: Iterable[bytes], *, size_bytes_max: int = CONTENT_BYTES_MAX
    ) -> ContentRef:
        """Write a content; it is on stable storage when this returns.

        More bytes than allowed raise `ValueError`, a full disk `StoreFull`; what `chunks` raises
        is passed on. In each case nothing is kept.
        """
        ...

    def begin(self, *, size_bytes_max: int = CONTENT_BYTES_MAX) -> Writing:
        """Begin a content whose bytes are not all there yet; its writer finishes or abandons it.
        What neither happens to, because of a crash, is swept."""
        ...

    def open(self, ref: ContentRef) -> BinaryIO:
        """The content from its beginning, every byte checked before the first is handed out.

        Bytes that are missing or changed raise `ContentDamaged`.
        """
        ...

    def locate(self, name: str) -> str:
        """Where every process of this machine finds the content, unchecked: the path of a file,
        or an address that begins with http. Nothing is waited for. Who reads it checks it."""
        ...

    def check(self) -> None:
        """Raise what `begin` and its writing would raise now, as far as that can be known."""
        ...

    def delete(self, names: Iterable[str]) -> None:
        """Delete contents; those that are gone already do no harm."""
        ...

    def names(self, older_than: int) -> Iterator[str]:
        """Everything written before a moment, also what a crash left unfinished."""
        ...

    def close(self) -> None:
        """Give back what was opened. Calling it twice does no harm."""
        ...


class Nowhere:
    """For a queue on a database server without a folder that all its machines share: everything
    lies in the database, and what is too large for that is refused."""

    def put(
        self, chunks: Iterable[bytes], *, size_bytes_max: int = CONTENT_BYTES_MAX
    ) -> ContentRef:
        raise StoreRefused(
            f"what is larger than {INLINE_BYTES_MAX:,} bytes needs a folder or a bucket that every "
            "machine of the queue shares; name it with contents=Folder(...) or --contents"
        )

    def begin(self, *, size_bytes_max: int = CONTENT_BYTES_MAX) -> Writing:
        self.put(())
        raise AssertionError

    def open(self, ref: ContentRef) -> BinaryIO:
        raise ContentDamaged(
            f"the content {ref.name} lies in a place that this process was not told of; name it "
            "with contents=Folder(...) or --contents"
        )

    def locate(self, name: str) -> str:
        raise ContentDamaged(
            f"the content {name} lies in a place that this process was not told of; name it "
            "with contents=Folder(...) or --contents"
        )

    def check(self) -> None:
        """Small documents are accepted, and that is all that there is."""

    def delete(self, names: Iterable[str]) -> None:
        """Whoever knows the folder deletes them with its next sweep."""

    def names(self, older_than: int) -> Iterator[str]:
        return iter(())

    def close(self) -> None:
        """Nothing to give back."""


def written(writing: Writing, chunks: Iterable[bytes]) -> ContentRef:
    """All of a content that is at hand; nothing of it stays if that fails."""
    try:
        for chunk in chunks:
            writing.write(chunk)
        return writing.finish()
    finally:
        writing.abandon()


_ROOT = ""  # the folder itself, among those that were synced


# Modes of folders and files: of their owner alone, or of a group whose members share a folder. The
# umask applies to files. It does not apply to folders: each member adds and deletes files in them.
_PRIVATE_FOLDER, _PRIVATE_FILE = 0o700, 0o600
_SHARED_FOLDER, _SHARED_FILE = 0o2770, 0o660


class Folder:
    """Contents as files, in subfolders by the first two digits of their names.

    Only their owner can read them; with `shared=True` the members of the folder's group can read,
    add and delete them. A shared folder that exists must have the mode 2770, which hands its group
    on to everything in it. No symbolic link inside the folder is followed.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        shared: bool = False,
        clock: Clock | None = None,
        new_name: Callable[[], str] = lambda: secrets.token_hex(16),
    ) -> None:
        self.path = Path(path).absolute()
        self.shared = shared
        self._clock = clock or SystemClock()
        self._new_name = new_name
        self._synced: set[str] = set()  # subfolders that survive a power cut

    def put(
        self, chunks: Iterable[bytes], *, size_bytes_max: int = CONTENT_BYTES_MAX
    ) -> ContentRef:
        return written(self.begin(size_bytes_max=size_bytes_max), chunks)

    def begin(self, *, size_bytes_max: int = CONTENT_BYTES_MAX) -> "_File":
        name = checked_name(self._new_name())
        # Not the content's own name: a backup writes known names, and what a killed one has left
        # under them would be in the way of the next.
        unfinished = name[:2] + secrets.token_hex(15) + UNFINISHED
        crash.point("content-before-write")
        with self._translated("write"):
            folder = self._make_subfolder(name[:2])
        try:
            with self._translated("write"):
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
                mode = _SHARED_FILE if self.shared else _PRIVATE_FILE
                file = os.open(unfinished, flags, mode=mode, dir_fd=folder)
        except BaseException:
            os.close(folder)
            raise
        return _File(self, (unfinished, name), folder, file, size_bytes_max)

    def open(self, ref: ContentRef) -> BinaryIO:
        name = checked_name(ref.name)
        try:
            with self._subfolder(name[:2]) as folder:
                descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder)
        except OSError as error:
            if error.errno in _NOTHING:
                raise ContentDamaged(f"the content {name} is missing in {self.path}") from error
            raise self._translate("read", error) from error
        file = os.fdopen(descriptor, "rb")
        try:
            with self._translated("read"):
                verify(file, ref)
                file.seek(0)
        except BaseException:
            file.close()
            raise
        return file

    def locate(self, name: str) -> str:
        return str(self.path / checked_name(name)[:2] / name)

    def check(self) -> None:
        self.begin().abandon()

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            checked_name(name.removesuffix(UNFINISHED))
            try:
                with self._subfolder(name[:2]) as folder:
                    os.unlink(name, dir_fd=folder)
            except OSError as error:
                if error.errno not in _NOTHING:
                    raise self._translate("delete", error) from error

    def names(self, older_than: int) -> Iterator[str]:
        for number in range(256):
            try:
                with self._subfolder(f"{number:02x}") as folder, os.scandir(folder) as entries:
                    old = [entry.name for entry in entries if _is_old_content(entry, older_than)]
            except OSError as error:
                if error.errno in _NOTHING:
                    continue
                raise self._translate("list", error) from error
            yield from old

    def close(self) -> None:
        """Nothing is open between two calls."""

    def _make_subfolder(self, two_digits: str) -> int:
        """An open subfolder, made if it is new."""
        mode = _SHARED_FOLDER if self.shared else _PRIVATE_FOLDER
        is_new = False
        with suppress(FileExistsError):
            self.path.mkdir(mode=mode)
            self._synced.clear()
            is_new = True
        root = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            # Also one that was there: who made it may have been killed before this line.
            if _ROOT not in self._synced:
                if self.shared:
                    self._share_root(root, is_new=is_new)
                _sync_folder(self.path.parent)
                self._synced.add(_ROOT)
            with suppress(FileExistsError):
                os.mkdir(two_digits, mode=mode, dir_fd=root)
                self._synced.discard(two_digits)
            if two_digits not in self._synced:
                if self.shared:
                    with self._subfolder(two_digits) as folder:
                        _share(folder)
                os.fsync(root)
                self._synced.add(two_digits)
            return os.open(two_digits, _OPEN_FOLDER, dir_fd=root)
        finally:
            os.close(root)

    def _share_root(self, root: int, *, is_new: bool) -> None:
        """Share a folder that was made here. One that exists is not opened to a group unasked."""
        if is_new:
            _share(root)
        mode = stat.S_IMODE(os.fstat(root).st_mode)
        if mode & _SHARED_FOLDER != _SHARED_FOLDER:
            raise StoreError(
                f"{self.path} is to be shared by a group and has the mode {mode:04o}; "
                f"give it the group that its users have in common, and run: chmod 2770 {self.path}"
            )

    @contextmanager
    def _subfolder(self, two_digits: str) -> Iterator[int]:
        root = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            folder = os.open(two_digits, _OPEN_FOLDER, dir_fd=root)
        finally:
            os.close(root)
        try:
            yield folder
        finally:
            os.close(folder)

    @contextmanager
    def _translated(self, verb: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._translate(verb, error) from error

    def _translate(self, verb: str, error: OSError) -> StoreError:
        if error.errno in _FULL:
            return StoreFull(f"the disk of {self.path} is full; nothing was stored by this call")
        said = f"{self.path}: cannot {verb} a content: {error.strerror or error}"
        if error.errno == errno.EACCES:
            said += (
                "; if several users share the folder, each process needs its group, and "
                "Folder(..., shared=True) or the setting contents_shared"
            )
        return StoreError(said)


class _File:
    """A file of a folder that is being written; under its name only when it is whole."""

    def __init__(
        self, owner: Folder, names: tuple[str, str], folder: int, file: int, size_bytes_max: int
    ) -> None:
        self._owner = owner
        self._present: str | None  # the name under which it is there
        self._present, self._name = names
        self._folder, self._file = folder, file
        self._size_bytes_max = size_bytes_max
        self._size_bytes = 0
        self._digest = hashlib.sha256()
        self._closed = False

    def write(self, chunk: bytes) -> None:
        self._size_bytes += len(chunk)
        if self._size_bytes > self._size_bytes_max:
            raise ValueError(
                f"the content has more than {self._size_bytes_max:,} bytes; no more are allowed"
            )
        self._digest.update(chunk)
        with self._owner._translated("write"):
            _write(self._file, chunk)

    def finish(self) -> ContentRef:
        with self._owner._translated("write"):
            # The age of a content follows the same clock as everything else.
            os.utime(self._file, ns=(self._owner._clock.now() * 1000,) * 2)
            os.fsync(self._file)
            crash.point("content-before-rename")
            assert self._present is not None
            os.rename(self._present, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
            self._present = self._name
            os.fsync(self._folder)
        self._present = None
        self._close()
        crash.point("content-after-rename")
        return ContentRef(self._name, self._size_bytes, self._digest.digest())

    def abandon(self) -> None:
        if self._present is not None and not self._closed:
            with suppress(OSError):
                os.unlink(self._present, dir_fd=self._folder)
        self._close()

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            os.close(self._file)
            os.close(self._folder)


class TemporaryFolder(Folder):
    """Contents for a queue in memory: they end with it."""

    def __init__(self, *, clock: Clock | None = None) -> None:
        super().__init__(tempfile.mkdtemp(prefix="fairturn-"), clock=clock)
        self._remove = weakref.finalize(self, _remove_own, self.path, os.getpid())

    def close(self) -> None:
        self._remove()


def payload_of(document: Document, body: str | bytes | None, contents: Contents) -> Any:
    """The JSON value that a document carries, wherever it lies."""
    refuse_other(document, Kind.PAYLOAD)
    if body is not None:
        return json.loads(body)
    with contents.open(_outside(document)) as stream:
        return json.load(stream)


def open_content(document: Document, body: str | bytes | None, contents: Contents) -> BinaryIO:
    """The content that a document carries, wherever it lies, checked and at its beginning."""
    refuse_other(document, Kind.CONTENT)
    if body is None:
        return contents.open(_outside(document))
    assert isinstance(body, bytes)
    check_bytes(document.id, body, document.sha256)
    return BytesIO(body)


def refuse_other(document: Document, kind: Kind) -> None:
    """Refuse to read a document as what it is not."""
    if document.kind is not kind:
        raise ValueError(f"document {document.id} carries a {document.kind} and no {kind}")


def check_bytes(id: str, body: bytes, sha256: bytes | None) -> None:
    """Raise `ContentDamaged` unless the bytes are those that the document came with."""
    if hashlib.sha256(body).digest() != sha256:
        raise ContentDamaged(f"the content of document {id} differs from its checksum")


def open_file(path: str, ref: ContentRef) -> BinaryIO:
    """A content where `Contents.locate` says it lies, checked and at its beginning."""
    try:
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb")
    except OSError as error:
        raise ContentDamaged(f"the content {path} cannot be read: {error.strerror}") from error
    try:
        verify(file, ref)
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return file


def _outside(document: Document) -> ContentRef:
    if document.content_name is None or document.sha256 is None:
        raise ContentDamaged(f"document {document.id} has lost what it carried")
    return ContentRef(document.content_name, document.size_bytes, document.sha256)


def chunks_of(stream: BinaryIO) -> Iterator[bytes]:
    """What is left in a stream, in pieces that fit into memory."""
    while chunk := stream.read(CHUNK_BYTES):
        yield chunk


def sweep(
    contents: Contents, unreferenced: Callable[[Sequence[str]], Sequence[str]], now: int
) -> int:
    """Delete what no document refers to and no submission can be about to; answers how many."""
    deleted = 0
    batch: list[str] = []
    for name in contents.names(now - SWEEP_AGE_US):
        batch.append(name)
        if len(batch) == 1_000:
            deleted += delete_unreferenced(contents, unreferenced, batch)
            batch = []
    return deleted + delete_unreferenced(contents, unreferenced, batch)


def delete_unreferenced(
    contents: Contents, unreferenced: Callable[[Sequence[str]], Sequence[str]], names: list[str]
) -> int:
    """Delete those of these contents that the store reports as unreferenced; return how many.

    A call that failed, or that answered with the receipt of an earlier one, may have stored its
    document all the same: the reply to its first attempt was lost. So no caller decides by itself
    that a content is not needed.
    """
    orphans = unreferenced(names) if names else ()
    contents.delete(orphans)
    return len(orphans)


def checked_name(name: str) -> str:
    """The name of a content, which was made here: anything else must not reach a path."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a content")
    return name


def _is_old_content(entry: os.DirEntry[str], older_than: int) -> bool:
    if not _NAME.fullmatch(entry.name.removesuffix(UNFINISHED)):
        return False  # not ours: it is left alone
    try:
        return entry.stat(follow_symlinks=False).st_mtime_ns // 1000 < older_than
    except FileNotFoundError:
        return False


def _write(file: int, chunk: bytes) -> None:
    rest = memoryview(chunk)
    while rest:
        rest = rest[os.write(file, rest) :]


def verify(file: BinaryIO, ref: ContentRef) -> None:
    """Raise `ContentDamaged` unless what is left in the file is the content."""
    digest = hashlib.sha256()
    size_bytes = 0
    for chunk in chunks_of(file):
        digest.update(chunk)
        size_bytes += len(chunk)
    if size_bytes != ref.size_bytes:
        raise ContentDamaged(
            f"the content {ref.name} has {size_bytes:,} bytes; {ref.size_bytes:,} were stored"
        )
    if digest.digest() != ref.sha256:
        raise ContentDamaged(
            f"the content {ref.name} has the SHA-256 {digest.hexdigest()}; "
            f"that of what was stored is {ref.sha256.hex()}"
        )


def _share(folder: int) -> None:
    """Let the group of a folder add and delete files, if the folder is this user's own. The mode
    given to `mkdir` is not enough: the umask is subtracted from it."""
    found = os.fstat(folder)
    if found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) != _SHARED_FOLDER:
        os.fchmod(folder, _SHARED_FOLDER)


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _remove_own(path: Path, pid: int) -> None:
    if os.getpid() == pid:  # a forked child must not take the folder from its parent
        shutil.rmtree(path, ignore_errors=True)
