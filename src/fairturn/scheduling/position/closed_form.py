"""Counting ordinary turns without taking them: those before a document, by division."""

from typing import NamedTuple

from fairturn.explain.snapshot import Line, Lineup
from fairturn.scheduling.turns import PATIENCE_EVERY


class Before(NamedTuple):
    """The documents before one, by why they are before it."""

    better_levels: int = 0  # of other customers
    other_turns: int = 0  # of other customers in its own level
    longest_waiting: int = 0  # of anybody, in any level
    own: int = 0  # of its own customer, in its level or a better one

    @property
    def total(self) -> int:
        return sum(self)


class Counted(NamedTuple):
    """Documents before one, the turns of others in its level (of a crowd, only of the largest), and
    whether it is reached at all."""

    before: Before
    turns: dict[int, int]
    reached: bool  # before its customer comes to its limit


def turns_before(line: Line, place: int, tick: int) -> int:
    """How many turns the line has before (place, tick), if enough documents wait in it."""
    distance = place - line.virtual_time
    if distance < 0:
        return 0
    whole, rest = divmod(distance, line.charge)
    return whole + (rest > 0 or line.tick < tick)


def count(lineup: Lineup) -> Counted:
    """The documents before one, without turns for the longest waiting."""
    own, own_level = lineup.own, lineup.level
    assert own is not None
    place, tick = own.virtual_time + lineup.rank.least * own.charge, own.tick
    better = sum(lineup.crowds.values())
    turns: dict[int, int] = {}
    special: list[tuple[Line, int]] = []  # with a limit, or its own
    for line in lineup.lines:
        level, _, _, customer, waiting, charge, room = line
        if level < own_level or not charge:
            n = waiting  # in mode `levels` only those before it are told
        else:
            n = min(waiting, turns_before(line, place, tick))
        if room is not None or customer == lineup.customer:
            special.append((line, lineup.rank.least if line is own else n))
        elif level < own_level:
            better += n
        elif n:
            turns[customer] = n
    mine = 0
    rooms: dict[int, int] = {}
    for line, wanted in sorted(special):  # better levels come first, and use up room first
        n = wanted
        if line.room is not None:
            left = rooms.get(line.customer, line.room)
            n = min(wanted, left)
            rooms[line.customer] = left - n
        if line.customer == lineup.customer:
            mine += n
        elif line.level < own_level:
            better += n
        elif n:
            turns[line.customer] = n
    reached = own.room is None or mine < own.room
    others = sum(turns.values())
    if lineup.crowd is not None:
        others += lineup.crowd.before[lineup.rank.least]
        turns.update(lineup.crowd.largest)
    return Counted(Before(better_levels=better, other_turns=others, own=mine), turns, reached)


def until_slot(number: int) -> int:
    """Ordinary claims after the one of this number, until the next is for the longest waiting."""
    return PATIENCE_EVERY - 1 - number % PATIENCE_EVERY


def slots_within(number: int, ordinary: int, fronts: int) -> int:
    """How many turns for the longest waiting there are among so many ordinary ones and just before
    the next, after the claim of this number, if so many customers are waiting for one."""
    until = until_slot(number)
    if ordinary < until:
        return 0
    return min(fronts, 1 + (ordinary - until) // (PATIENCE_EVERY - 1))
