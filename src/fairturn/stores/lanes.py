"""What comes next in each priority, by the turns of the customers: for every store."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

from fairturn.explain.snapshot import Line, charge_of, lines_of
from fairturn.model import Document, Settings
from fairturn.priority import LEVELS
from fairturn.scheduling.flows import COST_ONE, WEIGHT_ONE, Costs, Mode, Standing
from fairturn.scheduling.turns import Turns
from fairturn.stores.positions import FlowKey, Sight, look_ahead
from fairturn.stores.values import Row


class Next(NamedTuple):
    """A document that waits in a line."""

    order: int
    number: int
    cost: int | None


# Level, place, tick, customer and number of the first lines of a level, as the last claim left
# them, of customers whom the engine does not have; so many at most.
FirstLines = Callable[[int, int], Iterable[Row]]
# Order, number and cost of what waits in a flow, so many at most; behind the order that is given if
# the flow is not stored yet.
NextIn = Callable[[FlowKey, int, int], Iterable[Row]]


def next_numbers(
    sight: Sight, size: int, first_lines: FirstLines, next_in: NextIn
) -> Iterator[int]:
    """The numbers of the next documents of each level, in a database."""
    settings, turns = sight.settings, sight.turns
    look_ahead(sight)
    changed = list(lines_in_turn(turns.standings.values(), settings))
    plain = charge_of(settings, WEIGHT_ONE, ())
    charges = {c: charge_of(settings, weight, tuple(costs)) for c, weight, costs in sight.charged()}

    def waiting(line: Line, most: int) -> list[Next]:
        rows = next_in((line.customer, line.level), _before_head(turns, line), most)
        return sorted(map(Next._make, rows))[:most]

    for level, most in levels_of(settings, size):
        lines = [line for line in changed if line.level == level]
        for row in first_lines(level, most):
            lines.append(Line._make((*row, charges.get(row[3], plain), None)))
        yield from take_turns(lines, most, settings, waiting)


def _before_head(turns: Turns, line: Line) -> int:
    """Nothing waits up to here in a flow that is not stored yet."""
    standing = turns.standings.get(line.customer)
    head = standing.flows[line.level].head_order if standing is not None else None
    return 0 if head is None else head - 1


def lines_in_turn(standings: Iterable[Standing], settings: Settings) -> Iterator[Line]:
    """The lines of customers who may have a turn. In mode `levels` they are placed by their lowest
    order, as in a database."""
    for standing in standings:
        if standing.held:
            continue
        for line in lines_of(standing, settings):
            head = standing.flows[line.level].head_order
            if settings.mode is Mode.LEVELS and head is not None:
                yield line._replace(virtual_time=head)
            else:
                yield line


def take_turns(
    lines: Iterable[Line],
    size: int,
    settings: Settings,
    waiting: Callable[[Line, int], Sequence[Next]],
) -> list[int]:
    """The numbers of the next documents of one level, up to so many. Of each line so many are
    asked for at most, and of no more lines than that."""
    first = sorted(lines, key=lambda line: (line.virtual_time, line.tick, line.customer))[:size]
    if settings.mode is Mode.LEVELS:
        found = sorted(each for line in first for each in waiting(line, size))
        return [each.number for each in found[:size]]
    known = settings.costs is Costs.KNOWN
    heap = [(line.virtual_time, line.tick, line.customer, line.charge) for line in first]
    by_customer = {line.customer: line for line in first}
    left: dict[int, list[Next]] = {}
    heapify(heap)
    numbers: list[int] = []
    while heap and len(numbers) < size:
        at, tick, customer, charge = heap[0]
        if customer not in left:
            left[customer] = list(waiting(by_customer[customer], size))[::-1]
        if not left[customer]:
            heappop(heap)
            continue
        following = left[customer].pop()
        numbers.append(following.number)
        if known and following.cost is not None:
            charge = max(1, charge * following.cost // COST_ONE)
        heapreplace(heap, (at + charge, tick, customer, by_customer[customer].charge))
    return numbers


def levels_of(settings: Settings, size: int) -> list[tuple[int, int]]:
    """The levels, and how many documents of each: in mode `equal` one has all priorities."""
    if settings.mode is Mode.EQUAL:
        return [(1, size * LEVELS)]
    return [(level, size) for level in range(1, LEVELS + 1)]


def by_lane(
    documents: Iterable[Document], ids: Sequence[str], size: int
) -> tuple[tuple[Document, ...], ...]:
    """The documents in the order of the ids, in the lanes of their priorities."""
    found = {document.id: document for document in documents}
    lanes: list[list[Document]] = [[] for _ in range(LEVELS)]
    for id in ids:
        document = found.get(id)
        if document is not None and len(lanes[document.priority - 1]) < size:
            lanes[document.priority - 1].append(document)
    return tuple(map(tuple, lanes))
