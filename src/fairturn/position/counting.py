"""Counting ordinary turns without taking them: those before a document, by division."""

from typing import NamedTuple

from fairturn.situation import Line, Lineup
from fairturn.turns import PATIENCE_EVERY


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
    """Documents before one, the turns of others in its level, and whether it is reached at all."""

    before: Before
    turns: dict[int, int]
    reached: bool  # before its customer comes to its limit


def own_line(lineup: Lineup) -> Line | None:
    """The line that the document stands in."""
    for line in lineup.lines:
        if line.customer == lineup.customer and line.level == lineup.level:
            return line
    return None


def turns_before(line: Line, place: int, tick: int) -> int:
    """How many turns the line has before (place, tick), if enough documents wait in it."""
    distance = place - line.virtual_time
    if distance < 0:
        return 0
    whole, rest = divmod(distance, line.charge)
    return whole + (rest > 0 or line.tick < tick)


def count(lineup: Lineup) -> Counted:
    """The documents before one, without turns for the longest waiting."""
    own = own_line(lineup)
    assert own is not None
    place, tick = own.virtual_time + lineup.rank.least * own.charge, own.tick
    rooms: dict[int, int] = {}
    better, mine = sum(lineup.crowds.values()), 0
    turns: dict[int, int] = {}
    for line in lineup.lines:  # better levels come first, and use up room first
        level, customer = line.level, line.customer
        if level > lineup.level:
            break
        if level < lineup.level:
            n = line.waiting
        elif line is own:
            n = lineup.rank.least
        elif line.charge:
            n = min(line.waiting, turns_before(line, place, tick))
        else:
            n = line.waiting  # in mode `levels` only those before it are told
        if line.room is not None:
            left = rooms.get(customer, line.room)
            n = min(n, left)
            rooms[customer] = left - n
        if customer == lineup.customer:
            mine += n
        elif level < lineup.level:
            better += n
        elif n:
            turns[customer] = n
    reached = own.room is None or mine < own.room
    before = Before(better_levels=better, other_turns=sum(turns.values()), own=mine)
    return Counted(before, turns, reached)


def slots_within(number: int, ordinary: int, fronts: int) -> int:
    """How many turns for the longest waiting there are among so many ordinary ones and just before
    the next, after the claim of this number, if so many customers are waiting for one."""
    until = PATIENCE_EVERY - 1 - number % PATIENCE_EVERY
    if ordinary < until:
        return 0
    return min(fronts, 1 + (ordinary - until) // (PATIENCE_EVERY - 1))
