"""When a waiting document is expected to start: a 90 % prediction interval. Pure.

The work ahead, estimated from recent attempts, is divided by the slots of the workers. Retries and
likely arrivals with an earlier turn are added. docs/explain.md describes the method and its
accuracy in simulated workloads.
"""

from collections import Counter
from dataclasses import dataclass
from datetime import datetime
from math import ceil, sqrt
from statistics import fmean, pvariance
from typing import NamedTuple

from fairturn.clock import datetime_or_none, to_datetime
from fairturn.explain.snapshot import ALIVE_US, QueueActivity, QueueView, WorkerHeartbeat
from fairturn.scheduling.flows import Mode
from fairturn.scheduling.position import Cause, Position
from fairturn.scheduling.turns import PATIENCE_EVERY

CONFIDENCE = 0.9
_Z = 1.645  # 95th percentile of the normal distribution
_SHORTEST_US = 1_000  # a worker's overhead for a document
_IDLE_START_US = 2_000_000  # within which an idle worker claims a new document
_RECENT_US, _WINDOW_US_MIN = 600_000_000, 60_000_000  # window in which arrivals are counted
_RELATIVE_ERROR = 0.1  # durations and workers change
_VARIANCE_MAX = 1.5  # times the squared mean; above it durations vary widely
_SAMPLES_MIN = 4  # attempts of a customer; with fewer, the durations of all customers are used
_FAILURE_RATE_MAX = 0.8
_ARRIVALS_MAX = 0.95  # share of the slots that arrivals may use; above it there is no latest start


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The prediction interval of a start. `latest_at` is None if documents arrive ahead of this one
    as fast as they are processed."""

    earliest_at_us: int
    latest_at_us: int | None

    @property
    def earliest_at(self) -> datetime:
        return to_datetime(self.earliest_at_us)

    @property
    def latest_at(self) -> datetime | None:
        return datetime_or_none(self.latest_at_us)


class _Durations(NamedTuple):
    """Mean and variance of the durations of attempts, by customer and overall."""

    of: dict[int, tuple[float, float]]
    all: tuple[float, float]
    samples: int

    @property
    def vary_widely(self) -> bool:
        return self.all[1] > _VARIANCE_MAX * self.all[0] ** 2

    def work(self, turns: dict[int, int], others: int) -> tuple[float, float]:
        """Return mean and variance of the total duration of these documents."""
        mean, variance = others * self.all[0], others * self.all[1]
        for customer, n in turns.items():
            one = self.of.get(customer, self.all)
            mean, variance = mean + n * one[0], variance + n * one[1]
        return mean, variance


def alive(service: QueueActivity, at: int) -> list[str]:
    """Return the workers that hold a document under a lease or sent a heartbeat recently."""
    busy = {working.worker for working in service.running if working.alive}
    return sorted(busy | {seen.worker for seen in _seen_lately(service, at)})


def _seen_lately(service: QueueActivity, at: int) -> list[WorkerHeartbeat]:
    return [seen for seen in service.workers if abs(at - seen.seen_at) <= ALIVE_US]


def _slots(service: QueueActivity, at: int) -> tuple[int, int]:
    """Return the number of worker slots and how many of them are free. A worker without a heartbeat
    counts with the documents that it holds."""
    held = Counter(working.worker for working in service.running if working.alive)
    known = {seen.worker: seen.slots for seen in _seen_lately(service, at) if seen.slots}
    slots = sum(known.values()) + sum(n for worker, n in held.items() if worker not in known)
    return slots, sum(max(0, n - held[worker]) for worker, n in known.items())


def forecast(
    view: QueueView,
    position: Position,
    service: QueueActivity,
    *,
    mode: Mode,
    patience_us: int,
    at: int,
    kind_limit: int | None = None,
    kind_running: int = 0,
) -> Forecast | None:
    """Return when the document is expected to start; None if no worker is running or no attempt
    has ended yet. The limit is that of running documents of its kind."""
    if not alive(service, at):
        return None
    before = position.before
    slots, idle = _slots(service, at)
    if kind_limit is not None:
        slots, idle = min(slots, kind_limit), max(0, min(idle, kind_limit - kind_running))
    if before.total < idle:
        return Forecast(earliest_at_us=at, latest_at_us=at + _IDLE_START_US)
    ages = [max(0, at - running.claimed_at) for running in service.running if running.alive]
    slots = max(1, slots)
    durations = _durations(service, at)
    if durations is None:
        return None
    turns = {**position.turns, view.customer: before.own}
    summarized = before.other_turns - sum(position.turns.values())
    # One more: the first claim waits for a running document to end.
    ahead = before.better_levels + before.longest_waiting + summarized + 1
    mean, variance = durations.work(turns, ahead)
    error = (_RELATIVE_ERROR + sqrt(durations.all[1] / durations.samples) / durations.all[0]) * mean
    spread = _Z * sqrt(variance + error**2)
    if Cause.COSTS in position.causes or durations.vary_widely:
        spread *= 2  # recent durations then predict the next ones poorly
    fewest = (position.bounds.least + 1) / (before.total + 1)
    at_once = idle * durations.all[0]
    earliest = max(0.0, (mean * fewest - at_once - spread) / slots)
    # Failed attempts are retried, and one more customer may arrive with as many turns as this one.
    own, _ = durations.work({view.customer: before.own}, 0)
    again = (mean - own) / (1 - _failure_rate(service))
    again += own / (1 - _failure_rate_bound(service, view.customer))
    joining, its_variance = durations.work({}, view.rank.most + 1 if _newcomers_first(view) else 0)
    most = again + joining + spread + _Z * sqrt(its_variance) + slots * min(ages, default=0)
    overtaking = _overtaking_rate(view, position, service, at) * durations.all[0]
    latest = most / (slots - overtaking) if overtaking < _ARRIVALS_MAX * slots else None
    if mode is not Mode.LEVELS:
        latest = _with_patience(latest, view, patience_us, durations.all[0] / slots)
    return Forecast(
        earliest_at_us=at + int(earliest),
        latest_at_us=None if latest is None else at + ceil(max(latest, earliest + _IDLE_START_US)),
    )


def _durations(service: QueueActivity, at: int) -> _Durations | None:
    """Return the durations of recent attempts; None if there are none. A running document is half
    done on average: it counts with twice its age where that is longer than the mean, because a
    change in durations shows there first."""
    by_customer: dict[int, list[int]] = {}
    for attempt in service.attempts:
        if attempt.duration is not None:
            duration = max(_SHORTEST_US, attempt.duration)
            by_customer.setdefault(attempt.customer, []).append(duration)
    ended = [duration for durations in by_customer.values() for duration in durations]
    if not ended:
        return None
    mean = fmean(ended)
    for running in service.running:
        known = by_customer.setdefault(running.customer, [])
        twice = 2 * (at - running.claimed_at)
        if running.alive and twice > (fmean(known) if known else mean):
            known.append(twice)
    everything = [duration for durations in by_customer.values() for duration in durations]
    return _Durations(
        of={
            customer: (fmean(durations), pvariance(durations))
            for customer, durations in by_customer.items()
            if len(durations) >= _SAMPLES_MIN
        },
        all=(fmean(everything), pvariance(everything)),
        samples=len(everything),
    )


def _failure_rate(service: QueueActivity) -> float:
    """Return the share of recent attempts that failed and are retried."""
    if not service.attempts:
        return 0.0
    failed = sum(attempt.duration is None for attempt in service.attempts)
    return min(_FAILURE_RATE_MAX, failed / len(service.attempts))


def _failure_rate_bound(service: QueueActivity, customer: int) -> float:
    """Return an upper bound of one customer's failure rate: of a beta distribution with a uniform
    prior, because documents sent together fail together and a first upload has no history."""
    ended = [a.duration for a in service.attempts if a.customer == customer]
    failed, done = ended.count(None) + 1, len(ended) - ended.count(None) + 1
    n = failed + done
    deviation = sqrt(failed * done / (n + 1)) / n
    return min(_FAILURE_RATE_MAX, failed / n + _Z * deviation)


def _overtaking_rate(view: QueueView, position: Position, service: QueueActivity, at: int) -> float:
    """Return the rate, per microsecond, of recent arrivals that would have their turn first.

    A further document of a customer that has more waiting in the level than turns does not."""
    recent = [arrival for arrival in service.arrivals if at - arrival.at <= _RECENT_US]
    if not recent:
        return 0.0
    cut = len(recent) == len(service.arrivals)
    window = max(_WINDOW_US_MIN, at - recent[-1].at if cut else _RECENT_US)
    full = {
        line.customer
        for line in view.lines
        if line.level == view.level and line.waiting > position.turns.get(line.customer, 0)
    }
    level = view.level if _newcomers_first(view) else view.level - 1
    first = sum(
        arrival.customer != view.customer
        and (
            arrival.level < view.level or (arrival.level <= level and arrival.customer not in full)
        )
        for arrival in recent
    )
    return first / window


def _newcomers_first(view: QueueView) -> bool:
    """Whether a new customer in the level has a turn before the document; not in mode `levels`."""
    own = view.own
    return own is not None and own.virtual_time + view.rank.most * own.charge > view.clock


def _with_patience(
    latest: float | None, view: QueueView, patience_us: int, claim_us: float
) -> float:
    """Cap the latest start by the turns for the longest waiting, one for each of the customer's
    documents up to this one."""
    customers = max(view.lines_in_level, view.beyond_patience)
    turn = patience_us + PATIENCE_EVERY * (1 + customers) * claim_us
    patient = (view.rank.most + 1) * turn
    return patient if latest is None else min(latest, patient)
