"""Handlers in child processes: each slot is a process that can be limited, ended and replaced."""

import resource
import selectors
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

from fairturn.clock import stopwatch
from fairturn.contents.local import Contents
from fairturn.errors import HandlerNotLoaded
from fairturn.worker.executor import STUCK_S, Bell, Ended, Held
from fairturn.worker.handler import AGAIN, FILE, Answer, folder_of, remove_folder
from fairturn.worker.output import Output, pass_on
from fairturn.worker.prefetch import Pace
from fairturn.worker.results import Porter, keep_file
from fairturn.worker.slot import Slot, Started

STARTS_FAILED_MAX = 3  # in a row, then the worker gives up
START_AGAIN_S = 1.0  # after the system had no room for one more process
CHUNK_S = 0.01  # of measured work that one child has in hand
DESCRIPTORS_PER_SLOT, _OTHER_DESCRIPTORS = 8, 64
_CLOSE_S, _STOP_S = 60.0, 0.2  # to remove folders and to store results at the end
_LOOK_S = 0.05  # while documents wait inside children


class Limits(NamedTuple):
    """What one attempt, and one child, may take."""

    time_s: float | None
    memory_bytes: int | None
    documents: int  # then the child is replaced
    growth_bytes: int  # the same


class ProcessCrew:
    """As many child processes as documents run at once."""

    can_end = True

    def __init__(
        self,
        handler: str,
        main_module: dict[str, Any] | None,
        *,
        concurrency: int,
        limits: Limits,
        contents: Contents,
        folder: Path,
        pace: Pace,
        output: Output,
    ) -> None:
        _refuse_too_many(concurrency)
        self._limits = limits
        self._contents = contents
        self._folder = folder
        self._pace = pace
        self._bell = Bell()
        self._porter = Porter()
        self._ready: deque[Held] = deque()
        self._done: deque[Ended] = deque()
        self._starts_failed = 0
        self._concurrency = concurrency
        self._start_again_s = 0.0  # not before
        self._replacing = True
        self._closed = False
        self._started = Started(
            handler=handler,
            main=main_module,
            folders=str(folder),
            memory_limit_bytes=limits.memory_bytes,
            growth_bytes=limits.growth_bytes,
        )
        self._output = output
        self._slots: list[Slot] = []
        try:
            for _ in range(concurrency):
                self._slots.append(self._new_slot())
        except BaseException:
            self.close()
            raise

    def _new_slot(self) -> Slot:
        slot = Slot(self._started, self._output, self._limits.documents)
        self._bell.watch(slot.replies, selectors.EVENT_READ, lambda _: self._hear(slot))
        self._bell.watch(slot.output, selectors.EVENT_READ, lambda _: slot.listen())
        if slot.ending >= 0:
            self._bell.watch(slot.ending, selectors.EVENT_READ, lambda _: self._replace(slot))
        return slot

    # ── What the supervisor asks for ─────────────────────────────────────────────────────────────

    def free(self) -> int:
        return sum(slot.usable and not slot.given for slot in self._slots)

    def unstarted(self) -> int:
        return len(self._ready) + sum(max(0, len(slot.given) - 1) for slot in self._slots)

    def unstarted_since_s(self) -> float | None:
        try:
            return self._ready[0].claimed_s
        except IndexError:
            return None

    def running(self) -> list[Held]:
        return [slot.given[0] for slot in self._slots if slot.given]

    def give(self, documents: list[Held]) -> None:
        self._ready.extend(documents)
        self._hand_out()

    def make_way(self) -> None:
        """Each of them has an interpreter of its own."""

    def collect(self) -> list[Ended]:
        done = self._done
        ended = [done.popleft() for _ in range(len(done))]
        return [one for one in ended if not one.held.dropped]

    def tend(self, now_s: float) -> None:
        for slot in list(self._slots):
            if slot.ending < 0 and slot.has_ended():
                self._replace(slot)
                continue
            limit_s = self._limits.time_s
            if slot.given and not slot.killed_for:
                ran_s = now_s - slot.begun_s
                if limit_s is not None and ran_s >= limit_s:
                    slot.kill(f"time limit of {limit_s:g} s")
                elif len(slot.given) > 1 and _is_stuck(slot, now_s):
                    self._ready.extendleft(reversed(slot.take_back()))
                    self._pace.forget()
            slot.see_to_its_end(now_s)
        self._fill(now_s)
        self._hand_out()

    def due_s(self) -> float | None:
        due: list[float] = []
        if self._replacing and len(self._slots) < self._concurrency:
            due.append(self._start_again_s)
        for slot in self._slots:
            if slot.given and self._limits.time_s is not None and not slot.killed_for:
                due.append(slot.begun_s + self._limits.time_s)
            if len(slot.given) > 1 and not slot.killed_for:
                due.append(slot.begun_s + STUCK_S)
            if slot.killed_for or slot.silent_s is not None or slot.ending < 0:
                due.append(stopwatch() + _LOOK_S)
        return min(due, default=None)

    def wait(self, timeout_s: float) -> None:
        self._bell.wait(timeout_s)

    def ring(self) -> None:
        self._bell.ring()

    def take_back(self) -> list[Held]:
        taken = [held for slot in self._slots for held in slot.take_back()]
        taken += self._ready
        self._ready.clear()
        return taken

    def stop(self, held: Held) -> None:
        held.dropped = True
        for slot in self._slots:
            if slot.given and slot.given[0] is held:
                slot.kill("stopped")

    def replace_no_more(self) -> None:
        self._replacing = False

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for slot in self._slots:
            slot.close()
        for slot in self._slots:
            self._forget(slot)
            slot.wait()
        # Contents that do not answer must not keep a worker that is to stop.
        if self._porter.close(_CLOSE_S if self._replacing else _STOP_S):
            self._bell.close()

    # ── What happens ─────────────────────────────────────────────────────────────────────────────

    def _hand_out(self) -> None:
        """Give each child a little work in hand, the ones with nothing first."""
        if not self._ready:
            return
        # A child that has to wait for the worker between two documents is idle meanwhile; so it has
        # some of the work in hand, unless its documents take long.
        most = 1 + int(CHUNK_S / max(self._pace.mean_s, 1e-4)) if self._pace.ahead else 1
        now_s = stopwatch()
        hungry = [
            slot
            for slot in self._slots
            if slot.usable and 2 * len(slot.given) < most and not _is_stuck(slot, now_s)
        ]
        hungry.sort(key=lambda slot: len(slot.given))
        for left in range(len(hungry), 0, -1):
            slot = hungry[-left]
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
                self._bell.forget(slot.orders)

        self._bell.forget(slot.orders)
        self._bell.watch(slot.orders, selectors.EVENT_WRITE, send)

    def _hear(self, slot: Slot) -> None:
        """A child has said something."""
        slot.listen()
        ended = slot.hear()
        if slot.silent_s is not None:
            self._bell.forget(slot.replies)
        if slot.broken is not None:
            why, trace = slot.broken
            pass_on(self._output, "", trace)
            raise HandlerNotLoaded(
                f"the handler {self._started.handler} cannot be loaded in a child process: {why}"
            )
        if slot.usable:
            self._starts_failed = 0
        if ended:
            slot.listen()
            slot.end_line()
            self._pace.add(sum(seconds for *_, seconds in ended), len(ended))
            for held, answer, seconds in ended:
                self._finish(held, answer, seconds)
        if slot.worn:
            self._ready.extendleft(reversed(slot.take_back()))
        if (slot.worn or not slot.documents_left) and not slot.given:
            slot.retire()
        self._hand_out()

    def _finish(self, held: Held, answer: Answer, seconds: float) -> None:
        if answer[0] != FILE:
            self._done.append(Ended(held, answer, seconds))
            return

        def carry() -> None:
            kept, content = keep_file(self._contents, answer, self._folder_of(held))
            self._done.append(Ended(held, kept, seconds, content))
            self._bell.ring()

        self._porter.carry(carry)

    def _replace(self, slot: Slot) -> None:
        """A child is gone: whoever it ran has failed, the others have not begun."""
        if not slot.has_ended():
            return
        slot.listen(to_the_end=True)
        self._hear(slot)
        self._forget(slot)
        was_ready = slot.was_ready
        unstarted = slot.take_back()
        self._ready.extendleft(reversed(unstarted))
        now_s = stopwatch()
        for held in slot.given:
            self._done.append(Ended(held, (AGAIN, slot.why(), None, None), held.ran_s(now_s)))
            folder = self._folder_of(held)
            self._porter.carry(lambda folder=folder: remove_folder(folder))  # type: ignore[misc]
        slot.given.clear()
        slot.wait()
        self._slots.remove(slot)
        if not was_ready:
            self._starts_failed += 1
            if self._starts_failed >= STARTS_FAILED_MAX:
                raise HandlerNotLoaded(
                    f"{self._starts_failed} child processes in a row ended before they had loaded "
                    f"the handler {self._started.handler}: {slot.why()}"
                )
        self._fill(now_s)
        self._hand_out()

    def _fill(self, now_s: float) -> None:
        """Start the children that are missing. If the system has no room for one more, the others
        go on, and it is tried again."""
        if not self._replacing or now_s < self._start_again_s:
            return
        try:
            while len(self._slots) < self._concurrency:
                self._slots.append(self._new_slot())
        except OSError as error:
            self._start_again_s = now_s + START_AGAIN_S
            pass_on(
                self._output,
                "",
                f"a child process cannot be started ({error.strerror}); "
                f"{len(self._slots)} of {self._concurrency} go on, the next try is in "
                f"{START_AGAIN_S:g} s",
            )

    def _forget(self, slot: Slot) -> None:
        for descriptor in (slot.replies, slot.output, slot.ending, slot.orders):
            if descriptor >= 0:
                self._bell.forget(descriptor)

    def _folder_of(self, held: Held) -> str:
        return folder_of(str(self._folder), *held.fence)


def _is_stuck(slot: Slot, now_s: float) -> bool:
    """Whether what it runs turned out slow, so that nothing should wait behind it."""
    return bool(slot.given) and now_s > slot.begun_s + STUCK_S


def _refuse_too_many(concurrency: int) -> None:
    """Say so before the first child is started, and not in the middle of the work."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = concurrency * DESCRIPTORS_PER_SLOT + _OTHER_DESCRIPTORS
    if allowed != resource.RLIM_INFINITY and needed > allowed:
        raise ValueError(
            f"concurrency is {concurrency}; that takes {needed:,} open files and this process may "
            f"have {allowed:,}; raise the limit (ulimit -n), or start several workers"
        )
