"""How many documents will be claimed before a waiting one. Pure.

The answer assumes that nothing new comes, that nothing that runs ends, and that time stands still.
Turns are counted, not taken: the k-th turn of a line has the place `virtual_time + (k - 1) *
charge`, so that one division says how many turns of a line come before a place (`closed_form.py`).
Only while a customer may get a turn as the longest waiting are turns taken one by one
(`turn_by_turn.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from fairturn.explain.snapshot import Between, Line, Lineup
from fairturn.scheduling.flows import Costs, Mode
from fairturn.scheduling.position.closed_form import (
    Before,
    Counted,
    count,
    slots_within,
    until_slot,
)
from fairturn.scheduling.position.turn_by_turn import STEPS_MAX, walk


class Cause(StrEnum):
    """Why a position is known only between two bounds."""

    LIMITS = "limits"  # what ends makes room for documents that may not run now
    COSTS = "costs"  # how many turns somebody gets depends on what each document costs
    MANY_TURNS = "many_turns"  # for the longest waiting: too many to take one by one
    MANY_DOCUMENTS = "many_documents"  # too many to count
    UNFOLDED = "unfolded"  # too much has happened since the last claim


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """How many documents will be claimed before one.

    `before` is how it comes out if nothing ends meanwhile and every document costs what is
    expected. If the bounds are equal it is exact, whatever ends. `reached` is False if its customer
    comes to its limit before: then something must end first. `turns` are those of other customers
    before it in its own level, by customer; of more customers than are read, only of the largest.
    """

    bounds: Between
    before: Before
    reached: bool
    turns: Mapping[int, int]
    causes: tuple[Cause, ...]


def position(
    lineup: Lineup, *, mode: Mode, costs: Costs, steps_max: int = STEPS_MAX
) -> Position | None:
    """The position of a waiting document; None while its customer is paused."""
    own = lineup.own
    if own is None:
        return None
    causes = [cause for cause, applies in _known_causes(lineup, mode, costs) if applies]
    taken = walk(lineup, steps_max=steps_max) if lineup.beyond_patience else count(lineup)
    if taken is None:
        causes.append(Cause.MANY_TURNS)
        taken = _with_slots(lineup, count(lineup))
    if not taken.reached:
        causes.append(Cause.LIMITS)
        free = replace(lineup, lines=tuple(_unlimited(lineup, own.customer)))
        taken = _with_slots(free, count(free))._replace(reached=False)
    elif _limits_matter(lineup):
        causes.append(Cause.LIMITS)
    total = taken.before.total
    bounds = _bounds(lineup, own, causes, total) if causes else Between(total, total)
    return Position(
        bounds=bounds,
        before=taken.before,
        reached=taken.reached,
        turns=taken.turns,
        causes=() if bounds.exact else tuple(causes),
    )


def _known_causes(lineup: Lineup, mode: Mode, costs: Costs) -> list[tuple[Cause, bool]]:
    turns = costs is not Costs.EQUAL and mode is not Mode.LEVELS
    return [
        (Cause.COSTS, turns and lineup.lines_in_level > 1),
        (Cause.MANY_DOCUMENTS, not lineup.rank.exact or lineup.uncounted > 0),
        (Cause.UNFOLDED, not lineup.folded),
    ]


def _unlimited(lineup: Lineup, customer: int | None = None) -> list[Line]:
    """The lines as if this customer, or nobody, had a limit."""
    return [
        line._replace(room=None) if customer in (None, line.customer) else line
        for line in lineup.lines
    ]


def _limits_matter(lineup: Lineup) -> bool:
    """Whether another customer may come to its limit before the document, or is at it and would
    have turns before it."""
    limited = [line for line in lineup.lines if line.room is not None]
    stalled = [front for front in lineup.stalled if front.customer != lineup.customer]
    if not limited and not stalled:
        return False
    counted = count(replace(lineup, lines=tuple(_unlimited(lineup))))
    if stalled and slots_within(lineup.number, counted.before.total, 1):
        return True
    wanted = dict(counted.turns)
    for line in limited:
        if line.level < lineup.level:
            wanted[line.customer] = wanted.get(line.customer, 0) + line.waiting
    at_front = {front.customer for front in lineup.fronts}
    return any(
        line.room is not None
        and line.customer != lineup.customer
        and wanted.get(line.customer, 0) + (line.customer in at_front) > line.room
        for line in limited
    )


def _with_slots(lineup: Lineup, counted: Counted) -> Counted:
    """Add the turns for the longest waiting, as many as there can be."""
    slots = slots_within(lineup.number, counted.before.total, lineup.beyond_patience)
    return counted._replace(before=counted.before._replace(longest_waiting=slots))


def _bounds(lineup: Lineup, own: Line, causes: list[Cause], total: int) -> Between:
    """Bounds that hold whatever ends and whatever documents cost, as far as the causes say that
    it matters."""
    return Between(min(total, _least(lineup, own, causes)), max(total, _most(lineup, own, causes)))


def _least(lineup: Lineup, own: Line, causes: list[Cause]) -> int:
    if Cause.UNFOLDED in causes:
        return 0
    rank = lineup.rank.least
    at_front = _front_level(lineup) == own.level
    if at_front and rank:
        rank -= 1  # the first of them may have its turn as the longest waiting, free of charge
    lines = _unlimited(lineup, own.customer)
    if Cause.COSTS in causes:
        lines = [line for line in lines if line.level < own.level or line.customer == own.customer]
    least = count(replace(lineup, lines=tuple(lines), rank=Between(rank, rank))).before.total
    if at_front and not lineup.rank.least:
        least = min(least, until_slot(lineup.number))
    return least


def _most(lineup: Lineup, own: Line, causes: list[Cause]) -> int:
    if Cause.UNFOLDED in causes or _may_stall(lineup, own):
        return lineup.waiting - (
            own.waiting - lineup.rank.most
        )  # all but itself and its line's rest
    lines = _unlimited(lineup)
    if Cause.COSTS in causes:
        place = (own.customer, own.level)
        most = sum(line.waiting for line in lines if (line.customer, line.level) != place)
        most += lineup.rank.most + sum(lineup.crowds.values())
        most += 0 if lineup.crowd is None else lineup.crowd.waiting
    else:
        all_of_it = replace(lineup, lines=tuple(lines), rank=Between(*[lineup.rank.most] * 2))
        most = count(all_of_it).before.total
    most += lineup.uncounted
    return most + slots_within(lineup.number, most, lineup.beyond_patience + len(lineup.stalled))


def _may_stall(lineup: Lineup, own: Line) -> bool:
    """Whether its customer may come to its limit before the document. Then anything that waits in
    the queue can be claimed until something of this customer ends."""
    if own.room is None:
        return False
    mine = [line for line in lineup.lines if line.customer == own.customer]
    better = sum(line.waiting for line in mine if line.level < own.level)
    # Its oldest may have a turn as the longest waiting, in a worse level too.
    worse = _front_level(lineup) > own.level
    return lineup.rank.most + better + worse >= own.room


def _front_level(lineup: Lineup) -> int:
    """The level of its customer's oldest document, if that has waited beyond the patience."""
    fronts = (*lineup.fronts, *lineup.stalled)
    return next((front.level for front in fronts if front.customer == lineup.customer), 0)
