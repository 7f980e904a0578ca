"""One child process, seen from the worker: its documents, replies, output and end.

A child starts a document only after reading a permit, a few bytes in a pipe that both sides can
read. The worker can therefore take back unstarted documents at any time, by reading their permits.
"""

import os
import re
import signal
import subprocess
from collections import deque
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from fairturn.clock import stopwatch
from fairturn.model import Progress
from fairturn.stores import ids
from fairturn.worker import reaper
from fairturn.worker.executor import ActiveClaim, AttemptResult
from fairturn.worker.isolation import REAPER, Isolation
from fairturn.worker.messages import (
    EPOCHS,
    PERMIT_BYTES,
    READ_BYTES,
    ChildConfig,
    FrameDecoder,
    FrameError,
    pack,
    to_json,
)
from fairturn.worker.output import LineSplitter, Output, OutputTails
from fairturn.worker.results import CHECKPOINT_BYTES_MAX, Answer, checked_answer, is_json_text

# In a child's output: the start of a document.
_MARK = re.compile(rb"\0(%s)\n" % ids.FORM.encode())
_END_S = 2.0  # for the reaper to end; then its process group is killed
_SILENT_S = 0.5  # for a child to end after it has closed its pipe
_NUMBER_MAX = 1 << 53  # of seconds and progress: larger numbers do not fit in a database


class Slot:
    """A child process and the documents that were given to it.

    It has more than 15 attributes and 20 methods because a child's pipes, documents and end are
    one state.
    """

    def __init__(self, config: ChildConfig, isolation: Isolation, output: Output) -> None:
        self.given: deque[ActiveClaim] = deque()
        self.begun_s = stopwatch()  # start of the first document, or of the child
        self.documents_left = config.limits.documents
        self.was_ready = False
        self.registered: Any = None  # options of kinds, as JSON; None for a single handler
        self.recycle = False  # the child asked to be replaced
        self.broken: tuple[str, str] | None = None  # why the handler failed to load; traceback
        self.killed_for: str | None = None
        self.silent_s: float | None = None  # since when its reply pipe is closed
        self._killed_s = 0.0
        self._epoch = 0
        self._frames = FrameDecoder()
        self._lines = LineSplitter(output)
        self._tails = OutputTails()
        self._printing = ""  # the document that its output belongs to
        self._orders_left = bytearray()
        self._open(config, isolation)

    def _open(self, config: ChildConfig, isolation: Isolation) -> None:
        (
            (orders, self.orders),
            (self._permits_read, self._permits),
            (self.replies, replies),
            (life, self._life),
            (self.output, output),
        ) = _pipes(5)
        # The child's ends stay blocking, except for permits: both sides read them through one open
        # file description.
        for descriptor in (self.orders, self._permits_read, self.replies, self.output):
            os.set_blocking(descriptor, False)
        theirs = (orders, self._permits_read, replies, life)
        arguments = (
            str(Path(reaper.__file__).parents[2]),
            ",".join(map(str, theirs)),
            str(int(isolation.namespace)),
            str(config.limits.processes or 0),
        )
        try:
            self._process = subprocess.Popen(
                [*REAPER, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=theirs,
                start_new_session=True,
                env=isolation.environ,
            )
        except BaseException:
            self.ending = -1
            os.close(self._life)
            self._close_descriptors()
            raise
        finally:
            for descriptor in (orders, replies, life, output):
                os.close(descriptor)
        try:
            self.ending = os.pidfd_open(self._process.pid)
        except (AttributeError, OSError):
            self.ending = -1  # macOS, an old kernel, or a container that forbids it
        self._send(config)

    # ── Documents ────────────────────────────────────────────────────────────────────────────────

    @property
    def usable(self) -> bool:
        ends = self.recycle or self.killed_for is not None or self.silent_s is not None
        return self.was_ready and not ends and self.documents_left > 0

    @property
    def has_orders_left(self) -> bool:
        """Whether the pipe was full: call `flush` when it is writable."""
        return bool(self._orders_left)

    def give(self, documents: list[ActiveClaim]) -> None:
        """Send documents, each with a permit."""
        idle = not self.given
        self.given.extend(documents)
        if idle:
            self._begin_next()
        self.documents_left -= len(documents)
        self._send([self._epoch, [to_json(held.fields()) for held in documents]])
        with suppress(BrokenPipeError):
            os.write(self._permits, self._epoch.to_bytes(PERMIT_BYTES, "big") * len(documents))

    def take_back(self) -> list[ActiveClaim]:
        """Return the documents that have not started. The child skips them, by their epoch."""
        unused = 0
        while self.given:
            try:
                piece = os.read(self._permits_read, READ_BYTES)
            except (BlockingIOError, ValueError):
                break
            if not piece:
                break
            unused += len(piece) // PERMIT_BYTES
        if not unused:
            return []
        self._epoch = (self._epoch + 1) % EPOCHS
        self.documents_left += unused
        taken = [self.given.pop() for _ in range(unused)]
        for held in taken:
            held.begun_s = None
        return taken[::-1]

    def _begin_next(self) -> None:
        self.begun_s = stopwatch()
        if self.given:
            self.given[0].begun_s = self.begun_s

    def flush(self) -> None:
        """Send pending messages, as far as the pipe has room."""
        try:
            while self._orders_left:
                sent = os.write(self.orders, self._orders_left)
                del self._orders_left[:sent]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._orders_left.clear()  # the child has ended

    def _send(self, message: object) -> None:
        self._orders_left += pack(message)
        self.flush()

    # ── Replies and output ───────────────────────────────────────────────────────────────────────

    def read_replies(self) -> list[AttemptResult]:
        """Read the replies of the child; return the attempts that have ended."""
        ended: list[AttemptResult] = []
        try:
            while piece := os.read(self.replies, READ_BYTES):
                for message in self._frames.feed(piece):
                    self._understand(message, ended)
            self.silent_s = self.silent_s or stopwatch()
        except BlockingIOError:
            pass
        except FrameError as error:
            self.kill(f"the child sent an invalid reply: {error}")
        if ended:
            self._begin_next()
        return ended

    def _understand(self, message: object, ended: list[AttemptResult]) -> None:
        match message:
            case ["ready", registered] if not self.was_ready:
                self.was_ready, self.registered = True, registered
            case ["broken", str(why), str(trace)] if not self.was_ready:
                self.broken = why, trace
            case ["progress", int() | float() as done, int() | float() | None as total]:
                _check_numbers(done, total)
                if self.given:
                    self.given[0].progress = Progress(done, total)
            case ["checkpoint", str(text)]:
                if not is_json_text(text, CHECKPOINT_BYTES_MAX):
                    raise FrameError("an invalid checkpoint")
                if self.given:
                    self.given[0].checkpoint = text
            case [
                str(document),
                str(type),
                (str() | None) as text,
                (str() | None) as path,
                (int() | float() | None) as after_s,
                (str() | None) as target,
                (int() | float() | None) as cost,
                int() | float() as seconds,
                bool(recycle),
            ]:
                if not self.given or self.given[0].fence.document != document:
                    raise FrameError(f"a reply for {document!r}, which the child does not run")
                _check_numbers(after_s, cost, seconds)
                try:
                    answer = checked_answer(Answer(type, text, path, after_s, target, cost))
                except ValueError as error:
                    raise FrameError(f"an invalid answer: {error}") from None
                self.recycle |= recycle
                ended.append(AttemptResult(self.given.popleft(), answer, max(0.0, seconds)))
            case _:
                raise FrameError(repr(message)[:100])

    def forward_output(self, *, to_the_end: bool = False) -> None:
        """Forward printed lines; without `to_the_end` at most one read, so that a child that prints
        much does not starve the others."""
        with suppress(BlockingIOError):
            while piece := os.read(self.output, READ_BYTES):
                self._pass_on(piece)
                if not to_the_end:
                    break

    def end_line(self) -> None:
        """Flush the last line of a document that has ended."""
        if not self.given or self.given[0].fence.document != self._printing:
            self._lines.end(self._printing)

    def with_details(self, ended: AttemptResult) -> AttemptResult:
        """Return an attempt with the end of its output."""
        details = self._tails.take(ended.held.fence.document)
        return ended if details is None else ended._replace(details=details)

    def _pass_on(self, piece: bytes) -> None:
        first, *rest = _MARK.split(piece)
        self._feed(first)
        for document, part in zip(rest[::2], rest[1::2], strict=True):
            self._lines.end(self._printing)
            self._printing = document.decode("ascii")
            self._feed(part)

    def _feed(self, piece: bytes) -> None:
        if piece:
            self._lines.feed(self._printing, piece)
            self._tails.feed(self._printing, piece)

    # ── End ──────────────────────────────────────────────────────────────────────────────────────

    def kill(self, reason: str) -> None:
        """Begin to kill the child and all processes below it; `has_ended` reports the end."""
        if not self.killed_for:
            self.killed_for = reason
            self._killed_s = stopwatch()
            os.close(self._life)  # the reaper ends when this pipe closes

    def enforce_end(self, now_s: float) -> None:
        """Kill a child that closed its reply pipe without ending, and a reaper that does not end in
        time."""
        if self.silent_s is not None and now_s > self.silent_s + _SILENT_S:
            self.kill("the handler closed its connection to the worker")
        if self.killed_for and now_s > self._killed_s + _END_S:
            self._kill_by_force()

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def why(self) -> str:
        """Return why the running document failed, for its error."""
        if self.killed_for:
            return self.killed_for
        code = self._process.returncode
        if code is None or code >= 0:
            return f"the handler's process exited with code {code} without an outcome"
        name = ""
        with suppress(ValueError):
            name = f" ({signal.Signals(-code).name})"
        hint = ", perhaps because the system ran out of memory" if -code == signal.SIGKILL else ""
        return f"the handler's process was killed by signal {-code}{name}{hint}"

    def wait(self) -> None:
        """Wait for the end of the process, forward its last output and close the descriptors."""
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._kill_by_force()
            self._process.wait()
        self.forward_output(to_the_end=True)
        self._lines.end(self._printing)
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        mine = (self.orders, self._permits, self._permits_read, self.replies, self.output)
        for descriptor in (*mine, self.ending):
            if descriptor >= 0:
                os.close(descriptor)

    def _kill_by_force(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _pipes(number: int) -> list[tuple[int, int]]:
    """Return this number of pipes; if one fails, close the others and raise."""
    pipes: list[tuple[int, int]] = []
    try:
        for _ in range(number):
            pipes.append(os.pipe())
    except OSError:
        for descriptor in chain.from_iterable(pipes):
            os.close(descriptor)
        raise
    return pipes


def _check_numbers(*numbers: float | None) -> None:
    for number in numbers:
        if number is not None and not -_NUMBER_MAX <= number <= _NUMBER_MAX:
            raise FrameError(f"a number is {number!r:.40}, which is out of range")
