"""`Worker`: its options, and how a run is put together: kinds, executors, supervisor."""

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
from fairturn.worker.dispatcher import Dispatcher
from fairturn.worker.events import Event, LinePrinted, OnEvent
from fairturn.worker.executor import Executor, ExecutorResources, WakeupPipe
from fairturn.worker.folder import attempts_folder
from fairturn.worker.isolation import (
    Isolation,
    check_names,
    child_environment,
    has_namespaces,
    hide_memory,
)
from fairturn.worker.kinds import HandlerGroup, KindOptions, ServedKinds
from fairturn.worker.loader import Reference, load, main_module, reference_of, refuse_in_child
from fairturn.worker.messages import ChildLimits
from fairturn.worker.options import (
    BYTES_LIMIT_MAX,
    CONCURRENCY_MAX,
    check_limits,
    check_seconds,
    check_whole,
)
from fairturn.worker.outcomes import WorkerTotals
from fairturn.worker.output import pass_on
from fairturn.worker.prefetch import PrefetchPolicy
from fairturn.worker.process_executor import ProcessExecutor, check_open_files
from fairturn.worker.registry import Handler, Handlers
from fairturn.worker.supervisor import Supervisor, WorkerOptions
from fairturn.worker.thread_executor import ThreadExecutor
from fairturn.worker.tracebacks import describe, trace

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
    """Runs handlers on the documents of a queue, up to `concurrency` at a time.

    The handler is an importable function, or its name as "module:function"; it serves every kind of
    work. With `Handlers`, or the name of one, each document gets the handler of its kind. `kinds`
    restricts the worker to these kinds.

    A handler runs in child processes, which can be limited in time and memory and killed, or with
    `threads=True` in threads, which cannot. It receives a `ClaimedDocument` and returns a JSON
    value, None, a `ResultFile` or `Next`. If it raises `GiveUp`, the document is dead; after
    `Retry` or any other error the attempt is retried with the backoff `retry`. `Later` and
    `Unavailable` postpone the document without using an attempt.

    Children get a limited environment, with the variables that `pass_env` names, and their own PID
    namespace where the system allows it; None lifts a limit. docs/worker.md states what separates
    children from the worker and from each other, and what does not. Threads are not separated.
    """

    def __init__(
        self,
        queue: Queue,
        handler: Handler | Handlers | str,
        *,
        kinds: Sequence[str] | None = None,
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
        check_whole("concurrency", concurrency, 1, CONCURRENCY_MAX)
        check_whole("recycle_after", recycle_after, 1, 1 << 62)
        check_seconds("lease_s", lease_s, LEASE_S_MIN, 86_400)
        check_seconds("grace_s", grace_s, 0, 86_400)
        check_limits(time_limit_s, memory_limit_bytes)
        if process_limit is not None:
            check_whole("process_limit", process_limit, PROCESS_LIMIT_MIN, PROCESS_LIMIT_MAX)
        if file_limit_bytes is not None:
            check_whole("file_limit_bytes", file_limit_bytes, 1, BYTES_LIMIT_MAX)
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
        self._handler = handler
        self._default = KindOptions(
            concurrency, threads, time_limit_s, memory_limit_bytes, check(retry or Backoff())
        )
        self._kinds = ServedKinds(
            self._default, kinds, handler.options() if isinstance(handler, Handlers) else None
        )
        self._reference = self._new_reference()
        self._namespace = namespace
        self._isolation: Isolation | None = None  # of the current run, once it starts a child
        self._limits = ChildLimits(
            memory_bytes=memory_limit_bytes,
            processes=process_limit,
            file_bytes=file_limit_bytes,
            documents=recycle_after,
        )
        self._on_event = on_event
        self._on_event_failed = False
        self._running = False
        self._dispatcher: Dispatcher | None = None  # of the current run
        self._stops: list[bool] = []  # one for each call of `stop`: its `now`
        self._options = WorkerOptions(
            name=self.name,
            slots=concurrency,
            lease_s=lease_s,
            grace_s=grace_s,
            kinds=self._kinds,
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
        single_writer = self._queue.single_writer
        pace = PrefetchPolicy(refill=0.0 if self._default.threads and single_writer else 0.5)
        wakeup = WakeupPipe()
        dispatcher = self._dispatcher = Dispatcher(options.slots, pace, wakeup)
        try:
            with _signals_handled(self.stop):
                contents, output = self._queue.contents, self._print
                resources = ExecutorResources(contents, folder, pace, wakeup, output)
                options = options._replace(kinds=self._start(dispatcher, resources))
                return Supervisor(self._queue, dispatcher, pace, options).run()
        finally:
            self._dispatcher = self._isolation = None
            dispatcher.close()

    def stop(self, *, now: bool = False) -> None:
        """Stop the worker, from any thread; with `now`, without a grace period."""
        self._stops.append(now)  # before reading `_dispatcher`: a run that just starts sees it
        dispatcher = self._dispatcher
        if dispatcher is not None:
            dispatcher.ring()

    # ── Handlers and executors ───────────────────────────────────────────────────────────────────

    def _new_reference(self) -> Reference | None:
        """Return the names by which children import the handlers; None if all run in threads."""
        handler = self._handler
        if isinstance(handler, Handlers):
            assert self._kinds.names is not None
            of_children = [name for name in self._kinds.names if not self._kinds.of(name).threads]
            return {name: reference_of(handler.handler_of(name)) for name in of_children}
        if isinstance(handler, str) or not self._default.threads:
            return reference_of(handler)
        return None

    def _start(self, dispatcher: Dispatcher, resources: ExecutorResources) -> ServedKinds:
        """Start the executors of all kinds, and return the kinds."""
        started: dict[HandlerGroup, Executor] = {}
        try:
            kinds = self._kinds
            if isinstance(self._handler, str):
                kinds = self._named_kinds(started, resources)
            groups = kinds.groups()
            self._check_open_files(
                sum(kinds.slots_of(names) for group, names in groups.items() if not group.threads)
            )
            for group, names in groups.items():
                executor = started.pop(group, None)
                if executor is None:
                    executor = self._new_executor(group, names, kinds.slots_of(names), resources)
                dispatcher.add(executor, names, kinds.capped)
        finally:
            for unused in started.values():
                unused.close()
        return kinds

    def _named_kinds(
        self, started: dict[HandlerGroup, Executor], resources: ExecutorResources
    ) -> ServedKinds:
        """Return the kinds of a handler that was given by name. Unless it runs in threads, the
        children load it, not this process, and the first one returns what it registers."""
        slots, group = self._default.concurrency, self._default.where
        if group.threads:
            loaded = self._loaded()
            registered = loaded.options() if isinstance(loaded, Handlers) else None
        else:
            self._check_open_files(slots)
            children = started[group] = self._new_children(group, (), slots, resources)
            registered = children.registered(lambda: bool(self._stops))
        return ServedKinds(self._default, self._kinds.names, registered)

    def _new_executor(
        self, group: HandlerGroup, names: Sequence[str], slots: int, resources: ExecutorResources
    ) -> Executor:
        if group.threads:
            return ThreadExecutor(self._loaded(), slots, resources)
        return self._new_children(group, names, slots, resources)

    def _new_children(
        self, group: HandlerGroup, names: Sequence[str], slots: int, resources: ExecutorResources
    ) -> ProcessExecutor:
        """Start children for these kinds; without kinds, for those of the handler."""
        reference = self._reference
        assert reference is not None
        if not isinstance(reference, str):
            reference = {name: reference[name] for name in names}
        references = (reference,) if isinstance(reference, str) else reference.values()
        in_main = any(each.startswith("__main__:") for each in references)
        return ProcessExecutor(
            reference,
            main_module() if in_main else None,
            slots=slots,
            limits=self._limits._replace(memory_bytes=group.memory_limit_bytes),
            isolation=self._isolate(),
            resources=resources,
        )

    def _isolate(self) -> Isolation:
        """Return what separates children from this process, which hides its memory from them."""
        if self._isolation is None:
            hide_memory()
            environ = child_environment(os.environ, self._pass_env)
            self._isolation = Isolation(environ, self._namespace and has_namespaces(environ))
            if self._namespace and not self._isolation.namespace:
                self._print("", NO_NAMESPACE)
        return self._isolation

    def _check_open_files(self, children: int) -> None:
        check_open_files(self._default.concurrency, children)

    def _loaded(self) -> Handler | Handlers:
        """Return the handlers for threads, imported if they were given by name."""
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
