"""The engine of one process: `turns.py` on this database, with everything folded in that happened.

It is kept from claim to claim, follows what other processes have claimed in between, and is read
anew when that is too much or a transaction has failed.
"""

from collections import Counter
from collections.abc import Iterable
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from fairturn.clock import Uptime, stopwatch
from fairturn.flows import (
    WEIGHT_ONE,
    Arrived,
    Left,
    Mode,
    Pick,
    Purged,
    Returned,
    Standing,
)
from fairturn.interpreter import hurried
from fairturn.priority import LEVELS
from fairturn.stores.events import with_counts
from fairturn.stores.postgres.alone import SERVER_BOOT, Found, Look, Wanted, ask_for_one, to_look
from fairturn.stores.postgres.asking import MISSED, PRIORITY, Asked
from fairturn.stores.postgres.expiring import (
    FIRST_DELAY_ENDS,
    FIRST_LEASE_ENDS,
    Expiring,
    LeasesSeen,
    has_passed,
)
from fairturn.stores.postgres.rows import (
    CLOCK_MAX,
    LOCK_QUEUE,
    TURNS_COLUMNS,
    Horizon,
    QueueRow,
    Told,
    TurnsRow,
    to_queue,
)
from fairturn.stores.postgres.saving import save_flows, save_standings
from fairturn.stores.postgres.session import Answer, Session
from fairturn.stores.postgres.sharing import SHARED_MAX, WANTED, Wish
from fairturn.stores.postgres.shelf import PAGE_MIN, PostgresShelf, StoredFlow
from fairturn.stores.postgres.starting import Batch
from fairturn.stores.postgres.taking import TAKE_RECORDED, leave_out, taken
from fairturn.stores.values import Row, SettingsCache
from fairturn.turns import Turns

_NO_VERSION = -1
NOTHING_SEEN = Horizon("0", [])
_THOROUGH_S = 1.0  # between looks that let fold in what was recorded although nothing waits
_RESERVE = 4  # of a flow's documents, at least, where others claim from it too
_BY_CUSTOMER = itemgetter(0)

# What is kept between the claims of one process: more would be memory rather than speed.
_STANDINGS_MAX = 5_000

# Where the turns stand; which transactions it sees; what else there is to read; how many claims
# there were, since some version, that can be followed; and who else waits.
_STATE = f"""
    SELECT {TURNS_COLUMNS}, pg_snapshot_xmax(pg_current_snapshot())::text,
        ARRAY(SELECT x::text::bigint FROM pg_snapshot_xip(pg_current_snapshot()) x),
        {FIRST_LEASE_ENDS}, {FIRST_DELAY_ENDS},
        (SELECT count(customers) FROM fairturn.turns WHERE version > %(version)s), {WANTED}
    FROM fairturn.turns ORDER BY version DESC LIMIT 1"""
_FORGET_PURGED = (
    "DELETE FROM fairturn.flows WHERE customer = ANY (%s)",
    "DELETE FROM fairturn.standings WHERE customer = ANY (%s)",
    "DELETE FROM fairturn.limited WHERE customer = ANY (%s)",
)
# Only differences count within a level, so all of it can go back together.
_BACK_TO_ZERO = "UPDATE fairturn.flows SET place = place - (%s::bigint[])[level]"


class Folded(NamedTuple):
    """The queue with everything folded in that happened since the last claim."""

    queue: QueueRow
    state: TurnsRow
    turns: Turns
    now: int
    uptime: Uptime
    changed: bool
    waited_us: int  # for the lock
    wishes: list[Wish]


class Answers(NamedTuple):
    """What was asked for in the first round trip."""

    queue: Answer
    state: Answer
    ahead: Asked
    recorded: Answer


class Engine:
    """Where the turns stand, as the last claim of this process has left them."""

    def __init__(self, cache: SettingsCache) -> None:
        self._cache = cache
        self._turns: Turns | None = None
        self._shelf = PostgresShelf(Mode.FAIR)
        self._version = _NO_VERSION
        # Of what these transactions have recorded nothing is left.
        self._horizon = self._horizon_next = NOTHING_SEEN
        self._purged: list[int] = []  # nothing is to be left of them
        self._contended = True  # whether others claimed in between the last two claims,
        self._strangers = True  # and documents of customers that were not loaded here
        self._each = 1  # how many documents a flow gave, as a rule, in the last claim
        self._company = 0  # how many documents were picked for others the last time
        self._thorough_s = 0.0  # when a look lets whatever was recorded be folded in
        self._leases_seen = LeasesSeen()

    # ── Folding in ───────────────────────────────────────────────────────────────────────────────

    def fold_all(self, session: Session, moment: int | None, uptime: Uptime | None) -> Folded:
        """Everything folded in that happened since the last claim: for calls that do not claim, in
        a transaction that they have begun."""
        with session.together():
            asked = self.ask(session, Wanted(0, "", 0, moment, uptime))
        return self.fold(session, asked, uptime)

    def read_ahead(self, session: Session, wanted: Wanted) -> bool:
        """Read documents for a large claim before it has the lock: others wait for that. Whether
        the transaction has begun."""
        if self._turns is None:
            return False
        self._expect(wanted.n)
        return self._shelf.read_ahead(session)

    def look(self, session: Session, wanted: Wanted, known: QueueRow, noted_at: int | None) -> Look:
        """Let the server look whether there is anything, and claim what waits alone."""
        thorough = stopwatch() >= self._thorough_s
        if thorough:
            self._thorough_s = stopwatch() + _THOROUGH_S
        leases_from = self._leases_seen.look_from(wanted.uptime)
        asked = ask_for_one(
            *(session, wanted, known, self._horizon),
            leases_from=leases_from,
            thorough=thorough,
            noted_at=noted_at,
        )
        look = to_look(asked.fetchall()[0], wanted, known.key)
        if look.found is not Found.MORE and look.horizon is not None:
            self._horizon = look.horizon
        if look.found is Found.ONE:
            at = wanted.uptime.at if wanted.uptime else look.now
            self._leases_seen.see(look.first_lease_ends, at)
            self._contended = True  # the engine has a claim to follow
        elif look.found is Found.MORE:
            self._leases_seen.look_again(leases_from)
            self._shelf.wants_arrivals = True
        return look

    def ask(self, session: Session, wanted: Wanted) -> Answers:
        """Lock the queue, and read everything that the fold and the picks will probably need."""
        self._expect(wanted.n)
        missed: int | None = None
        if self._contended and self._turns is not None:
            missed = self._version
            # A large claim has most of its documents read ahead; a round trip more is little.
            self._shelf.front = self._turns.front() if wanted.n <= SHARED_MAX else None
        horizon = self._horizon._asdict()
        leases_from = self._leases_seen.look_from(wanted.uptime)
        state = {**horizon, "leases_from": leases_from, "version": self._version}
        return Answers(
            session.ask(LOCK_QUEUE, (wanted.moment,)),
            session.ask(_STATE, state),
            Asked(self._shelf, session, self._horizon, missed, strangers=self._strangers),
            session.ask(TAKE_RECORDED, horizon),
        )

    def _expect(self, n: int) -> None:
        """Let the shelf know how much a claim of so many documents will probably need."""
        self._shelf.make_ahead()
        # The last turn is taken when the one after it is known.
        self._shelf.page = max(PAGE_MIN, n + 1 + self._company)
        if self._turns is not None and any(self._turns.weights):
            active = sum(self._turns.weights) // WEIGHT_ONE
            each = max(self._each, 1 + n // max(1, active))
            # Others take as many.
            reserve = max(_RESERVE, 2 * each) if self._contended else each
            self._shelf.keep_ready(reserve, look=n > SHARED_MAX)

    def fold(self, session: Session, answers: Answers, uptime: Uptime | None) -> Folded:
        """Fold in what was asked for."""
        with hurried:
            return self._fold(session, answers, uptime)

    def _fold(self, session: Session, answers: Answers, uptime: Uptime | None) -> Folded:
        (queue_row,) = answers.queue.fetchall()
        queue, now = to_queue(queue_row, self._cache), queue_row[3]
        ((*state_row, since, late, lease_ends, delay_ends, followable, wanted),) = (
            answers.state.fetchall()
        )
        state = TurnsRow(tuple(state_row))
        at = uptime or Uptime(SERVER_BOOT, now)
        turns = self._load(session, answers.ahead, queue, state, followable)
        rebooted, state.boot = state.boot != at.boot, at.boot
        expiring = Expiring(queue, now, at)
        self._leases_seen.see(lease_ends, at.at)
        if rebooted or has_passed(lease_ends, at.at):
            expiring.expire(session, all_of_them=rebooted)
        if has_passed(delay_ends, now):
            expiring.promote(session)
        if expiring.any:
            with session.together():
                expiring.write(session)
        told, running, moved = taken(answers.recorded.fetchall())
        leave_out(running, expiring.expired)
        self._read_customers(turns, told, expiring)
        recorded = with_counts(told.recorded, running) if running else told.recorded
        turns.fold(now, expired=expiring.expired, recorded=recorded, due=expiring.due)
        self._count(turns, state, told, expiring, moved)
        self._horizon_next = Horizon(since, late)
        changed = bool(rebooted or told.recorded or moved or expiring.any)
        wishes = [Wish(*wish) for wish in wanted or ()]
        return Folded(queue, state, turns, now, at, changed, queue_row[4], wishes)

    def _load(
        self, session: Session, ahead: Asked, queue: QueueRow, state: TurnsRow, followable: int
    ) -> Turns:
        """The engine as the last claim left it: the one that is kept, or a new one."""
        behind = state.version - self._version
        self._contended = behind != 0
        if self._turns is not None and behind == followable:
            self._shelf.session = session
            if behind:
                self._follow(self._turns, ahead, session)
                self._hand_over(self._turns, state)
            self._shelf.receive(session, ahead, self._turns.standings)
            self._version = state.version
            return self._turns
        if self._turns is not None:
            page = self._shelf.page
            self.forget()
            self._shelf.page = page
            with session.together():
                ahead = Asked(self._shelf, session, NOTHING_SEEN)
        settings = queue.settings
        self._shelf.mode = settings.mode
        self._turns = Turns(
            self._shelf,
            mode=settings.mode,
            costs=settings.costs,
            patience_us=settings.patience_us,
        )
        self._hand_over(self._turns, state)
        self._shelf.receive(session, ahead, self._turns.standings)
        self._version = state.version
        return self._turns

    def _hand_over(self, turns: Turns, state: TurnsRow) -> None:
        """Let an engine stand where the last claim has left the turns."""
        turns.number, turns.tick = state.claims, state.tick
        turns.clocks, turns.weights = [0, *state.clocks], [0, *state.weights]
        self._shelf.weights = turns.weights

    def _follow(self, turns: Turns, ahead: Asked, session: Session) -> None:
        """Let the flows be as other claims have left them; who was not loaded is loaded."""
        missed = ahead.missed or session.ask(MISSED, (self._version,))
        unknown = []
        for customer, rows in groupby(missed.fetchall(), _BY_CUSTOMER):
            standing = turns.standings.get(customer)
            if standing is None:
                self._shelf.drop(customer)
                unknown.append(customer)
            else:
                self._shelf.change(standing, rows)
                turns.follow(customer)
        if ahead.load_missed is not None:
            self._shelf.take_loaded(ahead.load_missed)
        self._shelf.expect(unknown)
        for customer in unknown:
            turns.follow(customer)
        self._strangers = bool(unknown)

    def _read_customers(self, turns: Turns, told: Told, expiring: Expiring) -> None:
        """Read the customers of whom something happened, let the shelf know which lines are no
        longer what was read, and remember who was purged."""
        happened = [event for _, events in told.recorded for event in events]
        happened += expiring.expired
        happened += (arrived for _, arrived in expiring.due)
        if happened:
            self._shelf.expect_told({event.customer for event in happened})
        at_the_end = set(map(id, told.arrivals))
        for event in happened:
            if isinstance(event, Arrived | Left | Returned) and id(event) not in at_the_end:
                self._shelf.forget_line(event.customer, event.level)
            elif type(event) is Purged:
                self._purged.append(event.customer)

    def _count(
        self, turns: Turns, state: TurnsRow, told: Told, expiring: Expiring, moved: list[Row]
    ) -> None:
        """Keep how many documents wait, and from where on the new flows have theirs."""
        for arrived in told.arrivals:
            flow = turns.standings[arrived.customer].flows[arrived.level]
            assert isinstance(flow, StoredFlow)
            self._shelf.arrive(flow, arrived.order, arrived.n)
        if told.arrivals:
            self._shelf.seat_arrived()
        state.promoted += len(expiring.due)
        for customer, level, priority in expiring.began:
            _move(turns, state, (customer, level, priority), -1)
        for customer, level, waiting, priority, delayed in moved:
            state.promoted -= delayed
            if waiting:
                _move(turns, state, (customer, level, priority), -waiting)

    def standing(self, customer: int) -> Standing:
        """A customer that nothing has happened to since the last claim, to be changed."""
        assert self._turns is not None
        standing = self._turns.standings[customer] = self._shelf.standing(customer)
        return standing

    # ── Picking ──────────────────────────────────────────────────────────────────────────────────

    def pick(self, folded: Folded, batch: Batch, n: int) -> bool:
        """Up to so many turns, one after the other; whether there were any."""
        turns, now, state = folded.turns, folded.now, folded.state
        for _ in range(n):
            pick = turns.pick(now)
            if pick is None:
                break
            batch.picks.append(pick)
        rows, self._shelf.picked = self._shelf.picked, []
        batch.rows.extend(rows)
        for priority, taken_now in Counter([row[PRIORITY] for row in rows]).items():
            state.taken[priority - 1] += taken_now
        if rows:
            state.fence = batch.fence
        return bool(rows)

    def names_of(self, picks: Iterable[Pick]) -> list[str]:
        """The names of the customers that have these turns."""
        return [self._shelf.names[pick.customer] for pick in picks]

    def remember(self, folded: Folded, own: int, others: int) -> None:
        """So many documents were picked for this claim, and for others: the next one will probably
        need as much."""
        self._company = others
        if own:
            self._each = 1 + own // len(folded.turns.touched)

    def make_ahead(self) -> None:
        """Make the customers that the next claim will probably need, if they were read."""
        self._shelf.make_ahead()

    # ── Writing back ─────────────────────────────────────────────────────────────────────────────

    def save(self, session: Session, folded: Folded) -> None:
        """Write back every flow, standing and clock that has changed."""
        turns, state = folded.turns, folded.state
        save_standings(session, turns)
        save_flows(session, turns, state.version + 1)
        disturbed = self._shelf.disturbed
        changed = [(f.customer, f.level, (f.customer, f.level) in disturbed) for f in turns.touched]
        more = bool(turns.adjusted or self._purged)
        turns.adjusted.clear()
        turns.touched.clear()
        disturbed.clear()
        for statement in _FORGET_PURGED if self._purged else ():
            session.ask(statement, (self._purged,))
        state.claims, state.tick = turns.number, turns.tick
        state.clocks, state.weights = turns.clocks[1:], turns.weights[1:]
        forget = bool(self._purged) or len(turns.standings) > _STANDINGS_MAX
        if max(turns.clocks) > CLOCK_MAX:
            session.ask(_BACK_TO_ZERO, (state.clocks,))
            state.clocks = [0] * LEVELS
            more = forget = True
        state.write(session, None if more else changed)
        self._version, self._horizon = state.version, self._horizon_next
        self._purged = []
        if forget:
            self._drop()

    def forget(self) -> None:
        """Read everything anew next time, also what was recorded long ago."""
        self._drop()
        self._horizon = NOTHING_SEEN
        self._purged = []

    def _drop(self) -> None:
        self._turns, self._version = None, _NO_VERSION
        self._shelf = PostgresShelf(Mode.FAIR)
        self._leases_seen = LeasesSeen()


def _move(turns: Turns, state: TurnsRow, place: tuple[int, int, int], n: int) -> None:
    """So many documents ceased to wait."""
    customer, level, priority = place
    state.taken[priority - 1] += n
    standing = turns.standings.get(customer)
    flow = standing.flows.get(level) if standing else None
    if isinstance(flow, StoredFlow):
        flow.taken += n
        turns.touched.add(flow)
