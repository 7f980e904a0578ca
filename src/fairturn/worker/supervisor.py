"""The loop of a worker: claim, hand out, renew, record. One thread does all of it, by deadlines.

The loop waits neither for a handler nor for the store. Every call of the store is made in a thread
of its kind (`store_calls.py`), and the loop takes the reply when it arrives. So leases are renewed
and signals are obeyed while a claim waits for a lock.

An outcome is recorded together with the next claim, at once if a slot is free, and otherwise within
5 ms, so that a fast handler's outcomes share a transaction. While documents wait for a slot, a
server gets the claim and the outcomes before it as two calls. A file has one writer, so there the
two always share a transaction.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from fairturn.clock import SECOND_US, microseconds, stopwatch
from fairturn.contents.local import DISCARD_S, Contents, delete_unreferenced
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
from fairturn.stores.contract import Store
from fairturn.worker import events
from fairturn.worker.backoff import Delays, delay_us
from fairturn.worker.executor import Crew, Ended, Held
from fairturn.worker.handler import AGAIN, DONE, FILE, NEVER
from fairturn.worker.leases import Leases
from fairturn.worker.outage import Outage
from fairturn.worker.outcomes import Recorded, Recorder, state_after
from fairturn.worker.prefetch import Pace
from fairturn.worker.store_calls import Calls, Kind
from fairturn.worker.wakeups import Watch

LOOK_S = 1.0  # for documents that became due and leases that ran out
RECORD_S = 0.005  # that an outcome waits for others while every slot is busy
RECORD_MAX = 250  # outcomes that wait for others
HELD_BACK_S = 0.25  # a document that cannot start for so long is given back
ANSWER_S = 0.7  # that the store has, after the grace, to record what is left
SIGN_ON_S = SIGN_ON_EVERY_US / SECOND_US
IDLE_S = 2.0  # without work, then a worker that waits for the last documents says so


class Done(NamedTuple):
    """What a worker has done."""

    completed: int = 0
    failed: int = 0  # attempts, whether they are tried again or not
    released: int = 0
    cancelled: int = 0
    lost: int = 0


class Plan(NamedTuple):
    """How a worker works."""

    name: str
    slots: int
    lease_s: float
    grace_s: float
    retry: Delays
    until_empty: bool
    stops: Sequence[bool]  # grows when somebody asks to stop: at once, or when all is finished
    on_event: Callable[[events.Event], None] | None
    random: Callable[[], float]


class _Attempt(NamedTuple):
    """An attempt that is over and not recorded yet."""

    outcome: Outcome
    held: Held
    seconds: float


class Supervisor:
    """Claims for a crew and records what it does, until it is told to stop."""

    def __init__(
        self, store: Store, contents: Contents, crew: Crew, pace: Pace, plan: Plan
    ) -> None:
        self._store = store
        self._contents = contents
        self._crew = crew
        self._pace = pace
        self._plan = plan
        self._recorder = Recorder(
            store,
            plan.name,
            microseconds(plan.lease_s),
            reads_states=plan.on_event is not None,
        )
        self._calls = Calls(crew.ring)
        self._outage = Outage(plan.random)
        self._leases = Leases(store, self._calls, self._outage, plan.lease_s)
        self._held: dict[Fence, Held] = {}
        self._ended: list[_Attempt] = []  # not recorded yet
        self._oldest_s = 0.0  # since when the first of them waits
        self._claiming: list[_Attempt] | None = None  # what a claim in flight records
        self._recording: list[_Attempt] | None = None  # what another call in flight records
        self._sign_on_s: float | None = 0.0  # None: a heartbeat is in flight
        self._look_s = 0.0
        self._looking = False
        self._summary: Summary | None = None  # since the last claim and the last outcome
        self._cancelled: int | None = None  # documents ever cancelled, as the last look read it
        self._happened = 0  # claims and outcomes, to know whether a summary is newer
        self._dry = False  # the last claim found less than it could return
        self._stops = plan.stops
        self._stopped_s: float | None = None
        self._leave_s: float | None = None  # then the worker ends, whatever the store does
        self._leaving = False  # documents that come now are released
        self._idle_since_s: float | None = None
        self._idle_told = plan.on_event is None
        self._watch = Watch(store, self._calls.ring)
        self._counts = dict.fromkeys(Done._fields, 0)

    def ring(self) -> None:
        """Look whether the worker was asked to stop. From any thread, or a signal handler."""
        self._crew.ring()

    @property
    def _at_once(self) -> bool:
        """Whether the grace period is skipped."""
        return len(self._stops) > 1 or any(self._stops)

    def run(self) -> Done:
        """Work until told to stop, or until everything is done.

        Raises `StoreUnavailable` if the store did not record what was left when the worker had to
        stop: those documents run again when their leases have expired.
        """
        try:
            while not self._turn():
                self._crew.wait(self._next_s() - stopwatch())
        except BaseException:
            self._calls.mute()  # the crew's descriptors may be another file's after this
            try:
                self._crew.close()
            finally:
                self._abandon()
            raise
        finally:
            self._sign_off()
            self._calls.leave()
            self._watch.close()
        if self._held:
            raise StoreUnavailable(
                f"the store did not record how {len(self._held):,} attempts ended before the "
                "worker had to stop; their documents run again when their leases have expired"
            )
        return Done(**self._counts)

    # ── One turn of the loop ─────────────────────────────────────────────────────────────────────

    def _turn(self) -> bool:
        """Do everything that is due; True when there is nothing more to do."""
        now_s = stopwatch()
        self._crew.tend(now_s)
        self._take_in(self._crew.collect(), now_s)
        self._take_replies()
        if self._stops:
            self._wind_down(now_s)
        else:
            self._give_back_what_is_held_up(now_s)
        self._leases.renew(self._held.values(), now_s, self._take_renewed)
        self._sign_on(now_s)
        self._record_and_claim(now_s)
        if self._held:
            self._idle_since_s = None
        if self._held or self._claiming is not None:
            return self._must_leave(now_s)
        return bool(self._stops) or (self._plan.until_empty and self._dry and self._is_empty(now_s))

    def _next_s(self) -> float:
        """When the next turn is due. The end of a call in flight rings."""
        due = []
        renewal_s = self._leases.due_s()
        if self._held and renewal_s is not None:
            due.append(renewal_s)
        if self._sign_on_s is not None and not self._stops:
            due.append(max(self._sign_on_s, self._outage.until_s))
        if self._claiming is None:
            due.append(max(self._look_s, self._outage.until_s))
            if self._ended and self._recording is None:
                due.append(max(self._oldest_s + RECORD_S, self._outage.until_s))
        crew_s = self._crew.due_s()
        if crew_s is not None:
            due.append(crew_s)
        since_s = self._crew.unstarted_since_s()
        if since_s is not None and not self._stops:
            due.append(since_s + HELD_BACK_S)
        if self._leave_s is not None:
            due.append(self._leave_s)
        elif self._stopped_s is not None:
            due.append(self._stopped_s + (self._plan.grace_s if self._held else ANSWER_S))
        return min(due, default=stopwatch() + LOOK_S)

    # ── Calls of the store ───────────────────────────────────────────────────────────────────────

    def _take_replies(self) -> None:
        """Take the replies that are there. After an error, the store is asked again a little later,
        and later each time."""
        for call in self._calls.returned():
            try:
                reply = call.reply.result()
            except StoreUnavailable as error:
                pause_s = self._outage.go_on(stopwatch())
                call.fail()
                if self._plan.on_event is not None:
                    self._plan.on_event(events.StoreFailed(str(error), pause_s))
            except BaseException:
                call.fail()
                raise
            else:
                call.take(reply)
                if call.kind is not Kind.LOOK:  # a store that can be read may refuse to be written
                    self._store_answers(call.begun_s)

    def _take_in(self, ended: list[Ended], now_s: float) -> None:
        """Attempts that are over become outcomes."""
        if ended and not self._ended:
            self._oldest_s = now_s
        self._ended += [_Attempt(self._outcome(one), one.held, one.seconds) for one in ended]

    def _add(self, outcome: Outcome, held: Held, seconds: float, now_s: float) -> None:
        if not self._ended:
            self._oldest_s = now_s
        self._ended.append(_Attempt(outcome, held, seconds))

    def _outcome(self, ended: Ended) -> Outcome:
        held, (kind, text, _, after_s), seconds, content = ended
        if kind in _SUCCEEDED:
            return Completed(held.fence, text, content, microseconds(seconds))
        if kind == NEVER:
            return Failed(held.fence, text or "")
        assert kind == AGAIN
        attempt = held.claim.document.attempts
        delay = delay_us(self._plan.retry, attempt, self._plan.random, after_s)
        self._look_s = min(self._look_s, stopwatch() + delay / 1_000_000)
        return Failed(held.fence, text or "", delay)

    # ── Recording and claiming ───────────────────────────────────────────────────────────────────

    def _record_and_claim(self, now_s: float) -> None:
        if now_s < self._outage.until_s:
            return
        if self._claiming is not None:
            # With one writer the outcomes would only wait for the claim.
            if self._stops or not self._store.one_writer:
                self._record()
            return
        wanted = self._wanted(now_s)
        if self._ended and not self._must_record(now_s):
            return
        if wanted and self._crew.unstarted() and not self._store.one_writer:
            self._claim(wanted, [])
            self._record()
        elif wanted:
            recorded, self._ended = self._ended, []
            self._claim(wanted, recorded)
        else:
            self._record()

    def _wanted(self, now_s: float) -> int:
        """How many documents to claim now; none while nothing has changed since none was found."""
        wanted = 0
        if not self._stops:
            wanted = self._pace.wanted(self._crew.free(), self._crew.unstarted())
        if not wanted:
            self._look_s = max(self._look_s, now_s + LOOK_S)  # the end of a handler rings before
            return 0
        if not self._dry or now_s >= self._look_s:
            return wanted
        if not self._watch.changed:
            return 0
        if not self._store.one_writer:
            return wanted
        # Outcomes of others change the store too. To read is cheap; a claim would block writers.
        self._look()
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

        call = partial(self._store.sign_on, self._plan.name, self._plan.slots)
        self._calls.begin(Kind.LOOK, call, take, fail=take)

    def _look(self) -> None:
        """Read how many documents wait, are delayed and run."""
        if self._looking or stopwatch() < self._outage.until_s:
            return
        self._looking = True
        changed, version, happened = self._watch.changed, self._watch.version, self._happened

        def take(summary: Summary) -> None:
            self._looking = False
            if self._happened == happened:
                self._summary = summary
            more_cancelled = summary.cancelled != self._cancelled  # the next claim reports them
            self._cancelled = summary.cancelled
            if more_cancelled or (changed and summary.waiting):
                self._dry = False
            elif changed:
                self._watch.look(version)

        def fail() -> None:
            self._looking = False

        self._calls.begin(Kind.LOOK, self._store.summary, take, fail=fail)

    def _must_record(self, now_s: float) -> bool:
        """Whether outcomes are to be recorded now, or may wait a moment for more of them."""
        return (
            bool(self._stops)
            or self._crew.free() > self._crew.unstarted()
            or now_s >= self._oldest_s + RECORD_S
            or len(self._ended) >= RECORD_MAX
        )

    def _claim(self, wanted: int, recorded: list[_Attempt]) -> None:
        self._claiming = recorded
        version = self._watch.version  # an older one only rings once more
        outcomes = [attempt.outcome for attempt in recorded]

        def take(reply: Recorded) -> None:
            self._receive(reply, wanted, recorded, version)

        def fail() -> None:
            self._claiming = None
            self._keep(recorded)

        call = partial(self._recorder.claim, wanted, outcomes)
        self._calls.begin(Kind.CLAIM, call, take, fail=fail, late=self._recorder.release)

    def _record(self) -> None:
        """Record what ended, unless a call that does so is in flight."""
        if not self._ended or self._recording is not None:
            return
        recorded, self._ended = self._ended, []
        self._recording = recorded

        def take(reply: Recorded) -> None:
            self._recording = None
            self._settle(recorded, reply)

        def fail() -> None:
            self._recording = None
            self._keep(recorded)

        outcomes = [attempt.outcome for attempt in recorded]
        self._calls.begin(Kind.FINISH, partial(self._recorder.finish, outcomes), take, fail=fail)

    def _keep(self, recorded: list[_Attempt]) -> None:
        """These outcomes were not recorded, as far as is known: record them later."""
        self._ended[:0] = recorded

    def _receive(
        self, reply: Recorded, wanted: int, recorded: list[_Attempt], version: int
    ) -> None:
        """Take in the reply to a claim. All its documents are held before the first event: if that
        raises, they are released."""
        now_s = stopwatch()
        self._claiming = None
        self._summary, self._happened = None, self._happened + 1
        self._look_s = now_s + LOOK_S
        self._dry = len(reply.claims) < wanted and len(reply.cancelled) < CANCELS_REPORTED_MAX
        stopping = self._stops or self._leaving
        if not (self._dry or stopping or self._store.one_writer or now_s < self._outage.until_s):
            # The server works on the next claim while the handlers work on this one.
            more = self._pace.wanted(self._crew.free(), self._crew.unstarted() + len(reply.claims))
            if more:
                self._claim(more, [])
        held = [self._hold(claim, now_s) for claim in reply.claims]
        self._settle(recorded, reply)
        if self._plan.on_event is not None:
            for one in held:
                self._plan.on_event(events.DocumentClaimed(one.claim.document, one.fence))
            for document in reply.cancelled:
                self._plan.on_event(events.DocumentCancelled(document))
        if stopping:
            self._release(held, now_s)
        elif held:
            self._crew.give(held)
            if self._dry and not self._store.one_writer:  # there is nothing more urgent
                self._crew.make_way()
        if self._dry:
            self._watch.look(version)
        self._calls.begin(Kind.LOOK, self._store.sync)  # while the handlers begin

    def _hold(self, claim: Claim, now_s: float) -> Held:
        document = claim.document
        path = None
        if claim.body is None and document.content_name is not None:
            with suppress(ContentDamaged):  # its handler hears of it, if it asks for the content
                path = self._contents.locate(document.content_name)
        held = Held(claim, now_s, path)
        self._held[claim.fence] = held
        return held

    def _settle(self, recorded: list[_Attempt], reply: Recorded) -> None:
        """These outcomes are recorded, but for those whose lease was lost."""
        self._summary, self._happened = None, self._happened + 1
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
        on_event = self._plan.on_event
        if on_event is not None:
            for outcome, held, seconds in recorded:
                document = held.claim.document
                state = state_after(outcome, reply.states.get(document.id))
                on_event(events.DocumentEnded(document._replace(state=state), outcome, seconds))

    def _lose(self, held: Held, attempt: _Attempt | None = None) -> None:
        """Somebody else has the document: nothing of this attempt counts any more. A file that may
        be the result, after all, is left for the next sweep."""
        held.dropped = True
        if self._held.pop(held.fence, None) is None:
            return
        self._counts["lost"] += 1
        outcome = None if attempt is None else attempt.outcome
        if isinstance(outcome, Completed) and outcome.content is not None:
            self._calls.begin(Kind.LOOK, partial(self._delete, outcome.content.name))
        if self._plan.on_event is not None:
            self._plan.on_event(events.DocumentLost(held.claim.document, held.fence))

    def _delete(self, content_name: str) -> None:
        unreferenced = partial(self._store.unreferenced, timeout_s=DISCARD_S)
        with suppress(StoreError):  # the next sweep removes what cannot be removed now
            delete_unreferenced(self._contents, unreferenced, [content_name])

    def _store_answers(self, begun_s: float) -> None:
        """It has answered a call that was begun then."""
        away_s = self._outage.end(stopwatch(), begun_s)
        if away_s is not None and self._plan.on_event is not None:
            self._plan.on_event(events.StoreAnswers(away_s))

    # ── Keeping what is held ─────────────────────────────────────────────────────────────────────

    def _take_renewed(self, renewed: Renewed, progress: dict[Fence, Progress]) -> None:
        now_s = stopwatch()
        for fence, said in progress.items():
            if fence in self._held:
                self._held[fence].reported = said
            if self._plan.on_event is not None:
                self._plan.on_event(events.DocumentProgressed(fence, said))
        # What has ended meanwhile is in a call that records it, whose reply is the one that counts.
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
        """Attempts that are over, also those that are being recorded."""
        ending = [*self._ended, *(self._claiming or ()), *(self._recording or ())]
        return {attempt.held.fence for attempt in ending}

    def _stop_one(self, held: Held) -> None:
        held.dropped = True
        if any(running is held for running in self._crew.running()):
            self._crew.stop(held)
        else:
            self._crew.give([one for one in self._crew.take_back() if not one.dropped])

    def _give_back_what_is_held_up(self, now_s: float) -> None:
        """Give back what was claimed ahead and cannot start, because others turned out slow."""
        since_s = self._crew.unstarted_since_s()
        if since_s is not None and now_s >= since_s + HELD_BACK_S:
            self._pace.forget()
            self._release(self._crew.take_back(), now_s)

    def _release(self, some: list[Held], now_s: float) -> None:
        for held in some:
            if not held.dropped:
                held.dropped = True
                self._add(Released(held.fence), held, 0.0, now_s)

    # ── The end ──────────────────────────────────────────────────────────────────────────────────

    def _wind_down(self, now_s: float) -> None:
        """Give back what has not started; when the grace is over, everything."""
        if self._stopped_s is None:
            self._stopped_s = now_s
            if self._plan.on_event is not None:
                running = len(self._crew.running())
                unrecorded = len(self._ending())
                self._plan.on_event(events.Stopping(self._at_once, running, unrecorded))
            self._crew.replace_no_more()
        self._release(self._crew.take_back(), now_s)
        if self._at_once or now_s >= self._stopped_s + self._plan.grace_s:
            self._leave_s = now_s + ANSWER_S if self._leave_s is None else self._leave_s
            self._stop_all(now_s)

    def _must_leave(self, now_s: float) -> bool:
        """Whether the worker ends now although the store has not replied to all calls.

        If only a claim is in flight, it is not worth the grace period. The claim may wait for a
        lock of another process; if it still returns documents, `late` releases them.
        """
        until_s = self._leave_s
        if until_s is None and self._stopped_s is not None and not self._held:
            until_s = self._stopped_s + ANSWER_S
        if until_s is None or now_s < until_s:
            return False
        self._leave_s = until_s  # so that `_sign_off` does not wait for the store once more
        return True

    def _stop_all(self, now_s: float) -> None:
        """End what runs. It is given back once it has ended, so that it never runs twice at the
        same time; a thread is not waited for."""
        running = {held.fence for held in self._crew.running()}
        for held in self._crew.running():
            self._crew.stop(held)
        ended = self._ending()
        for fence, held in self._held.items():
            if fence not in ended and (fence not in running or not self._crew.can_end):
                held.dropped = True
                self._add(Released(fence), held, held.ran_s(now_s), now_s)

    def _is_empty(self, now_s: float) -> bool:
        if self._summary is None:
            self._look()
            return False
        summary = self._summary
        left = events.Idle(summary.waiting, summary.delayed, summary.running)
        if not any(left):
            return True
        self._idle_since_s = now_s if self._idle_since_s is None else self._idle_since_s
        if not self._idle_told and now_s >= self._idle_since_s + IDLE_S:
            self._idle_told = True
            assert self._plan.on_event is not None
            self._plan.on_event(left)
        return False

    def _abandon(self) -> None:
        """An error ended the loop: release what can be released."""
        self._leaving = True
        self._calls.wait(ANSWER_S)
        with suppress(StoreError):
            self._take_replies()
        ended = self._ending()
        outcomes = [attempt.outcome for attempt in self._ended]
        outcomes += [Released(fence) for fence in self._held if fence not in ended]
        if outcomes:
            self._calls.begin(Kind.FINISH, partial(self._store.finish, outcomes))

    def _sign_off(self) -> None:
        """Let explanations no longer count this worker, and let calls in flight return, within the
        time that is left."""
        self._calls.begin(Kind.LOOK, partial(self._store.sign_off, self._plan.name))
        now_s = stopwatch()
        leave_s = now_s + ANSWER_S if self._leave_s is None or self._leaving else self._leave_s
        self._calls.wait(leave_s - now_s)


_SUCCEEDED = (DONE, FILE)
_COUNTED = {
    Completed: "completed",
    Failed: "failed",
    Released: "released",
    Stopped: "cancelled",
}
