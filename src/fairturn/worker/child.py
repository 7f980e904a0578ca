"""The process that runs a handler. It imports next to nothing, and nothing that knows the database.

`reaper.py` is its parent; `slot.py` is how the worker sees it.
"""

import os
import select
import signal
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from fairturn.clock import stopwatch
from fairturn.worker.handler import ClaimedDocument, Running, Told
from fairturn.worker.loader import load
from fairturn.worker.messages import PERMIT_BYTES, Reader, pack, write_all
from fairturn.worker.tracebacks import describe, trace

PAUSE_BETWEEN_REPORTS_S = 0.25


class Runner:
    """Takes documents from the worker, one permit for each, and answers for each."""

    def __init__(self, orders: int, permits: int, replies: int) -> None:
        self._orders = Reader(orders)
        self._permits = permits
        self._replies = replies
        # A handler may close its output, and what it opens next would get what we write there.
        self._marks = marks = os.dup(1)
        self._pid = os.getpid()
        self._waiting: deque[tuple[int, Told]] = deque()
        for descriptor in (orders, permits, replies):
            os.set_inheritable(descriptor, False)
        # A process that a handler forks must neither answer for it nor take its documents.
        os.register_at_fork(after_in_child=lambda: _close(orders, permits, replies, marks))

    def prepare(self) -> tuple[Running, dict[str, object]] | None:
        """Load the handler as the worker says; None if that cannot be done."""
        said = self._orders.read()
        assert isinstance(said, dict)
        sys.path[:] = said["path"]
        try:
            handler = load(said["handler"], said["main"])
        except BaseException as error:
            # The worker prints it, once: every child fails at the same place.
            self._send(["broken", describe(error), trace(error)])
            return None
        limit = said["memory_limit_bytes"]
        if limit is not None:
            limit_memory(limit)
        self._send(["ready"])
        return Running(handler, self._print, limit), said

    def serve(self, running: Running, said: dict[str, object]) -> None:
        """Run documents until the worker wants no more."""
        folders = said["folders"]
        assert isinstance(folders, str)
        grown = _Growth(said["growth_bytes"])
        while True:
            told = self._next()
            if told is None:
                return
            document = ClaimedDocument(told, folders, _Reports(self._send))
            begun_s = stopwatch()
            answer = running.run(document)
            seconds = stopwatch() - begun_s
            if os.getpid() != self._pid:
                os._exit(0)  # a process that the handler forked, and that came back from it
            running.explain()
            _flush()
            worn = _has_children() or grown.too_far() or _is_memory(answer)
            self._send([told[0], *answer, seconds, worn])

    def _next(self) -> Told | None:
        """The document that the next permit is for. The worker can take permits back, and then it
        raises the epoch: documents of an older one have gone elsewhere."""
        permit = self._permit()
        if not permit:
            return None
        epoch = int.from_bytes(permit, "big")
        while True:
            if self._waiting:
                of, told = self._waiting.popleft()
                if of == epoch:
                    break
                continue
            message = self._orders.read()
            assert isinstance(message, list)
            self._waiting.extend((message[0], told) for told in message[1])
        # What is printed from here on belongs to this document.
        os.write(self._marks, b"\0%s\n" % told[0].encode())
        return _with_bytes(told)

    def _permit(self) -> bytes:
        while True:
            try:
                return os.read(self._permits, PERMIT_BYTES)
            except BlockingIOError:  # none is there, or the worker was faster
                poller = select.poll()
                poller.register(self._permits, select.POLLIN)
                poller.poll()

    def _print(self, text: str) -> None:
        """Add this to the output of the document that ran."""
        _flush()
        with suppress(OSError):
            write_all(self._marks, text.encode("utf-8", "backslashreplace"))

    def _send(self, message: list[object]) -> None:
        write_all(self._replies, pack(message))


def work(orders: int, permits: int, replies: int) -> None:
    """Run documents until there are no more, and end this process."""
    for number in (signal.SIGTERM, signal.SIGINT):
        # Not ignored, because what a handler starts would inherit that. The worker ends us.
        signal.signal(number, lambda number, frame: None)
    code = 0
    try:
        runner = Runner(orders, permits, replies)
        prepared = runner.prepare()
        if prepared is not None:
            runner.serve(*prepared)
    except EOFError:
        pass
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    _flush()
    os._exit(code)  # without waiting for threads that a handler has left


class _Reports:
    """Progress, sent to the worker now and then."""

    __slots__ = ("_next_s", "_send")

    def __init__(self, send: Callable[[list[object]], None]) -> None:
        self._send = send
        self._next_s = 0.0

    def __call__(self, done: float, total: float | None) -> None:
        now_s = stopwatch()
        if now_s >= self._next_s:
            self._next_s = now_s + PAUSE_BETWEEN_REPORTS_S
            self._send(["progress", done, total])


class _Growth:
    """Whether this process has grown so much that a new one is better."""

    def __init__(self, most_bytes: object) -> None:
        assert isinstance(most_bytes, int)
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        try:
            self._file = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._file = -1
        self._most = self._resident() + most_bytes

    def too_far(self) -> bool:
        return self._resident() > self._most

    def _resident(self) -> int:
        if self._file < 0:
            return 0
        try:
            return int(os.pread(self._file, 128, 0).split()[1]) * self._page_bytes
        except (OSError, ValueError, IndexError):
            return 0  # the handler closed it: then the number of documents decides


def limit_memory(limit_bytes: int) -> None:
    """From here on this process can take so much more memory, and no more."""
    import resource

    taken = 0
    try:
        with open("/proc/self/statm") as file:
            taken = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        pass
    resource.setrlimit(resource.RLIMIT_AS, (taken + limit_bytes, taken + limit_bytes))


def _with_bytes(told: list[object] | Told) -> Told:
    """Bytes travel as hexadecimal digits or base 64, because JSON has none."""
    values = list(told)
    if values[13] is not None:
        values[13] = bytes.fromhex(values[13])  # type: ignore[arg-type]
    if values[10] == "content" and values[11] is not None:
        import binascii

        values[11] = binascii.a2b_base64(values[11])  # type: ignore[arg-type]
    return tuple(values)  # type: ignore[return-value]


def _is_memory(answer: tuple[object, ...]) -> bool:
    return str(answer[1]).startswith("memory limit of ")


def _has_children() -> bool:
    """Whether the handler left a process behind, running or ended."""
    if not hasattr(os, "waitid"):
        return False  # macOS: the keeper ends them with the child
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        with suppress(OSError):
            os.close(descriptor)
