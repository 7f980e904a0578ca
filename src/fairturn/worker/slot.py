"""One child process, as the worker sees it: what it was given, what it says, how it ended.

A document starts only with a permit, a few bytes in a pipe that both sides can read from. So what a
child has not started can be taken back at any time, whatever the child is doing: either it gets the
permit, or the worker does.
"""

import base64
import os
import re
import signal
import subprocess
import sys
from collections import deque
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from fairturn.clock import stopwatch
from fairturn.model import Progress
from fairturn.worker import reaper
from fairturn.worker.executor import Held
from fairturn.worker.handler import AGAIN, DONE, FILE, NEVER, RESULT_BYTES_MAX, Answer
from fairturn.worker.messages import EPOCHS, PERMIT_BYTES, FrameError, Frames, pack
from fairturn.worker.output import Lines, Output

READ_BYTES = 262_144
_MARK = re.compile(rb"\0([0-9a-f]{15})\n")  # in the output of a child: this document begins
_END_S = 2.0  # for a keeper to end everything below it; then we do what we can ourselves
_SILENT_S = 0.5  # for a process to end after it has closed its pipe
_NUMBER_MAX = 1 << 53  # seconds, and how far a handler is; larger ones no database could keep
_SECRET = "FAIRTURN_DATABASE"  # the beginning of names in the environment that no handler sees

# A document that a child has ended, what it says of it, and the seconds that it took.
Said = tuple[Held, Answer, float]


class Started(NamedTuple):
    """What a child is told when it starts."""

    handler: str
    main: dict[str, Any] | None
    folders: str
    memory_limit_bytes: int | None
    growth_bytes: int


class Slot:
    """A child process and the documents that it was given."""

    def __init__(self, started: Started, output: Output, documents: int = 1 << 62) -> None:
        self.given: deque[Held] = deque()
        self.begun_s = stopwatch()  # the first of them, or the child itself
        self.documents_left = documents
        self.was_ready = False
        self.worn = False  # it asked to be replaced
        self.broken: tuple[str, str] | None = None  # why it has no handler, with a traceback
        self.killed_for: str | None = None
        self.silent_s: float | None = None  # since when nothing more can come from it
        self._killed_s = 0.0
        self._epoch = 0
        self._permitted = 0
        self._frames = Frames()
        self._lines = Lines(output)
        self._printing = ""  # the document whose output it is
        self._orders_left = bytearray()
        self.ending = -1  # becomes readable when the process ends; -1 where nothing tells that
        self._open(started)

    def _open(self, started: Started) -> None:
        (
            (orders, self.orders),
            (self._permits_read, self._permits),
            (self.replies, replies),
            (life, self._life),
            (self.output, output),
        ) = _pipes(5)
        # The other ends of these are others' and stay as they are. Permits are read by both
        # sides through one description of the pipe, so the child knows that it may find nothing.
        for descriptor in (self.orders, self._permits_read, self.replies, self.output):
            os.set_blocking(descriptor, False)
        theirs = (orders, self._permits_read, replies, life)
        package = str(Path(reaper.__file__).parents[2])
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-S", "-P", reaper.__file__, package, ",".join(map(str, theirs))],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=theirs,
                start_new_session=True,
                env={k: v for k, v in os.environ.items() if not k.startswith(_SECRET)},
            )
        except BaseException:
            self._close_life()
            self.give_back()
            raise
        finally:
            for descriptor in (orders, replies, life, output):
                os.close(descriptor)
        self.ending = _ending_of(self._process.pid)
        self._send(started._asdict() | {"path": sys.path})

    # ── Documents ────────────────────────────────────────────────────────────────────────────────

    @property
    def usable(self) -> bool:
        """Whether it can be given documents."""
        ends = self.worn or self.killed_for is not None or self.silent_s is not None
        return self.was_ready and not ends and self.documents_left > 0

    @property
    def has_orders_left(self) -> bool:
        """Whether something waits until the pipe has room."""
        return bool(self._orders_left)

    def give(self, documents: list[Held]) -> None:
        """More documents, each with a permit to start it."""
        idle = not self.given
        self.given.extend(documents)
        if idle:
            self._begin_next()
        self.documents_left -= len(documents)
        self._send([self._epoch, [_for_json(held) for held in documents]])
        with suppress(BrokenPipeError):
            os.write(self._permits, self._epoch.to_bytes(PERMIT_BYTES, "big") * len(documents))

    def take_back(self) -> list[Held]:
        """The documents that have not started. The child knows by the epoch that they are gone."""
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
        """The child is free for the next of its documents, if there is one."""
        self.begun_s = stopwatch()
        if self.given:
            self.given[0].begun_s = self.begun_s

    def flush(self) -> None:
        """Send what had no room before."""
        try:
            while self._orders_left:
                sent = os.write(self.orders, self._orders_left)
                del self._orders_left[:sent]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._orders_left.clear()  # nobody is left to read it

    def _send(self, message: object) -> None:
        self._orders_left += pack(message)
        self.flush()

    # ── What it says ─────────────────────────────────────────────────────────────────────────────

    def hear(self) -> list[Said]:
        """The documents that it has ended, with what it says of them."""
        ended: list[Said] = []
        try:
            while piece := os.read(self.replies, READ_BYTES):
                for message in self._frames.feed(piece):
                    self._understand(message, ended)
            self.silent_s = self.silent_s or stopwatch()
        except BlockingIOError:
            pass
        except FrameError as error:
            self.kill(f"the handler said something that is no answer: {error}")
        if ended:
            self._begin_next()
        return ended

    def _understand(self, message: object, ended: list[Said]) -> None:
        match message:
            case ["ready"] if not self.was_ready:
                self.was_ready = True
            case ["broken", str(why), str(trace)] if not self.was_ready:
                self.broken = why, trace
            case ["progress", int() | float() as done, int() | float() | None as total]:
                _refuse_senseless(done, total)
                if self.given:
                    self.given[0].progress = Progress(done, total)
            case [
                str(document),
                str(kind),
                (str() | None) as text,
                (str() | None) as path,
                (int() | float() | None) as after_s,
                int() | float() as seconds,
                bool(worn),
            ]:
                if not self.given or self.given[0].fence.document != document:
                    raise FrameError(f"an answer for {document!r}, which it does not run")
                _refuse_senseless(after_s, seconds)
                self.worn |= worn
                held = self.given.popleft()
                ended.append((held, _checked(kind, text, path, after_s), max(0.0, seconds)))
            case _:
                raise FrameError(repr(message)[:100])

    def listen(self, *, to_the_end: bool = False) -> None:
        """Pass on what it has printed; not everything at once, so that others are heard too."""
        with suppress(BlockingIOError):
            while piece := os.read(self.output, READ_BYTES):
                self._pass_on(piece)
                if not to_the_end:
                    break

    def end_line(self) -> None:
        """A document has ended, and with it the line that it printed last."""
        if not self.given or self.given[0].fence.document != self._printing:
            self._lines.end(self._printing)

    def _pass_on(self, piece: bytes) -> None:
        first, *rest = _MARK.split(piece)
        self._lines.feed(self._printing, first)
        for document, part in zip(rest[::2], rest[1::2], strict=True):
            self._lines.end(self._printing)
            self._printing = document.decode("ascii")
            self._lines.feed(self._printing, part)

    # ── Its end ──────────────────────────────────────────────────────────────────────────────────

    def kill(self, reason: str) -> None:
        """End it with everything that it started. It has ended when `has_ended` says so."""
        if not self.killed_for:
            self.killed_for = reason
            self._killed_s = stopwatch()
            self._close_life()

    def retire(self) -> None:
        """End it because it has served its time."""
        self.kill("retired")

    def see_to_its_end(self, now_s: float) -> None:
        """Whoever says nothing more should end, and a keeper should end what is below it. If they
        do not, end them."""
        if self.silent_s is not None and now_s > self.silent_s + _SILENT_S:
            self.kill("the handler closed its connection to the worker")
        if self.killed_for and now_s > self._killed_s + _END_S:
            self._kill_by_force()

    def has_ended(self) -> bool:
        """Whether the process is gone."""
        return self._process.poll() is not None

    def why(self) -> str:
        """Why the document that it ran has failed."""
        if self.killed_for:
            return self.killed_for
        code = self._process.returncode
        if code is None or code >= 0:
            return f"the handler's process exited with code {code} without an outcome"
        name = ""
        with suppress(ValueError):
            name = f" ({signal.Signals(-code).name})"
        hint = ", perhaps by the system for lack of memory" if -code == signal.SIGKILL else ""
        return f"the handler's process was killed by signal {-code}{name}{hint}"

    def close(self) -> None:
        """End it; `wait` waits for that."""
        self.kill("closed")

    def wait(self) -> None:
        """Until it is gone; then give back the descriptors."""
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._kill_by_force()
            self._process.wait()
        self.listen(to_the_end=True)
        self._lines.end(self._printing)
        self.give_back()

    def give_back(self) -> None:
        """Close the descriptors."""
        for descriptor in (self.orders, self._permits, self._permits_read, self.replies):
            os.close(descriptor)
        os.close(self.output)
        if self.ending >= 0:
            os.close(self.ending)

    def _close_life(self) -> None:
        if self._life >= 0:
            os.close(self._life)
            self._life = -1

    def _kill_by_force(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _pipes(number: int) -> list[tuple[int, int]]:
    """So many pipes, or none and the error."""
    pipes: list[tuple[int, int]] = []
    try:
        for _ in range(number):
            pipes.append(os.pipe())
    except OSError:
        for descriptor in chain.from_iterable(pipes):
            os.close(descriptor)
        raise
    return pipes


def _ending_of(pid: int) -> int:
    """A descriptor that tells when a process has ended; -1 where the system has none: on macOS, in
    an old kernel below a new Python, or in a container that forbids it."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return -1


def _for_json(held: Held) -> list[object]:
    values: list[object] = list(held.told)
    if held.is_content and isinstance(values[11], bytes):
        values[11] = base64.b64encode(values[11]).decode("ascii")
    if isinstance(values[13], bytes):
        values[13] = values[13].hex()
    return values


def _refuse_senseless(*numbers: float | None) -> None:
    for number in numbers:
        if number is not None and not -_NUMBER_MAX <= number <= _NUMBER_MAX:
            raise FrameError("a number that is none, or too large")


def _checked(kind: str, text: str | None, path: str | None, after_s: float | None) -> Answer:
    """An answer that a child gave: nothing that it says may spoil the recording."""
    if kind in (AGAIN, NEVER):
        return (kind, text or "the handler failed", None, after_s)
    fits = text is None or (text.isascii() and "\0" not in text and len(text) <= RESULT_BYTES_MAX)
    if kind not in (DONE, FILE) or not fits or (kind == FILE) is (path is None):
        raise FrameError(f"an answer of kind {kind!r}")
    return (kind, text, path, None)
