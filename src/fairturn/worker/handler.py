"""The API of handlers, and how a child process or a thread runs one.

A child imports little but this module, so rarely needed modules are imported where they are used.
"""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from io import BytesIO
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from fairturn.clock import to_datetime
from fairturn.worker.tracebacks import describe, message_of, trace

if TYPE_CHECKING:
    from pathlib import Path

    from fairturn.model import Fence

RESULT_BYTES_MAX = 16 * 1_048_576  # as in `model`, which a child does not import

# The kinds of an `Answer`: how the attempt ended.
DONE, FILE, RETRY, GIVE_UP = "done", "file", "retry", "give_up"

Handler = Callable[["ClaimedDocument"], object]


class Answer(NamedTuple):
    """How an attempt ended."""

    kind: str
    text: str | None = None  # the result, in JSON, or the error
    path: str | None = None  # FILE: of the result file
    after_s: float | None = None  # RETRY: the least delay


class DocumentFields(NamedTuple):
    """The fields of a claimed document that an executor passes to the handler."""

    id: str
    number: int  # of the fence
    customer: str
    name: str | None
    metadata_json: str | None
    priority: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    attempt: int
    size_bytes: int
    submitted_at_us: int
    is_payload: bool
    body: str | bytes | None
    path: str | None  # of the stored content
    sha256: bytes | None


class Retry(Exception):
    """Raised by a handler: fails the attempt and retries the document, after the worker's backoff
    and at least `after_s`."""

    after_s: float | None = None  # for subclasses that do not call `__init__`

    def __init__(self, message: str = "", *, after_s: float | None = None) -> None:
        super().__init__(message)
        self.after_s = after_s


class GiveUp(Exception):
    """Raised by a handler: fails the document permanently; it is dead and not retried."""


class ResultFile:
    """Returned by a handler: completes with a JSON value and a file, which is copied."""

    __slots__ = ("path", "value")

    def __init__(self, path: str | os.PathLike[str], value: object = None) -> None:
        self.path = os.fspath(path)
        self.value = value


class ClaimedDocument:
    """The document that a handler processes.

    It has more than 15 attributes because it offers all that a handler may read of a document.
    """

    # So that a handler that assigns to a misspelt attribute raises `AttributeError`.
    __slots__ = (
        "_fields",
        "_folder_made",
        "_folders",
        "_report",
        "attempt",
        "count",
        "customer",
        "id",
        "is_payload",
        "name",
        "priority",
        "size_bytes",
        "stop_requested",
        "submitted_at_us",
    )

    def __init__(
        self, fields: DocumentFields, folders: str, report: Callable[[float, float | None], None]
    ) -> None:
        self._fields = fields
        self.id = fields.id
        self.customer = fields.customer
        self.name = fields.name
        self.priority = fields.priority
        self.count = fields.count
        self.attempt = fields.attempt
        self.size_bytes = fields.size_bytes
        self.submitted_at_us = fields.submitted_at_us
        self.is_payload = fields.is_payload  # whether it has a `payload`, or content
        # Threads only: the document was cancelled, or its lease was lost.
        self.stop_requested = False
        self._folders = folders
        self._folder_made = False
        self._report = report

    def __repr__(self) -> str:
        return f"<document {self.id} of {self.customer!r}, attempt {self.attempt}>"

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
        with self._open_stored() as stream:
            return json.load(stream)

    def open(self) -> BinaryIO:
        """Open the content, after verifying its SHA-256.

        Raises `ValueError` if the document has a payload, `ContentDamaged` if the content is
        missing or does not match.
        """
        body = self._checked_body()
        return self._open_stored() if body is None else BytesIO(body)

    def read(self) -> bytes:
        """Return the content."""
        with self.open() as stream:
            return stream.read()

    @property
    def path(self) -> "Path":
        """The content as a file for reading: the stored one, or a copy in `folder`."""
        from pathlib import Path

        body = self._checked_body()
        if body is None:
            self._open_stored().close()
            return Path(self._stored_path())
        copy = self.folder / "content"
        if not copy.exists():
            copy.write_bytes(body)
        return copy

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
        self._report(done, total)

    def _checked_body(self) -> bytes | None:
        """Return the content, verified; None if it is stored outside the database."""
        from fairturn.contents.local import check_bytes

        if self.is_payload:
            raise ValueError(f"document {self.id} has a payload, not content; use .payload")
        body = self._fields.body
        if body is not None:
            assert isinstance(body, bytes)
            check_bytes(self.id, body, self._fields.sha256)
        return body

    def _open_stored(self) -> BinaryIO:
        from fairturn.contents.local import open_file
        from fairturn.errors import ContentDamaged
        from fairturn.model import ContentRef

        if self._fields.path is None or self._fields.sha256 is None:
            raise ContentDamaged(
                f"this worker cannot find the content of document {self.id}; set the folder or "
                "bucket with contents=Folder(...) or --contents"
            )
        path = self._stored_path()
        ref = ContentRef(os.path.basename(path), self.size_bytes, self._fields.sha256)
        return open_file(path, ref)

    def _stored_path(self) -> str:
        """Return the path of the content. One in a bucket is downloaded to `folder`, by a signed
        URL: the handler has no credentials of the bucket."""
        path = self._fields.path
        assert path is not None
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
    """Runs one handler on many documents, in one thread."""

    def __init__(
        self,
        handler: Handler,
        output: Callable[[str], None],
        memory_limit_bytes: int | None = None,
    ) -> None:
        self._handler = handler
        self._output = output  # for tracebacks
        self._memory_limit_bytes = memory_limit_bytes
        self._error: BaseException | None = None
        self._loop: Any = None  # for `async def` handlers

    def run(self, document: ClaimedDocument) -> Answer:
        """Run the handler and return how it ended; never raises."""
        try:
            result = self._handler(document)
            answer = Answer(DONE) if result is None else self._answer(result)
        except BaseException as error:
            answer = self._failure(error)
            self._error = error
        if document._folder_made and answer.kind != FILE:  # it may contain the result file
            remove_folder(str(document.folder))
        return answer

    def report_error(self) -> None:
        """Print the traceback of the last error. Not part of `run`, whose duration is measured."""
        error, self._error = self._error, None
        if error is None:
            return
        # `Retry` and `GiveUp` are deliberate, unless they were raised from another exception.
        deliberate = isinstance(error, Retry | GiveUp) and error.__cause__ is None
        out_of_memory = isinstance(error, MemoryError) and self._memory_limit_bytes is not None
        if not deliberate and not out_of_memory and (text := trace(error)):
            self._output(text)

    def close(self) -> None:
        if self._loop is not None:
            self._loop.close()

    def _answer(self, result: object) -> Answer:
        if hasattr(result, "__await__"):
            import asyncio

            if self._loop is None:
                self._loop = asyncio.Runner()

            result = self._loop.run(_wait(result))
        if isinstance(result, ResultFile):
            path = os.path.abspath(result.path)
            if not os.path.isfile(path):
                raise FileNotFoundError(f"the result {path} is not a file")
            return Answer(FILE, encode_result(result.value), path)
        return Answer(DONE, encode_result(result))

    def _failure(self, error: BaseException) -> Answer:
        text = describe(error)
        if isinstance(error, GiveUp):
            return Answer(GIVE_UP, message_of(error) or text)
        if isinstance(error, Retry):
            return Answer(RETRY, message_of(error) or text, after_s=_seconds(error.after_s))
        if isinstance(error, MemoryError) and self._memory_limit_bytes is not None:
            text = f"memory limit of {self._memory_limit_bytes:,} bytes: {text}"
        return Answer(RETRY, text)


def _seconds(value: object) -> float | None:
    """Return `after_s` of a `Retry`; None, for the usual backoff, if it is not a number."""
    try:
        return None if value is None else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None


async def _wait(result: Any) -> object:
    return await result


def encode_result(value: object) -> str | None:
    """Return a result as JSON text.

    Raises `TypeError` if it is not JSON, `ValueError` if it is larger than `RESULT_BYTES_MAX`.
    """
    if value is None:
        return None
    try:
        text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"the handler's result is not JSON: {error}") from None
    if len(text) > RESULT_BYTES_MAX:
        raise ValueError(
            f"the handler's result has {len(text):,} bytes; at most {RESULT_BYTES_MAX:,} are "
            "allowed: return a ResultFile"
        )
    return text
