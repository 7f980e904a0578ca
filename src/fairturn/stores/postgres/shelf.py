"""What `turns.py` reads of the database: flows in the order of their turns, documents in theirs.

A claim asks for all that it will probably need in one round trip, and what is missing is read when
it is needed. What a shelf has read stays true: what happens meanwhile reaches it through the events
that every claim folds in, and through the flows that other claims say that they have changed.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

from fairturn.flows import Flow, Mode, Standing
from fairturn.priority import LEVELS
from fairturn.stores.postgres.asking import (
    AHEAD_MAX,
    COST,
    FLOW,
    HEADS,
    LOAD,
    NEXT,
    ORDER,
    RETURNED,
    Asked,
    Page,
    grouped,
    paged,
)
from fairturn.stores.postgres.rows import NO_ORDER, columns
from fairturn.stores.postgres.session import BEGIN, PLAN, Answer, Overtaken, Session
from fairturn.stores.values import Row

PAGE_MIN = 4
_PAGE_NEXT_MIN = 64  # of the pages after the first, where most customers are known already
_AHEAD_LARGE_MAX = 512  # rows of one flow, for a large claim
_CLAIMS_AHEAD = 3  # of which a flow's documents are read, as far as one can tell
_ROWS_AHEAD_MAX = 8_000  # of all flows; beyond it, only what is needed next is read
_HEADS_MIN = 16
_LOWEST_INT = -(1 << 63)
_BY_CUSTOMER = itemgetter(0)


@dataclass(slots=True, eq=False)
class StoredFlow(Flow):
    """A flow, and what else its row says; and its next documents, as far as they were read."""

    taken: int = 0
    claimed_to: int = NO_ORDER  # nothing waits here that was not returned
    since: int | None = None  # head_since, head_bound and held, as they are in the database
    bound: int | None = None
    held: bool = False
    stored: bool = False
    upcoming: list[Row] | None = None  # the next one last
    ahead: int = 1  # how many were read the last time


class PostgresShelf:
    """The database as the last claim left it, read ahead a little."""

    def __init__(self, mode: Mode) -> None:
        self.mode = mode
        self.session: Session  # that of the transaction under way
        self.page = PAGE_MIN
        self.picked: list[Row] = []  # the rows of what was picked, in order
        self.names: dict[int, str] = {}  # of the customers that were loaded
        self.wants_arrivals = True
        self.wants_newcomers = True  # whether customers that are not loaded will probably be needed
        self.front: tuple[int, int, int, int] | None = None  # nobody comes before it
        self.disturbed: set[tuple[int, int]] = set()  # flows whose lines changed not only at ends
        self.reserve = 1  # read on when so many of a flow's documents are left
        self._ahead = 0  # how many rows were read and not used yet
        self._position = (0, 0, 0)  # up to here the turns were read
        self._turns: list[tuple[int, int, int, int]] = []  # read, the next one last
        self._turns_left = True  # whether there are more in the database
        self._repeated = False  # whether most of the last page was of customers that are loaded
        self.weights: list[int] = []  # of the active flows of each level, those not loaded too
        self._heads: list[tuple[int, int, int]] = []
        self._heads_left = True
        self._head = (_LOWEST_INT, 0)
        self._standings: dict[int, Standing] = {}
        self._coming: Page | None = None  # a page that was asked for, for the next claim
        self._loaded: dict[int, list[Row]] = {}  # of customers that will be loaded soon
        self._made: dict[int, Standing] = {}  # customers that will be needed soon, already made
        self._arrived: dict[tuple[int, int], list[Row]] = {}
        self._next: dict[tuple[int, int], list[Row]] = {}
        self._low: set[StoredFlow] = set()  # flows whose next documents are to be read,
        self._reading: set[StoredFlow] = set()  # and those of which they were asked for
        self._later: set[StoredFlow] = set()  # flows whose turns come after some not even read

    # ── In one round trip ────────────────────────────────────────────────────────────────────────

    def keep_ready(self, reserve: int, *, look: bool) -> None:
        """So many of a flow's documents will probably be needed: read on where there are less, if
        it is worth a look at all flows."""
        if look and reserve > self.reserve:
            for standing in self._standings.values():
                for flow in standing.flows.values():
                    assert isinstance(flow, StoredFlow)
                    known = len(flow.upcoming or ())
                    if flow.active and known <= reserve and known < flow.waiting:
                        self._low.add(flow)
        self.reserve = reserve

    def read_ahead(self, session: Session) -> bool:
        """Read on where documents are needed, in a transaction that begins with it: whether there
        was any need. Whatever others claim meanwhile is taken off again, as all that they claim."""
        wanted = self.wanted()
        if not wanted:
            return False
        with session.together():
            session.ask(BEGIN)
            session.ask(PLAN)
            more = session.ask(NEXT, wanted)
        self._take_more(more)
        return True

    def page_values(self) -> dict[str, int] | None:
        if not self._turns_left or len(self._turns) >= self.page:
            return None
        if self._repeated and self._knows_all():
            self._turns_left = False  # for ever: who becomes active from now on is told of
            return None
        # Where one page was not enough, strangers go on coming: then there is one more ahead.
        first = self._position == (0, 0, 0)
        return self._page_from_here(self.page if first else max(2 * self.page, _PAGE_NEXT_MIN))

    def page_values_later(self) -> dict[str, int] | None:
        if (
            not self._turns_left
            or self._position == (0, 0, 0)
            or len(self._turns) >= 2 * self.page
            or (self._repeated and self._knows_all())
        ):
            return None
        return self._page_from_here(max(self.page, _PAGE_NEXT_MIN))

    def _page_from_here(self, size: int) -> dict[str, int]:
        level, place, tick = self._position
        return {"level": level, "place": place, "tick": tick, "size": size}

    def expect_page(self, page: Page) -> None:
        self._coming = page

    def make_ahead(self) -> None:
        """If the page is there that was asked for, make the customers that it is about."""
        page = self._coming
        if page is None or not page.is_there:
            return
        self._coming = None
        self._take_page(page)
        for customer in list(self._loaded):
            self._made[customer] = self._make(customer)

    def heads_values(self) -> tuple[int, int, int] | None:
        if self._head[0] != _LOWEST_INT or not self._heads_left:
            return None
        return (*self._head, max(_HEADS_MIN, self.page))

    def wanted(self) -> list[list[Any]]:
        low, self._low = self._low, set()
        if self._turns_left:
            later = {flow for flow in low if self._comes_later(flow)}
            low -= later
            self._later |= later
        else:
            low |= self._later
            self._later.clear()
        self._reading, rows = set(), []
        room = max(1, _ROWS_AHEAD_MAX - self._ahead)
        for flow in low:
            if room > 0:
                rows.append(self._asked_of(flow, _unknown_from(flow)))
                self._reading.add(flow)
                room -= flow.ahead
            else:
                self._low.add(flow)
        return columns(rows)

    def _asked_of(self, flow: StoredFlow, head: int, *, ran_dry: bool = False) -> Row:
        """What a flow's documents are asked for with, from this order on."""
        flow.ahead = self._more(flow, ran_dry=ran_dry)
        return (flow.customer, flow.level, head, max(flow.claimed_to, head - 1), flow.ahead)

    def _comes_later(self, flow: StoredFlow) -> bool:
        """Whether there are turns before its next one that were not even read. If it comes sooner
        than one thinks, its documents are read then."""
        place = flow.head_order or 0 if self.mode is Mode.LEVELS else flow.virtual_time
        return self._turns_left and (flow.level, place, flow.tick) > self._position

    def receive(self, session: Session, asked: Asked, standings: dict[int, Standing]) -> None:
        """Take in what was asked for."""
        self.session = session
        self._standings = standings
        if asked.load_recorded is not None:
            self.take_loaded(asked.load_recorded)
        if asked.arrived is not None:
            self._arrived = grouped(asked.arrived.fetchall())
        self.wants_arrivals = False
        if asked.page is not None:
            self._take_page(asked.page)
        if asked.heads is not None:
            self._take_heads(asked.heads.fetchall(), max(_HEADS_MIN, self.page))
        if asked.more is not None:
            self._take_more(asked.more)
        if asked.front is not None:
            self._seat(paged(asked.front.fetchall())[1])

    def _take_page(self, page: Page) -> None:
        self.take_loaded(page.load)
        turns, documents = paged(page.next.fetchall())
        for flow, rows in documents.items():
            if flow[0] not in self._standings and flow[0] not in self._made:
                self._next[flow] = rows
        if turns:
            self._position = turns[-1][:3]
        self._turns_left = len(turns) == page.size
        self._repeated = 2 * sum(turn[3] in self._standings for turn in turns) > len(turns)
        self._turns[:0] = turns[::-1]

    def _take_more(self, more: Answer) -> None:
        read = grouped(more.fetchall())
        for flow in self._reading:
            self._extend(flow, read.get((flow.customer, flow.level), []))

    def take_loaded(self, answer: Answer) -> None:
        """What is needed to load customers."""
        for customer, rows in groupby(answer.fetchall(), _BY_CUSTOMER):
            if customer not in self._standings and customer not in self._made:
                self._loaded[customer] = list(rows)

    def _knows_all(self) -> bool:
        """Whether every flow that is active is loaded: then their weights add up."""
        loaded = [0] * len(self.weights)
        for standing in self._standings.values():
            for flow in standing.flows.values():
                if flow.active:
                    loaded[flow.level] += standing.weight
        return loaded == self.weights

    def _take_heads(self, page: list[Row], size: int) -> None:
        self._heads = [(row[0], row[1], row[2]) for row in reversed(page)]
        self._heads_left = len(page) == size
        if page:
            self._head = (page[-1][0], page[-1][2])

    def _put(self, flow: StoredFlow, rows: list[Row]) -> None:
        """These are the flow's next documents."""
        self._ahead += len(rows) - len(flow.upcoming or ())
        flow.upcoming = rows[::-1]

    def _extend(self, flow: StoredFlow, rows: list[Row]) -> None:
        """These come after what is known of the flow. If nothing is, because its line has changed
        meanwhile, they are no more than a guess, which is checked before it is used."""
        self._ahead += len(rows)
        flow.upcoming = [*rows[::-1], *(flow.upcoming or ())]

    def seat_arrived(self) -> None:
        """Give the documents that arrived to their flows, where these had none before."""
        self.wants_arrivals = True  # there were some, so there may be more the next time
        self._seat(self._arrived)
        self._arrived = {}

    def _seat(self, read: dict[tuple[int, int], list[Row]]) -> None:
        for (customer, level), rows in read.items():
            standing = self._standings.get(customer)
            flow = standing.flows.get(level) if standing else None
            if not isinstance(flow, StoredFlow) or flow.upcoming:
                continue
            if rows and flow.head_order == rows[0][ORDER] and self._ahead < _ROWS_AHEAD_MAX:
                self._put(flow, rows)

    def _more(self, flow: StoredFlow, *, ran_dry: bool) -> int:
        """How many of its documents to read: for some claims as they are as a rule. More would be
        read by everybody and claimed by somebody else, and handlers would wait for it. One that
        ran dry amid a claim gives more than others: twice as many, and so from then on."""
        if self._ahead >= _ROWS_AHEAD_MAX:
            return 2
        more = 2 * max(flow.ahead, self.reserve)
        if not ran_dry:
            more = max(flow.ahead, min(more, _CLAIMS_AHEAD * self.reserve))
        return min(more, max(AHEAD_MAX, min(self.page, _AHEAD_LARGE_MAX)))

    def expect_told(self, customers: set[int]) -> None:
        """Read these customers, of whom something was recorded. If one of them was not loaded, the
        next time probably one is not, too."""
        self.wants_newcomers = not customers <= self._standings.keys()
        self.expect(customers)

    def expect(self, customers: Iterable[int]) -> None:
        """Read these customers together, unless they are known."""
        loaded = self._loaded
        known = (self._standings, self._made, loaded)
        missing = [c for c in customers if not any(c in some for some in known)]
        if missing:
            rows = self.session.fetch(LOAD, (missing,))
            loaded.update((c, list(own)) for c, own in groupby(rows, _BY_CUSTOMER))

    # ── Flows ────────────────────────────────────────────────────────────────────────────────────

    def standing(self, customer: int) -> Standing:
        return self._made.pop(customer, None) or self._make(customer)

    def _make(self, customer: int) -> Standing:
        rows = self._loaded.pop(customer, None)
        if rows is None:
            rows = self.session.fetch(LOAD, ([customer],))
        standing = Standing(customer)
        _, name, weight, limit, paused, costs = rows[0][:6]
        if name is not None:
            self.names[customer] = name
        if weight is not None:
            standing.weight, standing.limit, standing.paused = weight, limit, paused
            standing.recent_costs = tuple(costs)
        for row in rows:
            level = row[FLOW][0]
            if level is None:
                continue
            flow = standing.flows[level] = StoredFlow(customer, level)
            self._set(flow, row[FLOW])
            upcoming = self._next.pop((customer, level), None)
            if upcoming is not None:
                self._put(flow, upcoming)
        _gather(standing)
        return standing

    def _set(self, flow: StoredFlow, row: Row) -> None:
        """Let a flow be as its row says."""
        _, place, flow.tick, flow.waiting, flow.running, flow.taken, *rest = row
        flow.claimed_to, flow.head_order, flow.since, flow.bound, flow.held = rest
        flow.virtual_time = 0 if self.mode is Mode.LEVELS else place
        flow.active = flow.waiting > 0 and not flow.held
        flow.stored = True

    def change(self, standing: Standing, rows: Iterable[Row]) -> None:
        """Another claim has changed flows of a customer that is loaded: rows of `MISSED`."""
        for _, disturbed, *row in rows:
            flow = standing.flows.get(row[0])
            if flow is None:
                flow = standing.flows[row[0]] = StoredFlow(standing.customer, row[0])
            assert isinstance(flow, StoredFlow)
            self._set(flow, tuple(row))
            upcoming, head = flow.upcoming or [], flow.head_order
            before = len(upcoming)
            while upcoming and (head is None or upcoming[-1][ORDER] < head):
                upcoming.pop()
            if disturbed or (upcoming and upcoming[-1][ORDER] != head):
                upcoming.clear()
            self._ahead += len(upcoming) - before
            if len(upcoming) <= self.reserve and len(upcoming) < flow.waiting:
                self._low.add(flow)
        _gather(standing)

    def drop(self, customer: int) -> None:
        """What was read of a customer that is not loaded yet is no longer true."""
        self._loaded.pop(customer, None)
        made = self._made.pop(customer, None)
        for flow in made.flows.values() if made else ():
            assert isinstance(flow, StoredFlow)
            self._put(flow, [])
        for level in range(1, LEVELS + 1):
            self._next.pop((customer, level), None)

    def flows(self, customer: int) -> Iterable[Flow]:
        """Nothing: every customer is loaded with all its flows."""
        return ()

    def flow(self, customer: int, level: int) -> StoredFlow:
        """Only claims make flows, so that this one is new."""
        return StoredFlow(customer, level)

    # Whoever is not loaded stays where it is in the database: what changes it loads it. So a stream
    # goes on from claim to claim, and never begins again.

    def turns(self) -> Iterator[tuple[int, int, int, int]]:
        while True:
            while self._turns:
                yield self._turns.pop()
            if self._coming is not None:
                self.session.catch_up()
                assert self._coming.is_there
                self.make_ahead()
                continue
            values = self.page_values()
            if values is None:
                return
            with self.session.together():
                page = Page(self.session.ask, values)
            self._take_page(page)

    def heads(self) -> Iterator[tuple[int, int, int]]:
        while True:
            while self._heads:
                yield self._heads.pop()
            if not self._heads_left:
                return
            size = max(_HEADS_MIN, self.page)
            self._take_heads(self.session.fetch(HEADS, (*self._head, size)), size)

    # ── Documents ────────────────────────────────────────────────────────────────────────────────

    def order_after(self, flow: Flow, order: int) -> int | None:
        assert isinstance(flow, StoredFlow)
        upcoming = flow.upcoming
        if not upcoming or upcoming[-1][ORDER] != order:
            upcoming = self._read(flow, order)
        row = upcoming.pop()
        self._ahead -= 1
        self.picked.append(row)
        flow.taken += 1
        if not row[RETURNED]:
            flow.claimed_to = order
        if flow.waiting == 0:
            self._low.discard(flow)
            self._later.discard(flow)
            return None
        left = len(upcoming)
        if left <= self.reserve and left < flow.waiting:
            self._low.add(flow)
            if not left:
                upcoming = self._read(flow, order + 1)
        return upcoming[-1][ORDER]  # type: ignore[no-any-return]

    def cost(self, flow: Flow) -> int | None:
        assert isinstance(flow, StoredFlow)
        upcoming, order = flow.upcoming, flow.head_order
        assert order is not None
        if not upcoming or upcoming[-1][ORDER] != order:
            upcoming = self._read(flow, order)
        return upcoming[-1][COST]  # type: ignore[no-any-return]

    def _read(self, flow: StoredFlow, head: int) -> list[Row]:
        """Read the next documents of a flow, from this order on; and with them those of others of
        its level that will have their turns, too."""
        rows = [self._asked_of(flow, head, ran_dry=True)]
        others = []
        for standing in self._standings.values():
            other = standing.flows.get(flow.level)
            if isinstance(other, StoredFlow) and _lacks_documents(other) and other is not flow:
                others.append(other)
                rows.append(self._asked_of(other, _unknown_from(other)))
                if len(rows) >= max(self.page, _PAGE_NEXT_MIN):
                    break
        found = grouped(self.session.fetch(NEXT, columns(rows)))
        documents = found.get((flow.customer, flow.level))
        if documents is None:
            raise Overtaken("a document that was to be claimed does not wait any more")
        self._put(flow, documents)
        for other in others:
            self._extend(other, found.get((other.customer, other.level), []))
        assert flow.upcoming
        return flow.upcoming

    def forget_line(self, customer: int, level: int) -> None:
        """Another document than those after all others began, or ceased, to wait in a flow."""
        self.disturbed.add((customer, level))
        self._arrived.pop((customer, level), None)
        self._next.pop((customer, level), None)
        standing = self._standings.get(customer) or self._made.get(customer)
        flow = standing.flows.get(level) if standing else None
        if isinstance(flow, StoredFlow) and flow.upcoming:
            self._put(flow, [])

    def arrive(self, flow: StoredFlow, order: int, n: int) -> None:
        """So many documents arrived, of which this is the first: what was not returned comes from
        it on. They come last, as a rule. But their transaction may have been overtaken by a
        document that became due, and was given a later order."""
        if flow.claimed_to == NO_ORDER:
            flow.claimed_to = order - 1
        if flow.waiting != n:  # it had some before, and they may come in between
            self._arrived.pop((flow.customer, flow.level), None)
        known = flow.upcoming
        if known and order < known[0][ORDER] and all(row[ORDER] != order for row in known):
            self.forget_line(flow.customer, flow.level)


def _gather(standing: Standing) -> None:
    """What a customer's flows say together."""
    running = 0
    head: int | None = None
    for flow in standing.flows.values():
        running += flow.running
        order = flow.head_order
        if order is not None and (head is None or order < head):
            assert isinstance(flow, StoredFlow)
            head, standing.head_since = order, flow.since or 0
    standing.running, standing.head_order = running, head


def _unknown_from(flow: StoredFlow) -> int:
    """The order from which on its documents are not known: after the last one that is, or the
    first one."""
    return flow.upcoming[0][ORDER] + 1 if flow.upcoming else flow.head_order or 0


def _lacks_documents(flow: StoredFlow) -> bool:
    """Whether its next turn, and the order after that, are not known."""
    known = len(flow.upcoming or ())
    return flow.active and known <= 1 and known < flow.waiting and flow.head_order is not None
