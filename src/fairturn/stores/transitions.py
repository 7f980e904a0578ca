"""The next state of a document when an attempt ends or its lease expires. Pure.

A store reads an `Attempt`, writes an `Ending` and records its event. PostgreSQL does the same in
`functions/finish.sql` and `functions/fold.sql`; tests compare both.
"""

from collections import Counter
from typing import NamedTuple

from fairturn.model import (
    ERROR_BYTES_MAX,
    FAILED,
    LEASE_EXPIRED,
    LEASE_US_MAX,
    Completed,
    Failed,
    Outcome,
    Released,
    Settings,
    State,
    Summary,
    kept_cost,
    real_cost_within,
)
from fairturn.scheduling.flows import CompletionEvent, Costs, EndEvent, Event, RequeueEvent
from fairturn.validation.text import description


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


def end_of(attempt: Attempt, outcome: Outcome, settings: Settings, now: int) -> Ending:
    """Return the ending of an attempt with an outcome. The attempt does not count if the document
    waits again."""
    ended = EndEvent(attempt.customer, attempt.band, 1)
    if isinstance(outcome, Completed):
        event = _finished(attempt, outcome, now) if settings.costs is Costs.LEARNED else ended
        return Ending(State.COMPLETED, event, real_cost=kept_cost(outcome))
    if isinstance(outcome, Failed):
        error = description(outcome.error, ERROR_BYTES_MAX)
        if attempt.cancelled:
            return Ending(State.CANCELLED, ended, error)
        if outcome.retry_in_us is None or attempt.is_last(settings):
            return Ending(State.DEAD, ended, error)
        return Ending(State.DELAYED, ended, error, due_at=now + max(0, outcome.retry_in_us))
    if isinstance(outcome, Released) and not attempt.cancelled:
        return Ending(State.WAITING, _returned(attempt, attempt.charge or 0))
    return Ending(State.CANCELLED, ended)


def end_of_lease(attempt: Attempt, settings: Settings) -> Ending:
    """Return the ending of an attempt whose lease expired. The attempt counts."""
    ended = EndEvent(attempt.customer, attempt.band, 1)
    if attempt.cancelled:
        return Ending(State.CANCELLED, ended)
    if attempt.is_last(settings):
        return Ending(State.DEAD, ended, LEASE_EXPIRED)
    return Ending(State.WAITING, _returned(attempt, 0), LEASE_EXPIRED)


def has_ended(lease_until: int, at: int | None) -> bool:
    """Return whether a lease has expired at this time; None: the machine has rebooted since.

    A lease that ends more than `LEASE_US_MAX` ahead counts as expired: the clock that it was set by
    has stepped back.
    """
    return at is None or not at < lease_until <= at + LEASE_US_MAX


def _returned(attempt: Attempt, refund: int) -> RequeueEvent:
    return RequeueEvent(attempt.customer, attempt.band, attempt.order, refund)


def _finished(attempt: Attempt, outcome: Completed, now: int) -> CompletionEvent:
    real = now - attempt.claimed_at if outcome.real_cost is None else outcome.real_cost
    return CompletionEvent(
        attempt.customer, attempt.band, attempt.cost, attempt.weight, real_cost_within(real)
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
        # Without an error it was released, which is not a failure.
        elif ending.error is not None:
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
