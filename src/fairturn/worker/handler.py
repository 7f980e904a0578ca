"""What a handler gets and what it may answer, and how one is run: the same in a child process and
in a thread.

A child imports this module and little else, so what few handlers need is imported where it is used.
"""

import json
import os
from collections.abc import Callable

from fairturn.worker.tracebacks import describe, message_of, trace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any, BinaryIO

    from fairturn.model import Fence

RESULT_BYTES_MAX = 16 * 1_048_576  # the same as in the model, which a child does not load

# How an attempt ended, as the first value of an answer.
DONE, FILE, AGAIN, NEVER = "done", "file", "again", "never"

# What the worker tells about a document, in this order: JSON, so that it can go to a child.
Told = tuple[
    str,  # id
    int,  # number of the fence
    str,  # customer
    str | None,  # name
    str | None,  # metadata, JSON text
    int,  # priority
    int,  # count
    int,  # attempt
    int,  # size_bytes
    int,  # submitted_at
    str,  # kind
    str | bytes | None,  # body
    str | None,  # path of the stored content
    bytes | None,  # SHA-256
]
# DONE with the result; FILE with the value and the path; AGAIN and NEVER with the error; and the
# seconds that AGAIN asks for.
Answer = tuple[str, str | None, str | None, float | None]
Handler = Callable[["ClaimedDocument"], object]


class TryAgain(Exception):
    """Raised by a handler: this attempt failed, and another one may succeed. It begins after the
    backoff of the worker, and `after_s` from now at the earliest."""

    after_s: float | None = None  # also of one that is made without our `__init__`

    def __init__(self, message: str = "", *, after_s: float | None = None) -> None:
        super().__init__(message)
        self.after_s = after_s


class NeverAgain(Exception):
    """Raised by a handler: no attempt at this document can succeed; it is dead at once."""


class ResultFile:
    """Returned by a handler: a file as the result, which is copied in, with a JSON value."""

    __slots__ = ("path", "value")

    def __init__(self, path: str | os.PathLike[str], value: object = None) -> None:
        self.path = os.fspath(path)
        self.value = value


class ClaimedDocument:
    """A document that a handler works on, under the fence of this attempt."""

    __slots__ = (
        "_body",
        "_folder_made",
        "_folders",
        "_kind",
        "_metadata",
        "_number",
        "_path",
        "_report",
        "_sha256",
        "attempt",
        "count",
        "customer",
        "id",
        "name",
        "priority",
        "size_bytes",
        "stop_requested",
        "submitted_at",
    )

    def __init__(
        self, told: Told, folders: str, report: Callable[[float, float | None], None]
    ) -> None:
        (
            self.id,
            self._number,
            self.customer,
            self.name,
            self._metadata,
            self.priority,
            self.count,
            self.attempt,
            self.size_bytes,
            self.submitted_at,
            self._kind,
            self._body,
            self._path,
            self._sha256,
        ) = told
        self._folders = folders
        self._folder_made = False
        self._report = report
        # Set in a thread, which cannot be ended, when the document was cancelled or taken away.
        self.stop_requested = False

    def __repr__(self) -> str:
        return f"<document {self.id} of {self.customer!r}, attempt {self.attempt}>"

    @property
    def fence(self) -> "Fence":
        """This attempt: hand it to outside systems, so that they can refuse an overtaken one."""
        from fairturn.model import Fence

        return Fence(self.id, self._number)

    @property
    def metadata(self) -> "dict[str, Any]":
        """What the submitter attached."""
        return json.loads(self._metadata) if self._metadata else {}

    @property
    def is_payload(self) -> bool:
        """Whether the document carries a JSON value, `payload`, and not a content to `read`."""
        return self._kind == "payload"

    @property
    def payload(self) -> "Any":
        """The JSON value that the document carries."""
        if not self.is_payload:
            raise ValueError(f"document {self.id} carries a content and no payload; read() it")
        if self._body is not None:
            return json.loads(self._body)
        with self._open_stored() as stream:
            return json.load(stream)

    def open(self) -> "BinaryIO":
        """The content that the document carries, as a stream; it is checked before."""
        self._need_content()
        if self._body is None:
            return self._open_stored()
        from io import BytesIO

        return BytesIO(self._checked_body())

    def read(self) -> bytes:
        """The content that the document carries, whole."""
        with self.open() as stream:
            return stream.read()

    @property
    def path(self) -> "Path":
        """The content as a file to read: where it is stored, or a copy in `folder`."""
        from pathlib import Path

        self._need_content()
        if self._body is None:
            self._open_stored().close()
            return Path(self._stored_path())
        copy = self.folder / "content"
        if not copy.exists():
            copy.write_bytes(self._checked_body())
        return copy

    @property
    def folder(self) -> "Path":
        """A folder of this attempt alone; it is removed with everything in it after the attempt."""
        from pathlib import Path

        folder = Path(folder_of(self._folders, self.id, self._number))
        if not self._folder_made:
            folder.mkdir(mode=0o700, exist_ok=True)
            self._folder_made = True
        return folder

    def progress(self, done: float, total: float | None = None) -> None:
        """Say how far the work is; it can be seen in the queue about a second later."""
        for name, value in (("done", done), ("total", total)):
            if value is None and name == "total":
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{name} is {value!r}; it must be a number")
            if not 0 <= value <= 1e15:
                raise ValueError(f"{name} is {value}; it must be from 0 to 10^15")
        self._report(done, total)

    def _need_content(self) -> None:
        if self.is_payload:
            raise ValueError(f"document {self.id} carries a payload and no content; see .payload")

    def _checked_body(self) -> bytes:
        from fairturn.contents.local import check_bytes

        assert isinstance(self._body, bytes)
        check_bytes(self.id, self._body, self._sha256)
        return self._body

    def _open_stored(self) -> "BinaryIO":
        from fairturn.contents.local import open_file
        from fairturn.errors import ContentDamaged
        from fairturn.model import ContentRef

        if self._path is None or self._sha256 is None:
            raise ContentDamaged(
                f"this worker does not find what document {self.id} carries; if it was told of no "
                "place for contents, name it with contents=Folder(...) or --contents"
            )
        path = self._stored_path()
        return open_file(path, ContentRef(os.path.basename(path), self.size_bytes, self._sha256))

    def _stored_path(self) -> str:
        """Where the content is stored, or the copy in `folder` of what lies in a bucket. It is
        fetched when it is asked for, and without the worker's right to the bucket."""
        assert self._path is not None
        if not self._path.startswith(("https://", "http://")):
            return self._path
        from fairturn.contents.s3 import fetch

        name = os.path.basename(self._path.partition("?")[0])
        copy = str(self.folder / name)
        if not os.path.exists(copy):
            fetch(self._path, f"{copy}.part")
            os.rename(f"{copy}.part", copy)
        return copy

    def _end(self, answer: Answer) -> None:
        """Remove what the attempt left behind, unless the worker still needs it for the result."""
        if self._folder_made and answer[0] != FILE:
            remove_folder(folder_of(self._folders, self.id, self._number))


def folder_of(folders: str, id: str, number: int) -> str:
    """Where an attempt has its own folder."""
    return f"{folders}/{id}-{number}"


def remove_folder(path: str) -> None:
    """Remove a folder with everything in it; what cannot be removed stays."""
    import shutil

    try:
        shutil.rmtree(path, ignore_errors=True)
    except RecursionError:
        _remove_nested(path)


def _remove_nested(top: str) -> None:
    """Remove folders that lie deeper in each other than Python can follow, or than a path can say,
    as an archive can make them: each is brought to the top before one looks into it."""
    from contextlib import suppress
    from secrets import token_hex

    folders = [top]
    while folders:
        folder = folders.pop()
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in list(entries):
                with suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        raised = f"{top}/{token_hex(16)}"
                        os.rename(entry.path, raised)
                        folders.append(raised)
                    else:
                        os.unlink(entry.path)
        if folder != top:
            with suppress(OSError):
                os.rmdir(folder)
    with suppress(OSError):
        os.rmdir(top)


class Running:
    """Runs one handler, again and again, in one thread."""

    def __init__(
        self,
        handler: Handler,
        tell: Callable[[str], None],
        memory_limit_bytes: int | None = None,
    ) -> None:
        self._handler = handler
        self._tell = tell  # gets the traceback of an error, for people
        self._memory_limit_bytes = memory_limit_bytes
        self._error: BaseException | None = None
        self._loop: Any = None  # of a handler that is a coroutine: one for each thread

    def run(self, document: ClaimedDocument) -> Answer:
        """Run the handler, whatever it does, and say how it ended."""
        try:
            result = self._handler(document)
            if result is None:
                answer: Answer = (DONE, None, None, None)
            else:
                answer = self._answer(result)
        except BaseException as error:
            answer = self._failure(error)
            self._error = error
        if document._folder_made:
            document._end(answer)
        return answer

    def explain(self) -> None:
        """Tell where the handler failed, if it did. It takes a moment, which is not the handler's,
        and so it is not a part of `run`."""
        error, self._error = self._error, None
        if error is None:
            return
        # An answer of ours is no accident, unless it was made of one.
        meant = isinstance(error, TryAgain | NeverAgain) and error.__cause__ is None
        out_of_memory = isinstance(error, MemoryError) and self._memory_limit_bytes is not None
        if not meant and not out_of_memory and (text := trace(error)):
            self._tell(text)

    def close(self) -> None:
        """End the loop of a handler that is a coroutine."""
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
            return (FILE, encode_result(result.value), path, None)
        return (DONE, encode_result(result), None, None)

    def _failure(self, error: BaseException) -> Answer:
        text = describe(error)
        if isinstance(error, NeverAgain):
            return (NEVER, message_of(error) or text, None, None)
        if isinstance(error, TryAgain):
            return (AGAIN, message_of(error) or text, None, _seconds(error.after_s))
        if isinstance(error, MemoryError) and self._memory_limit_bytes is not None:
            text = f"memory limit of {self._memory_limit_bytes:,} bytes: {text}"
        return (AGAIN, text, None, None)


def _seconds(value: object) -> float | None:
    """A delay that a handler asked for; None if it is no number, and the usual delay applies."""
    try:
        return None if value is None else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None


async def _wait(result: "Any") -> object:
    return await result


def encode_result(value: object) -> str | None:
    """A result as JSON text; what JSON cannot say is refused."""
    if value is None:
        return None
    try:
        text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"the handler's result is not JSON: {error}") from None
    if len(text) > RESULT_BYTES_MAX:
        raise ValueError(
            f"the handler's result has {len(text):,} bytes and at most {RESULT_BYTES_MAX:,} are "
            "allowed; return a ResultFile"
        )
    return text
