"""Handlers in child processes: each slot is a process that can be limited, killed and replaced."""

import resource
import selectors
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from fairturn.clock import stopwatch
from fairturn.errors import HandlerNotLoaded
from fairturn.worker.executor import ActiveClaim, AttemptResult, Executor, ExecutorResources
from fairturn.worker.handler import remove_folder
from fairturn.worker.isolation import Isolation, limits_processes
from fairturn.worker.loader import Reference
from fairturn.worker.messages import ChildConfig, ChildLimits
from fairturn.worker.output import pass_on
from fairturn.worker.results import RETRY, Answer
from fairturn.worker.slot import Slot

STUCK_S = 0.05  # documents queued behind one that runs for longer move to another slot
STARTS_FAILED_MAX = 3  # in a row; then the worker raises
START_PAUSE_S = 1.0  # after the system refused a new process
CHUNK_S = 0.01  # of measured work that is sent to one child at a time
DESCRIPTORS_PER_SLOT, _OTHER_DESCRIPTORS = 8, 64
_CLOSE_S, _STOP_S = 60.0, 0.2  # for the last folders and result files: normally, when stopping
_POLL_S = 0.05  # while a child ends


class ProcessExecutor(Executor):
    """Runs handlers in child processes.

    It has more than 15 attributes and 20 methods because it implements `Executor` and processes
    the events of its children.
    """

    def __init__(
        self,
        handler: Reference,
        main_module: dict[str, Any] | None,
        *,
        slots: int,
        limits: ChildLimits,
        isolation: Isolation,
        resources: ExecutorResources,
    ) -> None:
        super().__init__(slots, resources)
        if not limits_processes(isolation):
            limits = limits._replace(processes=None)
        self._limits = limits
        self._isolation = isolation
        self._config = ChildConfig(handler, main_module, sys.path, self._folders, limits)
        self._files = _FileThread()
        self._starts_failed = 0
        self._start_after_s = 0.0
        self._replacing = True
        self._slots: list[Slot] = []
        try:
            for _ in range(slots):
                self._slots.append(self._new_slot())
        except BaseException:
            self.close()
            raise

    def _new_slot(self) -> Slot:
        slot = Slot(self._config, self._isolation, self._output)
        self._wakeup.watch(slot.replies, selectors.EVENT_READ, lambda _: self._read_replies(slot))
        self._wakeup.watch(slot.output, selectors.EVENT_READ, lambda _: slot.forward_output())
        if slot.ending >= 0:
            self._wakeup.watch(slot.ending, selectors.EVENT_READ, lambda _: self._replace(slot))
        return slot

    # ── Executor ─────────────────────────────────────────────────────────────────────────────────

    def free(self) -> int:
        return sum(slot.usable and not slot.given for slot in self._slots)

    def unstarted(self) -> int:
        return super().unstarted() + sum(max(0, len(slot.given) - 1) for slot in self._slots)

    def running(self) -> list[ActiveClaim]:
        return [slot.given[0] for slot in self._slots if slot.given]

    def give(self, documents: list[ActiveClaim]) -> None:
        self._ready.extend(documents)
        self._hand_out()

    def tend(self, now_s: float) -> None:
        for slot in list(self._slots):
            if slot.ending < 0 and slot.has_ended():
                self._replace(slot)
                continue
            if slot.given and not slot.killed_for:
                ran_s, limit_s = now_s - slot.begun_s, slot.given[0].options.time_limit_s
                if limit_s is not None and ran_s >= limit_s:
                    slot.kill(f"time limit of {limit_s:g} s")
                elif len(slot.given) > 1 and _is_stuck(slot, now_s):
                    self._ready.extendleft(reversed(slot.take_back()))
                    self._pace.forget()
            slot.enforce_end(now_s)
        self._fill(now_s)
        self._hand_out()

    def due_s(self) -> float | None:
        due: list[float] = []
        if self._replacing and len(self._slots) < self._slots_max:
            due.append(self._start_after_s)
        for slot in self._slots:
            limit_s = slot.given[0].options.time_limit_s if slot.given else None
            if limit_s is not None and not slot.killed_for:
                due.append(slot.begun_s + limit_s)
            if len(slot.given) > 1 and not slot.killed_for:
                due.append(slot.begun_s + STUCK_S)
            if slot.killed_for or slot.silent_s is not None or slot.ending < 0:
                due.append(stopwatch() + _POLL_S)
        return min(due, default=None)

    def take_back(self) -> list[ActiveClaim]:
        taken = [held for slot in self._slots for held in slot.take_back()]
        taken += self._ready
        self._ready.clear()
        return taken

    def stop(self, held: ActiveClaim) -> bool:
        held.dropped = True
        for slot in self._slots:
            if slot.given and slot.given[0] is held:
                slot.kill("stopped")
                return True
        return False

    def stop_replacing(self) -> None:
        self._replacing = False

    def close(self) -> bool:
        if not self._closed:
            self._closed = True
            for slot in self._slots:
                slot.kill("closed")
            for slot in self._slots:
                self._forget(slot)
                slot.wait()
        # A bucket that does not respond must not keep the worker from stopping.
        return self._files.close(_CLOSE_S if self._replacing else _STOP_S)

    def registered(self, stopping: Callable[[], bool]) -> Any:
        """Wait until a child has loaded the handler. Return the options of its kinds, as JSON, if
        it is a registry; None for a single handler, and if `stopping` returns True before.

        Raises `HandlerNotLoaded` if no child can load it.
        """
        while not stopping():
            for slot in self._slots:
                if slot.was_ready:
                    return slot.registered
            due_s = self.due_s()
            self._wakeup.wait(1.0 if due_s is None else due_s - stopwatch())
            self.tend(stopwatch())
        return None

    # ── Children ─────────────────────────────────────────────────────────────────────────────────

    def _hand_out(self) -> None:
        """Send documents to the children, to idle ones first."""
        if not self._ready:
            return
        # A child is idle while it waits for the worker, so it gets several short documents at once.
        most = 1 + int(CHUNK_S / max(self._pace.mean_s, 1e-4)) if self._pace.ahead else 1
        now_s = stopwatch()
        ready = [
            slot
            for slot in self._slots
            if slot.usable and 2 * len(slot.given) < most and not _is_stuck(slot, now_s)
        ]
        ready.sort(key=lambda slot: len(slot.given))
        for left in range(len(ready), 0, -1):
            slot = ready[-left]
            share = -(-len(self._ready) // left)
            number = min(share, most - len(slot.given), slot.documents_left)
            if number > 0:
                slot.give([self._ready.popleft() for _ in range(number)])
                if slot.has_orders_left:
                    self._send_later(slot)

    def _send_later(self, slot: Slot) -> None:
        def send(_: int) -> None:
            slot.flush()
            if not slot.has_orders_left:
                self._wakeup.forget(slot.orders)

        self._wakeup.forget(slot.orders)
        self._wakeup.watch(slot.orders, selectors.EVENT_WRITE, send)

    def _read_replies(self, slot: Slot) -> None:
        """Process the replies and the output of a child."""
        slot.forward_output()
        ended = slot.read_replies()
        if slot.silent_s is not None:
            self._wakeup.forget(slot.replies)
        if slot.broken is not None:
            reason, trace = slot.broken
            pass_on(self._output, "", trace)
            raise HandlerNotLoaded(
                f"{self._shown_handler()} cannot be loaded in a child process: {reason}"
            )
        if slot.usable:
            self._starts_failed = 0
        if ended:
            slot.forward_output()
            slot.end_line()
            self._pace.add(sum(one.seconds for one in ended), len(ended))
            for one in ended:
                self._finish(slot.with_details(one))
        if slot.recycle:
            self._ready.extendleft(reversed(slot.take_back()))
        if (slot.recycle or not slot.documents_left) and not slot.given:
            slot.kill("retired")
        self._hand_out()

    def _finish(self, ended: AttemptResult) -> None:
        if ended.answer.path is None:
            self._done.append(ended)
            return

        def store() -> None:
            self._done.append(self._kept(ended))
            self._wakeup.ring()

        self._files.submit(store)

    def _replace(self, slot: Slot) -> None:
        """Replace a child that has ended: fail the document that it ran, keep the others."""
        if not slot.has_ended():
            return
        slot.forward_output(to_the_end=True)
        self._read_replies(slot)
        self._forget(slot)
        self._ready.extendleft(reversed(slot.take_back()))
        now_s = stopwatch()
        for held in slot.given:
            ended = AttemptResult(held, Answer(RETRY, slot.why()), held.ran_s(now_s))
            self._done.append(slot.with_details(ended))
            folder = self._folder_of(held)
            self._files.submit(lambda folder=folder: remove_folder(folder))  # type: ignore[misc]
        slot.given.clear()
        slot.wait()
        self._slots.remove(slot)
        if not slot.was_ready:
            self._starts_failed += 1
            if self._starts_failed >= STARTS_FAILED_MAX:
                raise HandlerNotLoaded(
                    f"{self._starts_failed} child processes in a row ended before they had loaded "
                    f"{self._shown_handler()}: {slot.why()}"
                )
        self._fill(now_s)
        self._hand_out()

    def _fill(self, now_s: float) -> None:
        """Start missing children. If the system refuses a process, retry after `START_PAUSE_S`; the
        other children continue."""
        if not self._replacing or now_s < self._start_after_s:
            return
        try:
            while len(self._slots) < self._slots_max:
                self._slots.append(self._new_slot())
        except OSError as error:
            self._start_after_s = now_s + START_PAUSE_S
            pass_on(
                self._output,
                "",
                f"a child process cannot be started ({error.strerror}); "
                f"{len(self._slots)} of {self._slots_max} are running; retrying in "
                f"{START_PAUSE_S:g} s",
            )

    def _shown_handler(self) -> str:
        handler = self._config.handler
        if isinstance(handler, str):
            return f"handler {handler}"
        return f"the handlers of {', '.join(handler)}"

    def _forget(self, slot: Slot) -> None:
        for descriptor in (slot.replies, slot.output, slot.ending, slot.orders):
            if descriptor >= 0:
                self._wakeup.forget(descriptor)


class _FileThread:
    """Runs file operations one after the other in a thread, started by the first."""

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="fairturn-files", daemon=True)
            self._thread.start()
        self._work.put(work)

    def close(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for the operations, and return whether all are done."""
        if self._thread is None:
            return True
        self._work.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            work()


def _is_stuck(slot: Slot, now_s: float) -> bool:
    """Whether its document runs for longer than `STUCK_S`: none should be queued behind it."""
    return bool(slot.given) and now_s > slot.begun_s + STUCK_S


def check_open_files(concurrency: int, children: int) -> None:
    """Raise `ValueError` if the limit of open files is too low, before a child is started."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = children * DESCRIPTORS_PER_SLOT + _OTHER_DESCRIPTORS
    if allowed != resource.RLIM_INFINITY and needed > allowed:
        raise ValueError(
            f"concurrency is {concurrency}, which needs {needed:,} open files; the limit is "
            f"{allowed:,}: raise it (ulimit -n), or start several workers"
        )
