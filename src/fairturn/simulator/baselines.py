"""Orders that others use, to compare with: first come first served, ageing, round robin.

Each is what its name says and no more: weights, patience and costs mean nothing to them. Limits of
running documents hold in all of them, so that the comparison is of the order alone.
"""

from collections import Counter, deque
from collections.abc import Callable
from heapq import heappop, heappush

from fairturn.scheduling.flows import Pick
from fairturn.simulator.orders import Paper

# How long a document must wait to pass those of one level better that come now.
AGEING_US = 120_000_000

# What decides between two documents: the smaller key goes first.
Key = Callable[[Paper], int]
Entry = tuple[int, int, Paper]  # (key, number, document)


def first_come(paper: Paper) -> int:
    """By the order of submission."""
    return paper.number


def aged(paper: Paper) -> int:
    """By level, but a document rises by one for each two minutes that it has waited.

    All rise at the same speed, so that who is before whom never changes while they wait."""
    return paper.submitted_at + paper.priority * AGEING_US


class _Limited:
    """Knows who may have another document running."""

    def __init__(self) -> None:
        self._limits: dict[int, int | None] = {}
        self._running: Counter[int] = Counter()
        self._gone: set[int] = set()  # cancelled, and still somewhere in a line

    def leave(self, paper: Paper, at: int) -> None:
        self._gone.add(paper.number)

    def _held(self, customer: int) -> bool:
        limit = self._limits.get(customer)
        return limit is not None and self._running[customer] >= limit

    def _picked(self, paper: Paper) -> Pick:
        self._running[paper.customer] += 1
        return Pick(paper.customer, paper.priority, paper.number, None, None, 0)


class Line(_Limited):
    """One line for everybody, sorted by a key."""

    def __init__(self, key: Key) -> None:
        super().__init__()
        self._key = key
        self._line: list[Entry] = []
        self._aside: dict[int, list[Entry]] = {}  # of customers at their limit

    def change(self, customer: int, weight: int, limit: int | None, at: int) -> None:
        self._limits[customer] = limit
        for entry in self._aside.pop(customer, ()):
            heappush(self._line, entry)

    def arrive(self, paper: Paper, at: int) -> None:
        heappush(self._line, (self._key(paper), paper.number, paper))

    def take_back(self, paper: Paper, at: int) -> None:
        self._let_on(paper.customer)
        self.arrive(paper, at)

    def end(self, pick: Pick, real_cost: int | None, at: int) -> None:
        self._let_on(pick.customer)

    def pick(self, now: int) -> Pick | None:
        while self._line:
            entry = heappop(self._line)
            paper = entry[2]
            if paper.number in self._gone:
                self._gone.remove(paper.number)
            elif self._held(paper.customer):
                heappush(self._aside.setdefault(paper.customer, []), entry)
            else:
                return self._picked(paper)
        return None

    def _let_on(self, customer: int) -> None:
        """One less is running, so one of those aside may stand in the line again."""
        self._running[customer] -= 1
        aside = self._aside.get(customer)
        if aside:
            heappush(self._line, heappop(aside))


class Ring(_Limited):
    """Round robin: customers in a ring, one document each time, blind to levels and to the past.
    Who has nothing waiting leaves the ring, and comes back at its end."""

    def __init__(self) -> None:
        super().__init__()
        self._ring: deque[int] = deque()
        self._inside: set[int] = set()
        self._lines: dict[int, list[Entry]] = {}

    def change(self, customer: int, weight: int, limit: int | None, at: int) -> None:
        self._limits[customer] = limit
        self._enter(customer)

    def arrive(self, paper: Paper, at: int) -> None:
        entry = (paper.number, paper.number, paper)
        heappush(self._lines.setdefault(paper.customer, []), entry)
        self._enter(paper.customer)

    def take_back(self, paper: Paper, at: int) -> None:
        self._running[paper.customer] -= 1
        self.arrive(paper, at)

    def end(self, pick: Pick, real_cost: int | None, at: int) -> None:
        self._running[pick.customer] -= 1
        self._enter(pick.customer)

    def pick(self, now: int) -> Pick | None:
        while self._ring:
            customer = self._ring.popleft()
            self._inside.remove(customer)
            paper = self._first(customer)
            if paper is not None and not self._held(customer):
                heappop(self._lines[customer])
                pick = self._picked(paper)
                self._enter(customer)
                return pick
        return None

    def _enter(self, customer: int) -> None:
        if customer in self._inside or self._held(customer) or self._first(customer) is None:
            return
        self._inside.add(customer)
        self._ring.append(customer)

    def _first(self, customer: int) -> Paper | None:
        line = self._lines.get(customer, [])
        while line and line[0][1] in self._gone:
            self._gone.remove(heappop(line)[1])
        return line[0][2] if line else None
