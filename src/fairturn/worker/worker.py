"""`Worker`: its options, and how a run is put together: handler, executor, supervisor."""

import os
import random
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fairturn.errors import HandlerNotLoaded
from fairturn.model import WORKER_BYTES_MAX
from fairturn.queue import Queue
from fairturn.validation import text
from fairturn.worker.backoff import Backoff, check
from fairturn.worker.events import Event, LinePrinted, OnEvent
from fairturn.worker.executor import Executor
from fairturn.worker.folder import attempts_folder
from fairturn.worker.handler import Handler
from fairturn.worker.isolation import (
    Isolation,
    check_names,
    child_environment,
    has_namespaces,
    hide_memory,
)
from fairturn.worker.loader import load, main_module, reference_of, refuse_in_child
from fairturn.worker.messages import ChildLimits
from fairturn.worker.outcomes import WorkerTotals
from fairturn.worker.output import pass_on
from fairturn.worker.prefetch import PrefetchPolicy
from fairturn.worker.process_executor import ProcessExecutor
from fairturn.worker.supervisor import Supervisor, WorkerOptions
from fairturn.worker.thread_executor import ThreadExecutor
from fairturn.worker.tracebacks import describe, trace

CONCURRENCY_MAX = 1_000
LEASE_S_MIN = 0.1
RECYCLE_AFTER = 10_000
# Of one child, by default: far above what handlers need, far below what harms a machine.
MEMORY_LIMIT_BYTES = 4 * 1_073_741_824
PROCESS_LIMIT, PROCESS_LIMIT_MIN, PROCESS_LIMIT_MAX = 1_000, 10, 4_000_000
FILE_LIMIT_BYTES = 8 * 1_073_741_824  # as large as a document may be
NO_NAMESPACE = (
    "this system allows no PID namespace: handlers see the names of other processes, and the "
    "process limit does not apply; see docs/worker.md, or pass namespace=False (--no-namespace)"
)


class Worker:
    """Runs a handler on the documents of a queue, up to `concurrency` at a time.

    The handler is an importable function, or its name as "module:function". It runs in child
    processes, which can be limited in time and memory and killed, or with `threads=True` in
    threads, which cannot. It receives a `ClaimedDocument` and returns a JSON value, None or a
    `ResultFile`. If it raises `GiveUp`, the document is dead; after `Retry` or any other error the
    attempt is retried with the backoff `retry`.

    Children get a limited environment, with the variables that `pass_env` names, and their own PID
    namespace where the system allows it; None lifts a limit. docs/worker.md states what separates
    children from the worker and from each other, and what does not. Threads are not separated.
    """

    def __init__(
        self,
        queue: Queue,
        handler: Handler | str,
        *,
        concurrency: int = 4,
        threads: bool = False,
        time_limit_s: float | None = None,
        memory_limit_bytes: int | None = MEMORY_LIMIT_BYTES,
        process_limit: int | None = PROCESS_LIMIT,
        file_limit_bytes: int | None = FILE_LIMIT_BYTES,
        pass_env: Sequence[str] = (),
        namespace: bool = True,
        lease_s: float = 30.0,
        grace_s: float = 30.0,
        retry: Backoff | None = None,
        recycle_after: int = RECYCLE_AFTER,
        on_event: OnEvent | None = None,
        name: str | None = None,
    ) -> None:
        _check_whole("concurrency", concurrency, 1, CONCURRENCY_MAX)
        _check_whole("recycle_after", recycle_after, 1, 1 << 62)
        _check_seconds("lease_s", lease_s, LEASE_S_MIN, 86_400)
        _check_seconds("grace_s", grace_s, 0, 86_400)
        if time_limit_s is not None:
            _check_seconds("time_limit_s", time_limit_s, 0.001, 1e9)
        if memory_limit_bytes is not None:
            _check_whole("memory_limit_bytes", memory_limit_bytes, 1, 1 << 60)
        if process_limit is not None:
            _check_whole("process_limit", process_limit, PROCESS_LIMIT_MIN, PROCESS_LIMIT_MAX)
        if file_limit_bytes is not None:
            _check_whole("file_limit_bytes", file_limit_bytes, 1, 1 << 60)
        self._pass_env = check_names(pass_env)
        if threads and (
            self._pass_env
            or time_limit_s is not None
            or memory_limit_bytes not in (None, MEMORY_LIMIT_BYTES)
            or process_limit not in (None, PROCESS_LIMIT)
            or file_limit_bytes not in (None, FILE_LIMIT_BYTES)
        ):
            raise ValueError(
                "time_limit_s, memory_limit_bytes, process_limit, file_limit_bytes and pass_env do "
                "not apply to threads, which run in the worker's process; remove them, or remove "
                "threads=True"
            )
        self.name = _new_name() if name is None else text.identity(name, "name", WORKER_BYTES_MAX)
        self._queue = queue
        named = not threads or isinstance(handler, str)
        self._handler = reference_of(handler) if named else handler
        self._threads = threads
        self._namespace = namespace
        self._limits = ChildLimits(
            time_s=time_limit_s,
            memory_bytes=memory_limit_bytes,
            processes=process_limit,
            file_bytes=file_limit_bytes,
            documents=recycle_after,
        )
        self._on_event = on_event
        self._on_event_failed = False
        self._running = False
        self._executor: Executor | None = None  # of the current run
        self._stops: list[bool] = []  # one for each call of `stop`: its `now`
        self._options = WorkerOptions(
            name=self.name,
            slots=concurrency,
            lease_s=lease_s,
            grace_s=grace_s,
            retry=check(retry or Backoff()),
            stops=self._stops,
            on_event=None if on_event is None else self._emit,
            random=random.Random().random,
        )

    def run(self, *, until_empty: bool = False) -> WorkerTotals:
        """Work until `stop` is called or the process receives SIGTERM or SIGINT, and return the
        totals. Running documents have `grace_s` to finish; the others are released.

        With `until_empty` it returns once no document waits, is delayed or runs, in any worker. It
        therefore waits for retries, due times and paused customers.

        Signals are handled only in the main thread. A second signal, or a second `stop`, ends the
        grace period; running documents are then released.
        """
        refuse_in_child()
        if self._running:
            raise RuntimeError(f"worker {self.name} is already running; create another Worker")
        self._running = True
        self._on_event_failed = False
        try:
            with attempts_folder() as folder:
                return self._run(folder, self._options._replace(until_empty=until_empty))
        finally:
            self._running = False
            self._stops.clear()

    def _run(self, folder: Path, options: WorkerOptions) -> WorkerTotals:
        # A claim from a file competes with handler threads for the GIL, so it waits until all have
        # ended. A server claims the next documents while they run.
        pace = PrefetchPolicy(refill=0.0 if self._threads and self._queue.single_writer else 0.5)
        executor = self._executor = self._new_executor(folder, pace)
        try:
            supervisor = Supervisor(self._queue, executor, pace, options)
            with _signals_handled(self.stop):
                return supervisor.run()
        finally:
            self._executor = None
            executor.close()

    def stop(self, *, now: bool = False) -> None:
        """Stop the worker, from any thread; with `now`, without a grace period."""
        self._stops.append(now)  # before reading `_executor`: a run that just starts sees it
        executor = self._executor
        if executor is not None:
            executor.ring()

    # ── Handler and executor ─────────────────────────────────────────────────────────────────────

    def _new_executor(self, folder: Path, pace: PrefetchPolicy) -> Executor:
        """Return the executor of the handler: threads of this process, or child processes."""
        if self._threads:
            return ThreadExecutor(
                self._loaded(),
                concurrency=self._options.slots,
                contents=self._queue.contents,
                folder=folder,
                pace=pace,
                output=self._print,
            )
        assert isinstance(self._handler, str)
        hide_memory()
        environ = child_environment(os.environ, self._pass_env)
        isolation = Isolation(environ, self._namespace and has_namespaces(environ))
        if self._namespace and not isolation.namespace:
            self._print("", NO_NAMESPACE)
        return ProcessExecutor(
            self._handler,
            main_module() if self._handler.startswith("__main__:") else None,
            concurrency=self._options.slots,
            limits=self._limits,
            isolation=isolation,
            contents=self._queue.contents,
            folder=folder,
            pace=pace,
            output=self._print,
        )

    def _loaded(self) -> Handler:
        """Return the handler for threads, imported if it was given as "module:function"."""
        if not isinstance(self._handler, str):
            return self._handler
        try:
            return load(self._handler)
        except Exception as error:
            pass_on(self._print, "", trace(error))
            raise HandlerNotLoaded(
                f"handler {self._handler} cannot be loaded: {describe(error)}"
            ) from None

    # ── Events ───────────────────────────────────────────────────────────────────────────────────

    def _emit(self, event: Event) -> None:
        """Call `on_event`, but no longer once it has raised: the worker then ends, and the events
        of its last outcomes and printed lines must not raise again."""
        if self._on_event is None or self._on_event_failed:
            return
        try:
            self._on_event(event)
        except BaseException:
            self._on_event_failed = True
            raise

    def _print(self, document: str, line: str) -> None:
        if self._on_event is not None:
            self._emit(LinePrinted(document, line))
        else:
            sys.stderr.write(f"{document or self.name}: {line}\n")


@contextmanager
def _signals_handled(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` on SIGTERM and SIGINT. Does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, lambda number, frame: stop()) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _new_name() -> str:
    # The random part makes the name unique; host and process are for people.
    return f"{socket.gethostname()[:64]}-{os.getpid()}-{secrets.token_hex(4)}"


def _check_whole(name: str, value: int, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}; it must be a whole number")
    if not least <= value <= most:
        raise ValueError(f"{name} is {value}; it must be from {least:,} to {most:,}")


def _check_seconds(name: str, value: float, least: float, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is {value!r}; it must be a number of seconds")
    if not least <= value <= most:
        raise ValueError(f"{name} is {value}; it must be from {least:g} to {most:g} seconds")
