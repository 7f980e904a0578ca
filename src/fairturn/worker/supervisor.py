"""The loop of a worker: claim, hand out, renew, record. It runs in one thread, by deadlines.

The loop blocks neither on a handler nor on the store. Calls of the store run in other threads
(`store_calls.py`), and the loop processes each reply when it arrives. So leases are renewed and
signals are handled while a claim waits for a lock.

Outcomes are recorded with the next claim: at once if a slot is idle, otherwise within 5 ms, so that
the outcomes of a fast handler share a transaction. On a server, claim and outcomes are separate
calls while documents wait for a slot. A file has one writer, so there they share a transaction.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from fairturn.clock import SECOND_US, microseconds, stopwatch
from fairturn.errors import ContentDamaged, StoreError, StoreUnavailable
from fairturn.explain.snapshot import SIGN_ON_EVERY_US
from fairturn.model import (
    CANCELS_REPORTED_MAX,
    Claim,
    Completed,
    Failed,
    Fence,
    Outcome,
    Progress,
    Released,
    Renewed,
    Stopped,
    Summary,
)
from fairturn.queue import Queue
from fairturn.worker import events
from fairturn.worker.backoff import Backoff, delay_us
from fairturn.worker.executor import ActiveClaim, AttemptResult, Executor
from fairturn.worker.handler import DONE, FILE, GIVE_UP, RETRY
from fairturn.worker.leases import LeaseRenewer
from fairturn.worker.outage import Outage
from fairturn.worker.outcomes import CallResult, OutcomeRecorder, state_after
from fairturn.worker.prefetch import PrefetchPolicy
from fairturn.worker.store_calls import StoreCalls, StoreOperation
from fairturn.worker.wakeups import StoreListener

POLL_S = 1.0  # for documents that became due and leases that expired
RECORD_S = 0.005  # how long an outcome waits for others while no slot is idle
RECORD_MAX = 250  # batch size of outcomes
HELD_BACK_S = 0.25  # a document that cannot start within this time is released
ANSWER_S = 0.7  # for the last calls of the store after the grace period
SIGN_ON_S = SIGN_ON_EVERY_US / SECOND_US
IDLE_S = 2.0  # until a worker with `until_empty` emits `WorkerIdle`


class WorkerTotals(NamedTuple):
    """How many attempts ended in each way."""

    completed: int = 0
    failed: int = 0  # retried or not
    released: int = 0
    cancelled: int = 0
    lost: int = 0


class WorkerOptions(NamedTuple):
    """The options of a run."""

    name: str
    slots: int
    lease_s: float
    grace_s: float
    retry: Backoff
    stops: Sequence[bool]  # grows with each call of `Worker.stop`: its `now`
    on_event: Callable[[events.Event], None] | None
    random: Callable[[], float]
    until_empty: bool = False


class _UnrecordedOutcome(NamedTuple):
    """An attempt that has ended and is not recorded yet."""

    outcome: Outcome
    held: ActiveClaim
    seconds: float


class Supervisor:
    """Claims documents for an executor and records their outcomes.

    It has more than 15 attributes and 20 methods because claims, outcomes, renewals, heartbeats
    and the stop have deadlines that depend on one another, in one loop.
    """

    def __init__(
        self, queue: Queue, executor: Executor, pace: PrefetchPolicy, options: WorkerOptions
    ) -> None:
        self._queue = queue
        self._executor = executor
        self._pace = pace
        self._options = options
        self._recorder = OutcomeRecorder(
            queue,
            options.name,
            options.lease_s,
            reads_states=options.on_event is not None,
        )
        self._calls = StoreCalls(executor.ring)
        self._outage = Outage(options.random)
        self._leases = LeaseRenewer(queue, self._calls, self._outage, options.lease_s)
        self._held: dict[Fence, ActiveClaim] = {}
        self._ended: list[_UnrecordedOutcome] = []
        self._oldest_s = 0.0  # end of the first of them
        self._claiming: list[_UnrecordedOutcome] | None = None  # by the claim in flight
        self._recording: list[_UnrecordedOutcome] | None = None  # by `finish` in flight
        self._sign_on_s: float | None = 0.0  # None: a heartbeat is in flight
        self._poll_s = 0.0
        self._summary_in_flight = False
        self._summary: Summary | None = None  # None after a claim or an outcome
        self._cancelled: int | None = None  # total in the last summary
        self._changes = 0  # claims and outcomes, to detect an outdated summary
        self._short = False  # the last claim returned fewer documents than requested
        self._stops = options.stops
        self._stopped_s: float | None = None
        self._deadline_s: float | None = None  # the worker ends then, even with calls in flight
        self._abandoning = False  # newly claimed documents are released
        self._idle_since_s: float | None = None
        self._idle_reported = options.on_event is None
        self._listener = StoreListener(queue, self._calls.ring)
        self._counts = dict.fromkeys(WorkerTotals._fields, 0)

    def ring(self) -> None:
        """Wake the loop, from any thread or a signal handler."""
        self._executor.ring()

    @property
    def _at_once(self) -> bool:
        """Whether the grace period is skipped."""
        return len(self._stops) > 1 or any(self._stops)

    def run(self) -> WorkerTotals:
        """Work until stopped, or until the queue is empty with `until_empty`.

        Raises `StoreUnavailable` if the store did not record the last outcomes in time: those
        documents run again when their leases have expired.
        """
        try:
            while not self._turn():
                self._executor.wait(self._next_s() - stopwatch())
        except BaseException:
            self._calls.mute()  # the executor's descriptors may be reused after `close`
            try:
                self._executor.close()
            finally:
                self._abandon()
            raise
        finally:
            self._sign_off()
            self._calls.leave()
            self._listener.close()
        if self._held:
            raise StoreUnavailable(
                f"the store did not record the outcomes of {len(self._held):,} attempts before the "
                "worker stopped; their documents run again when their leases have expired"
            )
        return WorkerTotals(**self._counts)

    # ── One turn of the loop ─────────────────────────────────────────────────────────────────────

    def _turn(self) -> bool:
        """Do everything that is due; return True when the worker is done."""
        now_s = stopwatch()
        self._executor.tend(now_s)
        self._take_in(self._executor.collect(), now_s)
        self._take_replies()
        if self._stops:
            self._wind_down(now_s)
        else:
            self._release_stuck(now_s)
        self._leases.renew(self._held.values(), now_s, self._take_renewed)
        self._sign_on(now_s)
        self._record_and_claim(now_s)
        if self._held:
            self._idle_since_s = None
        if self._held or self._claiming is not None:
            return self._is_past_deadline(now_s)
        return bool(self._stops) or (
            self._options.until_empty and self._short and self._is_empty(now_s)
        )

    def _next_s(self) -> float:
        """Return when the next turn is due. The end of a call in flight wakes the loop."""
        due = []
        renewal_s = self._leases.due_s()
        if self._held and renewal_s is not None:
            due.append(renewal_s)
        if self._sign_on_s is not None and not self._stops:
            due.append(max(self._sign_on_s, self._outage.until_s))
        if self._claiming is None:
            due.append(max(self._poll_s, self._outage.until_s))
            if self._ended and self._recording is None:
                due.append(max(self._oldest_s + RECORD_S, self._outage.until_s))
        executor_s = self._executor.due_s()
        if executor_s is not None:
            due.append(executor_s)
        since_s = self._executor.unstarted_since_s()
        if since_s is not None and not self._stops:
            due.append(since_s + HELD_BACK_S)
        if self._deadline_s is not None:
            due.append(self._deadline_s)
        elif self._stopped_s is not None:
            due.append(self._stopped_s + (self._options.grace_s if self._held else ANSWER_S))
        return min(due, default=stopwatch() + POLL_S)

    # ── Calls of the store ───────────────────────────────────────────────────────────────────────

    def _take_replies(self) -> None:
        """Process the replies that have arrived. Failed calls are retried with backoff."""
        for call in self._calls.returned():
            try:
                reply = call.reply.result()
            except StoreUnavailable as error:
                pause_s = self._outage.go_on(stopwatch())
                call.fail()
                if self._options.on_event is not None:
                    self._options.on_event(events.StoreFailed(str(error), pause_s))
            except BaseException:
                call.fail()
                raise
            else:
                call.take(reply)
                # A read does not end an outage: the store may be read-only.
                if call.kind is not StoreOperation.BACKGROUND:
                    self._end_outage(call.begun_s)

    def _take_in(self, ended: list[AttemptResult], now_s: float) -> None:
        if ended and not self._ended:
            self._oldest_s = now_s
        self._ended += [
            _UnrecordedOutcome(self._outcome(one), one.held, one.seconds) for one in ended
        ]

    def _add(self, outcome: Outcome, held: ActiveClaim, seconds: float, now_s: float) -> None:
        if not self._ended:
            self._oldest_s = now_s
        self._ended.append(_UnrecordedOutcome(outcome, held, seconds))

    def _outcome(self, ended: AttemptResult) -> Outcome:
        held, (kind, text, _, after_s), seconds, content = ended
        if kind in _SUCCEEDED:
            return Completed(held.fence, text, content, microseconds(seconds))
        if kind == GIVE_UP:
            return Failed(held.fence, text or "")
        assert kind == RETRY
        attempt = held.claim.document.attempts
        delay = delay_us(self._options.retry, attempt, self._options.random, after_s)
        self._poll_s = min(self._poll_s, stopwatch() + delay / 1_000_000)
        return Failed(held.fence, text or "", delay)

    # ── Recording and claiming ───────────────────────────────────────────────────────────────────

    def _record_and_claim(self, now_s: float) -> None:
        if now_s < self._outage.until_s:
            return
        if self._claiming is not None:
            # With a single writer, `finish` would block until the claim has ended.
            if self._stops or not self._queue.single_writer:
                self._record()
            return
        wanted = self._wanted(now_s)
        if self._ended and not self._must_record(now_s):
            return
        if wanted and self._executor.unstarted() and not self._queue.single_writer:
            self._claim(wanted, [])
            self._record()
        elif wanted:
            recorded, self._ended = self._ended, []
            self._claim(wanted, recorded)
        else:
            self._record()

    def _wanted(self, now_s: float) -> int:
        """Return how many documents to claim: 0 if the store has not changed since a claim came up
        short."""
        wanted = 0
        if not self._stops:
            wanted = self._pace.wanted(self._executor.free(), self._executor.unstarted())
        if not wanted:
            # The end of a handler wakes the loop before this.
            self._poll_s = max(self._poll_s, now_s + POLL_S)
            return 0
        if not self._short or now_s >= self._poll_s:
            return wanted
        if not self._listener.changed:
            return 0
        if not self._queue.single_writer:
            return wanted
        # The change may be an outcome of another worker. A read is cheap; a claim blocks writers.
        self._read_summary()
        return 0

    def _sign_on(self, now_s: float) -> None:
        """Send a heartbeat, if one is due and none is in flight."""
        if self._stops or self._sign_on_s is None:
            return
        if now_s < max(self._sign_on_s, self._outage.until_s):
            return
        self._sign_on_s = None

        def take(_: object = None) -> None:
            self._sign_on_s = stopwatch() + SIGN_ON_S

        call = partial(self._queue.sign_on, self._options.name, self._options.slots)
        self._calls.begin(StoreOperation.BACKGROUND, call, take, fail=take)

    def _read_summary(self) -> None:
        if self._summary_in_flight or stopwatch() < self._outage.until_s:
            return
        self._summary_in_flight = True
        changed, version, changes = self._listener.changed, self._listener.version, self._changes

        def take(summary: Summary) -> None:
            self._summary_in_flight = False
            if self._changes == changes:
                self._summary = summary
            more_cancelled = summary.cancelled != self._cancelled  # the next claim reports them
            self._cancelled = summary.cancelled
            if more_cancelled or (changed and summary.waiting):
                self._short = False
            elif changed:
                self._listener.look(version)

        def fail() -> None:
            self._summary_in_flight = False

        self._calls.begin(StoreOperation.BACKGROUND, self._queue.summary, take, fail=fail)

    def _must_record(self, now_s: float) -> bool:
        """Whether to record the outcomes now instead of waiting for more."""
        return (
            bool(self._stops)
            or self._executor.free() > self._executor.unstarted()
            or now_s >= self._oldest_s + RECORD_S
            or len(self._ended) >= RECORD_MAX
        )

    def _claim(self, wanted: int, recorded: list[_UnrecordedOutcome]) -> None:
        self._claiming = recorded
        version = self._listener.version  # an older version only causes one more wake-up
        outcomes = [attempt.outcome for attempt in recorded]

        def take(reply: CallResult) -> None:
            self._receive(reply, wanted, recorded, version)

        def fail() -> None:
            self._claiming = None
            self._keep(recorded)

        call = partial(self._recorder.claim, wanted, outcomes)
        self._calls.begin(StoreOperation.CLAIM, call, take, fail=fail, late=self._recorder.release)

    def _record(self) -> None:
        """Record the outcomes, unless a `finish` is in flight."""
        if not self._ended or self._recording is not None:
            return
        recorded, self._ended = self._ended, []
        self._recording = recorded

        def take(reply: CallResult) -> None:
            self._recording = None
            self._settle(recorded, reply)

        def fail() -> None:
            self._recording = None
            self._keep(recorded)

        outcomes = [attempt.outcome for attempt in recorded]
        self._calls.begin(
            StoreOperation.FINISH, partial(self._recorder.finish, outcomes), take, fail=fail
        )

    def _keep(self, recorded: list[_UnrecordedOutcome]) -> None:
        """Record these outcomes again: the call that recorded them failed."""
        self._ended[:0] = recorded

    def _receive(
        self, reply: CallResult, wanted: int, recorded: list[_UnrecordedOutcome], version: int
    ) -> None:
        """Process the reply to a claim. All documents are held before the first event, so that they
        are released if `on_event` raises."""
        now_s = stopwatch()
        self._claiming = None
        self._summary, self._changes = None, self._changes + 1
        self._poll_s = now_s + POLL_S
        self._short = len(reply.claims) < wanted and len(reply.cancelled) < CANCELS_REPORTED_MAX
        stopping = self._stops or self._abandoning
        if not (
            self._short or stopping or self._queue.single_writer or now_s < self._outage.until_s
        ):
            # The server executes the next claim while the handlers run.
            more = self._pace.wanted(
                self._executor.free(), self._executor.unstarted() + len(reply.claims)
            )
            if more:
                self._claim(more, [])
        held = [self._hold(claim, now_s) for claim in reply.claims]
        self._settle(recorded, reply)
        if self._options.on_event is not None:
            for one in held:
                self._options.on_event(events.DocumentClaimed(one.claim.document, one.fence))
            for document in reply.cancelled:
                self._options.on_event(events.DocumentCancelled(document))
        if stopping:
            self._release(held, now_s)
        elif held:
            self._executor.give(held)
            if self._short and not self._queue.single_writer:  # no other work is urgent
                self._executor.make_way()
        if self._short:
            self._listener.look(version)
        self._calls.begin(StoreOperation.BACKGROUND, self._queue.sync)  # while the handlers start

    def _hold(self, claim: Claim, now_s: float) -> ActiveClaim:
        document = claim.document
        path = None
        if claim.body is None and document.content_name is not None:
            with suppress(ContentDamaged):  # raised again if the handler reads it
                path = self._queue.contents.locate(document.content_name)
        held = ActiveClaim(claim, now_s, path)
        self._held[claim.fence] = held
        return held

    def _settle(self, recorded: list[_UnrecordedOutcome], reply: CallResult) -> None:
        """Count the recorded outcomes and emit their events, except for lost leases."""
        self._summary, self._changes = None, self._changes + 1
        gone = set(reply.lost)
        if gone:
            for attempt in recorded:
                if attempt.held.fence in gone:
                    self._lose(attempt.held, attempt)
            recorded = [attempt for attempt in recorded if attempt.held.fence not in gone]
        for kind, n in Counter([type(attempt.outcome) for attempt in recorded]).items():
            self._counts[_COUNTED[kind]] += n
        for attempt in recorded:
            del self._held[attempt.held.fence]
        on_event = self._options.on_event
        if on_event is not None:
            for outcome, held, seconds in recorded:
                document = held.claim.document
                state = state_after(outcome, reply.states.get(document.id))
                on_event(events.DocumentEnded(document._replace(state=state), outcome, seconds))

    def _lose(self, held: ActiveClaim, attempt: _UnrecordedOutcome | None = None) -> None:
        """Drop an attempt whose lease was lost, and delete its result file."""
        held.dropped = True
        if self._held.pop(held.fence, None) is None:
            return
        self._counts["lost"] += 1
        outcome = None if attempt is None else attempt.outcome
        if isinstance(outcome, Completed) and outcome.content is not None:
            # If the call fails, the next sweep deletes the file.
            self._calls.begin(
                StoreOperation.BACKGROUND, partial(self._queue.discard, [outcome.content.name])
            )
        if self._options.on_event is not None:
            self._options.on_event(events.DocumentLost(held.claim.document, held.fence))

    def _end_outage(self, begun_s: float) -> None:
        away_s = self._outage.end(stopwatch(), begun_s)
        if away_s is not None and self._options.on_event is not None:
            self._options.on_event(events.StoreRecovered(away_s))

    # ── Leases ───────────────────────────────────────────────────────────────────────────────────

    def _take_renewed(self, renewed: Renewed, progress: dict[Fence, Progress]) -> None:
        now_s = stopwatch()
        for fence, reported in progress.items():
            if fence in self._held:
                self._held[fence].reported = reported
            if self._options.on_event is not None:
                self._options.on_event(events.DocumentProgressed(fence, reported))
        # Skip attempts that ended in the meantime: the reply to their `finish` decides.
        gone = self._ending()
        for fence in renewed.lost:
            if fence in self._held and fence not in gone:
                self._stop_one(self._held[fence])
                self._lose(self._held[fence])
        for fence in renewed.cancelled:
            held = self._held.get(fence)
            if held is not None and fence not in gone:
                self._stop_one(held)
                self._add(Stopped(fence), held, held.ran_s(now_s), now_s)

    def _ending(self) -> set[Fence]:
        """Return the attempts that have ended, also those whose recording is in flight."""
        ending = [*self._ended, *(self._claiming or ()), *(self._recording or ())]
        return {attempt.held.fence for attempt in ending}

    def _stop_one(self, held: ActiveClaim) -> None:
        held.dropped = True
        if any(running is held for running in self._executor.running()):
            self._executor.stop(held)
        else:
            self._executor.give([one for one in self._executor.take_back() if not one.dropped])

    def _release_stuck(self, now_s: float) -> None:
        """Release prefetched documents that cannot start because others turned out slow."""
        since_s = self._executor.unstarted_since_s()
        if since_s is not None and now_s >= since_s + HELD_BACK_S:
            self._pace.forget()
            self._release(self._executor.take_back(), now_s)

    def _release(self, some: list[ActiveClaim], now_s: float) -> None:
        for held in some:
            if not held.dropped:
                held.dropped = True
                self._add(Released(held.fence), held, 0.0, now_s)

    # ── Stop ─────────────────────────────────────────────────────────────────────────────────────

    def _wind_down(self, now_s: float) -> None:
        """Release unstarted documents; after the grace period, running ones too."""
        if self._stopped_s is None:
            self._stopped_s = now_s
            if self._options.on_event is not None:
                running = len(self._executor.running())
                unrecorded = len(self._ending())
                self._options.on_event(events.WorkerStopping(self._at_once, running, unrecorded))
            self._executor.stop_replacing()
        self._release(self._executor.take_back(), now_s)
        if self._at_once or now_s >= self._stopped_s + self._options.grace_s:
            self._deadline_s = now_s + ANSWER_S if self._deadline_s is None else self._deadline_s
            self._stop_all(now_s)

    def _is_past_deadline(self, now_s: float) -> bool:
        """Whether the worker ends now although calls of the store are in flight.

        For a claim alone it does not wait for the grace period: the claim may be blocked by another
        process. If the claim returns documents later, `late` releases them.
        """
        until_s = self._deadline_s
        if until_s is None and self._stopped_s is not None and not self._held:
            until_s = self._stopped_s + ANSWER_S
        if until_s is None or now_s < until_s:
            return False
        self._deadline_s = until_s  # so that `_sign_off` does not wait again
        return True

    def _stop_all(self, now_s: float) -> None:
        """Kill running handlers. A document is released when its process has ended, so that two
        attempts never overlap; a thread cannot be killed, so its document is released at once."""
        running = {held.fence for held in self._executor.running()}
        for held in self._executor.running():
            self._executor.stop(held)
        ended = self._ending()
        for fence, held in self._held.items():
            if fence not in ended and (fence not in running or not self._executor.can_end):
                held.dropped = True
                self._add(Released(fence), held, held.ran_s(now_s), now_s)

    def _is_empty(self, now_s: float) -> bool:
        if self._summary is None:
            self._read_summary()
            return False
        summary = self._summary
        left = events.WorkerIdle(summary.waiting, summary.delayed, summary.running)
        if not any(left):
            return True
        self._idle_since_s = now_s if self._idle_since_s is None else self._idle_since_s
        if not self._idle_reported and now_s >= self._idle_since_s + IDLE_S:
            self._idle_reported = True
            assert self._options.on_event is not None
            self._options.on_event(left)
        return False

    def _abandon(self) -> None:
        """After an error: record the outcomes and release the other documents, if possible."""
        self._abandoning = True
        self._calls.wait(ANSWER_S)
        with suppress(StoreError):
            self._take_replies()
        ended = self._ending()
        outcomes = [attempt.outcome for attempt in self._ended]
        outcomes += [Released(fence) for fence in self._held if fence not in ended]
        if outcomes:
            self._calls.begin(StoreOperation.FINISH, partial(self._queue.finish, outcomes))

    def _sign_off(self) -> None:
        """Remove this worker from the store; wait for calls in flight until the deadline."""
        self._calls.begin(
            StoreOperation.BACKGROUND, partial(self._queue.sign_off, self._options.name)
        )
        now_s = stopwatch()
        deadline_s = (
            now_s + ANSWER_S if self._deadline_s is None or self._abandoning else self._deadline_s
        )
        self._calls.wait(deadline_s - now_s)


_SUCCEEDED = (DONE, FILE)
_COUNTED = {
    Completed: "completed",
    Failed: "failed",
    Released: "released",
    Stopped: "cancelled",
}
