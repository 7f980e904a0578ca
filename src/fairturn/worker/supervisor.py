"""The loop of a worker: claim, hand out, renew, record. One thread does all of it, by deadlines.

Nothing here waits for a handler. An outcome is recorded together with the next claim, at once if a
slot is free, and otherwise within 5 ms, so that a fast handler's outcomes share a transaction.
While there are documents in hand, nothing waits for a server, either: a claim of more of them, and
the outcomes of those before, are two calls of threads of their own, whose answers are taken in when
they are there.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from typing import NamedTuple

from fairturn.clock import microseconds, stopwatch
from fairturn.content import Contents
from fairturn.errors import ContentDamaged, StoreError, StoreUnavailable
from fairturn.interpreter import have_in_hand
from fairturn.model import (
    Claim,
    Claimed,
    Completed,
    Failed,
    Fence,
    Outcome,
    Progress,
    Released,
    Stopped,
)
from fairturn.store import Store
from fairturn.worker import events
from fairturn.worker.crew import Crew, Ended, Held
from fairturn.worker.errands import Errands
from fairturn.worker.handling import AGAIN, DONE, FILE, NEVER
from fairturn.worker.outage import Outage
from fairturn.worker.pacing import Pace
from fairturn.worker.retrying import Delays, delay_us
from fairturn.worker.watching import Watch

LOOK_S = 1.0  # for documents that became due and leases that ran out
RECORD_S = 0.005  # that an outcome waits for others while every slot is busy
RECORD_MAX = 250  # outcomes that wait for others
HELD_BACK_S = 0.25  # a document that cannot start for so long is given back
PROGRESS_S = 1.0  # between two reports of one document's progress
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
    unsure: bool = False  # whether it is recorded already, perhaps: the store did not answer


class _Claiming(NamedTuple):
    """A claim under way."""

    wanted: int
    begun_s: float
    recorded: list[_Attempt]  # with it
    version: int  # of the store, before it
    claimed: Callable[[], Claimed]  # what it gives, or the error that it ended with
    is_over: Callable[[], bool] = lambda: True


class _Recording(NamedTuple):
    """Outcomes on their way to the store."""

    begun_s: float
    recorded: list[_Attempt]
    lost: Future[list[Fence]]


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
        self._lease_us = microseconds(plan.lease_s)
        self._held: dict[Fence, Held] = {}
        self._ended: list[_Attempt] = []  # not recorded yet
        self._errands = Errands(crew.ring)
        self._claiming: _Claiming | None = None
        self._recording: _Recording | None = None
        self._oldest_s = 0.0  # since when the first of them waits
        self._renew_s = stopwatch() + plan.lease_s / 3
        self._progress_s = 0.0
        self._look_s = 0.0
        self._dry = False  # the last claim found less than was asked for
        self._outage = Outage(plan.random)
        self._stops = plan.stops
        self._stopped_s: float | None = None
        self._over = False  # the time to finish what runs
        self._idle_since_s: float | None = None
        self._idle_told = plan.on_event is None
        self._watch = Watch(store, crew.ring)
        self._counts = dict.fromkeys(Done._fields, 0)

    def ring(self) -> None:
        """Look whether somebody asked to stop. From any thread, or a signal handler."""
        self._crew.ring()

    @property
    def _at_once(self) -> bool:
        """Whether nobody is to be waited for."""
        return len(self._stops) > 1 or any(self._stops)

    def run(self) -> Done:
        """Work until told to stop, or until everything is done."""
        try:
            while not self._turn():
                self._crew.wait(self._next_s() - stopwatch())
        except BaseException:
            try:
                self._crew.close()
            finally:
                self._abandon()
            raise
        finally:
            self._watch.close()
            self._errands.close()
        return Done(**self._counts)

    # ── One turn of the loop ─────────────────────────────────────────────────────────────────────

    def _turn(self) -> bool:
        """Do everything that is due; True when there is nothing more to do."""
        now_s = stopwatch()
        self._crew.tend(now_s)
        self._take_in(self._crew.collect(), now_s)
        if self._stops:
            self._wind_down(now_s)
        else:
            self._give_back_what_is_held_up(now_s)
        if now_s >= self._renew_s:
            self._renew(now_s)
        elif now_s >= self._progress_s:
            self._report_progress(now_s)
        self._record_and_claim(now_s)
        if self._held or self._claiming is not None:
            self._idle_since_s = None
            return False
        return bool(self._stops) or (self._plan.until_empty and self._dry and self._is_empty(now_s))

    def _next_s(self) -> float:
        """When the next turn is due."""
        due = [self._renew_s]
        if self._claiming is None:  # otherwise its end rings
            due.append(max(self._look_s, self._outage.until_s))
            if self._ended:
                due.append(max(self._oldest_s + RECORD_S, self._outage.until_s))
        crew_s = self._crew.due_s()
        if crew_s is not None:
            due.append(crew_s)
        since_s = self._crew.unstarted_since_s()
        if since_s is not None and not self._stops:
            due.append(since_s + HELD_BACK_S)
        if self._held:
            due.append(self._progress_s)
        if self._stopped_s is not None and not self._over:
            due.append(self._stopped_s + self._plan.grace_s)
        return min(due)

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
        try:
            if self._recording is not None and self._recording.lost.done():
                begun_s = self._recording.begun_s
                self._take_recorded(self._recording)
                self._store_answers(begun_s)
            if self._claiming is not None:
                if not self._claiming.is_over():
                    return
                self._receive(self._claiming, now_s)
            if now_s < self._outage.until_s:
                return
            if self._claiming is not None:  # more, which was begun when that was there
                self._record_meanwhile()
                return
            wanted = self._wanted(now_s)
            if self._ended and not self._must_record(now_s):
                return
            if wanted:
                self._claim(wanted, now_s)
            elif self._ended:
                recorded, self._ended = self._ended, []
                with self._kept_if_it_fails(recorded):
                    lost = self._store.finish([attempt.outcome for attempt in recorded])
                self._settle(recorded, lost)
                self._store_answers(now_s)
        except StoreUnavailable as error:
            self._pause(error, now_s)

    def _wanted(self, now_s: float) -> int:
        """How many documents to claim now; none while nothing has changed since none was found."""
        wanted = 0
        if not self._stops:
            wanted = self._pace.wanted(self._crew.free(), self._crew.unstarted())
        if not wanted:
            self._look_s = max(self._look_s, now_s + LOOK_S)  # whoever ends wakes us before that
            return 0
        if not self._dry or now_s >= self._look_s:
            return wanted
        if not self._watch.changed:
            return 0
        if not self._store.one_writer:
            return wanted
        # Others' outcomes change the store too. To read is cheap; to claim would keep them waiting.
        version = self._watch.version
        if self._store.summary().waiting:
            return wanted
        self._watch.look(version)
        return 0

    def _must_record(self, now_s: float) -> bool:
        """Whether outcomes are to be recorded now, or may wait a moment for more of them."""
        return (
            bool(self._stops)
            or self._crew.free() > self._crew.unstarted()
            or now_s >= self._oldest_s + RECORD_S
            or len(self._ended) >= RECORD_MAX
        )

    def _claim(self, wanted: int, now_s: float) -> None:
        if self._crew.unstarted() and not self._store.one_writer:
            self._claim_meanwhile(wanted)
            self._record_meanwhile()
            return
        recorded, self._ended = self._ended, []
        claim = self._call(wanted, [attempt.outcome for attempt in recorded])
        self._receive(_Claiming(wanted, now_s, recorded, self._watch.version, claim), now_s)

    def _call(self, wanted: int, outcomes: Sequence[Outcome] = ()) -> Callable[[], Claimed]:
        name, lease_us = self._plan.name, self._lease_us
        claim = partial(self._store.claim, wanted, worker=name, lease_us=lease_us)
        return partial(claim, outcomes=outcomes, synced=False)

    def _claim_meanwhile(self, wanted: int) -> None:
        begun = self._errands.begin(self._call(wanted))
        version = self._watch.version  # an older one only rings once more
        self._claiming = _Claiming(wanted, stopwatch(), [], version, begun.result, begun.done)

    def _record_meanwhile(self) -> None:
        if self._ended and self._recording is None:
            recorded, self._ended = self._ended, []
            finish = partial(self._store.finish, [attempt.outcome for attempt in recorded])
            self._recording = _Recording(stopwatch(), recorded, self._errands.begin(finish))

    def _receive(self, claiming: _Claiming, now_s: float) -> None:
        """Take in what a claim gives."""
        claimed = self._claimed(claiming)
        self._look_s = stopwatch() + LOOK_S
        self._dry = len(claimed.claims) < claiming.wanted
        try:
            if not self._dry and now_s >= self._outage.until_s:
                self._claim_more(len(claimed.claims))
        finally:
            held = self._take_over(claimed, claiming.recorded, now_s)
        self._store_answers(claiming.begun_s)
        if self._plan.on_event is not None:
            for one in held:
                self._plan.on_event(events.DocumentClaimed(one.claim.document, one.fence))
        if self._stops:
            self._release(held, now_s)
        elif held:
            self._crew.give(held)
            if self._dry and not self._store.one_writer:  # there is nothing more urgent
                self._crew.make_way()
        if self._dry:
            self._watch.look(claiming.version)
        self._store.sync()  # while the handlers begin

    def _claim_more(self, claimed: int) -> None:
        """What was claimed is worked on while more is fetched: first of all, that is begun."""
        if self._stops or self._store.one_writer:
            return
        more = self._pace.wanted(self._crew.free(), self._crew.unstarted() + claimed)
        if more:
            self._claim_meanwhile(more)

    def _claimed(self, claiming: _Claiming) -> Claimed:
        """What a claim gives, or the error that it ended with."""
        self._claiming = None
        with self._kept_if_it_fails(claiming.recorded):
            return claiming.claimed()

    def _take_over(self, claimed: Claimed, recorded: list[_Attempt], now_s: float) -> list[Held]:
        """Hold what was claimed, and settle what was recorded with it. All are held before anybody
        hears of one: what an error leaves behind is given back."""
        held = [self._hold(claim, now_s) for claim in claimed.claims]
        have_in_hand(len(self._held))
        self._settle(recorded, claimed.lost)
        return held

    def _take_recorded(self, recording: _Recording) -> None:
        """Settle what was recorded without a claim."""
        self._recording = None
        with self._kept_if_it_fails(recording.recorded):
            lost = recording.lost.result()
        self._settle(recording.recorded, lost)

    @contextmanager
    def _kept_if_it_fails(self, recorded: list[_Attempt]) -> Iterator[None]:
        """If these outcomes cannot be recorded now, they are to be recorded later."""
        try:
            yield
        except BaseException:
            self._ended[:0] = [attempt._replace(unsure=True) for attempt in recorded]
            raise

    def _hold(self, claim: Claim, now_s: float) -> Held:
        document = claim.document
        path = None
        if claim.body is None and document.content_name is not None:
            with suppress(ContentDamaged):  # its handler hears of it, if it asks for the content
                path = self._contents.locate(document.content_name)
        held = Held(claim, now_s, path)
        self._held[claim.fence] = held
        return held

    def _settle(self, recorded: list[_Attempt], lost: list[Fence]) -> None:
        """These outcomes are recorded, but for those whose lease was lost."""
        gone = set(lost)
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
            for outcome, held, seconds, _ in recorded:
                on_event(events.DocumentEnded(held.claim.document, outcome, seconds))

    def _lose(self, held: Held, attempt: _Attempt | None = None) -> None:
        """Somebody else has the document: nothing of this attempt counts any more. A file that may
        be the result, after all, is left for the next sweep."""
        held.dropped = True
        if self._held.pop(held.fence, None) is None:
            return
        self._counts["lost"] += 1
        outcome = None if attempt is None or attempt.unsure else attempt.outcome
        if isinstance(outcome, Completed) and outcome.content is not None:
            with suppress(StoreError):  # the next sweep removes what cannot be removed now
                self._contents.delete([outcome.content.name])
        if self._plan.on_event is not None:
            self._plan.on_event(events.DocumentLost(held.claim.document, held.fence))

    def _pause(self, error: StoreUnavailable, now_s: float) -> None:
        """The store cannot be written to now: try again a little later, and later each time."""
        pause_s = self._outage.go_on(now_s)
        if self._plan.on_event is not None:
            self._plan.on_event(events.StoreFailed(str(error), pause_s))
        over_s = self._plan.grace_s + self._plan.lease_s
        if self._stopped_s is not None and now_s > self._stopped_s + over_s:
            raise error  # the leases have run out; others do the work again

    def _store_answers(self, begun_s: float) -> None:
        """It has answered a call that was begun then."""
        away_s = self._outage.end(stopwatch(), begun_s)
        if away_s is not None and self._plan.on_event is not None:
            self._plan.on_event(events.StoreAnswers(away_s))

    # ── Keeping what is held ─────────────────────────────────────────────────────────────────────

    def _renew(self, now_s: float) -> None:
        self._renew_s = now_s + self._plan.lease_s / 3
        if not self._held:
            return
        try:
            self._tell_store(list(self._held.values()), now_s)
        except StoreUnavailable as error:
            self._pause(error, now_s)
            self._renew_s = self._outage.until_s
        else:
            self._store_answers(now_s)

    def _report_progress(self, now_s: float) -> None:
        self._progress_s = now_s + PROGRESS_S
        told = [held for held in self._held.values() if held.progress is not held.reported]
        if told:
            with suppress(StoreUnavailable):  # the next renewal tells it
                self._tell_store(told, now_s)

    def _tell_store(self, some: list[Held], now_s: float) -> None:
        """Renew the leases of these, and pass on how far they are."""
        progress: dict[Fence, Progress] = {}
        for held in some:
            said = held.progress
            if said is not None and said is not held.reported:
                progress[held.fence] = said
        lost, cancelled = self._store.renew(
            [held.fence for held in some], lease_us=self._lease_us, progress=progress
        )
        for fence, said in progress.items():
            self._held[fence].reported = said
            if self._plan.on_event is not None:
                self._plan.on_event(events.DocumentProgressed(fence, said))
        ended = self._ending()
        for fence in lost:
            if fence not in ended:  # otherwise the store says so once more when it is recorded
                self._stop_one(self._held[fence])
                self._lose(self._held[fence])
        for fence in cancelled:
            if fence not in ended:
                held = self._held[fence]
                self._stop_one(held)
                self._add(Stopped(fence), held, held.ran_s(now_s), now_s)

    def _ending(self) -> set[Fence]:
        """Attempts that are over, also those that are being recorded."""
        ending = list(self._ended)
        for call in (self._claiming, self._recording):
            ending += call.recorded if call is not None else []
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
        self._over = self._at_once or now_s >= self._stopped_s + self._plan.grace_s
        if self._over:
            self._stop_all(now_s)

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
        try:
            summary = self._store.summary()
        except StoreUnavailable:
            return False
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
        """Something unforeseen ended the loop: give back what can be given back."""
        if self._recording is not None:
            with suppress(StoreError):
                self._take_recorded(self._recording)
        claiming = self._claiming
        if claiming is not None:
            with suppress(StoreError):
                self._take_over(self._claimed(claiming), claiming.recorded, stopwatch())
        ended = self._ending()
        outcomes = [attempt.outcome for attempt in self._ended]
        outcomes += [Released(fence) for fence in self._held if fence not in ended]
        with suppress(StoreError):
            if outcomes:
                self._store.finish(outcomes)


_SUCCEEDED = (DONE, FILE)
_COUNTED = {
    Completed: "completed",
    Failed: "failed",
    Released: "released",
    Stopped: "cancelled",
}
