"""The queue position of a document: how many documents will be claimed before it. Pure.

The position assumes that no document arrives, no running document ends, and no time passes. The
k-th turn of a line has the place `virtual_time + (k - 1) * charge`, so one division yields the
number of its turns before a place (`closed_form.py`). Turns are taken one by one
(`turn_by_turn.py`) only while a customer may have a turn as the longest waiting.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from fairturn.explain.snapshot import CountRange, QueueView, WaitingLine
from fairturn.scheduling.flows import Costs, Mode
from fairturn.scheduling.position.closed_form import (
    DocumentsAhead,
    TurnCount,
    count,
    patience_turns_within,
    until_patience_turn,
)
from fairturn.scheduling.position.turn_by_turn import STEPS_MAX, walk


class Cause(StrEnum):
    """Why a position is a range."""

    LIMITS = "limits"  # turns of a customer with a limit depend on when running documents end
    COSTS = "costs"  # the number of turns of a customer depends on the cost of each document
    MANY_TURNS = "many_turns"  # too many turns for the longest waiting to take one by one
    MANY_DOCUMENTS = "many_documents"  # too many to count
    UNFOLDED = "unfolded"  # too many events since the last claim


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The documents ahead of one.

    `before` assumes that no running document ends and every document has its expected cost. If the
    bounds are equal it is exact, whichever documents end. `reached` is False if the customer
    reaches its limit first, so that a running document must end. `turns` are the turns of other
    customers ahead in the same level, by customer; in a `LineSummary`, only of the largest.
    """

    bounds: CountRange
    before: DocumentsAhead
    reached: bool
    turns: Mapping[int, int]
    causes: tuple[Cause, ...]


def position(
    view: QueueView, *, mode: Mode, costs: Costs, steps_max: int = STEPS_MAX
) -> Position | None:
    """Return the position of a waiting document; None while its customer is paused."""
    own = view.own
    if own is None:
        return None
    causes: list[Cause] = []
    costs_matter = costs is not Costs.EQUAL and mode is not Mode.LEVELS
    if costs_matter and view.lines_in_level > 1:
        causes.append(Cause.COSTS)
    if not view.rank.exact or view.uncounted > 0:
        causes.append(Cause.MANY_DOCUMENTS)
    if not view.folded:
        causes.append(Cause.UNFOLDED)
    taken = walk(view, steps_max=steps_max) if view.beyond_patience else count(view)
    if taken is None:
        causes.append(Cause.MANY_TURNS)
        taken = _with_patience_turns(view, count(view))
    if not taken.reached:
        causes.append(Cause.LIMITS)
        free = replace(view, lines=tuple(_unlimited(view, own.customer)))
        taken = _with_patience_turns(free, count(free))._replace(reached=False)
    elif _limits_matter(view):
        causes.append(Cause.LIMITS)
    total = taken.before.total
    bounds = CountRange(total, total)
    if causes:
        least, most = _least(view, own, causes), _most(view, own, causes)
        bounds = CountRange(min(total, least), max(total, most))
    return Position(
        bounds=bounds,
        before=taken.before,
        reached=taken.reached,
        turns=taken.turns,
        causes=() if bounds.exact else tuple(causes),
    )


def _unlimited(view: QueueView, customer: int | None = None) -> list[WaitingLine]:
    """Return the lines without the limit of this customer, or without any limit."""
    return [
        line._replace(capacity=None) if customer in (None, line.customer) else line
        for line in view.lines
    ]


def _limits_matter(view: QueueView) -> bool:
    """Whether another customer reaches its limit before the document, or is at its limit and would
    otherwise have a turn before it."""
    limited = [line for line in view.lines if line.capacity is not None]
    stalled = [head for head in view.stalled if head.customer != view.customer]
    if not limited and not stalled:
        return False
    counted = count(replace(view, lines=tuple(_unlimited(view))))
    if stalled and patience_turns_within(view.number, counted.before.total, 1):
        return True
    wanted = dict(counted.turns)
    for line in limited:
        if line.level < view.level:
            wanted[line.customer] = wanted.get(line.customer, 0) + line.waiting
    overdue = {head.customer for head in view.overdue}
    return any(
        line.capacity is not None
        and line.customer != view.customer
        and wanted.get(line.customer, 0) + (line.customer in overdue) > line.capacity
        for line in limited
    )


def _with_patience_turns(view: QueueView, counted: TurnCount) -> TurnCount:
    """Add the largest possible number of turns for the longest waiting."""
    n = patience_turns_within(view.number, counted.before.total, view.beyond_patience)
    return counted._replace(before=counted.before._replace(longest_waiting=n))


def _least(view: QueueView, own: WaitingLine, causes: list[Cause]) -> int:
    """Return a lower bound that holds whichever documents end and whatever they cost, as far as
    `causes` names these."""
    if Cause.UNFOLDED in causes:
        return 0
    rank = view.rank.least
    overdue = _overdue_level(view) == own.level
    if overdue and rank:
        rank -= 1  # the head may have a turn as the longest waiting, which is not charged
    lines = _unlimited(view, own.customer)
    if Cause.COSTS in causes:
        lines = [line for line in lines if line.level < own.level or line.customer == own.customer]
    least = count(replace(view, lines=tuple(lines), rank=CountRange(rank, rank))).before.total
    if overdue and not view.rank.least:
        least = min(least, until_patience_turn(view.number))
    return least


def _most(view: QueueView, own: WaitingLine, causes: list[Cause]) -> int:
    """Return an upper bound that holds whichever documents end and whatever they cost, as far as
    `causes` names these."""
    if Cause.UNFOLDED in causes or _may_stall(view, own):
        return view.waiting - (own.waiting - view.rank.most)  # all but it and those behind it
    lines = _unlimited(view)
    if Cause.COSTS in causes:
        place = (own.customer, own.level)
        most = sum(line.waiting for line in lines if (line.customer, line.level) != place)
        most += view.rank.most + sum(view.others_by_level.values()) + view.other_lines.waiting
    else:
        all_of_it = replace(view, lines=tuple(lines), rank=CountRange(*[view.rank.most] * 2))
        most = count(all_of_it).before.total
    most += view.uncounted
    return most + patience_turns_within(view.number, most, view.beyond_patience + len(view.stalled))


def _may_stall(view: QueueView, own: WaitingLine) -> bool:
    """Whether the document's customer may reach its limit first. Any waiting document may then be
    claimed before a running one of the customer ends."""
    if own.capacity is None:
        return False
    mine = [line for line in view.lines if line.customer == own.customer]
    better = sum(line.waiting for line in mine if line.level < own.level)
    # Its head may have a turn as the longest waiting, even in a worse level.
    worse = _overdue_level(view) > own.level
    return view.rank.most + better + worse >= own.capacity


def _overdue_level(view: QueueView) -> int:
    """Return the level of the customer's head if that is overdue, otherwise 0."""
    overdue = (*view.overdue, *view.stalled)
    return next((head.level for head in overdue if head.customer == view.customer), 0)
