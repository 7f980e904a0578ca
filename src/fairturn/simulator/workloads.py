"""Named workloads of queues that many customers share, generated from a seed.

docs/simulate.md and docs/fairness.md have their figures: update them after a change here.
"""

from collections.abc import Callable
from random import Random
from typing import NamedTuple

from fairturn.scheduling.flows import Costs
from fairturn.simulator.plan import Loss
from fairturn.simulator.scenario import Draft, Scenario

SEED = 1993
WORKERS = 4
MINUTE, HOUR, DAY = 60, 3_600, 86_400


class Workload(NamedTuple):
    name: str
    title: str
    make: Callable[[Random], Scenario]


def make(name: str, seed: int = SEED) -> Scenario:
    return WORKLOADS[name].make(Random(seed))


def _short(random: Random) -> float:
    """Return the cost of an ordinary document in seconds."""
    return random.uniform(1, 3)


def _quiet(draft: Draft, random: Random, until_s: float, customers: int = 20) -> None:
    """Add customers that submit one document every two minutes. They never pause for 25 minutes,
    and so reach level 9 after 40 minutes."""
    for number in range(1, customers + 1):
        name = f"quiet-{number:02}"
        draft.customer(name, "quiet")
        at_s = random.uniform(0, 2 * MINUTE)
        while at_s < until_s:
            draft.add(at_s, name, _short(random))
            at_s += random.uniform(110, 130)


def _poisson(
    draft: Draft, random: Random, name: str, *, per_s: float, until_s: float, cost_s: float
) -> None:
    """Add Poisson arrivals with exponential costs."""
    at_s = random.expovariate(per_s)
    while at_s < until_s:
        draft.add(at_s, name, random.expovariate(1 / cost_s))
        at_s += random.expovariate(per_s)


def _dump(random: Random) -> Scenario:
    draft = Draft()
    _quiet(draft, random, 1.75 * HOUR)
    draft.customer("dump", "dump")
    for _ in range(10_000):
        draft.add(15 * MINUTE, "dump", _short(random))
    return draft.finish("dump", workers=WORKERS)


def _two_dumps(random: Random) -> Scenario:
    draft = Draft()
    draft.customer("late", "late")
    for number, at_s in enumerate((0, 5 * MINUTE), start=1):
        draft.customer(f"dump-{number}", "dumps")
        for _ in range(3_000):
            draft.add(at_s, f"dump-{number}", _short(random))
    for _ in range(60):
        draft.add(10 * MINUTE, "late", _short(random))
    return draft.finish("two-dumps", workers=WORKERS)


def _every_20_minutes(random: Random) -> Scenario:
    draft = Draft()
    until_s = 12 * HOUR
    for number in range(1, 13):
        name = f"regular-{number:02}"
        draft.customer(name, "regular")
        first_s = random.uniform(0, 20 * MINUTE)
        for turn in range(36):
            draft.add(first_s + turn * 20 * MINUTE, name, _short(random))
    for number in range(1, 11):
        name = f"batch-{number:02}"
        draft.customer(name, "batches")
        at_s = random.uniform(0, 30 * MINUTE)
        while at_s < until_s:
            for _ in range(15):
                draft.add(at_s, name, _short(random))
            at_s += 30 * MINUTE
    draft.customer("dump", "dump")
    for _ in range(3_000):
        draft.add(9 * HOUR, "dump", _short(random))
    return draft.finish("every-20-minutes", workers=WORKERS)


def _many_names(random: Random) -> Scenario:
    draft = Draft()
    _quiet(draft, random, 1.75 * HOUR)
    for number in range(1, 101):
        name = f"name-{number:03}"
        draft.customer(name, "names")
        for _ in range(100):
            draft.add(15 * MINUTE, name, _short(random))
    return draft.finish("many-names", workers=WORKERS)


def _threes(name: str, load: float) -> Callable[[Random], Scenario]:
    """Small customers only: each submits once, one in ten submits three documents. Costs are scaled
    to the exact load, because near 1 a hundredth decides whether the queue grows."""

    def make(random: Random) -> Scenario:
        until_s, cost_s = 4 * HOUR, 5.0
        per_s = load * WORKERS / cost_s / 1.2
        draft = Draft()
        documents: list[tuple[float, str, float]] = []
        at_s = random.expovariate(per_s)
        while at_s < until_s:
            group = "threes" if random.random() < 0.1 else "ones"
            customer = f"{group[:-1]}-{len(documents):05}"
            draft.customer(customer, group)
            for _ in range(3 if group == "threes" else 1):
                documents.append((at_s, customer, random.expovariate(1 / cost_s)))
            at_s += random.expovariate(per_s)
        scale = load * WORKERS * until_s / sum(cost for _, _, cost in documents)
        for at_s, customer, work_s in documents:
            draft.add(at_s, customer, scale * work_s)
        return draft.finish(name, workers=WORKERS)

    return make


def _newcomers(random: Random) -> Scenario:
    draft = Draft()
    for number in range(1, 6):
        name = f"regular-{number}"
        draft.customer(name, "regular")
        for _ in range(30):
            draft.add(10 * MINUTE, name, random.uniform(3, 5))
    at_s, number = 0.0, 0
    while at_s < 2 * HOUR:
        number += 1
        name = f"new-{number:05}"
        draft.customer(name, "newcomers")
        draft.add(at_s, name, random.uniform(3, 5))
        at_s += random.expovariate(1.05)
    return draft.finish("newcomers", workers=WORKERS)


def _heavy(name: str, costs: Costs) -> Callable[[Random], Scenario]:
    """Documents of very different cost: most take a second, some ten minutes."""

    def make(random: Random) -> Scenario:
        draft = Draft()
        for number in range(1, 31):
            customer = f"light-{number:02}"
            draft.customer(customer, "light")
            _poisson(draft, random, customer, per_s=1 / 100, until_s=3 * HOUR, cost_s=1.0)
        for number in range(1, 5):
            customer = f"large-{number}"
            draft.customer(customer, "large")
            for burst in range(6):
                at_s = random.uniform(burst, burst + 1) * HOUR / 2
                for _ in range(40):
                    draft.add(at_s, customer, min(600.0, 10 * random.paretovariate(1.5)))
        return draft.finish(name, workers=WORKERS, costs=costs)

    return make


def _mass_cancel(random: Random) -> Scenario:
    draft = Draft()
    for name in ("canceller", "other"):
        draft.customer(name, name)
        for _ in range(2_000):
            draft.add(0, name, _short(random))
    draft.cancel_all(MINUTE, "canceller")
    for _ in range(5):
        draft.add(2 * MINUTE, "canceller", _short(random))
    return draft.finish("mass-cancel", workers=WORKERS)


def _day(random: Random) -> Scenario:
    """From midnight to midnight, with a peak above the capacity of the workers at 14:00."""
    draft = Draft()
    cost_s, peak = 20.0, 1.25
    shares = [1 / (number + 2) for number in range(60)]
    names = [f"customer-{number:02}" for number in range(1, 61)]
    for number, name in enumerate(names):
        draft.customer(name, "large" if number < 6 else "small")
    per_s = peak * WORKERS / cost_s
    at_s = random.expovariate(per_s)
    while at_s < DAY:
        # A tenth of the peak at night; a linear rise to the peak and a linear fall.
        busy = max(0.1, 1 - abs(at_s - 14 * HOUR) / (9 * HOUR))
        if random.random() < busy:
            draft.add(at_s, random.choices(names, shares)[0], random.expovariate(1 / cost_s))
        at_s += random.expovariate(per_s)
    return draft.finish("day", workers=WORKERS)


def _weights(random: Random) -> Scenario:
    draft = Draft()
    for name, weight in (("bronze", 1), ("silver", 2), ("gold", 4)):
        draft.customer(name, name, weight)
        for _ in range(1_000):
            draft.add(0, name, _short(random))
    return draft.finish("weights", workers=WORKERS)


def _retry_storm(random: Random) -> Scenario:
    draft = Draft()
    _quiet(draft, random, 2 * HOUR)
    draft.customer("storm", "storm")
    delays_s = (10, 20, 40, 80)
    for _ in range(1_500):
        fails = random.randint(1, 4)
        draft.add(HOUR, "storm", _short(random), delays_s[:fails])
    return draft.finish("retry-storm", workers=WORKERS)


def _lost_workers(random: Random) -> Scenario:
    draft = Draft()
    until_s, cost_s = 2.5 * HOUR, 8.0
    for group, customers, per_s in (("small", 40, 0.35 / 40), ("large", 2, 0.35 / 2)):
        for number in range(1, customers + 1):
            name = f"{group}-{number:02}"
            draft.customer(name, group)
            _poisson(draft, random, name, per_s=per_s, until_s=until_s, cost_s=cost_s)
    loss = Loss(HOUR * 1_000_000, 5, int(1.5 * HOUR) * 1_000_000)
    return draft.finish("lost-workers", workers=2 * WORKERS, losses=[loss])


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("dump", "one dump of 10,000 documents and 20 quiet customers", _dump),
        Workload("two-dumps", "two dumps, and then a customer with 60 documents", _two_dumps),
        Workload(
            "every-20-minutes",
            "customers that submit a document every 20 minutes, batches and a dump",
            _every_20_minutes,
        ),
        Workload("many-names", "one dump under 100 names and 20 quiet customers", _many_names),
        Workload(
            "threes",
            "small customers, one in ten with three documents; load 0.9",
            _threes("threes", 0.9),
        ),
        Workload(
            "threes-overload", "the same with a load of 1.02", _threes("threes-overload", 1.02)
        ),
        Workload("newcomers", "an endless stream of new customers; load 1.05", _newcomers),
        Workload(
            "heavy-known",
            "documents of a second and documents of minutes, with known costs",
            _heavy("heavy-known", Costs.KNOWN),
        ),
        Workload(
            "heavy-unknown",
            "the same with unknown costs, which are learned",
            _heavy("heavy-unknown", Costs.LEARNED),
        ),
        Workload("mass-cancel", "2,000 documents cancelled, and five new ones", _mass_cancel),
        Workload("day", "a day with a peak above capacity", _day),
        Workload("weights", "three customers with weights 1, 2 and 4", _weights),
        Workload("retry-storm", "1,500 documents that fail and are retried", _retry_storm),
        Workload("lost-workers", "five of eight workers are lost for half an hour", _lost_workers),
    )
}
