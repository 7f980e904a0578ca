"""Orders of other queues, for comparison: first come first served, ageing, round robin.

They ignore weights, patience and costs. All of them apply the limits of running documents, so that
only the order differs.
"""

from collections import Counter, deque
from collections.abc import Callable
from heapq import heappop, heappush

from fairturn.scheduling.flows import Pick
from fairturn.simulator.orders import Paper

# Wait after which a document passes new ones of the next better level.
AGEING_US = 120_000_000

Key = Callable[[Paper], int]  # the document with the smallest key is first
Entry = tuple[int, int, Paper]  # (key, number, document)


def first_come(paper: Paper) -> int:
    return paper.number


def aged(paper: Paper) -> int:
    """Order by level, but a document rises by one level per `AGEING_US` of waiting. All rise at the
    same speed, so that the order of waiting documents never changes."""
    return paper.submitted_at + paper.priority * AGEING_US


class _Limited:
    """Applies the limits of running documents."""

    def __init__(self) -> None:
        self._limits: dict[int, int | None] = {}
        self._running: Counter[int] = Counter()
        self._cancelled: set[int] = set()  # removed from a heap when they are its head

    def leave(self, paper: Paper, at: int) -> None:
        self._cancelled.add(paper.number)

    def _at_limit(self, customer: int) -> bool:
        limit = self._limits.get(customer)
        return limit is not None and self._running[customer] >= limit

    def _picked(self, paper: Paper) -> Pick:
        self._running[paper.customer] += 1
        return Pick(paper.customer, paper.priority, paper.number, None, None, 0)


class Line(_Limited):
    """One queue for all customers, ordered by a key."""

    def __init__(self, key: Key) -> None:
        super().__init__()
        self._key = key
        self._heap: list[Entry] = []
        self._aside: dict[int, list[Entry]] = {}  # of customers at their limit

    def change(self, customer: int, weight: int, limit: int | None, at: int) -> None:
        self._limits[customer] = limit
        for entry in self._aside.pop(customer, ()):
            heappush(self._heap, entry)

    def arrive(self, paper: Paper, at: int) -> None:
        heappush(self._heap, (self._key(paper), paper.number, paper))

    def take_back(self, paper: Paper, at: int) -> None:
        self._release(paper.customer)
        self.arrive(paper, at)

    def end(self, pick: Pick, real_cost: int | None, at: int) -> None:
        self._release(pick.customer)

    def pick(self, now: int) -> Pick | None:
        while self._heap:
            entry = heappop(self._heap)
            paper = entry[2]
            if paper.number in self._cancelled:
                self._cancelled.remove(paper.number)
            elif self._at_limit(paper.customer):
                heappush(self._aside.setdefault(paper.customer, []), entry)
            else:
                return self._picked(paper)
        return None

    def _release(self, customer: int) -> None:
        """Decrement the running count for a document that ended, and push one set-aside document
        back onto the heap."""
        self._running[customer] -= 1
        aside = self._aside.get(customer)
        if aside:
            heappush(self._heap, heappop(aside))


class Ring(_Limited):
    """Round robin: one document of each customer in turn, without levels. A customer leaves the
    ring when no document waits, and returns at its end."""

    def __init__(self) -> None:
        super().__init__()
        self._ring: deque[int] = deque()
        self._members: set[int] = set()
        self._heaps: dict[int, list[Entry]] = {}

    def change(self, customer: int, weight: int, limit: int | None, at: int) -> None:
        self._limits[customer] = limit
        self._enter(customer)

    def arrive(self, paper: Paper, at: int) -> None:
        entry = (paper.number, paper.number, paper)
        heappush(self._heaps.setdefault(paper.customer, []), entry)
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
            self._members.remove(customer)
            paper = self._head(customer)
            if paper is not None and not self._at_limit(customer):
                heappop(self._heaps[customer])
                pick = self._picked(paper)
                self._enter(customer)
                return pick
        return None

    def _enter(self, customer: int) -> None:
        if customer in self._members or self._at_limit(customer) or self._head(customer) is None:
            return
        self._members.add(customer)
        self._ring.append(customer)

    def _head(self, customer: int) -> Paper | None:
        heap = self._heaps.get(customer, [])
        while heap and heap[0][1] in self._cancelled:
            self._cancelled.remove(heappop(heap)[1])
        return heap[0][2] if heap else None
