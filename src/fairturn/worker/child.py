"""The process that runs a handler. It imports no queue, no store and as little else as possible.

`reaper.py` is its parent process; `slot.py` is the worker's end of its pipes.
"""

import os
import resource
import select
import signal
import sys
from collections import deque
from contextlib import suppress
from typing import Any

from fairturn.clock import stopwatch
from fairturn.worker.handler import ClaimedDocument, DocumentFields, HandlerRunner
from fairturn.worker.loader import load
from fairturn.worker.messages import (
    PERMIT_BYTES,
    READ_BYTES,
    ChildConfig,
    ChildLimits,
    from_json,
    pack,
    read_message,
    write_all,
)
from fairturn.worker.registry import Handlers
from fairturn.worker.results import Answer
from fairturn.worker.tracebacks import describe, trace

PAUSE_BETWEEN_REPORTS_S = 0.25
_REAPER_PROCESSES = 2  # reaper and init, which count too


class ChildRunner:
    """Runs documents of the worker, each with a permit, and sends a reply for each."""

    def __init__(self, orders: int, permits: int, replies: int) -> None:
        self._orders = os.fdopen(orders, "rb", READ_BYTES, closefd=False)
        self._permits = permits
        self._replies = replies
        # A duplicate: if a handler closes its output, the next file it opens must not get marks.
        self._marks = marks = os.dup(1)
        self._pid = os.getpid()
        self._report_after_s = 0.0
        self._waiting: deque[tuple[int, list[Any]]] = deque()
        for descriptor in (orders, permits, replies):
            os.set_inheritable(descriptor, False)
        # A process that a handler forks must neither reply nor take documents.
        os.register_at_fork(after_in_child=lambda: _close(orders, permits, replies, marks))

    def run(self) -> None:
        """Apply the limits, load the handlers, and run documents until the worker closes its
        pipes."""
        config = ChildConfig(*read_message(self._orders))
        limits = ChildLimits(*config.limits)
        sys.path[:] = config.path
        if limits.processes is not None and os.geteuid():
            # Counts the processes of the user namespace; for root, the reaper sets the limit.
            _limit(resource.RLIMIT_NPROC, limits.processes + _REAPER_PROCESSES)
        if limits.file_bytes is not None:
            _limit(resource.RLIMIT_FSIZE, limits.file_bytes)
        try:
            handlers = load(config.handler, config.main_module)
        except BaseException as error:
            # The worker prints the traceback once, although all children fail alike.
            self._send(["broken", describe(error), trace(error)])
            return
        if limits.memory_bytes is not None:
            _limit_memory(limits.memory_bytes)
        self._send(["ready", handlers.options() if isinstance(handlers, Handlers) else None])
        running = HandlerRunner(handlers, limits.memory_bytes)
        grown = _MemoryGrowth(limits.growth_bytes)
        while (fields := self._next()) is not None:
            self._report_after_s = 0.0
            document = ClaimedDocument(fields, config.folders, self)
            begun_s = stopwatch()
            answer = running.run(document)
            seconds = stopwatch() - begun_s
            if os.getpid() != self._pid:
                os._exit(0)  # a forked copy of this process that returned from the handler
            if traceback := running.last_traceback():
                self._print(traceback)
            _flush()
            recycle = _has_children() or grown.is_excessive() or _is_memory(answer)
            self._send([fields.id, *answer, seconds, recycle])

    def _next(self) -> DocumentFields | None:
        """Return the document of the next permit; None at the end. The worker takes documents back
        by reading their permits and incrementing the epoch: skip documents of an older epoch."""
        permit = self._permit()
        if not permit:
            return None
        epoch = int.from_bytes(permit, "big")
        sent_epoch = -1
        while sent_epoch != epoch:
            while not self._waiting:
                sent_epoch, documents = read_message(self._orders)
                self._waiting.extend((sent_epoch, values) for values in documents)
            sent_epoch, values = self._waiting.popleft()
        fields = from_json(values)
        # Everything printed after this mark belongs to this document.
        os.write(self._marks, b"\0%s\n" % fields.id.encode())
        return fields

    def _permit(self) -> bytes:
        while True:
            try:
                return os.read(self._permits, PERMIT_BYTES)
            except BlockingIOError:  # none yet, or the worker took it back
                poller = select.poll()
                poller.register(self._permits, select.POLLIN)
                poller.poll()

    def report(self, done: float, total: float | None) -> None:
        """Send progress, at most once per `PAUSE_BETWEEN_REPORTS_S`."""
        now_s = stopwatch()
        if now_s >= self._report_after_s:
            self._report_after_s = now_s + PAUSE_BETWEEN_REPORTS_S
            self._send(["progress", done, total])

    def save(self, checkpoint: str) -> None:
        """Send a checkpoint. None is left out: the last one must arrive, even if the process
        crashes next."""
        self._send(["checkpoint", checkpoint])

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
        ChildRunner(orders, permits, replies).run()
    except EOFError:
        pass
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    _flush()
    os._exit(code)  # threads that a handler left running must not delay the exit


class _MemoryGrowth:
    """Measures how much resident memory this process has gained since its start."""

    def __init__(self, most_bytes: int) -> None:
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


def _limit_memory(limit_bytes: int) -> None:
    """Limit the private memory of this process to its present size plus `limit_bytes`. Reserved
    address space does not count: CUDA, Java and browsers reserve far more than they use."""
    taken = 0
    try:
        with open("/proc/self/statm") as file:
            taken = int(file.read().split()[5]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        pass
    _limit(resource.RLIMIT_DATA, taken + limit_bytes)


def _limit(what: int, value: int) -> None:
    """Set a limit that this process cannot raise again; an inherited lower one stays."""
    _, most = resource.getrlimit(what)
    if most != resource.RLIM_INFINITY:
        value = min(value, most)
    resource.setrlimit(what, (value, value))


def _is_memory(answer: Answer) -> bool:
    return (answer.text or "").startswith("memory limit of ")


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
