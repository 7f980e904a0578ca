"""Cancels and retries, settings, and another mode."""

from collections.abc import Sequence

from fairturn import ids
from fairturn.clock import Uptime
from fairturn.flows import Arrived, Changed, Event, Left, Resumed
from fairturn.model import CustomerSettings, Settings, State, level_of, weight_in_thousandths
from fairturn.stores.ends import Ends
from fairturn.stores.postgres.engine import Engine
from fairturn.stores.postgres.rows import (
    CONFIGURE,
    FORGET_TURNS,
    LOCK_QUEUE,
    MOMENT,
    NO_ORDER,
    QUEUE,
    Moves,
    add_ends,
    count_change,
    record,
    settings_columns,
    to_queue,
)
from fairturn.stores.postgres.session import (
    BEGIN,
    LOCK_LIMITS,
    LOCK_SETTINGS,
    SHARE_SETTINGS,
    Session,
)
from fairturn.stores.postgres.shelf import StoredFlow
from fairturn.stores.values import (
    CANCELLED,
    DEAD,
    DELAYED,
    RUNNING,
    STATES,
    WAITING,
    SettingsCache,
)

_NOW = f"SELECT {MOMENT}"
# By the primary key. Whoever holds the queue waits for no document, but tries again.
_STATES = """
    SELECT number, state, customer, level, priority, order_number FROM fairturn.documents
    WHERE number = ANY (%s) ORDER BY number FOR NO KEY UPDATE"""
_STATES_AT_ONCE = f"{_STATES} NOWAIT"
_CANCEL = f"""
    UPDATE fairturn.documents SET state = {CANCELLED}, failed = true, returned = false,
        delayed_until = NULL, ended_at = %s
    WHERE number = ANY (%s)"""
_ASK_TO_STOP = "UPDATE fairturn.documents SET cancel_requested = true WHERE number = ANY (%s)"
# By documents_returned, and by documents_flow from the flow's claimed_to on. A flow that is new, or
# had only what was returned, may have got documents that no claim has folded in.
_LOWEST = f"""
    SELECT f.customer, f.level, least((
            SELECT min(order_number) FROM fairturn.documents
            WHERE returned AND customer = f.customer AND level = f.level), (
            SELECT d.order_number FROM fairturn.documents d
            WHERE d.customer = f.customer AND d.level = f.level AND d.state = {WAITING}
                AND NOT d.returned AND d.order_number > coalesce((
                    SELECT nullif(claimed_to, {NO_ORDER}) FROM fairturn.flows o
                    WHERE o.customer = f.customer AND o.level = f.level), 0)
            ORDER BY d.customer, d.level, d.order_number LIMIT 1))
    FROM unnest(%s::bigint[], %s::smallint[]) AS f(customer, level)"""
_RETRY = f"""
    UPDATE fairturn.documents d SET state = {WAITING}, returned = true, failed = false,
        attempts = 0, ended_at = NULL, level = v.level
    FROM unnest(%s::bigint[], %s::smallint[]) AS v(number, level)
    WHERE d.number = v.number"""

_ADJUST = """
    INSERT INTO fairturn.customers (name, weight, running_max, paused) VALUES (%s, %s, %s, %s)
    ON CONFLICT (name) DO UPDATE SET weight = excluded.weight,
        running_max = excluded.running_max, paused = excluded.paused
    RETURNING number"""
_LIMIT = "INSERT INTO fairturn.limited (customer) VALUES (%s) ON CONFLICT DO NOTHING"
# Whoever holds a lock on the settings for long, in a transaction of the caller's, must not make all
# others wait behind us.
_GIVE_UP_SOON = "SET LOCAL lock_timeout = '1s'"

_HEADS = "SELECT customer, head_since FROM fairturn.flows WHERE head_since IS NOT NULL"
_RELEVEL = f"""
    UPDATE fairturn.documents SET
        level = CASE WHEN %s THEN 1 ELSE priority END,
        charged_cost = NULL, charged_weight = NULL, charge = NULL, returned = (state = {WAITING})
    WHERE state IN ({DELAYED}, {WAITING}, {RUNNING})"""
_CLEAR_FLOWS = "DELETE FROM fairturn.flows"
_CLEAR_CLOCKS = """
    UPDATE fairturn.turns SET clocks = array_fill(0::bigint, ARRAY[9]),
        weights = array_fill(0::bigint, ARRAY[9])"""
_RUNNING = f"""
    SELECT d.customer, d.level, count(*)
    FROM fairturn.leases l JOIN fairturn.documents d ON d.number = ANY (l.documents)
    WHERE d.state = {RUNNING} AND d.fence = l.fence GROUP BY d.customer, d.level"""
# By documents_returned: all that waits counts as returned.
_WAITING = """
    SELECT customer, level, min(order_number), count(*) FROM fairturn.documents
    WHERE returned GROUP BY customer, level ORDER BY 3"""
_ARRIVED = """
    SELECT number, arrived FROM fairturn.customers
    WHERE (SELECT sum(n) FROM unnest(arrived) n) > 0"""


def cancel(
    session: Session, cache: SettingsCache, documents: Sequence[str], key: int, moment: int | None
) -> list[State | None]:
    """End documents that have not begun, ask running ones to stop; the states afterwards."""
    numbers = [ids.decode(id, key) for id in documents]
    known = [number for number in numbers if number is not None]
    with session.together():
        session.ask(BEGIN)
        session.ask(SHARE_SETTINGS)
        locked = session.ask(LOCK_QUEUE, (moment,))
        asked = session.ask(_STATES_AT_ONCE, (known,))
    now = locked.fetchall()[0][3]
    found = {row[0]: row for row in asked.fetchall()}
    ended: list[int] = []
    left: list[tuple[int, int, int]] = []  # (customer, level, order)
    moves = Moves()
    for number in dict.fromkeys(known):
        if number not in found:
            continue
        _, state, customer, level, priority, order = found[number]
        if state == WAITING:
            moves.wait(customer, level, priority, -1)
            left.append((customer, level, order))
        elif state == DELAYED:
            moves.delay(customer, level, priority, -1)
        if state in (WAITING, DELAYED):
            ended.append(number)
            found[number] = (number, CANCELLED)
    running = [number for number, row in found.items() if row[1] == RUNNING]
    events = _left(session, now, ended, left)
    with session.commit("cancel"):
        if running:
            session.ask(_ASK_TO_STOP, (running,))
        moves.write(session)
        add_ends(session, Ends(cancelled=len(ended)))
        record(session, now, events)
        count_change(session)
    return [STATES[found[n][1]] if n in found else None for n in numbers]


def _left(
    session: Session, now: int, ended: list[int], left: list[tuple[int, int, int]]
) -> list[Event]:
    """End documents, and say which were the next ones in the lines that some of them left."""
    if not ended:
        return []
    flows = sorted({(customer, level) for customer, level, _ in left})
    with session.together():
        session.ask(_CANCEL, (now, ended))
        asked = session.ask(_LOWEST, ([c for c, _ in flows], [n for _, n in flows]))
    lowest = {(customer, level): order for customer, level, order in asked.fetchall()}
    events: list[Event] = []
    for customer, level, order in reversed(left):  # what goes later was still there before
        following = lowest[customer, level]
        events.append(Left(customer, level, order, following))
        lowest[customer, level] = order if following is None else min(order, following)
    return events[::-1]


def retry(
    session: Session, cache: SettingsCache, documents: Sequence[str], key: int, moment: int | None
) -> list[State | None]:
    """Let dead documents wait again; the states before."""
    numbers = [ids.decode(id, key) for id in documents]
    known = [number for number in numbers if number is not None]
    with session.together():
        session.ask(BEGIN)
        session.ask(SHARE_SETTINGS)
        told = session.ask(QUEUE)
        asked = session.ask(_STATES, (known,))
        told_now = session.ask(_NOW, (moment,))
    queue = to_queue(told.fetchall()[0], cache)
    ((now,),) = told_now.fetchall()
    found = {row[0]: row for row in asked.fetchall()}
    states: list[State | None] = []
    events: list[Event] = []
    again: list[tuple[int, int]] = []
    moves = Moves()
    for number in numbers:
        if number is None or number not in found:
            states.append(None)
            continue
        _, state, customer, _, priority, order = found[number]
        states.append(STATES[state])
        if state == DEAD:
            level = level_of(priority, queue.settings.mode)
            again.append((number, level))
            found[number] = (number, WAITING, customer, level, priority, order)
            moves.wait(customer, level, priority)
            events.append(Arrived(customer, level, order, 1))
    with session.commit("retry"):
        if again:
            session.ask(_RETRY, ([n for n, _ in again], [level for _, level in again]))
        moves.write(session)
        record(session, now, events)
        count_change(session)
    return states


def adjust(session: Session, name: str, settings: CustomerSettings, moment: int | None) -> None:
    """Change a customer's settings. Nobody records outcomes while a limit is given: from then on
    each has to tell of the end of a run."""
    values = (weight_in_thousandths(settings.weight), settings.limit, settings.paused)
    with session.together():
        session.ask(BEGIN)
        session.ask(SHARE_SETTINGS)
        asked = session.ask(_ADJUST, (name, *values))
        if settings.limit is not None:
            session.ask(LOCK_LIMITS)
        told_now = session.ask(_NOW, (moment,))
    ((number,),) = asked.fetchall()
    ((now,),) = told_now.fetchall()
    with session.commit("configure"):
        if settings.limit is not None:
            session.ask(_LIMIT, (number,))
        record(session, now, [Changed(number, *values)])
        count_change(session)


def configure(
    session: Session,
    cache: SettingsCache,
    settings: Settings,
    moment: int | None,
    uptime: Uptime | None,
) -> None:
    """Put other settings in force; nobody submits or records meanwhile."""
    with session.together():
        session.ask(BEGIN)
        session.ask(_GIVE_UP_SOON)
        session.ask(LOCK_SETTINGS)
        locked = session.ask(LOCK_QUEUE, (moment,))
    row = locked.fetchall()[0]
    queue = to_queue(row[:3], cache)
    if settings.mode is not queue.settings.mode:
        _rebuild(session, cache, settings, moment, uptime)
    with session.commit("configure"):
        session.ask(CONFIGURE, settings_columns(settings))
        session.ask(FORGET_TURNS)


def _rebuild(
    session: Session,
    cache: SettingsCache,
    settings: Settings,
    moment: int | None,
    uptime: Uptime | None,
) -> None:
    """Fold in what was recorded under the old mode, then put the waiting documents into the flows
    of the new one, in their order, with clocks at 0.

    All documents that wait now count as returned, so that the new flows need not look for them
    among those that ended long ago; what comes later comes after them."""
    engine = Engine(cache)
    engine.save(session, engine.fold_all(session, moment, uptime))
    heads: dict[int, int] = dict(session.fetch(_HEADS))
    with session.together():
        session.ask(_RELEVEL, (settings.mode.value == "equal",))
        session.ask(_CLEAR_FLOWS)
        session.ask(_CLEAR_CLOCKS)
        session.ask(CONFIGURE, settings_columns(settings))
        running = session.ask(_RUNNING)
        waiting = session.ask(_WAITING)
        arrived = session.ask(_ARRIVED)
    engine = Engine(cache)
    folded = engine.fold_all(session, moment, uptime)
    turns, now = folded.turns, folded.now
    for customer, level, n in running.fetchall():
        turns.apply(Resumed(customer, level, n), now)
    for customer, level, order, n in waiting.fetchall():
        turns.apply(Arrived(customer, level, order, n), heads[customer])
    # So that what arrived, less what was taken, is what waits.
    for customer, by_priority in arrived.fetchall():
        standing = turns.standings.get(customer)
        if standing is None:
            standing = engine.standing(customer)
        for priority, n in enumerate(by_priority, start=1):
            level = level_of(priority, settings.mode)
            if n == 0 and level not in standing.flows:
                continue
            flow = standing.flows.get(level)
            if flow is None:
                flow = standing.flows[level] = StoredFlow(customer, level)
            assert isinstance(flow, StoredFlow)
            flow.taken += n
            turns.touched.add(flow)
    for standing in turns.standings.values():
        for flow in standing.flows.values():
            assert isinstance(flow, StoredFlow)
            flow.taken -= flow.waiting
            turns.touched.add(flow)
    engine.save(session, folded)
