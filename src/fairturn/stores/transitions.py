"""The next state of a document when an attempt ends or its lease expires. Pure.

A store reads an `Attempt`, writes an `Ending` and records its event. PostgreSQL does the same in
`functions/finish.sql` and `functions/fold.sql`; tests compare both.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fairturn.errors import KindRefused
from fairturn.model import (
    ATTEMPTS_STORED_MAX,
    DETAILS_BYTES_MAX,
    ERROR_BYTES_MAX,
    FAILED,
    LEASE_EXPIRED,
    LEASE_US_MAX,
    SNOOZES_MAX,
    STEP_VALUE_BYTES_MAX,
    STEPS_MAX,
    Advanced,
    AttemptOutcome,
    AttemptRecord,
    Completed,
    Failed,
    FinishedStep,
    OutageReport,
    Outcome,
    Released,
    Settings,
    Snoozed,
    State,
    Summary,
    kept_cost,
    real_cost_within,
)
from fairturn.scheduling.flows import (
    ArrivalEvent,
    CompletionEvent,
    Costs,
    EndEvent,
    Event,
    RequeueEvent,
    band_of,
    level_in,
)
from fairturn.scheduling.outages import ReportResult
from fairturn.validation.text import description, kind_name, tail

TOO_MANY_STEPS = (
    f"the document has finished {STEPS_MAX} steps, the maximum; the handler must complete it"
)
SNOOZED_TOO_OFTEN = (
    f"the document was snoozed {SNOOZES_MAX:,} times, the maximum; the handler must complete or "
    "fail it"
)


class Attempt(NamedTuple):
    """A running document, and the charge of its turn."""

    customer: int
    band: int
    order: int
    attempts: int  # this one included
    cancelled: bool  # a cancel was requested
    claimed_at: int = 0
    cost: int | None = None
    weight: int | None = None
    charge: int | None = None
    attempts_max: int | None = None  # of its kind; None: that of the queue
    step: int = 0
    snoozes: int = 0

    def is_last(self, settings: Settings) -> bool:
        """Return whether the document has no attempts left after this one."""
        return self.attempts >= (self.attempts_max or settings.attempts_max)


class Ending(NamedTuple):
    """The state of a document after an attempt: ended, delayed until `due_at`, or waiting."""

    state: State
    event: Event
    error: str | None = None
    real_cost: int | None = None
    due_at: int = 0
    arrival: ArrivalEvent | None = None  # of the next step, recorded with `event` in one batch
    counts: bool = True  # whether the attempt counts; delayed documents otherwise count a snooze
    stored_as: AttemptOutcome | None = None  # None: the attempt is not stored


def storable_step(outcome: Outcome) -> Outcome:
    """Return the outcome; in place of a step with an invalid kind or too large a value, a failure
    that is not retried."""
    if not isinstance(outcome, Advanced):
        return outcome
    try:
        kind_name(outcome.kind)
        size = len((outcome.value or "").encode())
        if size > STEP_VALUE_BYTES_MAX:
            raise ValueError(
                f"the value of the step has {size:,} bytes as JSON; at most "
                f"{STEP_VALUE_BYTES_MAX:,} are allowed: use a file"
            )
    except (TypeError, ValueError) as error:
        return Failed(outcome.fence, str(error))
    return outcome


def end_of(
    attempt: Attempt,
    outcome: Outcome,
    settings: Settings,
    now: int,
    *,
    kind_number: Callable[[str], int] | None = None,
    report: ReportResult | None = None,
) -> Ending:
    """Return the ending of an attempt with an outcome.

    `kind_number` returns the number of the kind in which an advanced document waits, which it may
    create, or raises `KindRefused`; `report` is the result of an outage report.
    """
    ended = EndEvent(attempt.customer, attempt.band, 1)
    if isinstance(outcome, Completed):
        event = _finished(attempt, outcome, settings, now)
        return Ending(State.COMPLETED, event, real_cost=kept_cost(outcome))
    if isinstance(outcome, Failed):
        return _failed(attempt, outcome.error, outcome.retry_in_us, settings, now)
    if attempt.cancelled:
        return Ending(State.CANCELLED, ended)
    if isinstance(outcome, Advanced):
        return _advanced(attempt, outcome, settings, now, kind_number)
    if isinstance(outcome, Snoozed):
        if attempt.snoozes >= SNOOZES_MAX:
            return _failed(attempt, SNOOZED_TOO_OFTEN, None, settings, now)
        due_at = now + max(0, outcome.delay_us)
        return Ending(State.DELAYED, ended, due_at=due_at, counts=False)
    if isinstance(outcome, OutageReport):
        assert report is not None
        if report.uses_attempt(attempt.snoozes) or attempt.snoozes >= SNOOZES_MAX:
            return _failed(attempt, outcome.error, report.delay_us, settings, now)
        error = description(outcome.error, ERROR_BYTES_MAX)
        return Ending(State.DELAYED, ended, error, due_at=now + report.delay_us, counts=False)
    if isinstance(outcome, Released):
        return Ending(State.WAITING, _returned(attempt, attempt.charge or 0), counts=False)
    return Ending(State.CANCELLED, ended)


def _failed(
    attempt: Attempt, error: str, retry_in_us: int | None, settings: Settings, now: int
) -> Ending:
    ended = EndEvent(attempt.customer, attempt.band, 1)
    state, due_at = State.DELAYED, 0
    if attempt.cancelled:
        state = State.CANCELLED
    elif retry_in_us is None or attempt.is_last(settings):
        state = State.DEAD
    else:
        due_at = now + max(0, retry_in_us)
    error = description(error, ERROR_BYTES_MAX)
    return Ending(state, ended, error, due_at=due_at, stored_as=AttemptOutcome.FAILED)


def _advanced(
    attempt: Attempt,
    outcome: Advanced,
    settings: Settings,
    now: int,
    kind_number: Callable[[str], int] | None,
) -> Ending:
    if attempt.step >= STEPS_MAX:
        return _failed(attempt, TOO_MANY_STEPS, None, settings, now)
    assert kind_number is not None
    try:
        kind = kind_number(outcome.kind)
    except KindRefused as refused:
        return _failed(attempt, str(refused), None, settings, now)
    band = band_of(level_in(attempt.band), kind)
    arrival = ArrivalEvent(attempt.customer, band, attempt.order, 1)
    event = _finished(attempt, outcome, settings, now)
    return Ending(State.WAITING, event, arrival=arrival, stored_as=AttemptOutcome.ADVANCED)


def end_of_lease(attempt: Attempt, settings: Settings) -> Ending:
    """Return the ending of an attempt whose lease expired. The attempt counts."""
    ended = EndEvent(attempt.customer, attempt.band, 1)
    lost = AttemptOutcome.LOST
    if attempt.cancelled:
        return Ending(State.CANCELLED, ended, stored_as=lost)
    if attempt.is_last(settings):
        return Ending(State.DEAD, ended, LEASE_EXPIRED, stored_as=lost)
    return Ending(State.WAITING, _returned(attempt, 0), LEASE_EXPIRED, stored_as=lost)


def has_ended(lease_until: int, at: int | None) -> bool:
    """Return whether a lease has expired at this time; None: the machine has rebooted since.

    A lease that ends more than `LEASE_US_MAX` ahead counts as expired: the clock that it was set by
    has stepped back.
    """
    return at is None or not at < lease_until <= at + LEASE_US_MAX


def _returned(attempt: Attempt, refund: int) -> RequeueEvent:
    return RequeueEvent(attempt.customer, attempt.band, attempt.order, refund)


def _finished(
    attempt: Attempt, outcome: Completed | Advanced, settings: Settings, now: int
) -> EndEvent | CompletionEvent:
    if settings.costs is not Costs.LEARNED:
        return EndEvent(attempt.customer, attempt.band, 1)
    real = now - attempt.claimed_at if outcome.real_cost is None else outcome.real_cost
    return CompletionEvent(
        attempt.customer, attempt.band, attempt.cost, attempt.weight, real_cost_within(real)
    )


def attempt_record(
    ending: Ending,
    outcome: Outcome | None,
    *,
    step: int,
    kind: str,
    attempt: int,
    worker: str,
    claimed_at: int,
    ended_at: int,
) -> AttemptRecord | None:
    """Return the attempt as it is stored, if it is; the outcome of a lost one is None."""
    if ending.stored_as is None:
        return None
    record = AttemptRecord(
        step=step,
        kind=kind,
        attempt=attempt,
        worker=worker,
        claimed_at_us=claimed_at,
        ended_at_us=ended_at,
        outcome=ending.stored_as,
        error=ending.error,
    )
    if isinstance(outcome, Failed) and outcome.details is not None:
        return record._replace(details=tail(outcome.details, DETAILS_BYTES_MAX))
    if isinstance(outcome, Advanced) and ending.stored_as is AttemptOutcome.ADVANCED:
        return record._replace(value=outcome.value, content=outcome.content)
    return record


def without_oldest(records: Sequence[AttemptRecord]) -> list[AttemptRecord]:
    """Return at most `ATTEMPTS_STORED_MAX` records, without the oldest that are no steps."""
    surplus = len(records) - ATTEMPTS_STORED_MAX
    kept = []
    for record in records:
        if surplus > 0 and record.outcome is not AttemptOutcome.ADVANCED:
            surplus -= 1
        else:
            kept.append(record)
    return kept


def finished_steps(records: Sequence[AttemptRecord]) -> tuple[FinishedStep, ...]:
    """Return the steps among the attempts of a document, in their order."""
    return tuple(
        FinishedStep(r.step, r.kind, r.attempt, r.worker, r.claimed_at_us, r.ended_at_us)
        for r in records
        if r.outcome is AttemptOutcome.ADVANCED
    )


OUTCOME_COLUMNS = ("attempts", "retried", *FAILED)  # of `OutcomeCounters`, in both databases


class OutcomeCounters:
    """Counters of attempts that ended other than completed, and of what became of their documents.

    Completed documents are not counted, so that the most frequent outcome writes no counter: their
    number is that of all attempts, less the running ones, less `attempts`.
    """

    __slots__ = ("attempts", "failed", "retried")

    def __init__(self, attempts: int = 0, retried: int = 0, *failed: int) -> None:
        self.attempts = attempts
        self.retried = retried
        self.failed: Counter[State] = Counter(dict(zip(FAILED, failed, strict=False)))

    def attempt(self, ending: Ending) -> None:
        """Count the ending of an attempt."""
        if ending.state is State.COMPLETED:
            return
        self.attempts += 1
        if ending.state in FAILED:
            self.end(ending.state)
        elif ending.counts and ending.error is not None:
            self.retried += 1

    def end(self, state: State) -> None:
        """Count a document that ended in one of the states `FAILED`."""
        self.failed[state] += 1

    def purge(self) -> None:
        """Count an attempt whose document was purged."""
        self.attempts += 1

    @property
    def row(self) -> tuple[int, ...]:
        """The arguments of the constructor, in the order of `OUTCOME_COLUMNS`."""
        return self.attempts, self.retried, *(self.failed[state] for state in FAILED)


def to_summary(
    waiting_by_priority: tuple[int, ...],
    *,
    delayed: int,
    running: int,
    started: int,
    outcome_counters: OutcomeCounters,
    repairs: int = 0,
) -> Summary:
    """Return the summary of a queue from counters of one snapshot."""
    return Summary(
        waiting_by_priority=waiting_by_priority,
        delayed=delayed,
        running=running,
        started=started,
        completed=started - running - outcome_counters.attempts,
        **{state.value: outcome_counters.failed[state] for state in FAILED},
        retried=outcome_counters.retried,
        repairs=repairs,
    )
