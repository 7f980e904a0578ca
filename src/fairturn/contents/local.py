"""The contents of documents that are too large for their row.

`Contents` is the interface; `Folder` stores files beside the database, `s3.Bucket` objects in S3. A
content is durable before its row is inserted and deleted after its row. So a crash may leave a
content without a document, which a sweep deletes, but never a document without its content.
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
from typing import Any, BinaryIO, NoReturn, Protocol

from fairturn.clock import Clock, SystemClock
from fairturn.errors import ContentDamaged, StoreError, StoreFull, StoreRefused
from fairturn.model import CONTENT_BYTES_MAX, INLINE_BYTES_MAX, BodyType, ContentRef, Document
from fairturn.stores import crash

CHUNK_BYTES = 1_048_576
# An unreferenced content may belong to a submission in progress, but not after this time.
SWEEP_AGE_US = 3_600 * 1_000_000
# How long a call waits for open transactions before it leaves its contents to the sweep.
DISCARD_S = 0.25

_NAME = re.compile(r"[0-9a-f]{32}", re.ASCII)
_BODIES = {BodyType.PAYLOAD: "a payload", BodyType.CONTENT: "content"}  # in messages
UNFINISHED = ".part"  # suffix of incomplete contents
_FULL = (errno.ENOSPC, errno.EDQUOT)
_NOTHING = (errno.ENOENT, errno.ELOOP, errno.ENOTDIR)  # a symbolic link is not followed
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


# Reads the rest of an open file. Raises `ContentDamaged` unless it matches the reference.
Verify = Callable[[BinaryIO, ContentRef], None]


class ContentWriter(Protocol):
    """Writes a stored file chunk by chunk."""

    def write(self, chunk: bytes) -> None:
        """Append bytes.

        Raises `ValueError` if the content becomes too large, `StoreFull` if the disk is full.
        """
        ...

    def finish(self) -> ContentRef:
        """Make the content durable and return its reference."""
        ...

    def abandon(self) -> None:
        """Delete what was written. Does nothing after `finish` or a second time."""
        ...


class Contents(Protocol):
    """Stores contents under names that it generates; no user input becomes part of a path. A class
    for another place inherits from it and implements the methods without a body."""

    def put(
        self, chunks: Iterable[bytes], *, size_bytes_max: int = CONTENT_BYTES_MAX
    ) -> ContentRef:
        """Write the content, and return its reference once it is durable.

        Raises `ValueError` if it is too large, `StoreFull` if the disk is full, and what `chunks`
        raises. After an error nothing is stored.
        """
        writing = self.begin(size_bytes_max=size_bytes_max)
        try:
            for chunk in chunks:
                writing.write(chunk)
            return writing.finish()
        finally:
            writing.abandon()

    def begin(self, *, size_bytes_max: int = CONTENT_BYTES_MAX) -> ContentWriter:
        """Begin to write a stored file. A sweep deletes it if a crash prevents `finish` and
        `abandon`."""
        ...

    def open(self, ref: ContentRef, verify: Verify | None = None) -> BinaryIO:
        """Open a stored file after verifying all of it, with `verify` if it is given.

        Raises `ContentDamaged` if it is missing or its size or SHA-256 differs.
        """
        ...

    def locate(self, name: str) -> str:
        """Return where any process of this machine can read the content: a file path or an HTTP
        URL. Does no I/O; the reader must verify the content."""
        ...

    def check(self) -> None:
        """Raise what writing a stored file would raise now, as far as can be determined."""
        return

    def delete(self, names: Iterable[str]) -> None:
        """Delete contents; ignore missing ones."""
        ...

    def names(self, older_than: int) -> Iterator[str]:
        """Iterate over the contents last written before `older_than`, also incomplete ones."""
        ...

    def close(self) -> None:
        """Free the resources. Idempotent."""
        return


class NoContents(Contents):
    """For a queue on PostgreSQL without a shared folder or bucket: contents are in the database,
    and large ones are rejected."""

    def begin(self, *, size_bytes_max: int = CONTENT_BYTES_MAX) -> ContentWriter:
        raise StoreRefused(
            f"content of more than {INLINE_BYTES_MAX:,} bytes needs a folder or a bucket that "
            "all machines of the queue share; set it with contents=Folder(...) or --contents"
        )

    def open(self, ref: ContentRef, verify: Verify | None = None) -> NoReturn:
        self.locate(ref.name)

    def locate(self, name: str) -> NoReturn:
        raise ContentDamaged(
            f"content {name} is in a folder or bucket that is not configured in this process; set "
            "it with contents=Folder(...) or --contents"
        )

    def delete(self, names: Iterable[str]) -> None:
        """Do nothing: a process with the folder deletes them in its next sweep."""

    def names(self, older_than: int) -> Iterator[str]:
        return iter(())


_CHECK_BYTES = 4_096  # that `check` writes: an empty file fits on a full disk
_ROOT = ""  # the folder itself, in `_synced`

# Modes for the owner alone, or for a group that shares a folder. The umask applies to files but not
# to folders, in which each member of the group must be able to add and delete files.
_PRIVATE_FOLDER, _PRIVATE_FILE = 0o700, 0o600
_SHARED_FOLDER, _SHARED_FILE = 0o2770, 0o660


class Folder(Contents):
    """Contents as files, in subfolders named by the first two digits of their names.

    Only the owner can read them. With `shared=True` the folder's group can read, add and delete
    them; an existing folder must then have mode 2770, so that new files inherit its group. Symbolic
    links inside the folder are not followed.
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
        self._synced: set[str] = set()  # subfolders whose entries are durable

    def begin(self, *, size_bytes_max: int = CONTENT_BYTES_MAX) -> "_FileWriter":
        name = checked_name(self._new_name())
        # A random name: a backup writes known names, and the remains of a killed backup must not
        # block the next one.
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
        return _FileWriter(self, (unfinished, name), folder, file, size_bytes_max)

    def open(self, ref: ContentRef, verify: Verify | None = None) -> BinaryIO:
        name = checked_name(ref.name)
        try:
            with self._subfolder(name[:2]) as folder:
                descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder)
        except OSError as error:
            if error.errno in _NOTHING:
                raise ContentDamaged(f"content {name} is missing in {self.path}") from error
            raise self._translate("read", error) from error
        with self._translated("read"):
            return _verified(descriptor, ref, verify or verify_all)

    def locate(self, name: str) -> str:
        return str(self.path / checked_name(name)[:2] / name)

    def check(self) -> None:
        writing = self.begin()
        try:
            writing.write(b"\0" * _CHECK_BYTES)
        finally:
            writing.abandon()

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

    def _make_subfolder(self, two_digits: str) -> int:
        """Return the descriptor of a subfolder, which is created if it is missing."""
        mode = _SHARED_FOLDER if self.shared else _PRIVATE_FOLDER
        is_new = False
        with suppress(FileExistsError):
            self.path.mkdir(mode=mode)
            self._synced.clear()
            is_new = True
        root = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            # Also for an existing folder: its creator may have been killed before this line.
            if _ROOT not in self._synced:
                if self.shared:
                    self._share_root(root, is_new=is_new)
                sync(self.path.parent)
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
        """Share a new folder with its group; raise `StoreError` for an existing private one."""
        if is_new:
            _share(root)
        mode = stat.S_IMODE(os.fstat(root).st_mode)
        if mode & _SHARED_FOLDER != _SHARED_FOLDER:
            raise StoreError(
                f"{self.path} has mode {mode:04o}, and contents_shared needs 2770; "
                f"give it a group of all its users (chgrp), and run: chmod 2770 {self.path}"
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
        message = f"{self.path}: cannot {verb} content: {error.strerror or error}"
        if error.errno == errno.EACCES:
            message += (
                "; if several users share the folder, each process needs its group, and "
                "Folder(..., shared=True) or the setting contents_shared"
            )
        return StoreError(message)


class _FileWriter:
    """Writes a file under a temporary name, and renames it when it is complete."""

    def __init__(
        self, owner: Folder, names: tuple[str, str], folder: int, file: int, size_bytes_max: int
    ) -> None:
        self._owner = owner
        self._present: str | None  # its current name; None once it is finished
        self._present, self._name = names
        self._folder, self._file = folder, file
        self._size_bytes_max = size_bytes_max
        self._size_bytes = 0
        self._digest = hashlib.sha256()
        self._closed = False

    def write(self, chunk: bytes) -> None:
        self._size_bytes += len(chunk)
        if self._size_bytes > self._size_bytes_max:
            raise ValueError(f"the content has more than {self._size_bytes_max:,} bytes, the limit")
        self._digest.update(chunk)
        with self._owner._translated("write"):
            _write(self._file, chunk)

    def finish(self) -> ContentRef:
        with self._owner._translated("write"):
            # `names` compares the age of contents with the time of this clock.
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
    """Contents of a queue in memory, deleted with it."""

    def __init__(self, *, clock: Clock | None = None) -> None:
        super().__init__(tempfile.mkdtemp(prefix="fairturn-"), clock=clock)
        self._remove = weakref.finalize(self, _remove_own, self.path, os.getpid())

    def close(self) -> None:
        self._remove()


def payload_of(
    document: Document, body: str | bytes | None, contents: Contents, verify: Verify | None = None
) -> Any:
    """Return the payload of a document, from its row or the contents."""
    refuse_other(document, BodyType.PAYLOAD)
    if body is not None:
        return json.loads(body)
    with contents.open(_outside(document), verify) as stream:
        return json.load(stream)


def open_content(
    document: Document, body: str | bytes | None, contents: Contents, verify: Verify | None = None
) -> BinaryIO:
    """Open the content of a document, from its row or the contents, after verifying it."""
    refuse_other(document, BodyType.CONTENT)
    if body is None:
        return contents.open(_outside(document), verify)
    assert isinstance(body, bytes)
    check_bytes(document.id, body, document.sha256)
    return BytesIO(body)


def refuse_other(document: Document, body_type: BodyType) -> None:
    """Raise `ValueError` if the document has not this type of body."""
    if document.body_type is not body_type:
        has, lacks = _BODIES[document.body_type], _BODIES[body_type]
        raise ValueError(f"document {document.id} has {has}, not {lacks}")


def check_bytes(id: str, body: bytes, sha256: bytes | None) -> None:
    """Raise `ContentDamaged` unless the bytes match the SHA-256."""
    if hashlib.sha256(body).digest() != sha256:
        raise ContentDamaged(f"the content of document {id} does not match its SHA-256")


def open_file(path: str, ref: ContentRef) -> BinaryIO:
    """Open a file that `Contents.locate` returned, after verifying it."""
    try:
        return _verified(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), ref, verify_all)
    except OSError as error:
        raise ContentDamaged(f"content {path} cannot be read: {error.strerror}") from error


def _verified(descriptor: int, ref: ContentRef, verify: Verify) -> BinaryIO:
    try:
        file = os.fdopen(descriptor, "rb")
    except OSError:  # a directory
        os.close(descriptor)
        raise
    try:
        verify(file, ref)
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return file


def _outside(document: Document) -> ContentRef:
    if document.content_name is None or document.sha256 is None:
        raise ContentDamaged(f"the body of document {document.id} is missing in its row")
    return ContentRef(document.content_name, document.size_bytes, document.sha256)


def chunks_of(stream: BinaryIO) -> Iterator[bytes]:
    """Iterate over the rest of a stream, in chunks of `CHUNK_BYTES`."""
    while chunk := stream.read(CHUNK_BYTES):
        yield chunk


def copy_content(ref: ContentRef, source: Contents, target: Folder) -> None:
    """Copy a content under its own name, unless the target has it undamaged. Raise `ContentDamaged`
    if the source has not."""
    with suppress(ContentDamaged):  # also raised for a missing one
        target.open(ref).close()
        return
    with source.open(ref) as stream:
        named = Folder(target.path, shared=target.shared, new_name=lambda: ref.name)
        if named.put(chunks_of(stream)) != ref:
            raise ContentDamaged(f"the content {ref.name} changed while it was copied")


def sweep(
    contents: Contents, unreferenced: Callable[[Sequence[str]], Sequence[str]], now: int
) -> int:
    """Delete contents that are unreferenced and older than `SWEEP_AGE_US`; return how many."""
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

    Callers must not decide this themselves: a submission that failed or was replayed may have
    stored its document, if only the reply was lost.
    """
    orphans = unreferenced(names) if names else ()
    contents.delete(orphans)
    return len(orphans)


def checked_name(name: str) -> str:
    """Return the name of a stored file; raise `ValueError` for any other text: it may be a path."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a stored file")
    return name


def _is_old_content(entry: os.DirEntry[str], older_than: int) -> bool:
    if not _NAME.fullmatch(entry.name.removesuffix(UNFINISHED)):
        return False  # not a stored file
    try:
        return entry.stat(follow_symlinks=False).st_mtime_ns // 1000 < older_than
    except FileNotFoundError:
        return False


def _write(file: int, chunk: bytes) -> None:
    rest = memoryview(chunk)
    while rest:
        rest = rest[os.write(file, rest) :]


def verify_all(
    file: BinaryIO, ref: ContentRef, checkpoint: Callable[[], None] | None = None
) -> None:
    """Raise `ContentDamaged` unless the rest of the file matches the reference. `checkpoint` is
    called before each chunk, and may raise to stop."""
    digest = hashlib.sha256()
    size_bytes = 0
    for chunk in chunks_of(file):
        if checkpoint is not None:
            checkpoint()
        digest.update(chunk)
        size_bytes += len(chunk)
    if size_bytes != ref.size_bytes:
        raise ContentDamaged(
            f"content {ref.name} has {size_bytes:,} bytes; {ref.size_bytes:,} were stored"
        )
    if digest.digest() != ref.sha256:
        raise ContentDamaged(
            f"content {ref.name} has the SHA-256 {digest.hexdigest()}; "
            f"{ref.sha256.hex()} was stored"
        )


def _share(folder: int) -> None:
    """Set the shared mode of a folder that this user owns: `mkdir` has applied the umask."""
    found = os.fstat(folder)
    if found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) != _SHARED_FOLDER:
        os.fchmod(folder, _SHARED_FOLDER)


def sync(path: Path) -> None:
    """Make a file, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_own(path: Path, pid: int) -> None:
    if os.getpid() == pid:  # a forked child must not remove its parent's folder
        shutil.rmtree(path, ignore_errors=True)
