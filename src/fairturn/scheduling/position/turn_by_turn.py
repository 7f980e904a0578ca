"""Taking turns one by one, as the engine would, as long as some may go to the longest waiting.

With time standing still, each customer has at most one such turn: for the oldest document that it
has now, and only if that has had no ordinary turn before. So turns are taken one by one only up to
the last ordinary turn of such a document in a level. The rest of the level is counted, and every
tenth claim goes to the next of those that stand in worse levels.
"""

from collections.abc import Collection

from fairturn.explain.snapshot import Front, Line, Lineup
from fairturn.scheduling.position.closed_form import Before, Counted, turns_before, until_slot

# Turns that are taken one by one, at most: some 50 ms.
STEPS_MAX = 20_000

Key = tuple[int, int]  # (place, tick)
_AT_THE_END = (1 << 200, 0)


class _GaveUp(Exception):
    """There are too many turns to take."""


class _Reached(Exception):
    """The document has its turn, or its customer came to its limit."""


class _Lane:
    """A line, how many turns it has had, and how many documents are left in it."""

    __slots__ = ("customer", "had", "key", "left", "level", "line")

    def __init__(self, line: Line) -> None:
        self.line = line
        self.level, place, tick, self.customer, self.left, _, _ = line
        self.key = (place, tick)  # of its first turn
        self.had = 0


def walk(lineup: Lineup, *, steps_max: int = STEPS_MAX) -> Counted | None:
    """The documents before one, turns for the longest waiting included; None: too many to say."""
    return None if lineup.crowd is not None else _Walk(lineup, steps_max).run()


class _Walk:
    def __init__(self, lineup: Lineup, steps_max: int) -> None:
        self.customer, self.level = lineup.customer, lineup.level
        self.rank = lineup.rank.least  # own documents that are still before it
        self.steps = steps_max
        self.number = lineup.number
        self.crowds = lineup.crowds
        assert lineup.own is not None
        self.own = _Lane(lineup.own)
        self.lines: dict[int, list[Line]] = {level: [] for level in range(1, self.level + 1)}
        for line in lineup.lines:
            self.lines[line[0]].append(line)
        self.lanes: dict[int, dict[int, _Lane]] = {}  # of the levels where they are needed
        self.taken: set[tuple[int, int]] = set()  # (level, customer) that had a slot
        self.room = {line.customer: line.room for line in lineup.lines if line.room is not None}
        self.fronts = iter(lineup.fronts)
        self.at_front = {front.customer: front.level for front in lineup.fronts}  # yet to be served
        self.better = self.others = self.longest = self.mine = 0
        self.turns: dict[int, int] = {}
        self.reached = True

    def run(self) -> Counted | None:
        try:
            for level in range(1, self.level):
                self._better_level(level)
            self._own_level()
        except _GaveUp:
            return None
        except _Reached:
            pass
        before = Before(self.better, self.others, self.longest, self.mine)
        return Counted(before, self.turns, self.reached)

    # ── Level by level ───────────────────────────────────────────────────────────────────────────

    def _lanes(self, level: int) -> dict[int, _Lane]:
        """The lanes of a level, made when it is that level's turn."""
        lanes = self.lanes[level] = {line.customer: _Lane(line) for line in self.lines[level]}
        if level == self.level:
            lanes[self.customer] = self.own
        for at, customer in self.taken:
            if at == level:
                lanes[customer].left -= 1
        return lanes

    def _better_level(self, level: int) -> None:
        lanes = self._lanes(level)
        end = self._order_matters_up_to(level, lanes.values())
        if self.customer in lanes and self._is_at_front():
            end = _AT_THE_END  # it may have its turn here; then it matters what came before
        if end is not None:
            if self.crowds.get(level):
                raise _GaveUp  # in which order they come is not known
            self._step(lanes.values(), end)
        rest = self.crowds.get(level, 0)
        for lane in lanes.values():
            if lane.customer in self.room or lane.customer == self.customer:
                n = self._open(lane)
                self._take(lane, n)
                self._pass(n, lane)
            else:
                rest += lane.left
        self._pass(rest, None, level)

    def _own_level(self) -> None:
        target = self._target()
        if self.room or any(self.at_front.get(line[3]) for line in self.lines[self.level]):
            lanes = self._lanes(self.level).values()
            near = [lane for lane in lanes if lane.key < target]
            end = self._order_matters_up_to(self.level, near)
            if self._is_at_front() and self._turns_before(near, target) <= self.steps:
                end = target  # it may have its turn any time, and then it matters whose came before
            if end is not None:
                self._step(lanes, min(end, target))
            self._count_lanes(lanes)
        else:
            self._count_lines()
        n = min(self.rank, self._open(self.own))
        self._take(self.own, n)
        self._pass(n, self.own)
        self.rank -= n
        self._slot()
        self._own_turn()

    def _turns_before(self, lanes: Collection[_Lane], key: Key) -> int:
        return sum(min(lane.left, turns_before(lane.line, *key)) for lane in lanes)

    def _count_lanes(self, lanes: Collection[_Lane]) -> None:
        """The turns of others that are left before the document's own."""
        place, tick = self._target()
        for lane in lanes:
            n = min(lane.left, turns_before(lane.line, place, tick) - lane.had)
            if n > 0 and lane is not self.own:
                if lane.customer in self.room:
                    n = min(n, self.room[lane.customer])
                    self.room[lane.customer] -= n
                self._pass(n, lane)

    def _count_lines(self) -> None:
        """The same, where nobody has a limit and nobody in the level may be the longest waiting."""
        place, tick = self._target()
        served = {customer for level, customer in self.taken if level == self.level}
        for line in self.lines[self.level]:
            customer = line.customer
            n = min(line.waiting - (customer in served), turns_before(line, place, tick))
            if n > 0 and customer != self.customer:
                self.turns[customer] = n
        self._pass(sum(self.turns.values()), None, self.level)

    def _target(self) -> Key:
        """The place of the document's own turn."""
        line = self.own.line
        return line.virtual_time + (self.own.had + self.rank) * line.charge, line.tick

    def _is_at_front(self) -> bool:
        """Whether the document itself may have its turn as the longest waiting."""
        return self.rank == 0 and self.at_front.get(self.customer) == self.level

    def _order_matters_up_to(self, level: int, lanes: Collection[_Lane]) -> Key | None:
        """The last first turn of a line whose first document may have its turn as the longest
        waiting; the very end, if one at the front elsewhere can come to its limit here."""
        end: Key | None = None
        for lane in lanes:
            at = self.at_front.get(lane.customer)
            if at is None:
                continue
            if at == level:
                end = lane.key if end is None or lane.key > end else end
            elif self.room.get(lane.customer, lane.left + 1) <= lane.left:
                return _AT_THE_END
        return end

    # ── One by one ───────────────────────────────────────────────────────────────────────────────

    def _step(self, lanes: Collection[_Lane], end: Key) -> None:
        """Take all turns up to this place, and that one."""
        place, tick = end[0], end[1] + 1
        by_tick = {}
        turns: list[Key] = []
        for lane in lanes:
            line = lane.line
            n = min(self._open(lane), turns_before(line, place, tick))
            if n <= 0:
                continue
            self.steps -= n
            if self.steps < 0:
                raise _GaveUp
            by_tick[line.tick] = lane
            turns.append(lane.key)
            turns += [(line.virtual_time + k * line.charge, line.tick) for k in range(1, n)]
        turns.sort()
        for _, tick in turns:
            lane = by_tick[tick]
            if lane.left > 0 and (not self.room or self._open(lane) > 0):
                self._turn(lane)

    def _turn(self, lane: _Lane) -> None:
        slot = not until_slot(self.number)
        if slot:
            self._slot()
        if lane is self.own and self.rank == 0:
            self._own_turn()
        if slot and self._open(lane) <= 0:
            return  # the slot took its last document, or the last room of its customer
        self.rank -= lane is self.own
        self._take(lane, 1)
        self._count(1, lane)

    def _own_turn(self) -> None:
        self.reached = self._open(self.own) > 0
        raise _Reached

    def _open(self, lane: _Lane) -> int:
        """How many documents of the line may still be claimed."""
        room = self.room.get(lane.customer)
        return lane.left if room is None else min(lane.left, room)

    def _take(self, lane: _Lane, n: int) -> None:
        """Ordinary turns of a line."""
        if n <= 0:
            return
        customer = lane.customer
        lane.had += n
        lane.left -= n
        if customer in self.room:
            self.room[customer] -= n
        if self.at_front.get(customer) == lane.level:
            del self.at_front[customer]  # the first of them was the oldest

    # ── Counting claims ──────────────────────────────────────────────────────────────────────────

    def _pass(self, ordinary: int, lane: _Lane | None, level: int = 0) -> None:
        """Count ordinary claims, and in between those for the longest waiting."""
        while ordinary > 0:
            n = min(ordinary, until_slot(self.number)) if self.at_front else ordinary
            self._count(n, lane, level)
            ordinary -= n
            if ordinary and self.at_front:
                self._slot()

    def _count(self, n: int, lane: _Lane | None, level: int = 0) -> None:
        """Count ordinary claims of a line; without one, they are of others in this level."""
        self.number += n
        if lane is None:
            self.better += n if level < self.level else 0
            self.others += n if level == self.level else 0
        elif lane.customer == self.customer:
            self.mine += n
        elif lane.level < self.level:
            self.better += n
        elif n:
            self.others += n
            self.turns[lane.customer] = self.turns.get(lane.customer, 0) + n

    def _slot(self) -> None:
        """If the next claim is for the longest waiting, and somebody waits for it: take it."""
        if until_slot(self.number):
            return
        front = self._next_front()
        if front is None:
            return
        customer, level = front.customer, front.level
        if customer == self.customer and level == self.level:
            if self.rank == 0:
                raise _Reached
            self.rank -= 1
        del self.at_front[customer]
        self.number += 1
        self.longest += 1
        lane = self.lanes.get(level, {}).get(customer)
        if customer == self.customer and level == self.level:
            self.own.left -= 1
        elif lane is not None:
            lane.left -= 1
        else:
            self.taken.add((level, customer))
        if customer in self.room:
            self.room[customer] -= 1

    def _next_front(self) -> Front | None:
        """The first that has had no turn yet, and whose customer is not at its limit."""
        for front in self.fronts:
            if front.customer in self.at_front and self.room.get(front.customer, 1) > 0:
                return front
        self.at_front.clear()
        return None
