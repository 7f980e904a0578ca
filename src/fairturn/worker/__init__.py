"""The back door: a worker claims documents, runs a handler on each, and records the outcomes.

Children import this package too. So the worker's own machinery is imported when one is made.
"""

import os
import sys
from collections.abc import Callable
from importlib import import_module

from fairturn.worker.handler import Handler
from fairturn.worker.loader import load, main_module, reference_of, refuse_in_child

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

    from fairturn.queue import Queue
    from fairturn.worker.backoff import Delays
    from fairturn.worker.events import Event
    from fairturn.worker.executor import Crew
    from fairturn.worker.prefetch import Pace
    from fairturn.worker.supervisor import Done, Supervisor

CONCURRENCY_MAX = 1_000
LEASE_S_MIN = 0.1
RECYCLE_AFTER = 10_000
GROWTH_BYTES_MAX = 256 * 1_048_576
_MACHINERY = ("folder", "signals", "supervisor")  # with what these import, all that a run imports


class Worker:
    """Runs a handler on the documents of a queue, `concurrency` of them at once.

    The handler is a function that can be imported, or its name as "module:function". It runs in
    child processes, which have a time limit and a memory limit and can be ended; with
    `threads=True` in threads of this process, where neither applies. It gets a `ClaimedDocument`
    and returns a JSON value, None or a `ResultFile`; `TryAgain` and `NeverAgain` say what to do
    after a failure, and every other error is tried again, with the delays of `retry`.
    """

    def __init__(
        self,
        queue: "Queue",
        handler: Handler | str,
        *,
        concurrency: int = 4,
        threads: bool = False,
        time_limit_s: float | None = None,
        memory_limit_bytes: int | None = None,
        lease_s: float = 30.0,
        grace_s: float = 30.0,
        retry: "Delays | None" = None,
        recycle_after: int = RECYCLE_AFTER,
        on_event: "Callable[[Event], None] | None" = None,
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
        if threads and (time_limit_s is not None or memory_limit_bytes is not None):
            raise ValueError(
                "time_limit_s and memory_limit_bytes do not apply to threads, which cannot be "
                "ended; leave them out, or leave out threads=True"
            )
        self._queue = queue
        named = not threads or isinstance(handler, str)
        self._handler = reference_of(handler) if named else handler
        self._concurrency = concurrency
        self._threads = threads
        self._time_limit_s = time_limit_s
        self._memory_limit_bytes = memory_limit_bytes
        self._lease_s = lease_s
        self._grace_s = grace_s
        self._retry = retry
        self._recycle_after = recycle_after
        self._on_event = on_event
        self._tell = on_event  # the same, for one run
        self.name = _checked_name(name) if name is not None else _new_name()
        self._running = False
        self._supervisor: Supervisor | None = None
        self._stops: list[bool] = []  # one for each time that somebody asked: now, or not
        for module in (*_MACHINERY, "thread_executor" if threads else "process_executor"):
            import_module(f"fairturn.worker.{module}")

    def run(self, *, until_empty: bool = False) -> "Done":
        """Work until `stop` is called, or the process gets SIGTERM or SIGINT; then finish what
        runs within the grace period and give back the rest. The answer says how much was done.

        With `until_empty` it returns as soon as no document waits, is delayed or runs, here or in
        another worker. So it waits for retries and due times, and for customers that are paused.

        Signals are handled only if this is called in the main thread. A second one, or a second
        `stop`, ends everything at once; what runs is given back with its attempt.
        """
        refuse_in_child()
        if self._running:
            raise RuntimeError(f"the worker {self.name} runs already; make another one beside it")
        self._running = True
        try:
            return self._run(until_empty)
        finally:
            self._running = False
            self._stops.clear()

    def _run(self, until_empty: bool) -> "Done":
        import random

        from fairturn.worker.backoff import Delays, check
        from fairturn.worker.folder import attempts_folder
        from fairturn.worker.prefetch import Pace
        from fairturn.worker.signals import handled
        from fairturn.worker.supervisor import Plan, Supervisor

        self._tell = None if self._on_event is None else _until_it_fails(self._on_event)
        plan = Plan(
            name=self.name,
            slots=self._concurrency,
            lease_s=self._lease_s,
            grace_s=self._grace_s,
            retry=check(self._retry or Delays()),
            until_empty=until_empty,
            stops=self._stops,
            on_event=self._tell,
            random=random.Random().random,
        )
        # Threads share the interpreter with a claim from a file: they gain nothing by it until all
        # have ended. From a server more is fetched while they work.
        pace = Pace(refill=0.0 if self._threads and self._queue.store.one_writer else 0.5)
        with attempts_folder() as folder:
            crew = self._new_crew(folder, pace)
            try:
                store, contents = self._queue.store, self._queue.contents
                self._supervisor = Supervisor(store, contents, crew, pace, plan)
                with handled(self.stop):
                    return self._supervisor.run()
            finally:
                self._supervisor = None
                crew.close()

    def stop(self, *, now: bool = False) -> None:
        """Ask the worker to stop, from any thread; with `now`, without waiting for what runs."""
        self._stops.append(now)  # first, so that a supervisor that begins just now sees it
        supervisor = self._supervisor
        if supervisor is not None:
            supervisor.ring()

    def _new_crew(self, folder: "Path", pace: "Pace") -> "Crew":
        if self._threads:
            from fairturn.worker.thread_executor import ThreadCrew

            return ThreadCrew(
                self._loaded() if isinstance(self._handler, str) else self._handler,
                concurrency=self._concurrency,
                contents=self._queue.contents,
                folder=folder,
                pace=pace,
                output=self._print,
            )
        from fairturn.worker.process_executor import Limits, ProcessCrew

        assert isinstance(self._handler, str)
        return ProcessCrew(
            self._handler,
            main_module() if self._handler.startswith("__main__:") else None,
            concurrency=self._concurrency,
            limits=Limits(
                self._time_limit_s, self._memory_limit_bytes, self._recycle_after, GROWTH_BYTES_MAX
            ),
            contents=self._queue.contents,
            folder=folder,
            pace=pace,
            output=self._print,
        )

    def _loaded(self) -> Handler:
        """The handler that has a name, in this process."""
        from fairturn.errors import HandlerNotLoaded
        from fairturn.worker.output import pass_on
        from fairturn.worker.tracebacks import describe, trace

        assert isinstance(self._handler, str)
        try:
            return load(self._handler)
        except Exception as error:
            pass_on(self._print, "", trace(error))
            raise HandlerNotLoaded(
                f"the handler {self._handler} cannot be loaded: {describe(error)}"
            ) from None

    def _print(self, document: str, line: str) -> None:
        if self._tell is not None:
            from fairturn.worker.events import LinePrinted

            self._tell(LinePrinted(document, line))
        else:
            sys.stderr.write(f"{document or self.name}: {line}\n")


def _until_it_fails(on_event: "Callable[[Event], None]") -> "Callable[[Event], None]":
    """The same, but deaf after an error: the worker that ends by it has more to tell, such as what
    its children still print, and must get to the end of giving back."""
    failed = False

    def tell(event: "Event") -> None:
        nonlocal failed
        if failed:
            return
        try:
            on_event(event)
        except BaseException:
            failed = True
            raise

    return tell


def _new_name() -> str:
    """Random, so that two workers never have the same name; the rest is for people."""
    import secrets
    import socket

    return f"{socket.gethostname()[:64]}-{os.getpid()}-{secrets.token_hex(4)}"


def _checked_name(name: str) -> str:
    from fairturn.model import WORKER_BYTES_MAX
    from fairturn.validation.text import identity

    return identity(name, "name", WORKER_BYTES_MAX)


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
