"""The document that a handler gets, and how a child process or a thread runs a handler.

A child imports little but this module, so rarely needed modules are imported where they are used.
"""

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from io import BytesIO
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Protocol

from fairturn.clock import to_datetime
from fairturn.worker.registry import Handler, Handlers
from fairturn.worker.results import (
    CHECKPOINT_BYTES_MAX,
    DELIBERATE,
    DONE,
    RETRY,
    Answer,
    answer_to,
    answer_to_error,
    encode,
)
from fairturn.worker.tracebacks import describe, trace

if TYPE_CHECKING:
    from pathlib import Path

    from fairturn.model import Fence, FinishedStep


class StoredFile(NamedTuple):
    """A content outside the database."""

    path: str | None  # or a URL; None if the worker cannot find it
    size_bytes: int
    sha256: str


class DocumentFields(NamedTuple):
    """The fields of a claim that an executor passes to the handler, all of them JSON except that
    content is bytes."""

    id: str
    number: int  # of the fence
    customer: str
    kind: str
    name: str | None
    metadata_json: str | None
    priority: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    attempt: int
    step: int
    size_bytes: int
    submitted_at_us: int
    is_payload: bool
    body: str | bytes | None
    path: str | None  # of the stored content
    sha256: str | None
    previous_json: str | None
    previous_file: Sequence[Any] | None  # the fields of a `StoredFile`
    steps: Sequence[Sequence[Any]]  # the fields of each `FinishedStep`
    checkpoint_json: str | None


class Reporter(Protocol):
    """Passes on what a handler reports while it runs."""

    def report(self, done: float, total: float | None) -> None: ...

    def save(self, checkpoint: str) -> None: ...


class ClaimedDocument:
    """The document that a handler processes.

    It has more than 15 attributes because it offers all that a handler may read of a document.
    """

    # So that a handler that assigns to a misspelt attribute raises `AttributeError`.
    __slots__ = (
        "_checkpoint",
        "_fields",
        "_folder_made",
        "_folders",
        "_reporter",
        "attempt",
        "count",
        "customer",
        "id",
        "is_payload",
        "kind",
        "name",
        "priority",
        "size_bytes",
        "step",
        "stop_requested",
        "submitted_at_us",
    )

    def __init__(self, fields: DocumentFields, folders: str, reporter: Reporter) -> None:
        self._fields = fields
        self.id = fields.id
        self.customer = fields.customer
        self.kind = fields.kind  # the kind of work
        self.name = fields.name
        self.priority = fields.priority
        self.count = fields.count
        self.attempt = fields.attempt  # of this step
        self.step = fields.step  # how many steps are finished
        self.size_bytes = fields.size_bytes
        self.submitted_at_us = fields.submitted_at_us
        self.is_payload = fields.is_payload  # whether it has a `payload`, or content
        # Threads only: the document was cancelled, or its lease was lost.
        self.stop_requested = False
        self._folders = folders
        self._folder_made = False
        self._reporter = reporter
        self._checkpoint = fields.checkpoint_json

    def __repr__(self) -> str:
        return (
            f"<document {self.id} of {self.customer!r}, kind {self.kind}, attempt {self.attempt}>"
        )

    @property
    def submitted_at(self) -> datetime:
        return to_datetime(self.submitted_at_us)

    @property
    def fence(self) -> "Fence":
        """The fencing token of this attempt: external systems can reject a superseded one by it."""
        from fairturn.model import Fence

        return Fence(self.id, self._fields.number)

    @property
    def metadata(self) -> dict[str, Any]:
        text = self._fields.metadata_json
        return json.loads(text) if text else {}

    @property
    def payload(self) -> Any:
        """The JSON value; raises `ValueError` if the document has content."""
        if not self.is_payload:
            raise ValueError(f"document {self.id} has content, not a payload; call read()")
        if self._fields.body is not None:
            return json.loads(self._fields.body)
        with self._open(self._stored(), "the payload") as stream:
            return json.load(stream)

    def open(self) -> BinaryIO:
        """Open the content, after verifying its SHA-256.

        Raises `ValueError` if the document has a payload, `ContentDamaged` if the content is
        missing or does not match.
        """
        body = self._checked_body()
        return self._open(self._stored(), "the content") if body is None else BytesIO(body)

    def read(self) -> bytes:
        """Return the content."""
        with self.open() as stream:
            return stream.read()

    @property
    def path(self) -> "Path":
        """The content as a file for reading: the stored one, or a copy in `folder`."""
        body = self._checked_body()
        if body is None:
            return self._path_of(self._stored(), "the content")
        copy = self.folder / "content"
        if not copy.exists():
            copy.write_bytes(body)
        return copy

    # ── Pipelines ────────────────────────────────────────────────────────────────────────────────

    @property
    def previous(self) -> Any:
        """The value that the last step passed to `Next`; None in the first step."""
        text = self._fields.previous_json
        return None if text is None else json.loads(text)

    @property
    def previous_file(self) -> "Path | None":
        """The file that the last step passed to `Next`, for reading; None if it passed none."""
        stored = self._fields.previous_file
        return (
            None if stored is None else self._path_of(StoredFile(*stored), "the last step's file")
        )

    @property
    def steps(self) -> "tuple[FinishedStep, ...]":
        """The finished steps, oldest first."""
        from fairturn.model import FinishedStep

        return tuple(FinishedStep(*step) for step in self._fields.steps)

    @property
    def last_checkpoint(self) -> Any:
        """The value of the last `checkpoint` of this step, also of an earlier attempt; None if
        there is none."""
        return None if self._checkpoint is None else json.loads(self._checkpoint)

    def checkpoint(self, value: Any) -> None:
        """Store a JSON value, at most 64 KiB, for later attempts of this step; the worker stores it
        within about a second. A later call replaces the value.

        Raises `TypeError` if it is not JSON, `ValueError` if it is too large.
        """
        more = "store a position in the document, and results in a file"
        self._checkpoint = encode(value, "the checkpoint", CHECKPOINT_BYTES_MAX, more) or "null"
        self._reporter.save(self._checkpoint)

    @property
    def folder(self) -> "Path":
        """A private folder, removed after the attempt."""
        from pathlib import Path

        folder = Path(folder_of(self._folders, self.id, self._fields.number))
        if not self._folder_made:
            folder.mkdir(mode=0o700, exist_ok=True)
            self._folder_made = True
        return folder

    def progress(self, done: float, total: float | None = None) -> None:
        """Report progress; the worker stores it about a second later."""
        for name, value in (("done", done), ("total", total)):
            if value is None and name == "total":
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{name} is {value!r}; it must be a number")
            if not 0 <= value <= 1e15:
                raise ValueError(f"{name} is {value}; it must be from 0 to 10^15")
        self._reporter.report(done, total)

    # ── Contents ─────────────────────────────────────────────────────────────────────────────────

    def _checked_body(self) -> bytes | None:
        """Return the content, verified; None if it is stored outside the database."""
        from fairturn.contents.local import check_bytes

        if self.is_payload:
            raise ValueError(f"document {self.id} has a payload, not content; use .payload")
        body = self._fields.body
        if body is not None:
            assert isinstance(body, bytes)
            check_bytes(self.id, body, bytes.fromhex(self._fields.sha256 or ""))
        return body

    def _stored(self) -> StoredFile:
        return StoredFile(self._fields.path, self.size_bytes, self._fields.sha256 or "")

    def _path_of(self, stored: StoredFile, what: str) -> "Path":
        """Return the path of a stored file, after verifying it."""
        from pathlib import Path

        self._open(stored, what).close()
        assert stored.path is not None
        return Path(self._local_path(stored.path))

    def _open(self, stored: StoredFile, what: str) -> BinaryIO:
        from fairturn.contents.local import open_file
        from fairturn.errors import ContentDamaged
        from fairturn.model import ContentRef

        if stored.path is None or not stored.sha256:
            raise ContentDamaged(
                f"this worker cannot find {what} of document {self.id}; set the folder or bucket "
                "with contents=Folder(...) or --contents"
            )
        path = self._local_path(stored.path)
        sha256 = bytes.fromhex(stored.sha256)
        return open_file(path, ContentRef(os.path.basename(path), stored.size_bytes, sha256))

    def _local_path(self, path: str) -> str:
        """Return the path of a stored file. One in a bucket is downloaded to `folder`, by a signed
        URL: the handler has no credentials of the bucket."""
        if not path.startswith(("https://", "http://")):
            return path
        from fairturn.contents.s3 import fetch

        copy = str(self.folder / os.path.basename(path.partition("?")[0]))
        if not os.path.exists(copy):
            fetch(path, f"{copy}.part")
            os.rename(f"{copy}.part", copy)
        return copy


def folder_of(folders: str, id: str, number: int) -> str:
    return f"{folders}/{id}-{number}"


def remove_folder(path: str) -> None:
    """Remove a folder and its contents; ignore what cannot be removed."""
    import shutil

    try:
        shutil.rmtree(path, ignore_errors=True)
    except RecursionError:
        _remove_nested(path)


def _remove_nested(top: str) -> None:
    """Remove folders that are nested deeper than Python's recursion or the length of a path allows,
    as an archive can create them: move each to the top, then empty it."""
    from secrets import token_hex

    folders = [top]
    while folders:
        folder = folders.pop()
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in list(entries):
                with suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        moved = f"{top}/{token_hex(16)}"
                        os.rename(entry.path, moved)
                        folders.append(moved)
                    else:
                        os.unlink(entry.path)
        if folder != top:
            with suppress(OSError):
                os.rmdir(folder)
    with suppress(OSError):
        os.rmdir(top)


class HandlerRunner:
    """Runs handlers on many documents, in one thread: one handler, or that of each kind."""

    def __init__(self, handlers: Handler | Handlers, memory_limit_bytes: int | None = None) -> None:
        self._handlers = handlers
        self._memory_limit_bytes = memory_limit_bytes
        self._error: BaseException | None = None
        self._loop: Any = None  # for `async def` handlers

    def run(self, document: ClaimedDocument) -> Answer:
        """Run the handler and return how it ended; never raises."""
        try:
            result = self._handler(document.kind)(document)
            answer = Answer(DONE) if result is None else self._answer(result)
        except BaseException as error:
            answer = self._failure(error)
            self._error = error
        if document._folder_made and answer.path is None:  # it may contain the result file
            remove_folder(str(document.folder))
        return answer

    def last_traceback(self) -> str:
        """Return the traceback of the last document's error; empty if it needs none. Not part of
        `run`, whose duration is measured."""
        error, self._error = self._error, None
        if error is None:
            return ""
        deliberate = isinstance(error, DELIBERATE) and error.__cause__ is None
        out_of_memory = isinstance(error, MemoryError) and self._memory_limit_bytes is not None
        return "" if deliberate or out_of_memory else trace(error)

    def close(self) -> None:
        if self._loop is not None:
            self._loop.close()

    def _handler(self, kind: str) -> Handler:
        if isinstance(self._handlers, Handlers):
            return self._handlers.handler_of(kind)
        return self._handlers

    def _answer(self, result: object) -> Answer:
        if hasattr(result, "__await__"):
            import asyncio

            if self._loop is None:
                self._loop = asyncio.Runner()

            result = self._loop.run(_wait(result))
        return answer_to(result)

    def _failure(self, error: BaseException) -> Answer:
        text = describe(error)
        if isinstance(error, MemoryError) and self._memory_limit_bytes is not None:
            text = f"memory limit of {self._memory_limit_bytes:,} bytes: {text}"
        try:
            return answer_to_error(error, text)
        except Exception as wrong:  # `raise MyLater()` with a delay of -1
            return Answer(RETRY, describe(wrong))


async def _wait(result: Any) -> object:
    return await result
