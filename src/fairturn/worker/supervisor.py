"""The loop of a worker: claim, hand out, renew, record. It runs in one thread, by deadlines.

The loop blocks neither on a handler nor on the store. Calls of the store run in other threads
(`store_calls.py`), and the loop processes each reply when it arrives. So leases are renewed and
signals are handled while a claim waits for a lock.

Outcomes are recorded with the next claim: at once if a slot is idle, otherwise within 5 ms, so that
the outcomes of a fast handler share a transaction. On a server, claim and outcomes are separate
calls while documents wait for a slot. A file has one writer, so there they share a transaction.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from fairturn.clock import SECOND_US, stopwatch
from fairturn.errors import ContentDamaged, StoreError, StoreUnavailable
from fairturn.model import CANCELS_REPORTED_MAX, Claim, Released, Renewed, Stopped
from fairturn.queue import Queue
from fairturn.worker import events
from fairturn.worker.backlog import PendingDocuments, read_pending
from fairturn.worker.backoff import Outage
from fairturn.worker.dispatcher import ClaimLimits, Dispatcher
from fairturn.worker.executor import ActiveClaim, AttemptResult
from fairturn.worker.kinds import ServedKinds
from fairturn.worker.leases import LeaseRenewer, Reports
from fairturn.worker.outcomes import (
    Attempts,
    CallResult,
    OutcomeRecorder,
    UnrecordedOutcome,
    WorkerTotals,
    outcome_of,
    retry_us_of,
)
from fairturn.worker.prefetch import PrefetchPolicy
from fairturn.worker.store_calls import StoreCalls, StoreListener, StoreOperation
from fairturn.worker.upkeep import Upkeep

POLL_S = 1.0  # for documents that became due and leases that expired
RECORD_S = 0.005  # how long an outcome waits for others while no slot is idle
RECORD_MAX = 250  # batch size of outcomes
HELD_BACK_S = 0.25  # a document that cannot start within this time is released
ANSWER_S = 0.7  # for the last calls of the store after the grace period
IDLE_S = 2.0  # until a worker with `until_empty` emits `WorkerIdle`


class WorkerOptions(NamedTuple):
    """The options of a run."""

    name: str
    slots: int
    lease_s: float
    grace_s: float
    kinds: ServedKinds
    stops: Sequence[bool]  # grows with each call of `Worker.stop`: its `now`
    on_event: events.OnEvent | None
    random: Callable[[], float]
    until_empty: bool = False


class Supervisor:
    """Claims documents for a dispatcher and records their outcomes.

    It has more than 15 attributes and 20 methods because claims, outcomes, renewals and the stop
    have deadlines that depend on one another, in one loop.
    """

    def __init__(
        self, queue: Queue, dispatcher: Dispatcher, pace: PrefetchPolicy, options: WorkerOptions
    ) -> None:
        self._queue = queue
        self._dispatcher = dispatcher
        self._pace = pace
        self._options = options
        self._kinds = options.kinds
        self._calls = StoreCalls(dispatcher.ring)
        self._outage = Outage(options.random)
        self._recorder = OutcomeRecorder(
            queue, options.name, options.lease_s, self._kinds.names, options.on_event
        )
        self._attempts = Attempts(options.on_event, self._discard)
        self._leases = LeaseRenewer(queue, self._calls, self._outage, options.lease_s)
        self._claiming = False  # a claim is in flight
        self._recording = False  # a `finish` is in flight
        self._upkeep = Upkeep(
            queue,
            self._calls,
            self._outage,
            worker=options.name,
            slots=options.slots,
            kinds=options.kinds,
        )
        self._poll_s = 0.0
        self._pending_in_flight = False
        self._pending: PendingDocuments | None = None  # None after a claim or an outcome
        self._cancelled: int | None = None  # total, as last read
        self._changes = 0  # claims and outcomes, to detect outdated numbers
        self._short = False  # the last claim returned fewer documents than requested
        self._at_limit: frozenset[str] = frozenset()  # kinds that it took as many of as it could
        self._stops = options.stops
        self._stopped_s: float | None = None
        self._deadline_s: float | None = None  # the worker ends then, even with calls in flight
        self._abandoning = False  # newly claimed documents are released
        self._idle_since_s: float | None = None
        self._idle_reported = False
        self._listener = StoreListener(queue, self._calls.ring)

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
                self._dispatcher.wait(self._next_s() - stopwatch())
        except BaseException:
            self._calls.mute()  # the executor's descriptors may be reused after `close`
            try:
                self._dispatcher.close()
            finally:
                self._abandon()
            raise
        finally:
            self._sign_off()
            self._calls.leave()
            self._listener.close()
        if self._attempts.held:
            raise StoreUnavailable(
                f"the store did not record the outcomes of {len(self._attempts.held):,} attempts "
                "before the worker stopped; their documents run again when their leases have "
                "expired"
            )
        return self._attempts.totals()

    def _emit(self, event: events.Event) -> None:
        if self._options.on_event is not None:
            self._options.on_event(event)

    # ── One turn of the loop ─────────────────────────────────────────────────────────────────────

    def _turn(self) -> bool:
        """Do everything that is due; return True when the worker is done."""
        now_s = stopwatch()
        self._dispatcher.tend(now_s)
        for ended in self._dispatcher.collect():
            self._end(ended, now_s)
        self._take_replies()
        if self._stops:
            self._wind_down(now_s)
        else:
            self._release_stuck(now_s)
        self._leases.renew(self._attempts.held.values(), now_s, self._take_renewed)
        if not self._stops:
            self._upkeep.begin(now_s)
        self._record_and_claim(now_s)
        if self._attempts.held:
            self._idle_since_s = None
        if self._attempts.held or self._claiming:
            return self._is_past_deadline(now_s)
        return bool(self._stops) or (
            self._options.until_empty and self._short and self._is_empty(now_s)
        )

    def _next_s(self) -> float:
        """Return when the next turn is due. The end of a call in flight wakes the loop."""
        due = []
        renewal_s = self._leases.due_s()
        if self._attempts.held and renewal_s is not None:
            due.append(renewal_s)
        upkeep_s = self._upkeep.due_s()
        if upkeep_s is not None and not self._stops:
            due.append(upkeep_s)
        if not self._claiming:
            due.append(max(self._poll_s, self._outage.until_s))
            if self._attempts.unrecorded and not self._recording:
                due.append(max(self._attempts.oldest_s + RECORD_S, self._outage.until_s))
        executor_s = self._dispatcher.due_s()
        if executor_s is not None:
            due.append(executor_s)
        since_s = self._dispatcher.unstarted_since_s()
        if since_s is not None and not self._stops:
            due.append(since_s + HELD_BACK_S)
        if self._deadline_s is not None:
            due.append(self._deadline_s)
        elif self._stopped_s is not None:
            due.append(
                self._stopped_s + (self._options.grace_s if self._attempts.held else ANSWER_S)
            )
        return min(due, default=stopwatch() + POLL_S)

    # ── Calls of the store ───────────────────────────────────────────────────────────────────────

    def _take_replies(self) -> None:
        """Process the replies that have arrived. Failed calls are retried with backoff."""
        for call in self._calls.returned():
            try:
                reply = call.reply.result()
            except StoreUnavailable as error:
                pause_s = self._outage.go_on(stopwatch())
                call.then(None)
                self._emit(events.StoreFailed(str(error), pause_s))
            except BaseException:
                call.then(None)
                raise
            else:
                call.then(reply)
                # A read does not end an outage: the store may be read-only.
                if call.kind is not StoreOperation.BACKGROUND:
                    away_s = self._outage.end(stopwatch(), call.begun_s)
                    if away_s is not None:
                        self._emit(events.StoreRecovered(away_s))

    def _end(self, ended: AttemptResult, now_s: float) -> None:
        """Note the outcome of an attempt, and when its document can be claimed again."""
        outcome = outcome_of(ended, self._options.random)
        retry_us = retry_us_of(outcome)
        if retry_us is not None:
            self._poll_s = min(self._poll_s, stopwatch() + retry_us / SECOND_US)
        self._attempts.end(ended.held, outcome, ended.seconds, now_s)

    # ── Recording and claiming ───────────────────────────────────────────────────────────────────

    def _record_and_claim(self, now_s: float) -> None:
        if now_s < self._outage.until_s:
            return
        if self._claiming:
            # With a single writer, `finish` would block until the claim has ended.
            if self._stops or not self._queue.single_writer:
                self._record()
            return
        wanted = self._wanted(now_s)
        if self._attempts.unrecorded and not self._must_record(now_s):
            return
        if wanted.n and self._dispatcher.unstarted() and not self._queue.single_writer:
            self._claim(wanted, [])
            self._record()
        elif wanted.n:
            self._claim(wanted, self._attempts.take())
        else:
            self._record()

    def _wanted(self, now_s: float) -> ClaimLimits:
        """Return what to claim: nothing if the store has not changed since a claim came up short,
        except of kinds that reached their limit in it."""
        wanted = ClaimLimits(0) if self._stops else self._dispatcher.claimable()
        if not wanted.n:
            # The end of a handler wakes the loop before this.
            self._poll_s = max(self._poll_s, now_s + POLL_S)
            return wanted
        if not self._short or now_s >= self._poll_s or any(map(wanted.allow, self._at_limit)):
            return wanted
        if not self._listener.changed:
            return ClaimLimits(0)
        if not self._queue.single_writer:
            return wanted
        # The change may be an outcome of another worker. A read is cheap; a claim blocks writers.
        self._read_pending()
        return ClaimLimits(0)

    def _read_pending(self) -> None:
        if self._pending_in_flight or stopwatch() < self._outage.until_s:
            return
        self._pending_in_flight = True
        changed, version, changes = self._listener.changed, self._listener.version, self._changes

        def then(pending: PendingDocuments | None) -> None:
            self._pending_in_flight = False
            if pending is None:
                return
            if self._changes == changes:
                self._pending = pending
            more_cancelled = pending.cancelled != self._cancelled  # the next claim reports them
            self._cancelled = pending.cancelled
            if more_cancelled or (changed and pending.can_start(self._dispatcher.claimable())):
                self._short = False
            elif changed:
                self._listener.wait_beyond(version)

        until_empty = self._options.until_empty
        read = partial(read_pending, self._queue, self._kinds.names, until_empty=until_empty)
        self._calls.begin(StoreOperation.BACKGROUND, read, then)

    def _must_record(self, now_s: float) -> bool:
        """Whether to record the outcomes now instead of waiting for more."""
        return (
            bool(self._stops)
            or self._dispatcher.free() > self._dispatcher.unstarted()
            or now_s >= self._attempts.oldest_s + RECORD_S
            or len(self._attempts.unrecorded) >= RECORD_MAX
        )

    def _claim(self, wanted: ClaimLimits, recorded: list[UnrecordedOutcome]) -> None:
        """Claim documents, and record these outcomes in the same transaction."""
        self._claiming = True
        version = self._listener.version  # an older version only causes one more wake-up

        def then(reply: CallResult | None) -> None:
            self._claiming = False
            if reply is None:
                self._attempts.put_back(recorded)
            else:
                self._receive(reply, wanted, recorded, version)

        call = partial(self._recorder.claim, wanted, recorded)
        self._calls.begin(StoreOperation.CLAIM, call, then, late=self._recorder.release)

    def _record(self) -> None:
        """Record the outcomes, unless a `finish` is in flight."""
        if not self._attempts.unrecorded or self._recording:
            return
        self._recording = True
        recorded = self._attempts.take()

        def then(reply: CallResult | None) -> None:
            self._recording = False
            if reply is None:
                self._attempts.put_back(recorded)
            else:
                self._pending, self._changes = None, self._changes + 1
                self._attempts.settle(recorded, reply)

        call = partial(self._recorder.finish, recorded)
        self._calls.begin(StoreOperation.FINISH, call, then)

    def _discard(self, content_name: str) -> None:
        """Delete the result file of a lost attempt. If this fails, the next sweep deletes it."""
        self._calls.begin(StoreOperation.BACKGROUND, partial(self._queue.discard, [content_name]))

    def _receive(
        self,
        reply: CallResult,
        wanted: ClaimLimits,
        recorded: list[UnrecordedOutcome],
        version: int,
    ) -> None:
        """Process the reply to a claim. All documents are held before the first event, so that they
        are released if `on_event` raises."""
        now_s = stopwatch()
        self._pending, self._changes = None, self._changes + 1
        self._poll_s = now_s + POLL_S
        self._short = len(reply.claims) < wanted.n and len(reply.cancelled) < CANCELS_REPORTED_MAX
        self._at_limit = wanted.reached(reply.claims)
        held = [self._hold(claim, now_s) for claim in reply.claims]
        stopping = self._stops or self._abandoning
        if not (
            self._short or stopping or self._queue.single_writer or now_s < self._outage.until_s
        ):
            # The server executes the next claim while the handlers run.
            more = self._dispatcher.claimable(held)
            if more.n:
                self._claim(more, [])
        self._attempts.settle(recorded, reply)
        for one in held:
            self._emit(events.DocumentClaimed(one.claim.document, one.fence))
        for document in reply.cancelled:
            self._emit(events.DocumentCancelled(document))
        if stopping:
            self._attempts.release(held, now_s)
        elif held:
            self._dispatcher.give(held)
        if self._short:
            self._listener.wait_beyond(version)
        self._calls.begin(StoreOperation.BACKGROUND, self._queue.sync)  # while the handlers start

    def _hold(self, claim: Claim, now_s: float) -> ActiveClaim:
        held = self._attempts.held[claim.fence] = ActiveClaim(
            claim, now_s, self._kinds.of(claim.document.kind)
        )
        if claim.body is None and claim.document.content_name is not None:
            held.path = self._locate(claim.document.content_name)
        if claim.previous_content is not None:
            held.previous_path = self._locate(claim.previous_content.name)
        return held

    def _locate(self, content_name: str) -> str | None:
        """Return the path of a content; None if it is damaged, which reading it raises again."""
        with suppress(ContentDamaged):
            return self._queue.contents.locate(content_name)
        return None

    # ── Leases ───────────────────────────────────────────────────────────────────────────────────

    def _take_renewed(self, renewed: Renewed, reports: Reports) -> None:
        now_s = stopwatch()
        for fence, progress in reports.progress.items():
            self._emit(events.DocumentProgressed(fence, progress))
        # Skip attempts that ended in the meantime: the reply to their `finish` decides.
        running = self._attempts.open()
        for fence in renewed.lost:
            held = running.pop(fence, None)
            if held is not None:
                self._stop_one(held)
                self._attempts.lose(held)
        for fence in renewed.cancelled:
            held = running.pop(fence, None)
            if held is not None:
                self._stop_one(held)
                self._attempts.end(held, Stopped(fence), held.ran_s(now_s), now_s)

    def _stop_one(self, held: ActiveClaim) -> None:
        held.dropped = True
        if any(running is held for running in self._dispatcher.running()):
            self._dispatcher.stop(held)
        else:
            self._dispatcher.give([one for one in self._dispatcher.take_back() if not one.dropped])

    def _release_stuck(self, now_s: float) -> None:
        """Release prefetched documents that cannot start because others turned out slow."""
        since_s = self._dispatcher.unstarted_since_s()
        if since_s is not None and now_s >= since_s + HELD_BACK_S:
            self._pace.forget()
            self._attempts.release(self._dispatcher.take_back(), now_s)

    # ── Stop ─────────────────────────────────────────────────────────────────────────────────────

    def _wind_down(self, now_s: float) -> None:
        """Release unstarted documents; after the grace period, running ones too."""
        if self._stopped_s is None:
            self._stopped_s = now_s
            running = len(self._dispatcher.running())
            unrecorded = len(self._attempts.held) - len(self._attempts.open())
            self._emit(events.WorkerStopping(self._at_once, running, unrecorded))
            self._dispatcher.stop_replacing()
        self._attempts.release(self._dispatcher.take_back(), now_s)
        if self._at_once or now_s >= self._stopped_s + self._options.grace_s:
            self._deadline_s = now_s + ANSWER_S if self._deadline_s is None else self._deadline_s
            self._stop_all(now_s)

    def _is_past_deadline(self, now_s: float) -> bool:
        """Whether the worker ends now although calls of the store are in flight.

        For a claim alone it does not wait for the grace period: the claim may be blocked by another
        process. If the claim returns documents later, `late` releases them.
        """
        until_s = self._deadline_s
        if until_s is None and self._stopped_s is not None and not self._attempts.held:
            until_s = self._stopped_s + ANSWER_S
        if until_s is None or now_s < until_s:
            return False
        self._deadline_s = until_s  # so that `_sign_off` does not wait again
        return True

    def _stop_all(self, now_s: float) -> None:
        """Kill running handlers. A document is released when its process has ended, so that two
        attempts never overlap; a thread cannot be killed, so its document is released at once."""
        killed = {held.fence for held in self._dispatcher.running() if self._dispatcher.stop(held)}
        for fence, held in self._attempts.open().items():
            if fence not in killed:
                held.dropped = True
                self._attempts.end(held, Released(fence), held.ran_s(now_s), now_s)

    def _is_empty(self, now_s: float) -> bool:
        if self._pending is None:
            self._read_pending()
            return False
        left = events.WorkerIdle(*self._pending[:3])
        if not any(left):
            return True
        self._idle_since_s = now_s if self._idle_since_s is None else self._idle_since_s
        if not self._idle_reported and now_s >= self._idle_since_s + IDLE_S:
            self._idle_reported = True
            self._emit(left)
        return False

    def _abandon(self) -> None:
        """After an error: record the outcomes and release the other documents, if possible."""
        self._abandoning = True
        self._calls.wait(ANSWER_S)
        with suppress(StoreError):
            self._take_replies()
        outcomes = [attempt.outcome for attempt in self._attempts.unrecorded]
        outcomes += [Released(fence) for fence in self._attempts.open()]
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
