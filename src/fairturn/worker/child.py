"""The process that runs a handler. It imports no queue, no store and as little else as possible.

`reaper.py` is its parent process; `slot.py` is the worker's end of its pipes.
"""

import os
import select
import signal
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from fairturn.clock import stopwatch
from fairturn.worker.handler import ClaimedDocument, DocumentFields, HandlerRunner
from fairturn.worker.loader import load
from fairturn.worker.messages import PERMIT_BYTES, FrameReader, pack, write_all
from fairturn.worker.tracebacks import describe, trace

PAUSE_BETWEEN_REPORTS_S = 0.25
_REAPER_PROCESSES = 2  # reaper and init, which count too


class ChildRunner:
    """Runs documents of the worker, each with a permit, and sends a reply for each."""

    def __init__(self, orders: int, permits: int, replies: int) -> None:
        self._orders = FrameReader(orders)
        self._permits = permits
        self._replies = replies
        # A duplicate: if a handler closes its output, the next file it opens must not get marks.
        self._marks = marks = os.dup(1)
        self._pid = os.getpid()
        self._waiting: deque[tuple[int, DocumentFields]] = deque()
        for descriptor in (orders, permits, replies):
            os.set_inheritable(descriptor, False)
        # A process that a handler forks must neither reply nor take documents.
        os.register_at_fork(after_in_child=lambda: _close(orders, permits, replies, marks))

    def prepare(self) -> tuple[HandlerRunner, dict[str, object]] | None:
        """Apply the limits and load the handler; return the runner and the configuration, or None
        if the handler cannot be loaded."""
        config = self._orders.read()
        assert isinstance(config, dict)
        sys.path[:] = config["path"]
        limit_processes(config["process_limit"])
        limit_files(config["file_limit_bytes"])
        try:
            handler = load(config["handler"], config["main"])
        except BaseException as error:
            # The worker prints the traceback once, although all children fail alike.
            self._send(["broken", describe(error), trace(error)])
            return None
        limit = config["memory_limit_bytes"]
        if limit is not None:
            limit_memory(limit)
        self._send(["ready"])
        return HandlerRunner(handler, self._print, limit), config

    def serve(self, running: HandlerRunner, config: dict[str, object]) -> None:
        """Run documents until the worker closes its pipes."""
        folders = config["folders"]
        assert isinstance(folders, str)
        grown = _MemoryGrowth(config["growth_bytes"])
        while True:
            fields = self._next()
            if fields is None:
                return
            document = ClaimedDocument(fields, folders, _ProgressReporter(self._send))
            begun_s = stopwatch()
            answer = running.run(document)
            seconds = stopwatch() - begun_s
            if os.getpid() != self._pid:
                os._exit(0)  # a forked copy of this process that returned from the handler
            running.report_error()
            _flush()
            recycle = _has_children() or grown.is_excessive() or _is_memory(answer)
            self._send([fields[0], *answer, seconds, recycle])

    def _next(self) -> DocumentFields | None:
        """Return the document of the next permit; None at the end. The worker takes documents back
        by reading their permits and incrementing the epoch: skip documents of an older epoch."""
        permit = self._permit()
        if not permit:
            return None
        epoch = int.from_bytes(permit, "big")
        while True:
            if self._waiting:
                its_epoch, fields = self._waiting.popleft()
                if its_epoch == epoch:
                    break
                continue
            message = self._orders.read()
            assert isinstance(message, list)
            self._waiting.extend((message[0], fields) for fields in message[1])
        # Everything printed after this mark belongs to this document.
        os.write(self._marks, b"\0%s\n" % fields[0].encode())
        return _with_bytes(fields)

    def _permit(self) -> bytes:
        while True:
            try:
                return os.read(self._permits, PERMIT_BYTES)
            except BlockingIOError:  # none yet, or the worker took it back
                poller = select.poll()
                poller.register(self._permits, select.POLLIN)
                poller.poll()

    def _print(self, text: str) -> None:
        _flush()
        with suppress(OSError):
            write_all(self._marks, text.encode("utf-8", "backslashreplace"))

    def _send(self, message: list[object]) -> None:
        write_all(self._replies, pack(message))


def work(orders: int, permits: int, replies: int) -> None:
    """Run documents until the worker closes its pipes, then exit."""
    for number in (signal.SIGTERM, signal.SIGINT):
        # Not SIG_IGN, which processes started by a handler would inherit. The worker ends this one.
        signal.signal(number, lambda number, frame: None)
    code = 0
    try:
        runner = ChildRunner(orders, permits, replies)
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
    os._exit(code)  # threads that a handler left running must not delay the exit


class _ProgressReporter:
    """Sends progress to the worker, at most once per `PAUSE_BETWEEN_REPORTS_S`."""

    __slots__ = ("_next_s", "_send")

    def __init__(self, send: Callable[[list[object]], None]) -> None:
        self._send = send
        self._next_s = 0.0

    def __call__(self, done: float, total: float | None) -> None:
        now_s = stopwatch()
        if now_s >= self._next_s:
            self._next_s = now_s + PAUSE_BETWEEN_REPORTS_S
            self._send(["progress", done, total])


class _MemoryGrowth:
    """Measures how much resident memory this process has gained since its start."""

    def __init__(self, most_bytes: object) -> None:
        assert isinstance(most_bytes, int)
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        try:
            self._file = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._file = -1
        self._most = self._resident() + most_bytes

    def is_excessive(self) -> bool:
        return self._resident() > self._most

    def _resident(self) -> int:
        if self._file < 0:
            return 0
        try:
            return int(os.pread(self._file, 128, 0).split()[1]) * self._page_bytes
        except (OSError, ValueError, IndexError):
            return 0  # the handler closed the file: only the number of documents counts then


def limit_memory(limit_bytes: int) -> None:
    """Limit the private memory of this process to its present size plus `limit_bytes`. Reserved
    address space does not count: CUDA, Java and browsers reserve far more than they use."""
    import resource

    taken = 0
    try:
        with open("/proc/self/statm") as file:
            taken = int(file.read().split()[5]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        pass
    _limit(resource.RLIMIT_DATA, taken + limit_bytes)


def limit_processes(limit: int | None) -> None:
    """Limit the processes and threads of the user namespace; the reaper limits those of root."""
    if limit is not None and os.geteuid():
        import resource

        _limit(resource.RLIMIT_NPROC, limit + _REAPER_PROCESSES)


def limit_files(limit_bytes: int | None) -> None:
    if limit_bytes is not None:
        import resource

        _limit(resource.RLIMIT_FSIZE, limit_bytes)


def _limit(what: int, value: int) -> None:
    """Set a limit that this process cannot raise again; an inherited lower one stays."""
    import resource

    _, most = resource.getrlimit(what)
    if most != resource.RLIM_INFINITY:
        value = min(value, most)
    resource.setrlimit(what, (value, value))


def _with_bytes(fields: list[object] | DocumentFields) -> DocumentFields:
    """Decode the body from base64 and the SHA-256 from hexadecimal: JSON has no bytes."""
    values = list(fields)
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
        return False  # macOS: the reaper kills them with the child
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
