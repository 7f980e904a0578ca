"""Hands documents to the executors of their kinds, and decides how many may be claimed.

A worker with one handler has one executor. Kinds that run in threads, or with another memory limit,
have executors of their own; their idle threads and children use no slot of the worker. Every
claimed document must be able to start: a claim is limited by the idle slots of the worker, and for
each kind by its concurrency and by the idle slots of its executor.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fairturn.model import NO_CAPS, Claim
from fairturn.worker.executor import ActiveClaim, AttemptResult, Executor, WakeupPipe
from fairturn.worker.prefetch import PrefetchPolicy


class ClaimLimits(NamedTuple):
    """How many documents to claim: in total, and of single kinds."""

    n: int
    at_most: Mapping[str, int] = NO_CAPS

    def allow(self, kind: str) -> bool:
        """Return whether a document of this kind may be claimed."""
        return self.at_most.get(kind, self.n) > 0

    def reached(self, claims: Sequence[Claim]) -> frozenset[str]:
        """Return the kinds of which the claims took as many documents as they could: more of them
        may wait."""
        if not self.at_most:
            return frozenset()
        taken = Counter(claim.document.kind for claim in claims)
        return frozenset(kind for kind, most in self.at_most.items() if taken[kind] >= most)


class Dispatcher:
    """The executors of a worker. The supervisor's thread calls its methods, except `ring`.

    It has more than 15 attributes and 20 methods because it is the supervisor's view of all
    executors.
    """

    def __init__(self, slots: int, pace: PrefetchPolicy, wakeup: WakeupPipe) -> None:
        self._slots = slots
        self._pace = pace
        self._wakeup = wakeup
        self._executors: list[Executor] = []
        self._by_kind: dict[str, Executor] = {}
        self._kinds_of: dict[Executor, Sequence[str]] = {}
        self._capped: dict[str, int] = {}
        self._active: Counter[str] = Counter()  # documents in the executors, by kind, if limited
        self._closed = False

    def add(self, executor: Executor, kinds: Sequence[str], capped: Mapping[str, int]) -> None:
        """Add an executor for these kinds, of which some have a concurrency of their own; none for
        the only executor of a worker that serves every kind. `close` closes it."""
        self._executors.append(executor)
        self._kinds_of[executor] = kinds
        self._by_kind.update(dict.fromkeys(kinds, executor))
        self._capped.update((kind, most) for kind, most in capped.items() if kind in kinds)

    # ── Claims ───────────────────────────────────────────────────────────────────────────────────

    def free(self) -> int:
        """Return the number of idle slots."""
        if self._is_single:
            return self._executors[0].free()
        running = self._active.total() - self.unstarted()
        return max(0, min(self._slots - running, sum(one.free() for one in self._executors)))

    @property
    def _is_single(self) -> bool:
        return len(self._executors) == 1

    @property
    def _is_limited(self) -> bool:
        """Whether the documents of each kind are counted."""
        return bool(self._capped) or not self._is_single

    def unstarted(self) -> int:
        """Return how many given documents have not started."""
        return sum(executor.unstarted() for executor in self._executors)

    def claimable(self, arriving: Sequence[ActiveClaim] = ()) -> ClaimLimits:
        """Return how many documents to claim, if `arriving` are given next."""
        free, unstarted = self.free(), self.unstarted() + len(arriving)
        # Nothing is prefetched for several executors: it might wait for a slot that others use.
        n = self._pace.wanted(free, unstarted) if self._is_single else max(0, free - unstarted)
        if not n or not self._is_limited:
            return ClaimLimits(n)
        active = self._active + Counter(held.kind for held in arriving)
        at_most = {
            kind: max(0, most - active[kind])
            for kind, most in self._capped.items()
            if most - active[kind] < n
        }
        if not self._is_single:
            n = self._within_executors(n, at_most, arriving)
        if all(kind in at_most for kind in self._by_kind):
            n = min(n, sum(at_most.values()))
        return ClaimLimits(n, at_most)

    def _within_executors(
        self, n: int, at_most: dict[str, int], arriving: Sequence[ActiveClaim]
    ) -> int:
        """Limit each kind to the idle slots of its executor; return how many documents to claim, so
        that kinds of one executor do not exceed them together either."""
        for executor, kinds in self._kinds_of.items():
            idle = executor.free() - executor.unstarted()
            idle = max(0, idle - sum(self._executor_of(held) is executor for held in arriving))
            if idle >= n:
                continue
            for kind in kinds:
                at_most[kind] = min(idle, at_most.get(kind, idle))
            if 0 < idle < sum(at_most[kind] for kind in kinds):
                n = idle
        return n

    # ── Documents ────────────────────────────────────────────────────────────────────────────────

    def give(self, documents: list[ActiveClaim]) -> None:
        """Start the documents in this order, as slots become free."""
        if self._is_limited:
            self._active.update(held.kind for held in documents)
        if self._is_single:
            self._executors[0].give(documents)
            return
        for executor in self._executors:
            own = [held for held in documents if self._executor_of(held) is executor]
            if own:
                executor.give(own)

    def take_back(self) -> list[ActiveClaim]:
        """Remove and return the documents that have not started."""
        taken = [held for executor in self._executors for held in executor.take_back()]
        if self._is_limited:
            self._active.subtract(held.kind for held in taken)
        return taken

    def collect(self) -> list[AttemptResult]:
        """Return the attempts that ended since the last call."""
        ended = [one for executor in self._executors for one in executor.take_done()]
        if self._is_limited:
            self._active.subtract(one.held.kind for one in ended)
        return [one for one in ended if not one.held.dropped]

    def running(self) -> list[ActiveClaim]:
        """Return the documents that have started."""
        return [held for executor in self._executors for held in executor.running()]

    def unstarted_since_s(self) -> float | None:
        """Return when the oldest unstarted document was claimed; None if there is none."""
        since = (executor.unstarted_since_s() for executor in self._executors)
        return min((at_s for at_s in since if at_s is not None), default=None)

    def stop(self, held: ActiveClaim) -> bool:
        """Discard the result of a running document, as `Executor.stop` does."""
        return self._executor_of(held).stop(held)

    def _executor_of(self, held: ActiveClaim) -> Executor:
        return self._executors[0] if self._is_single else self._by_kind[held.kind]

    # ── The loop ─────────────────────────────────────────────────────────────────────────────────

    def tend(self, now_s: float) -> None:
        """Enforce limits, replace children, and move documents from stuck slots."""
        for executor in self._executors:
            executor.tend(now_s)

    def due_s(self) -> float | None:
        """Return when `tend` is due; None if nothing is."""
        due = (executor.due_s() for executor in self._executors)
        return min((at_s for at_s in due if at_s is not None), default=None)

    def wait(self, timeout_s: float) -> None:
        """Wait for the end of an attempt, for `ring`, or for the timeout."""
        self._wakeup.wait(timeout_s)

    def ring(self) -> None:
        """End `wait`, from any thread or a signal handler."""
        self._wakeup.ring()

    def stop_replacing(self) -> None:
        """Do not replace children that end from now on."""
        for executor in self._executors:
            executor.stop_replacing()

    def close(self) -> None:
        """End all handlers and free the resources. Idempotent."""
        if self._closed:
            return
        self._closed = True
        ended = [executor.close() for executor in self._executors]
        # A thread that still runs may write to the pipe, whose descriptor must not be reused.
        if all(ended):
            self._wakeup.close()
