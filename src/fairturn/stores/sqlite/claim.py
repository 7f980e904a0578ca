"""Claiming: fold in what happened, let `turns.py` decide, write the picks back set-wise."""

import json

import apsw

from fairturn.clock import SECOND_US, Uptime
from fairturn.model import Claim
from fairturn.priority import LEVELS
from fairturn.scheduling.flows import (
    Changed,
    FlowMismatch,
    Left,
    Mode,
    Pick,
    Purged,
    Recorded,
    Standing,
)
from fairturn.scheduling.turns import Turns
from fairturn.stores.events import with_counts
from fairturn.stores.sqlite.counters import MOVE_COUNTS, Tally
from fairturn.stores.sqlite.finish import end_expired, promote_due
from fairturn.stores.sqlite.flows import PAGE_MIN, SqliteShelf, StoredFlow
from fairturn.stores.sqlite.rows import COUNT_COUNTED, QueueRow, take_recorded
from fairturn.stores.values import BODY, NUMBER, PRIORITY, RUNNING, WAITING, Row, to_claims

# What is kept between the claims of one process: more would be memory rather than speed.
_STANDINGS_MAX = 2_000

# Claims that a power cut may have undone since the last sync; their fences must not come again.
_FORGOTTEN_MAX = 1 << 20

# Virtual times end at 2^63; one claim adds less than 2^57.
CLOCK_MAX = 1 << 60

# How often a claim that found too little reads all flows for documents that it does not know of.
_LOOK_EVERY_US = 60 * SECOND_US
# After everything is applied.
_HIDDEN = "SELECT customer FROM flows WHERE waiting <> folded LIMIT 1"

_LEVELS = "SELECT level, clock, weight FROM levels"
_BODY = "SELECT body FROM bodies WHERE document = ?"
_START = f"""
    UPDATE documents SET state = {RUNNING}, returned = 0, attempts = attempts + 1, fence = ?,
        claimed_at = ?, lease_until = ?, worker = ?,
        charged_cost = ?, charged_weight = ?, charge = ?
    WHERE number = ? AND state = {WAITING}"""
_FENCE = "SELECT fence FROM documents WHERE number = ?"
_ADD_LEASE = "INSERT INTO leases (fence, until, running, documents) VALUES (?, ?, ?, ?)"
_RUNNING_OF = f"""
    SELECT d.level, count(*) FROM leases l, json_each(l.documents) j
        JOIN documents d ON d.number = j.value
    WHERE d.state = {RUNNING} AND d.fence = l.fence AND d.customer = ? GROUP BY d.level"""
_COUNTED = "UPDATE customers SET counted = running_max IS NOT NULL WHERE number = ?"
# What a flow becomes, in the order of `_flow_values`. As a rule its seat stays, and with it the
# entry in flows_head, which SQLite would otherwise write anew.
_MOVE_FLOW = """
    UPDATE flows SET waiting = waiting + ?, claimed_to = ?, place = ?, tick = ?, folded = ?,
        running = ?, head_order = ?, head_since = ?"""
_SAVE_FLOW = f"{_MOVE_FLOW} WHERE customer = ? AND level = ?"
_SAVE_FLOW_AND_SEAT = f"{_MOVE_FLOW}, head_bound = ?, held = ? WHERE customer = ? AND level = ?"
_ADD_FLOW = """
    INSERT OR IGNORE INTO flows (waiting, claimed_to, place, tick, folded, running, head_order,
        head_since, head_bound, held, customer, level)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"""
_FORGET_PURGED = (
    "DELETE FROM flows WHERE customer = ?",
    "DELETE FROM standings WHERE customer = ?",
)
# Only differences count within a level, so all of it can go back together.
_BACK_TO_ZERO = """
    UPDATE flows SET place = place - (SELECT clock FROM levels l WHERE l.level = flows.level);
    UPDATE levels SET clock = 0"""
_SAVE_STANDING = """
    INSERT OR REPLACE INTO standings (customer, weight, running_max, paused, recent_costs)
    VALUES (?, ?, ?, ?, ?)"""
_DROP_STANDING = "DELETE FROM standings WHERE customer = ?"
_SAVE_LEVEL = "UPDATE levels SET clock = ?, weight = ? WHERE level = ?"
_SAVE_QUEUE = f"""
    UPDATE queue SET next_number = ?, claims = ?, fence = ?, tick = ?, turns_version = ?,
        boot = ?, {MOVE_COUNTS}"""


class Claiming:
    """The engine of one process. It is kept from claim to claim, and read anew from the file when
    another process has claimed in between or a transaction has failed."""

    def __init__(self) -> None:
        self._turns: Turns | None = None
        self._shelf = SqliteShelf(Mode.FAIR)
        self._version = -1
        self._purged: list[tuple[int]] = []  # nothing is to be left of them
        self._looked_at: int | None = None  # for hidden documents, on the clock of the boot

    def claim(
        self,
        connection: apsw.Connection,
        queue: QueueRow,
        n: int,
        *,
        worker: str,
        lease_us: int,
        now: int,
        uptime: Uptime,
    ) -> list[Claim]:
        """Take up to `n` documents, inside a transaction that writes."""
        tally = Tally()
        rebooted = queue.boot != uptime.boot
        turns = self.fold(connection, queue, tally, now=now, uptime=uptime, page=n)
        picks: list[Pick] = []
        while len(picks) < n and (pick := turns.pick(now)) is not None:
            picks.append(pick)
        rows, self._shelf.picked = self._shelf.picked, []
        if picks:
            for pick in picks:
                if pick.customer not in self._shelf.names:
                    raise FlowMismatch(pick.customer)
            queue.fence += 1
            until = uptime.at + lease_us
            _start(connection, picks, rows, (queue.fence, now, until, worker), tally)
        if picks or turns.touched or turns.adjusted or rebooted:
            self.save(connection, queue, tally)  # otherwise nothing is written: it was only a look
        if len(picks) < n and any(queue.waiting):
            self._look_for_hidden(connection, uptime.at)
        if not picks:
            return []
        return to_claims(
            _with_bodies(connection, rows),
            [self._shelf.names[pick.customer] for pick in picks],
            queue.key,
            fence=queue.fence,
            worker=worker,
            at=now,
            lease_ends_at=now + lease_us,
        )

    def _look_for_hidden(self, connection: apsw.Connection, at: int) -> None:
        """Once in a while, when less was found than wanted: is there a flow of whose waiting
        documents no claim knows?"""
        if self._looked_at is not None and 0 <= at - self._looked_at < _LOOK_EVERY_US:
            return
        customer = connection.execute(_HIDDEN).get
        if customer is not None:
            raise FlowMismatch(customer)
        self._looked_at = at

    def fold(
        self,
        connection: apsw.Connection,
        queue: QueueRow,
        tally: Tally,
        *,
        now: int,
        uptime: Uptime,
        page: int = 0,
    ) -> Turns:
        """The engine with everything folded in that happened since the last claim."""
        turns = self._load(connection, queue, page)
        expired = end_expired(connection, queue, now, uptime, tally)
        recorded = take_recorded(connection)
        self._shelf.given = queue.next_number - 1  # higher ones go to what becomes due now
        due = promote_due(connection, queue, now, uptime, tally)
        if queue.boot and queue.boot != uptime.boot:
            queue.fence += _FORGOTTEN_MAX
        queue.boot = uptime.boot
        self._prepare(turns, recorded)
        turns.fold(now, expired=expired, recorded=self._with_counts(recorded), due=due)
        return turns

    def _load(self, connection: apsw.Connection, queue: QueueRow, page: int) -> Turns:
        if self._turns is None or self._version != queue.turns_version:
            self.forget()
            settings = queue.settings
            shelf = self._shelf = SqliteShelf(settings.mode)
            for level, clock, weight in connection.execute(_LEVELS):
                shelf.clocks[level], shelf.weights[level] = clock, weight
            self._turns = Turns(
                shelf,
                mode=settings.mode,
                costs=settings.costs,
                patience_us=settings.patience_us,
                number=queue.claims,
                tick=queue.tick,
                clocks=shelf.clocks,
                weights=shelf.weights,
            )
        self._shelf.connection = connection
        # The last turn is taken when the one after it is known.
        self._shelf.page = max(PAGE_MIN, page + 1)
        return self._turns

    def _prepare(self, turns: Turns, recorded: list[Recorded]) -> None:
        """Let the shelf know of cancels, and remember who was purged."""
        for event in (event for _, events in recorded for event in events):
            if type(event) is Left:
                self._shelf.cancelled(turns.standings.get(event.customer), event)
            elif type(event) is Purged:
                self._purged.append((event.customer,))

    def _with_counts(self, recorded: list[Recorded]) -> list[Recorded]:
        """Before a customer gets a limit, say how many of its documents run: without a limit
        nobody keeps that number. It is what runs now and what ended after that."""
        changes = [e for _, events in recorded for e in events if type(e) is Changed]
        if not changes:
            return recorded
        connection = self._shelf.connection
        connection.executemany(_COUNTED, {(change.customer,) for change in changes})
        connection.execute(COUNT_COUNTED)
        limited = {change.customer for change in changes if change.limit is not None}
        running = {c: dict(connection.execute(_RUNNING_OF, (c,))) for c in limited}
        return with_counts(recorded, running)

    def save(self, connection: apsw.Connection, queue: QueueRow, tally: Tally) -> None:
        """Write back every flow, standing and clock that has changed."""
        turns = self._turns
        assert turns is not None
        for customer in turns.adjusted:
            _save_standing(connection, turns.standings[customer])
        self._save_flows(connection, turns, tally)
        turns.adjusted.clear()
        turns.touched.clear()
        for statement in _FORGET_PURGED:
            connection.executemany(statement, self._purged)
        self._purged.clear()
        self._save_levels(connection, turns)
        tally.write_delayed(connection)
        self._version = queue.turns_version = queue.turns_version + 1
        connection.execute(
            _SAVE_QUEUE,
            (
                queue.next_number,
                turns.number,
                queue.fence,
                turns.tick,
                queue.turns_version,
                queue.boot,
                *tally.counts(),
            ),
        )
        if max(turns.clocks) > CLOCK_MAX:
            connection.execute(_BACK_TO_ZERO)
            self.forget()
        if len(turns.standings) > _STANDINGS_MAX:
            self.forget()

    def _save_flows(self, connection: apsw.Connection, turns: Turns, tally: Tally) -> None:
        moved: list[Row] = []
        seated: list[Row] = []
        by_order = turns.mode is Mode.LEVELS
        slack = turns.patience_us // 2
        for flow in turns.touched:
            assert isinstance(flow, StoredFlow)
            customer, level, order = flow.customer, flow.level, flow.head_order
            standing = turns.standings[customer]
            is_head = order is not None and order == standing.head_order
            since = standing.head_since if is_head else None
            values = (
                tally.flows.get((customer, level), 0),
                flow.claimed_to,
                (order or 0) if by_order else flow.virtual_time,
                flow.tick,
                flow.waiting,
                flow.running,
                order,
                since,
            )
            bound, held = flow.bound, int(standing.held)
            if since is None or bound is None or not bound <= since <= bound + slack:
                bound = since
            if bound == flow.bound and held == flow.held:
                moved.append((*values, customer, level))
            else:
                flow.bound, flow.held = bound, held
                seated.append((*values, bound, held, customer, level))
        before = connection.total_changes()
        connection.executemany(_SAVE_FLOW, moved)
        connection.executemany(_SAVE_FLOW_AND_SEAT, seated)
        if connection.total_changes() - before < len(moved) + len(seated):
            # Some are not in the file yet. Those that are stay as they were just written.
            connection.executemany(_ADD_FLOW, [(*row[:8], None, 0, *row[8:]) for row in moved])
            connection.executemany(_ADD_FLOW, seated)

    def _save_levels(self, connection: apsw.Connection, turns: Turns) -> None:
        shelf = self._shelf
        changed = [
            (turns.clocks[level], turns.weights[level], level)
            for level in range(1, LEVELS + 1)
            if turns.clocks[level] != shelf.clocks[level]
            or turns.weights[level] != shelf.weights[level]
        ]
        connection.executemany(_SAVE_LEVEL, changed)
        shelf.clocks[:] = turns.clocks
        shelf.weights[:] = turns.weights

    def expect_after(self, customer: int, order: int) -> None:
        """What is not returned waits only after this order, in every flow of the customer."""
        assert self._turns is not None
        for flow in self._turns.standings[customer].flows.values():
            assert isinstance(flow, StoredFlow)
            flow.claimed_to = order

    def forget(self) -> None:
        """Read everything anew next time."""
        self._turns = None
        self._purged.clear()


def _start(
    connection: apsw.Connection,
    picks: list[Pick],
    rows: list[Row],
    lease: tuple[int, int, int, str],
    tally: Tally,
) -> None:
    """Let the picked documents run."""
    numbers = [row[NUMBER] for row in rows]
    fence, _, until, _ = lease
    before = connection.total_changes()
    connection.executemany(
        _START,
        [
            (*lease, pick.cost, pick.weight, pick.charge, number)
            for pick, number in zip(picks, numbers, strict=True)
        ],
    )
    if connection.total_changes() - before != len(numbers):
        raise FlowMismatch(_not_waiting(connection, picks, numbers, fence))
    connection.execute(_ADD_LEASE, (fence, until, len(numbers), json.dumps(numbers)))
    for pick, row in zip(picks, rows, strict=True):
        tally.wait(pick.customer, pick.level, row[PRIORITY], -1)


def _not_waiting(
    connection: apsw.Connection, picks: list[Pick], numbers: list[int], fence: int
) -> int:
    """The customer of a document that was picked and did not wait."""
    started: set[int] = set()
    for pick, number in zip(picks, numbers, strict=True):
        if number in started or connection.execute(_FENCE, (number,)).get != fence:
            return pick.customer
        started.add(number)
    raise AssertionError("every document that was picked has been started")


def _with_bodies(connection: apsw.Connection, rows: list[Row]) -> list[Row]:
    """The rows with the bodies that are too large to lie in them."""
    if all(row[BODY] is not None for row in rows):
        return rows
    return [
        row
        if row[BODY] is not None
        else (*row[:BODY], connection.execute(_BODY, (row[NUMBER],)).get, *row[BODY + 1 :])
        for row in rows
    ]


def _save_standing(connection: apsw.Connection, standing: Standing) -> None:
    values = (standing.weight, standing.limit, standing.paused, standing.recent_costs)
    plain = Standing(standing.customer)
    if values == (plain.weight, plain.limit, plain.paused, plain.recent_costs):
        connection.execute(_DROP_STANDING, (standing.customer,))
    else:
        weight, limit, paused, costs = values
        connection.execute(
            _SAVE_STANDING, (standing.customer, weight, limit, int(paused), json.dumps(costs))
        )
