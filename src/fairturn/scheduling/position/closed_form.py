"""The number of ordinary turns before a document, by division."""

from typing import NamedTuple

from fairturn.explain.snapshot import QueueView, WaitingLine
from fairturn.scheduling.turns import PATIENCE_EVERY


class DocumentsAhead(NamedTuple):
    """The number of documents ahead of one, by reason."""

    better_levels: int = 0  # of other customers
    other_turns: int = 0  # of other customers in the same level
    longest_waiting: int = 0  # of any customer, in any level
    own: int = 0  # of the same customer, in the same level or a better one

    @property
    def total(self) -> int:
        return sum(self)


class TurnCount(NamedTuple):
    """The fields of the same names in `Position`."""

    before: DocumentsAhead
    turns: dict[int, int]
    reached: bool


def turns_before(line: WaitingLine, place: int, tick: int) -> int:
    """Return how many turns an endless line would have before (place, tick)."""
    distance = place - line.virtual_time
    if distance < 0:
        return 0
    whole, rest = divmod(distance, line.charge)
    return whole + (rest > 0 or line.tick < tick)


def count(view: QueueView) -> TurnCount:
    """Count the documents ahead, without turns for the longest waiting."""
    own, own_level = view.own, view.level
    assert own is not None
    place, tick = own.virtual_time + view.rank.least * own.charge, own.tick
    better = sum(view.others_by_level.values())
    turns: dict[int, int] = {}
    special: list[tuple[WaitingLine, int]] = []  # with a limit, or of the same customer
    for line in view.lines:
        level, _, _, customer, waiting, charge, capacity = line
        if level < own_level or not charge:
            n = waiting  # mode `levels`: the view contains only documents ahead
        else:
            n = min(waiting, turns_before(line, place, tick))
        if capacity is not None or customer == view.customer:
            special.append((line, view.rank.least if line is own else n))
        elif level < own_level:
            better += n
        elif n:
            turns[customer] = n
    mine = 0
    capacities: dict[int, int] = {}
    for line, wanted in sorted(special):  # better levels use the capacity first
        n = wanted
        if line.capacity is not None:
            left = capacities.get(line.customer, line.capacity)
            n = min(wanted, left)
            capacities[line.customer] = left - n
        if line.customer == view.customer:
            mine += n
        elif line.level < own_level:
            better += n
        elif n:
            turns[line.customer] = n
    reached = own.capacity is None or mine < own.capacity
    others = sum(turns.values()) + view.other_lines.before.get(view.rank.least, 0)
    turns.update(view.other_lines.largest)
    return TurnCount(
        DocumentsAhead(better_levels=better, other_turns=others, own=mine), turns, reached
    )


def until_patience_turn(number: int) -> int:
    """Return how many ordinary claims precede the next turn for the longest waiting."""
    return PATIENCE_EVERY - 1 - number % PATIENCE_EVERY


def patience_turns_within(number: int, ordinary: int, overdue: int) -> int:
    """Return how many of `overdue` turns for the longest waiting fall between claim `number` and
    the ordinary claim that follows `ordinary` others."""
    until = until_patience_turn(number)
    if ordinary < until:
        return 0
    return min(overdue, 1 + (ordinary - until) // (PATIENCE_EVERY - 1))
