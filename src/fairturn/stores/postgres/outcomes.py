"""Outcomes: how attempts end, each exactly once; and renewals."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from json import dumps
from typing import Any, cast

from fairturn import ids
from fairturn.flows import Costs, Ended, Event
from fairturn.model import (
    Completed,
    Fence,
    Outcome,
    Progress,
    Renewed,
    State,
    kept_cost,
)
from fairturn.stores.ending import Attempt, end_of
from fairturn.stores.ends import Ends
from fairturn.stores.postgres.rows import (
    MOMENT,
    QUEUE,
    Moves,
    QueueRow,
    add_ends,
    columns,
    count_change,
    record,
)
from fairturn.stores.postgres.session import BEGIN, SHARE_BOTH, Answer, Overtaken, Session
from fairturn.stores.values import (
    CODES,
    COMPLETED,
    DELAYED,
    RUNNING,
    WAITING,
    Row,
    SettingsCache,
)

# What is left of leases, whose numbers are in `leaving`. The lock comes first: what somebody else
# has just recorded of the same lease counts, or nobody would see that he was the last.
_LEAVE = """
    held AS (
        SELECT l.fence, l.running - e.n AS rest
        FROM fairturn.leases l JOIN leaving e ON e.fence = l.fence
        ORDER BY l.fence FOR UPDATE OF l),
    dropped AS (
        DELETE FROM fairturn.leases l USING held h WHERE l.fence = h.fence AND h.rest <= 0),
    shrunk AS (
        UPDATE fairturn.leases l SET running = h.rest FROM held h
        WHERE l.fence = h.fence AND h.rest > 0)"""
_MOMENT = MOMENT.replace("%s", "%(moment)s")  # for a statement whose values have names
# What belongs to a document, in an array that is sorted like the numbers: these are all different,
# so that a number's place among them is found by halves. A join takes the server a tenth longer.
_PLACE = "[width_bucket({}.number, %(numbers)s::bigint[])]"
# All of it in one statement, by the primary keys: the documents, the leases that they leave, the
# results, and for customers with a limit the word for the next claim (2 is the code of `Ended`).
# State and fence make every change conditional on the lease. Nothing is changed if the settings
# are no longer those that this process knows.
_COMPLETE = f"""
    WITH now AS MATERIALIZED (SELECT {_MOMENT} AS moment),
    ended AS (
        UPDATE fairturn.documents d SET state = {COMPLETED}, ended_at = (SELECT moment FROM now),
            error = NULL, real_cost = (%(costs)s::bigint[]){_PLACE.format("d")}
        WHERE (SELECT settings_version FROM fairturn.queue) = %(settings_version)s
            AND d.number = ANY (%(numbers)s::bigint[]) AND d.state = {RUNNING}
            AND d.fence = (%(fences)s::bigint[]){_PLACE.format("d")}
        RETURNING d.number, d.fence, d.customer, d.level),
    leaving AS (SELECT fence, count(*) AS n FROM ended GROUP BY fence),
    {_LEAVE},
    told AS (
        INSERT INTO fairturn.recorded (at, customers, events)
        SELECT (SELECT moment FROM now), array_agg(e.customer),
            '[' || string_agg('[2,' || e.customer || ',' || e.level || ',1]', ','
                ORDER BY (%(positions)s::integer[]){_PLACE.format("e")}) || ']'
        FROM ended e JOIN fairturn.limited l ON l.customer = e.customer
        WHERE EXISTS (SELECT 1 FROM fairturn.limited)
        HAVING count(*) > 0),
    counted AS (SELECT count(*) AS n FROM ended)"""
# How many ended; and which, if that is not all.
_ENDED = """
    SELECT n, NULL FROM counted
    UNION ALL
    SELECT number, fence FROM ended WHERE (SELECT n FROM counted) <> %(n)s"""
_WITH_RESULTS = """, stored AS (
        INSERT INTO fairturn.results (document, result, content_name, size_bytes, sha256)
        SELECT e.number, r.result, r.content_name, r.size_bytes, r.sha256
        FROM ended e JOIN unnest(%(documents)s::bigint[], %(results)s::text[],
                %(content_names)s::text[], %(sizes)s::bigint[], %(hashes)s::bytea[])
            AS r(number, result, content_name, size_bytes, sha256) ON r.number = e.number
        ON CONFLICT (document) DO UPDATE SET result = excluded.result,
            content_name = excluded.content_name, size_bytes = excluded.size_bytes,
            sha256 = excluded.sha256)"""
_COMPLETE_PLAIN = _COMPLETE + _ENDED
_COMPLETE_WITH_RESULTS = _COMPLETE + _WITH_RESULTS + _ENDED
_GIVEN = ("numbers", "fences", "positions", "costs")
_GIVEN_RESULTS = ("documents", "results", "content_names", "sizes", "hashes")

# By the primary keys.
_HELD = f"""
    SELECT d.number, d.fence, d.priority,
        EXISTS (SELECT 1 FROM fairturn.limited l WHERE l.customer = d.customer),
        d.customer, d.level, d.order_number, d.attempts, d.cancel_requested, d.claimed_at,
        d.charged_cost, d.charged_weight, d.charge
    FROM fairturn.documents d JOIN unnest(%s::bigint[], %s::bigint[]) AS g(number, fence)
        ON d.number = g.number AND d.fence = g.fence
    WHERE d.state = {RUNNING} ORDER BY d.number FOR NO KEY UPDATE OF d"""
_NOW = f"SELECT {MOMENT}"
_END = """
    UPDATE fairturn.documents d SET state = v.state, failed = v.state > 3, ended_at = %s,
        error = v.error, real_cost = v.real_cost
    FROM unnest(%s::smallint[], %s::text[], %s::bigint[], %s::bigint[])
        AS v(state, error, real_cost, number)
    WHERE d.number = v.number"""
_DELAY = f"""
    UPDATE fairturn.documents d SET state = {DELAYED}, due_at = v.due_at, delayed_until = v.due_at,
        error = v.error
    FROM unnest(%s::bigint[], %s::text[], %s::bigint[]) AS v(due_at, error, number)
    WHERE d.number = v.number"""
_GIVE_BACK = f"""
    UPDATE fairturn.documents SET state = {WAITING}, returned = true, attempts = attempts - 1
    WHERE number = ANY (%s)"""
_ADD_RESULTS = """
    INSERT INTO fairturn.results (document, result, content_name, size_bytes, sha256)
    SELECT * FROM unnest(%s::bigint[], %s::text[], %s::text[], %s::bigint[], %s::bytea[])
    ON CONFLICT (document) DO UPDATE SET result = excluded.result,
        content_name = excluded.content_name, size_bytes = excluded.size_bytes,
        sha256 = excluded.sha256"""
_LEAVE_LEASES = f"""
    WITH leaving AS (SELECT * FROM unnest(%s::bigint[], %s::integer[]) AS v(fence, n)), {_LEAVE}
    SELECT 1"""

_RENEW = f"""
    UPDATE fairturn.documents d SET lease_until = %s + (SELECT {MOMENT}),
        progress = coalesce(v.progress, d.progress),
        progress_fence = CASE WHEN v.progress IS NULL THEN d.progress_fence ELSE v.fence END
    FROM unnest(%s::bigint[], %s::bigint[], %s::text[]) AS v(number, fence, progress)
    WHERE d.number = v.number AND d.state = {RUNNING} AND d.fence = v.fence
    RETURNING d.number, d.fence, d.cancel_requested"""
# A lease can become shorter too, and then it is to be looked for earlier.
_LOOK_SOONER = f"""
    UPDATE fairturn.leases SET until = %s + (SELECT {MOMENT})
    WHERE fence = ANY (%s) AND until > %s + (SELECT {MOMENT})"""


def all_completed(outcomes: Sequence[Outcome]) -> bool:
    """Whether nothing failed, stopped or was released."""
    return set(map(type, outcomes)) <= {Completed}


class Finishing:
    """The outcomes of one call. What is completed and nothing else takes one statement, if none of
    it is told twice."""

    def __init__(self, outcomes: Sequence[Outcome], known: QueueRow) -> None:
        self.lost: list[Fence] = []
        self._outcomes = outcomes
        self._known = known
        self._numbers = ids.decode_all([o.fence.document for o in outcomes], known.key)
        self._completed: Answer | None = None
        self._plain = (
            known.settings.costs is not Costs.LEARNED
            and len(set(self._numbers)) == len(outcomes)
            and all_completed(outcomes)
        )

    @property
    def any(self) -> bool:
        """Whether something was recorded."""
        return len(self.lost) < len(self._outcomes)

    def ask(self, session: Session, moment: int | None) -> None:
        """In a transaction, and a pipeline, that the caller has begun: record the outcomes."""
        if not self._outcomes:
            return
        session.ask(SHARE_BOTH)
        if self._plain:
            self._completed = self._complete(session, moment)

    def needs_a_look(self) -> bool:
        """Whether one statement is not enough for the outcomes, so that `record` has to see to
        them."""
        return bool(self._outcomes) and not self._plain

    def _complete(self, session: Session, moment: int | None) -> Answer:
        outcomes = cast("Sequence[Completed]", self._outcomes)
        completed = list(zip(self._numbers, outcomes, strict=True))
        rows = [
            (number, outcome.fence.number, place, kept_cost(outcome))
            for place, (number, outcome) in enumerate(completed)
            if number is not None
        ]
        rows.sort()
        given = dict(zip(_GIVEN, columns(rows) or [[], [], [], []], strict=True))
        values = {
            **given,
            "settings_version": self._known.settings_version,
            "moment": moment,
            "n": len(self._outcomes),
        }
        results = _results(completed)
        if not results:
            return session.ask(_COMPLETE_PLAIN, values)
        values.update(zip(_GIVEN_RESULTS, columns(results), strict=True))
        return session.ask(_COMPLETE_WITH_RESULTS, values)

    def settle(self, queue: QueueRow) -> None:
        """See what became of what was asked for."""
        if self._completed is None:
            return
        if queue.settings_version != self._known.settings_version:
            raise Overtaken("the settings have changed")
        (n, _), *rows = self._completed.fetchall()
        if n == len(self._outcomes):
            return
        ended = set(rows)
        for outcome, number in zip(self._outcomes, self._numbers, strict=True):
            attempt = (number, outcome.fence.number)
            if attempt in ended:
                ended.remove(attempt)
            else:
                self.lost.append(outcome.fence)

    def record(self, session: Session, queue: QueueRow, moment: int | None) -> "_Ending":
        """Decide over the outcomes one by one; the answer is to be written. The locks are held
        already."""
        known = [(n, o.fence.number) for n, o in zip(self._numbers, self._outcomes, strict=True)]
        with session.together():
            asked = session.ask(_HELD, columns(known))
            told = session.ask(_NOW, (moment,))
        ((now,),) = told.fetchall()
        ending = _Ending(queue, now)
        held = {row[:2]: row[2:] for row in asked.fetchall()}
        for outcome, attempt in zip(self._outcomes, known, strict=True):
            row = held.pop(attempt, None)
            if row is None:
                self.lost.append(outcome.fence)
            else:
                ending.end(outcome, attempt, row)
        return ending


class _Ending:
    """What several outcomes change."""

    def __init__(self, queue: QueueRow, now: int) -> None:
        self._settings = queue.settings
        self._now = now
        self._ends: list[Row] = []
        self._delays: list[Row] = []
        self._given_back: list[int] = []
        self._results: list[tuple[int | None, Completed]] = []
        self._left: Counter[int] = Counter()
        self._events: list[Event] = []
        self._moves = Moves()
        self._counted = Ends()

    def end(self, outcome: Outcome, fence: tuple[Any, int], row: Row) -> None:
        number, lease = fence
        self._left[lease] += 1
        priority, limited, *rest = row
        attempt = Attempt(*rest)
        customer, level = attempt.customer, attempt.level
        ending = end_of(attempt, outcome, self._settings, self._now)
        self._counted.attempt(ending)
        state, event, error, real_cost, due_at = ending
        if state is State.DELAYED:
            self._delays.append((due_at, error, number))
            self._moves.delay(customer, level, priority)
        elif state is State.WAITING:
            self._given_back.append(number)
            self._moves.wait(customer, level, priority)
        else:
            self._ends.append((CODES[state], error, real_cost, number))
        if isinstance(outcome, Completed):
            self._results.append((number, outcome))
        if limited or type(event) is not Ended:
            self._events.append(event)

    def write(self, session: Session) -> None:
        if self._ends:
            session.ask(_END, (self._now, *columns(self._ends)))
        if self._delays:
            session.ask(_DELAY, columns(self._delays))
        if self._given_back:
            session.ask(_GIVE_BACK, (self._given_back,))
        results = _results(self._results)
        if results:
            session.ask(_ADD_RESULTS, columns(results))
        if self._left:
            session.ask(_LEAVE_LEASES, (list(self._left), list(self._left.values())))
        self._moves.write(session)
        add_ends(session, self._counted)
        record(session, self._now, self._events)


def _results(completed: Iterable[tuple[int | None, Completed]]) -> list[Row]:
    return [
        (number, outcome.result, *(outcome.content or (None, None, None)))
        for number, outcome in completed
        if (outcome.result is not None or outcome.content is not None) and number is not None
    ]


def finish(session: Session, finishing: Finishing, moment: int | None, cache: SettingsCache) -> Row:
    """Record outcomes, in one round trip if one statement is enough. The queue's row as it was
    found."""
    if not finishing.needs_a_look():
        with session.commit("finish"):
            session.ask(BEGIN)
            finishing.ask(session, moment)
            asked = session.ask(QUEUE)
            count_change(session)
        (row,) = asked.fetchall()
        return row
    with session.together():
        session.ask(BEGIN)
        finishing.ask(session, moment)
        asked = session.ask(QUEUE)
    (row,) = asked.fetchall()
    queue = QueueRow(cache.parse(row[0]), row[1], row[2])
    ending = finishing.record(session, queue, moment)
    with session.commit("finish"):
        ending.write(session)
        count_change(session)
    return row


def renew(
    session: Session,
    key: int,
    fences: Sequence[Fence],
    progress: Mapping[Fence, Progress],
    *,
    lease_us: int,
    at: int | None,
) -> Renewed:
    """Move the ends of leases, and keep how far the attempts are."""
    rows = sorted(
        {
            (number, fence.number, dumps(progress[fence]) if fence in progress else None)
            for fence in fences
            if (number := ids.decode(fence.document, key)) is not None
        }
    )
    with session.commit("renew"):
        session.ask(BEGIN)
        asked = None
        if rows:
            asked = session.ask(_RENEW, (lease_us, at, *columns(rows)))
            numbers = list({fence.number for fence in fences})
            session.ask(_LOOK_SOONER, (lease_us, at, numbers, lease_us, at))
    kept = {row[:2]: row[2] for row in asked.fetchall()} if asked else {}
    renewed = Renewed([], [])
    for fence in fences:
        attempt = (ids.decode(fence.document, key), fence.number)
        if attempt not in kept:
            renewed.lost.append(fence)
        elif kept[attempt]:
            renewed.cancelled.append(fence)
    return renewed
