"""Named workloads of queues that many customers share, generated from a seed.

docs/simulate.md and docs/fairness.md have their figures: update them after a change here.
"""

from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

from fairturn.clock import microseconds
from fairturn.scheduling.flows import Costs
from fairturn.simulator.plan import Loss
from fairturn.simulator.scenario import Draft, Scenario

SEED = 1993
WORKERS = 4
MINUTE, HOUR, DAY = 60, 3_600, 86_400

Fill = Callable[[Draft, Random], None]


class Workload(NamedTuple):
    name: str
    title: str
    fill: Fill  # adds the customers and documents
    workers: int
    costs: Costs
    losses: Sequence[Loss]


WORKLOADS: dict[str, Workload] = {}


def make(name: str, seed: int = SEED) -> Scenario:
    _, _, fill, workers, costs, losses = WORKLOADS[name]
    draft = Draft()
    fill(draft, Random(seed))
    return draft.finish(name, workers=workers, costs=costs, losses=losses)


def _workload(
    name: str,
    title: str,
    *,
    workers: int = WORKERS,
    costs: Costs = Costs.EQUAL,
    losses: Sequence[Loss] = (),
) -> Callable[[Fill], Fill]:
    """Decorate the function that fills a workload; `WORKLOADS` has them in this order."""

    def register(fill: Fill) -> Fill:
        WORKLOADS[name] = Workload(name, title, fill, workers, costs, losses)
        return fill

    return register


def _short(random: Random) -> float:
    """Return the cost of an ordinary document in seconds."""
    return random.uniform(1, 3)


def _upload(draft: Draft, random: Random, at_s: float, customer: str, documents: int) -> None:
    """Add ordinary documents that a customer submits together."""
    for _ in range(documents):
        draft.add(at_s, customer, _short(random))


def _quiet(draft: Draft, random: Random, until_s: float) -> None:
    """Add 20 customers that submit one document every two minutes. They never pause for 25 minutes,
    and so reach level 9 after 40 minutes."""
    for number in range(1, 21):
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


@_workload("dump", "one dump of 10,000 documents and 20 quiet customers")
def _dump(draft: Draft, random: Random) -> None:
    _quiet(draft, random, 1.75 * HOUR)
    draft.customer("dump", "dump")
    _upload(draft, random, 15 * MINUTE, "dump", 10_000)


@_workload("two-dumps", "two dumps, and then a customer with 60 documents")
def _two_dumps(draft: Draft, random: Random) -> None:
    draft.customer("late", "late")
    for number, at_s in enumerate((0, 5 * MINUTE), start=1):
        draft.customer(f"dump-{number}", "dumps")
        _upload(draft, random, at_s, f"dump-{number}", 3_000)
    _upload(draft, random, 10 * MINUTE, "late", 60)


@_workload(
    "every-20-minutes", "customers that submit a document every 20 minutes, batches and a dump"
)
def _every_20_minutes(draft: Draft, random: Random) -> None:
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
            _upload(draft, random, at_s, name, 15)
            at_s += 30 * MINUTE
    draft.customer("dump", "dump")
    _upload(draft, random, 9 * HOUR, "dump", 3_000)


@_workload("many-names", "one dump under 100 names and 20 quiet customers")
def _many_names(draft: Draft, random: Random) -> None:
    _quiet(draft, random, 1.75 * HOUR)
    for number in range(1, 101):
        name = f"name-{number:03}"
        draft.customer(name, "names")
        _upload(draft, random, 15 * MINUTE, name, 100)


@_workload("threes", "small customers, one in ten with three documents; load 0.9")
def _threes(draft: Draft, random: Random) -> None:
    _ones_and_threes(draft, random, 0.9)


@_workload("threes-overload", "the same with a load of 1.02")
def _threes_overload(draft: Draft, random: Random) -> None:
    _ones_and_threes(draft, random, 1.02)


def _ones_and_threes(draft: Draft, random: Random, load: float) -> None:
    """Add small customers: each submits once, one in ten submits three documents. Costs are scaled
    to the exact load, because near 1 a hundredth decides whether the queue grows."""
    until_s, cost_s = 4 * HOUR, 5.0
    per_s = load * WORKERS / cost_s / 1.2
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


@_workload("newcomers", "an endless stream of new customers; load 1.05")
def _newcomers(draft: Draft, random: Random) -> None:
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


# The lower decorator is applied, and listed, first.
@_workload("heavy-unknown", "the same with unknown costs, which are learned", costs=Costs.LEARNED)
@_workload(
    "heavy-known",
    "documents of a second and documents of minutes, with known costs",
    costs=Costs.KNOWN,
)
def _heavy(draft: Draft, random: Random) -> None:
    """Most documents take a second, some ten minutes."""
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


@_workload("mass-cancel", "2,000 documents cancelled, and five new ones")
def _mass_cancel(draft: Draft, random: Random) -> None:
    for name in ("canceller", "other"):
        draft.customer(name, name)
        _upload(draft, random, 0, name, 2_000)
    draft.cancel_all(MINUTE, "canceller")
    _upload(draft, random, 2 * MINUTE, "canceller", 5)


@_workload("day", "a day with a peak above capacity")
def _day(draft: Draft, random: Random) -> None:
    """From midnight to midnight, with a peak above the capacity of the workers at 14:00."""
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


@_workload("weights", "three customers with weights 1, 2 and 4")
def _weights(draft: Draft, random: Random) -> None:
    for name, weight in (("bronze", 1), ("silver", 2), ("gold", 4)):
        draft.customer(name, name, weight)
        _upload(draft, random, 0, name, 1_000)


@_workload("retry-storm", "1,500 documents that fail and are retried")
def _retry_storm(draft: Draft, random: Random) -> None:
    _quiet(draft, random, 2 * HOUR)
    draft.customer("storm", "storm")
    delays_s = (10, 20, 40, 80)
    for _ in range(1_500):
        fails = random.randint(1, 4)
        draft.add(HOUR, "storm", _short(random), delays_s[:fails])


@_workload(
    "lost-workers",
    "five of eight workers are lost for half an hour",
    workers=2 * WORKERS,
    losses=[Loss(microseconds(HOUR), 5, microseconds(1.5 * HOUR))],
)
def _lost_workers(draft: Draft, random: Random) -> None:
    until_s, cost_s = 2.5 * HOUR, 8.0
    for group, customers, per_s in (("small", 40, 0.35 / 40), ("large", 2, 0.35 / 2)):
        for number in range(1, customers + 1):
            name = f"{group}-{number:02}"
            draft.customer(name, group)
            _poisson(draft, random, name, per_s=per_s, until_s=until_s, cost_s=cost_s)


@_workload(
    "routed", "kinds of work with their own workers, and a flood in one", costs=Costs.LEARNED
)
def _routed(draft: Draft, random: Random) -> None:
    """Each kind has one worker of its own; the others serve all kinds. Text and OCR need more than
    one worker."""
    # Seconds per document, and the load in workers.
    for kind, from_s, to_s, load in (
        ("text", 1, 3, 1.2),
        ("ocr", 5, 15, 1.2),
        ("export", 1, 2, 0.6),
    ):
        draft.workers_for(kind, 1)
        every_s = 20 * (from_s + to_s) / 2 / load
        for number in range(1, 21):
            name = f"{kind}-{number:02}"
            draft.customer(name, kind)
            at_s = random.uniform(0, every_s)
            while at_s < 2 * HOUR:
                draft.add(at_s, name, random.uniform(from_s, to_s), kind=kind)
                at_s += random.uniform(0.9, 1.1) * every_s
    draft.customer("flood", "flood")
    for _ in range(2_000):
        draft.add(15 * MINUTE, "flood", random.uniform(5, 15), kind="ocr")


@_workload("outage", "the service that 10,000 documents need is unavailable for half an hour")
def _outage(draft: Draft, random: Random) -> None:
    for number in range(1, 21):
        name = f"scans-{number:02}"
        draft.customer(name, "scans")
        at_s = 0.0
        for _ in range(500):
            at_s += random.expovariate(0.07)
            draft.add(at_s, name, _short(random), kind="ocr")
    for number in range(1, 21):
        name = f"texts-{number:02}"
        draft.customer(name, "texts")
        at_s = random.uniform(0, 2 * MINUTE)
        while at_s < 2 * HOUR:
            draft.add(at_s, name, _short(random), kind="text")
            at_s += random.uniform(110, 130)
    draft.outage("ocr", 30 * MINUTE, 60 * MINUTE, fails_after_s=5)
