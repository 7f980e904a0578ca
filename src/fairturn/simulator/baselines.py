"""Orders of other queues, for comparison: first come first served, ageing, round robin.

They ignore weights, patience and costs. All of them apply the limits of running documents and the
kinds that a worker serves, so that only the order differs.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from fairturn.scheduling.flows import Pick
from fairturn.simulator.orders import Paper

# Wait after which a document passes new ones of the next better level.
AGEING_US = 120_000_000

Key = Callable[[Paper], int]  # the document with the smallest key is first
Entry = tuple[int, int, Paper]  # (key, number, document)
CustomerAndKind = tuple[int, int]


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
    """One queue for all customers, ordered by a key. A worker takes the first document of the kinds
    that it serves."""

    def __init__(self, key: Key) -> None:
        super().__init__()
        self._key = key
        self._heaps: dict[int, list[Entry]] = {}  # by kind
        self._aside: dict[CustomerAndKind, list[Entry]] = {}  # of customers at their limit

    def change(self, customer: int, weight: int, limit: int | None, at: int) -> None:
        self._limits[customer] = limit
        for kind, heap in self._heaps.items():
            for entry in self._aside.pop((customer, kind), ()):
                heappush(heap, entry)

    def arrive(self, paper: Paper, at: int) -> None:
        heap = self._heaps.setdefault(paper.kind, [])
        heappush(heap, (self._key(paper), paper.number, paper))

    def take_back(self, paper: Paper, at: int) -> None:
        self._release(paper.customer)
        self.arrive(paper, at)

    def end(self, pick: Pick, real_cost: int | None, at: int) -> None:
        self._release(pick.customer)

    def pick(self, now: int, kinds: Sequence[int]) -> Pick | None:
        heads = [head for kind in kinds if (head := self._head(kind)) is not None]
        if not heads:
            return None
        _, _, paper = min(heads)
        heappop(self._heaps[paper.kind])
        return self._picked(paper)

    def _head(self, kind: int) -> Entry | None:
        """Return the first document of a kind that may run; set those before it aside."""
        heap = self._heaps.get(kind, [])
        while heap:
            entry = heap[0]
            paper = entry[2]
            if paper.number in self._cancelled:
                self._cancelled.remove(paper.number)
            elif self._at_limit(paper.customer):
                heappush(self._aside.setdefault((paper.customer, kind), []), entry)
            else:
                return entry
            heappop(heap)
        return None

    def _release(self, customer: int) -> None:
        """Decrement the running count for a document that ended, and push one set-aside document
        of each kind back onto its heap."""
        self._running[customer] -= 1
        for kind, heap in self._heaps.items():
            aside = self._aside.get((customer, kind))
            if aside:
                heappush(heap, heappop(aside))


class Ring(_Limited):
    """Round robin: one document of each customer in turn, without levels. A customer has a place in
    the ring for each kind of its waiting documents, and returns at the end. A worker passes over
    the places of kinds that it does not serve."""

    def __init__(self) -> None:
        super().__init__()
        self._rings: dict[int, deque[tuple[int, int]]] = {}  # kind -> places: (number, customer)
        self._places: set[CustomerAndKind] = set()
        self._entered = 0  # the number of the last place
        self._heaps: dict[CustomerAndKind, list[Entry]] = {}

    def change(self, customer: int, weight: int, limit: int | None, at: int) -> None:
        self._limits[customer] = limit
        self._return(customer)

    def arrive(self, paper: Paper, at: int) -> None:
        entry = (paper.number, paper.number, paper)
        heappush(self._heaps.setdefault((paper.customer, paper.kind), []), entry)
        self._enter(paper.customer, paper.kind)

    def take_back(self, paper: Paper, at: int) -> None:
        self._running[paper.customer] -= 1
        self.arrive(paper, at)
        self._return(paper.customer)

    def end(self, pick: Pick, real_cost: int | None, at: int) -> None:
        self._running[pick.customer] -= 1
        self._return(pick.customer)

    def pick(self, now: int, kinds: Sequence[int]) -> Pick | None:
        places = [(place, kind) for kind in kinds if (place := self._first(kind)) is not None]
        if not places:
            return None
        (_, customer), kind = min(places)
        self._rings[kind].popleft()
        self._places.remove((customer, kind))
        pick = self._picked(heappop(self._heaps[customer, kind])[2])
        self._enter(customer, kind)
        return pick

    def _first(self, kind: int) -> tuple[int, int] | None:
        """Return the first place whose customer may be served; remove those before it."""
        ring = self._rings.get(kind)
        while ring:
            customer = ring[0][1]
            if self._head(customer, kind) is not None and not self._at_limit(customer):
                return ring[0]
            ring.popleft()
            self._places.remove((customer, kind))
        return None

    def _return(self, customer: int) -> None:
        for kind in self._rings:
            self._enter(customer, kind)

    def _enter(self, customer: int, kind: int) -> None:
        if (customer, kind) in self._places or self._at_limit(customer):
            return
        if self._head(customer, kind) is not None:
            self._entered += 1
            self._places.add((customer, kind))
            self._rings.setdefault(kind, deque()).append((self._entered, customer))

    def _head(self, customer: int, kind: int) -> Paper | None:
        heap = self._heaps.get((customer, kind), [])
        while heap and heap[0][1] in self._cancelled:
            self._cancelled.remove(heappop(heap)[1])
        return heap[0][2] if heap else None
