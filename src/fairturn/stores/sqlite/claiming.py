"""Claiming: fold in what happened, let `turns.py` decide, write the picks back set-wise."""

import json

import apsw

from fairturn.clock import Uptime
from fairturn.flows import (
    Arrived,
    Changed,
    Counted,
    Ended,
    Event,
    Finished,
    Flow,
    Left,
    Mode,
    Pick,
    Purged,
    Recorded,
    Returned,
    Standing,
)
from fairturn.model import Claim, Fence
from fairturn.priority import LEVELS
from fairturn.stores.sqlite.outcomes import end_expired, promote_due
from fairturn.stores.sqlite.rows import (
    COUNT_COUNTED,
    ROW_BODY_BYTES_MAX,
    RUNNING,
    QueueRow,
    Row,
    take_recorded,
    to_claimed_document,
)
from fairturn.stores.sqlite.shelf import SqliteShelf
from fairturn.stores.sqlite.tally import Tally
from fairturn.turns import Turns

# What is kept between the claims of one process: more would be memory rather than speed.
_STANDINGS_MAX = 20_000
_ROWS_AHEAD_MAX = 20_000

# Virtual times end at 2^63; one claim adds less than 2^57.
CLOCK_MAX = 1 << 60

_LEVELS = "SELECT level, clock, weight FROM levels"
_BODY = "SELECT body FROM bodies WHERE document = ?"
_START = f"""
    UPDATE documents SET state = {RUNNING}, returned = 0, attempts = attempts + 1, fence = ?,
        claimed_at = ?, lease_until = ?, worker = ?,
        charged_cost = ?, charged_weight = ?, charge = ?
    WHERE number = ?"""
_ADD_LEASE = "INSERT INTO leases (fence, until, running, documents) VALUES (?, ?, ?, ?)"
_RUNNING_OF = f"""
    SELECT d.level, count(*) FROM leases l, json_each(l.documents) j
        JOIN documents d ON d.number = j.value
    WHERE d.state = {RUNNING} AND d.fence = l.fence AND d.customer = ? GROUP BY d.level"""
_COUNTED = "UPDATE customers SET counted = running_max IS NOT NULL WHERE number = ?"
_SAVE_FLOW = """
    INSERT INTO flows (customer, level, waiting, claimed_to, place, tick, folded, running,
        head_order, head_since, held)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT DO UPDATE SET waiting = waiting + excluded.waiting,
        claimed_to = excluded.claimed_to, place = excluded.place, tick = excluded.tick,
        folded = excluded.folded, running = excluded.running, head_order = excluded.head_order,
        head_since = excluded.head_since, held = excluded.held"""
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
_SAVE_LEVEL = "UPDATE levels SET clock = ?, weight = ?, waiting = waiting + ? WHERE level = ?"
_SAVE_QUEUE = """
    UPDATE queue SET next_number = ?, claims = ?, fence = ?, tick = ?, turns_version = ?,
        boot = ?"""


class Claiming:
    """The engine of one process. It is kept from claim to claim, and read anew from the file when
    another process has claimed in between or a transaction has failed."""

    def __init__(self) -> None:
        self._turns: Turns | None = None
        self._shelf = SqliteShelf(Mode.FAIR)
        self._version = -1
        self._purged: list[tuple[int]] = []  # nothing is to be left of them

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
            queue.fence += 1
            until = uptime.at + lease_us
            _start(connection, picks, rows, (queue.fence, now, until, worker), tally)
        if picks or turns.touched or turns.adjusted or rebooted:
            self.save(connection, queue, tally)  # otherwise nothing is written: it was only a look
        return [
            _to_claim(connection, row, queue, worker=worker, now=now, lease_us=lease_us)
            for row in rows
        ]

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
        queue.boot = uptime.boot
        recorded = take_recorded(connection)
        given = queue.next_number - 1  # higher orders are given to what becomes due now
        due = promote_due(connection, queue, now, tally)
        self._prepare(recorded, given)
        for _, arrived in due:
            self._shelf.know((arrived.customer, arrived.level), given)
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
        self._shelf.page = max(16, page)
        self._turns.read_again()
        return self._turns

    def _prepare(self, recorded: list[Recorded], given: int) -> None:
        """Let the shelf know of arrivals and cancels, and remember who was purged."""
        for event in (event for _, events in recorded for event in events):
            if type(event) is Arrived:
                self._shelf.know((event.customer, event.level), given)
            elif type(event) is Left:
                self._shelf.cancelled(event.customer, event.level, event.order)
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
        running: dict[int, dict[int, int]] = {
            customer: dict(connection.execute(_RUNNING_OF, (customer,))) for customer in limited
        }
        counted = []
        for at, events in reversed(recorded):
            with_counts: list[Event] = []
            for event in reversed(events):
                with_counts.append(event)
                if event.customer not in limited:
                    continue
                now = running[event.customer]
                if isinstance(event, Ended | Finished | Returned):
                    ended = event.n if isinstance(event, Ended) else 1
                    now[event.level] = now.get(event.level, 0) + ended
                elif type(event) is Changed and event.limit is not None:
                    with_counts.append(Counted(event.customer, dict(now)))
            counted.append(Recorded(at, tuple(reversed(with_counts))))
        return counted[::-1]

    def save(self, connection: apsw.Connection, queue: QueueRow, tally: Tally) -> None:
        """Write back every flow, standing and clock that has changed."""
        turns, shelf = self._turns, self._shelf
        assert turns is not None
        for customer in turns.adjusted:
            _save_standing(connection, turns.standings[customer])
        flows = []
        for flow in turns.touched:
            place = (flow.customer, flow.level)
            shelf.know(place, queue.next_number - 1)  # nothing waits in a flow without a row
            values = self._flow_values(flow, turns.standings[flow.customer], turns.mode)
            flows.append((*place, tally.flows.get(place, 0), *values))
        turns.adjusted.clear()
        turns.touched.clear()
        connection.executemany(_SAVE_FLOW, flows)
        for statement in _FORGET_PURGED:
            connection.executemany(statement, self._purged)
        self._purged.clear()
        self._save_levels(connection, turns, tally)
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
            ),
        )
        if max(turns.clocks) > CLOCK_MAX:
            connection.execute(_BACK_TO_ZERO)
            self.forget()
        if len(turns.standings) > _STANDINGS_MAX or shelf.ahead > _ROWS_AHEAD_MAX:
            self.forget()

    def _flow_values(self, flow: Flow, standing: Standing, mode: Mode) -> tuple[int | None, ...]:
        """A flow in the words of its row, from claimed_to on."""
        order = flow.head_order
        is_head = order is not None and order == standing.head_order
        return (
            self._shelf.claimed_to[flow.customer, flow.level],
            (order or 0) if mode is Mode.LEVELS else flow.virtual_time,
            flow.tick,
            flow.waiting,
            flow.running,
            order,
            standing.head_since if is_head else None,
            int(standing.held),
        )

    def _save_levels(self, connection: apsw.Connection, turns: Turns, tally: Tally) -> None:
        shelf = self._shelf
        changed = [
            (turns.clocks[level], turns.weights[level], tally.levels.get(level, 0), level)
            for level in range(1, LEVELS + 1)
            if level in tally.levels
            or turns.clocks[level] != shelf.clocks[level]
            or turns.weights[level] != shelf.weights[level]
        ]
        connection.executemany(_SAVE_LEVEL, changed)
        shelf.clocks[:] = turns.clocks
        shelf.weights[:] = turns.weights

    def expect_after(self, customer: int, order: int) -> None:
        """What is not returned waits only after this order, in every flow of the customer."""
        assert self._turns is not None
        for level in self._turns.standings[customer].flows:
            self._shelf.claimed_to[customer, level] = order

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
    numbers = [row[3] for row in rows]
    connection.executemany(
        _START,
        [
            (*lease, pick.cost, pick.weight, pick.charge, number)
            for pick, number in zip(picks, numbers, strict=True)
        ],
    )
    fence, _, until, _ = lease
    connection.execute(_ADD_LEASE, (fence, until, len(numbers), json.dumps(numbers)))
    for pick, row in zip(picks, rows, strict=True):
        tally.wait(pick.customer, pick.level, row[6], -1)


def _to_claim(
    connection: apsw.Connection, row: Row, queue: QueueRow, *, worker: str, now: int, lease_us: int
) -> Claim:
    _, attempts, body, *_ = row
    document = to_claimed_document(row[3:], queue.key, attempts=attempts + 1, at=now, worker=worker)
    if body is None and document.size_bytes > ROW_BODY_BYTES_MAX:
        body = connection.execute(_BODY, (row[3],)).get
    return Claim(Fence(document.id, queue.fence), document, body, now + lease_us)


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
