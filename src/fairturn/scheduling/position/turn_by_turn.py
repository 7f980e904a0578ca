"""The documents ahead of one, counted turn by turn where a turn may go to the longest waiting.

Each customer has at most one such turn: for its present head, and only if the head had no ordinary
turn before. So turns are taken one by one only up to the last ordinary turn of an overdue head in a
level. The rest of the level is counted, and every tenth claim goes to the next overdue head in a
worse level.
"""

from collections import defaultdict
from collections.abc import Collection

from fairturn.explain.snapshot import OverdueHead, QueueView, WaitingLine
from fairturn.scheduling.position.closed_form import (
    DocumentsAhead,
    TurnCount,
    turns_before,
    until_patience_turn,
)

# The most turns to take one by one: about 50 ms.
STEPS_MAX = 20_000

Key = tuple[int, int]  # (place, tick)
_END = (1 << 200, 0)


class _TooManyTurns(Exception):
    """More than `steps_max` turns, or turns whose order is not in the view."""


class _WalkEnd(Exception):
    """The document has its turn, or its customer reached its limit."""


class _LineCursor:
    """A line, the turns that it has had, and the documents left in it."""

    __slots__ = ("customer", "had", "key", "left", "level", "line")

    def __init__(self, line: WaitingLine) -> None:
        self.line = line
        self.level, place, tick, self.customer, self.left, _, _ = line
        self.key = (place, tick)  # of its first turn
        self.had = 0


def walk(view: QueueView, *, steps_max: int = STEPS_MAX) -> TurnCount | None:
    """Count the documents ahead, with turns for the longest waiting; None if there are too many."""
    many = view.other_lines.lines or view.other_lines.overdue
    return None if many else _Walk(view, steps_max).run()


class _Walk:
    """One count. It has more than 15 attributes because each turn, ordinary or for the longest
    waiting, changes the same cursors, capacities and counters."""

    def __init__(self, view: QueueView, steps_max: int) -> None:
        self.customer, self.level = view.customer, view.level
        self.rank = view.rank.least  # documents of its own line that are still ahead
        self.steps = steps_max
        self.number = view.number
        self.others_by_level = view.others_by_level
        self.cursors: dict[int, dict[int, _LineCursor]] = defaultdict(dict)  # by level, customer
        for line in view.lines:
            self.cursors[line.level][line.customer] = _LineCursor(line)
        self.own = self.cursors[self.level][self.customer]
        self.capacity = {
            line.customer: line.capacity for line in view.lines if line.capacity is not None
        }
        self.overdue = iter(view.overdue)
        self.overdue_levels = {head.customer: head.level for head in view.overdue}  # not claimed
        self.better = self.others = self.longest = self.mine = 0
        self.turns: dict[int, int] = {}
        self.reached = True

    def run(self) -> TurnCount | None:
        try:
            for level in range(1, self.level):
                self._better_level(level)
            self._own_level()
        except _TooManyTurns:
            return None
        except _WalkEnd:
            pass
        before = DocumentsAhead(self.better, self.others, self.longest, self.mine)
        return TurnCount(before, self.turns, self.reached)

    # ── Level by level ───────────────────────────────────────────────────────────────────────────

    def _better_level(self, level: int) -> None:
        cursors = self.cursors[level]
        end = self._walk_end(level, cursors.values())
        if self.customer in cursors and self._is_overdue_head():
            end = _END  # the document may have its turn here: the parts ahead must be exact
        if end is not None:
            if self.others_by_level.get(level):
                raise _TooManyTurns  # the view has only their number, not their order
            self._step(cursors.values(), end)
        rest = self.others_by_level.get(level, 0)
        for cursor in cursors.values():
            if cursor.customer in self.capacity or cursor.customer == self.customer:
                n = self._claimable(cursor)
                self._take(cursor, n)
                self._claim(n, cursor)
            else:
                rest += cursor.left
        self._claim(rest, None)

    def _own_level(self) -> None:
        target = self._target()
        cursors = self.cursors[self.level].values()
        near = [cursor for cursor in cursors if cursor.key < target]
        end = self._walk_end(self.level, near)
        if self._is_overdue_head() and self._turns_before(near, target) <= self.steps:
            end = target  # the document may have its turn at any point: count parts exactly
        if end is not None:
            self._step(cursors, min(end, target))
        self._count_others(cursors)
        n = min(self.rank, self._claimable(self.own))
        self._take(self.own, n)
        self._claim(n, self.own)
        self.rank -= n
        self._patience_turn()
        self._own_turn()

    def _turns_before(self, cursors: Collection[_LineCursor], key: Key) -> int:
        return sum(min(cursor.left, turns_before(cursor.line, *key)) for cursor in cursors)

    def _count_others(self, cursors: Collection[_LineCursor]) -> None:
        """Count the remaining turns of other customers before the document's own."""
        place, tick = self._target()
        for cursor in cursors:
            n = min(cursor.left, turns_before(cursor.line, place, tick) - cursor.had)
            if n > 0 and cursor is not self.own:
                if cursor.customer in self.capacity:
                    n = min(n, self.capacity[cursor.customer])
                    self.capacity[cursor.customer] -= n
                self._claim(n, cursor)

    def _target(self) -> Key:
        """Return the place of the document's own turn."""
        line = self.own.line
        return line.virtual_time + (self.own.had + self.rank) * line.charge, line.tick

    def _is_overdue_head(self) -> bool:
        """Whether the document itself may have a turn as the longest waiting."""
        return self.rank == 0 and self.overdue_levels.get(self.customer) == self.level

    def _walk_end(self, level: int, cursors: Collection[_LineCursor]) -> Key | None:
        """Return the place up to which turns must be taken one by one: the last first turn of a
        line with an overdue head; the end of the level, if a customer whose overdue head is in
        another level can reach its limit here."""
        end: Key | None = None
        for cursor in cursors:
            at = self.overdue_levels.get(cursor.customer)
            if at is None:
                continue
            if at == level:
                end = cursor.key if end is None or cursor.key > end else end
            elif self.capacity.get(cursor.customer, cursor.left + 1) <= cursor.left:
                return _END
        return end

    # ── One by one ───────────────────────────────────────────────────────────────────────────────

    def _step(self, cursors: Collection[_LineCursor], end: Key) -> None:
        """Take all turns up to and including this place."""
        place, tick = end[0], end[1] + 1
        by_tick = {}
        turns: list[Key] = []
        for cursor in cursors:
            line = cursor.line
            n = min(self._claimable(cursor), turns_before(line, place, tick))
            if n <= 0:
                continue
            self.steps -= n
            if self.steps < 0:
                raise _TooManyTurns
            by_tick[line.tick] = cursor
            turns.append(cursor.key)
            turns += [(line.virtual_time + k * line.charge, line.tick) for k in range(1, n)]
        turns.sort()
        for _, tick in turns:
            cursor = by_tick[tick]
            if cursor.left > 0 and (not self.capacity or self._claimable(cursor) > 0):
                self._turn(cursor)

    def _turn(self, cursor: _LineCursor) -> None:
        patience = not until_patience_turn(self.number)
        if patience:
            self._patience_turn()
        if cursor is self.own and self.rank == 0:
            self._own_turn()
        if patience and self._claimable(cursor) <= 0:
            return  # that turn took the line's last document or the customer's last capacity
        self.rank -= cursor is self.own
        self._take(cursor, 1)
        self._count(1, cursor)

    def _own_turn(self) -> None:
        self.reached = self._claimable(self.own) > 0
        raise _WalkEnd

    def _claimable(self, cursor: _LineCursor) -> int:
        """Return how many documents of the line may still be claimed."""
        capacity = self.capacity.get(cursor.customer)
        return cursor.left if capacity is None else min(cursor.left, capacity)

    def _take(self, cursor: _LineCursor, n: int) -> None:
        """Take ordinary turns of a line."""
        if n <= 0:
            return
        customer = cursor.customer
        cursor.had += n
        cursor.left -= n
        if customer in self.capacity:
            self.capacity[customer] -= n
        if self.overdue_levels.get(customer) == cursor.level:
            del self.overdue_levels[customer]  # the first turn claimed the overdue head

    # ── Counting claims ──────────────────────────────────────────────────────────────────────────

    def _claim(self, ordinary: int, cursor: _LineCursor | None) -> None:
        """Count ordinary claims, and the turns for the longest waiting between them. Without a
        cursor they are of other customers in a better level."""
        while ordinary > 0:
            n = min(ordinary, until_patience_turn(self.number)) if self.overdue_levels else ordinary
            self._count(n, cursor)
            ordinary -= n
            if ordinary and self.overdue_levels:
                self._patience_turn()

    def _count(self, n: int, cursor: _LineCursor | None) -> None:
        """Count ordinary claims without a turn for the longest waiting between them."""
        self.number += n
        if cursor is not None and cursor.customer == self.customer:
            self.mine += n
        elif cursor is None or cursor.level < self.level:
            self.better += n
        elif n:
            self.others += n
            self.turns[cursor.customer] = self.turns.get(cursor.customer, 0) + n

    def _patience_turn(self) -> None:
        """Take the next claim if it goes to the customer that has waited longest."""
        if until_patience_turn(self.number):
            return
        head = self._next_overdue()
        if head is None:
            return
        customer, level = head.customer, head.level
        if customer == self.customer and level == self.level:
            if self.rank == 0:
                raise _WalkEnd
            self.rank -= 1
        del self.overdue_levels[customer]
        self.number += 1
        self.longest += 1
        if level <= self.level:
            self.cursors[level][customer].left -= 1
        if customer in self.capacity:
            self.capacity[customer] -= 1

    def _next_overdue(self) -> OverdueHead | None:
        """Return the next head without a turn so far whose customer is not at its limit."""
        for head in self.overdue:
            if head.customer in self.overdue_levels and self.capacity.get(head.customer, 1) > 0:
                return head
        self.overdue_levels.clear()
        return None
