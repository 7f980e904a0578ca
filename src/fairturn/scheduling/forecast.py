"""When a waiting document will start: between which moments, at 90 %. Pure.

The claims before it come at the pace at which documents end: as many at once as run now, each as
long as those of its customer took lately. To that comes what fails and comes back, and what is
likely to be submitted meanwhile and to have its turn first. docs/explain.md has the method, and
what it reached in simulated workloads.
"""

from collections import Counter
from dataclasses import dataclass
from math import ceil, sqrt
from statistics import fmean, pvariance
from typing import NamedTuple

from fairturn.explain.snapshot import ALIVE_US, Lineup, Seen, Service
from fairturn.scheduling.flows import Mode
from fairturn.scheduling.position import Cause, Position
from fairturn.scheduling.turns import PATIENCE_EVERY

CONFIDENCE = 0.9
_Z = 1.645  # of a normal distribution: one in twenty is further out on either side
_SHORTEST_US = 1_000  # a worker needs so long for a document, whatever it does
_LOOK_US = 2_000_000  # until a worker with nothing to do sees a document, at most
_RECENT_US, _WINDOW_US_MIN = 600_000_000, 60_000_000  # how far back arrivals are counted
_UNSURE = 0.1  # of what is expected: durations and workers change
_DIFFER = 1.5  # times the mean, squared: the variance from which documents differ much
_KNOWN_FROM = 4  # attempts of one customer, from which its own durations count
_FAILING_MAX = 0.8  # the share of attempts that fail, beyond which nothing can be said
_BUSY_MAX = 0.95  # the share of the workers that what comes in may take up


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The moments between which a document will start; `latest_at` is None if nobody can say,
    because as much comes in before it as is done."""

    earliest_at: int
    latest_at: int | None


class _Durations(NamedTuple):
    """How long documents take: the mean and the variance, of each customer and of all."""

    of: dict[int, tuple[float, float]]
    all: tuple[float, float]
    known: int

    @property
    def differ(self) -> bool:
        """Whether some documents take much longer than most: the deviation is above the mean."""
        return self.all[1] > _DIFFER * self.all[0] ** 2

    def work(self, turns: dict[int, int], others: int) -> tuple[float, float]:
        """The mean and the variance of the time that these documents take, one after the other."""
        mean, variance = others * self.all[0], others * self.all[1]
        for customer, n in turns.items():
            one = self.of.get(customer, self.all)
            mean, variance = mean + n * one[0], variance + n * one[1]
        return mean, variance


def alive(service: Service, at: int) -> list[str]:
    """The workers that are running: they hold a document, or were seen lately."""
    busy = {working.worker for working in service.running if working.alive}
    return sorted(busy | {seen.worker for seen in _seen_lately(service, at)})


def _seen_lately(service: Service, at: int) -> list[Seen]:
    return [seen for seen in service.workers if abs(at - seen.seen_at) <= ALIVE_US]


def _slots(service: Service, at: int) -> tuple[int, int]:
    """How many documents the workers run at the same time, and how many slots are free. A worker
    without a heartbeat has as many as it holds documents."""
    held = Counter(working.worker for working in service.running if working.alive)
    known = {seen.worker: seen.slots for seen in _seen_lately(service, at) if seen.slots}
    slots = sum(known.values()) + sum(n for worker, n in held.items() if worker not in known)
    return slots, sum(max(0, n - held[worker]) for worker, n in known.items())


def forecast(
    lineup: Lineup, position: Position, service: Service, *, mode: Mode, patience_us: int, at: int
) -> Forecast | None:
    """Between which moments the document will start; None if no worker is running, or if nothing
    has ended yet from which one could tell."""
    if not alive(service, at):
        return None
    before = position.before
    slots, idle = _slots(service, at)
    if before.total < idle:
        return Forecast(earliest_at=at, latest_at=at + _LOOK_US)
    ages = [max(0, at - running.claimed_at) for running in service.running if running.alive]
    slots = max(1, slots)
    durations = _durations(service, at)
    if durations is None:
        return None
    turns = {**position.turns, lineup.customer: before.own}
    # The first claim comes when one of those that run ends.
    unnamed = before.other_turns - sum(position.turns.values())  # of customers in a crowd
    ahead = before.better_levels + before.longest_waiting + unnamed + 1
    mean, variance = durations.work(turns, ahead)
    error = (_UNSURE + sqrt(durations.all[1] / durations.known) / durations.all[0]) * mean
    spread = _Z * sqrt(variance + error**2)
    if Cause.COSTS in position.causes or durations.differ:
        spread *= 2  # what ended lately is then no good measure of what comes next
    fewest = (position.bounds.least + 1) / (before.total + 1)
    at_once = idle * durations.all[0]
    earliest = max(0.0, (mean * fewest - at_once - spread) / slots)
    # What fails comes back, and one more customer may come who has as many turns as this one.
    own, _ = durations.work({lineup.customer: before.own}, 0)
    again = (mean - own) / (1 - _failing(service))
    again += own / (1 - _failing_at_most(service, lineup.customer))
    joining, its_variance = durations.work(
        {}, lineup.rank.most + 1 if _newcomers_first(lineup) else 0
    )
    most = again + joining + spread + _Z * sqrt(its_variance) + slots * min(ages, default=0)
    overtaking = _overtaking(lineup, position, service, at) * durations.all[0]
    latest = most / (slots - overtaking) if overtaking < _BUSY_MAX * slots else None
    if mode is not Mode.LEVELS:
        latest = _with_patience(latest, lineup, patience_us, durations.all[0] / slots)
    return Forecast(
        earliest_at=at + int(earliest),
        latest_at=None if latest is None else at + ceil(max(latest, earliest + _LOOK_US)),
    )


def _durations(service: Service, at: int) -> _Durations | None:
    """Of what ended lately. What runs is half done, on average; where that makes it longer than
    what ended, it counts too: a queue that has changed shows there first."""
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
            if len(durations) >= _KNOWN_FROM
        },
        all=(fmean(everything), pvariance(everything)),
        known=len(everything),
    )


def _failing(service: Service) -> float:
    """The share of attempts that fail, and are repeated."""
    if not service.attempts:
        return 0.0
    failed = sum(attempt.duration is None for attempt in service.attempts)
    return min(_FAILING_MAX, failed / len(service.attempts))


def _failing_at_most(service: Service, customer: int) -> float:
    """The share of one customer's attempts that fail, at most: as long as few have ended, nobody
    knows. What a customer sends together is likely to fail together."""
    ended = [a.duration for a in service.attempts if a.customer == customer]
    failed, done = ended.count(None) + 1, len(ended) - ended.count(None) + 1
    n = failed + done  # a beta distribution, from a share of which nothing is known
    deviation = sqrt(failed * done / (n + 1)) / n
    return min(_FAILING_MAX, failed / n + _Z * deviation)


def _overtaking(lineup: Lineup, position: Position, service: Service, at: int) -> float:
    """How many documents come in, per microsecond, that have their turn first, as it was lately.

    Of a customer who has more waiting in the level than it has turns, one more changes nothing."""
    recent = [arrival for arrival in service.arrivals if at - arrival.at <= _RECENT_US]
    if not recent:
        return 0.0
    cut = len(recent) == len(service.arrivals)
    window = max(_WINDOW_US_MIN, at - recent[-1].at if cut else _RECENT_US)
    full = {
        line.customer
        for line in lineup.lines
        if line.level == lineup.level and line.waiting > position.turns.get(line.customer, 0)
    }
    level = lineup.level if _newcomers_first(lineup) else lineup.level - 1
    first = sum(
        arrival.customer != lineup.customer
        and (
            arrival.level < lineup.level
            or (arrival.level <= level and arrival.customer not in full)
        )
        for arrival in recent
    )
    return first / window


def _newcomers_first(lineup: Lineup) -> bool:
    """Whether somebody who comes now has a turn in the level before the document. In mode `levels`
    nobody has."""
    own = lineup.own
    return own is not None and own.virtual_time + lineup.rank.most * own.charge > lineup.clock


def _with_patience(
    latest: float | None, lineup: Lineup, patience_us: int, claim_us: float
) -> float:
    """Nobody waits longer than until the turn for the longest waiting comes round to them, and to
    each of their documents after the other."""
    customers = max(lineup.lines_in_level, lineup.beyond_patience)
    turn = patience_us + PATIENCE_EVERY * (1 + customers) * claim_us
    patient = (lineup.rank.most + 1) * turn
    return patient if latest is None else min(latest, patient)
