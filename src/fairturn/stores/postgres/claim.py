"""Claims: one call of the SQL function `claim` decides and commits, a second round trip reads the
documents. The steps of the function, in `functions/claim.sql`:

1. `has_work` checks without a lock whether there is anything to do.
2. The row of `queue` is locked: the lock of claims. For a known token the function returns the
   number of its running documents and does nothing more.
3. `check_epoch` begins a new epoch if the database is another one.
4. `fold` (`functions/fold.sql`) applies expired leases, events, counter changes and due documents
   to the flows; `convert` converts flows after a change of mode. Each step handles about `budget`
   documents or events; `more` reports that some are left.
5. `probe` compares the counters of some customers with their flows.
6. Flows of the kinds that the worker serves and that are free take turns in the order of
   `scheduling/turns.py`, and give documents (`functions/turns.sql`, `functions/kinds.sql`).
7. Documents, one lease for all of them, flows and scheduler state are written. Cancels that no
   claim has reported are removed from the reports and returned.

`claim_after` takes advisory locks 1 and 2 (shared), locks the row of `queue`, records outcomes
(`functions/finish.sql`), and then calls `claim` in the same transaction. `claimed` reads the
documents by the token after the commit.

The server does not wait for the client while it holds the lock of claims, so a process that freezes
or loses its network never blocks other claims. If the reply is lost, a call without outcomes is
repeated with the same token and returns the same documents; with outcomes it raises
`StoreUnavailable`. Cancelled documents are reported once: a lost reply loses
their report.
"""

import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import NamedTuple
from uuid import UUID

from fairturn.clock import Clock, Uptime, stopwatch
from fairturn.errors import StoreError
from fairturn.model import Claim, Claimed, ContentRef, Document, Fence, FinishedStep, Outcome
from fairturn.stores import crash
from fairturn.stores.ids import IdKey
from fairturn.stores.postgres.admin import repair_customers
from fairturn.stores.postgres.connection import PostgresDatabase
from fairturn.stores.postgres.finish import OUTCOME_TYPES, outcome_columns
from fairturn.stores.postgres.pool import Use
from fairturn.stores.postgres.query import numbered
from fairturn.stores.postgres.rows import CLAIM_COLUMNS, SERVER_BOOT, now_of, uptime_of
from fairturn.stores.postgres.session import Session
from fairturn.stores.values import BODY, Row, to_claims

_LOG = logging.getLogger("fairturn.postgres")

BUDGET = 2_000  # documents or events that each step of a claim handles in one transaction
BUDGET_MIN = 2  # a customer, and one of its documents
PROBE_SIZE = 100  # customers whose counters one claim compares with their flows
PROBE_FLOWS_MAX = 1_000  # after the customer that exceeds it, the comparison ends
PROBE_EVERY_US = 1_000_000
PROBE_EVERY_IDLE_US = 60_000_000  # while there is nothing to claim
REPAIRS_MAX = 10  # customers whose counters one claim rebuilds
REPAIR_PAUSE_S = 60.0  # after a repair that did not get its locks

CLAIM = """
    SELECT claimed, more, changed, repaired, suspects, cancelled, '{}'::int4[]
    FROM fairturn.claim(%s::uuid, %s::int4, %s::text, %s::int8, %s::int8, %s::int8, %s::text,
        %s::int4, %s::text[], %s::text[], %s::int4[])"""
CLAIM_AFTER = f"""
    SELECT claimed, more, changed, repaired, suspects, cancelled, lost
    FROM fairturn.claim_after(%s::uuid, %s::int4, %s::text, %s::int8, %s::int8, %s::int8, %s::text,
        %s::int4, %s::text[], %s::text[], %s::int4[], {OUTCOME_TYPES})"""
DOCUMENTS = f"""
    SELECT {CLAIM_COLUMNS.replace("d.attempts", "d.attempts - 1")}, d.body_bytes, t.customer_name,
        d.fence, d.claimed_at, t.previous, t.content_name, t.content_size, t.content_hash, t.steps,
        t.checkpoint
    FROM fairturn.claimed(%s::uuid) t CROSS JOIN LATERAL (SELECT (t.document).*) d"""
_BYTES, _NAME, _FENCE, _CLAIMED_AT = range(-10, -6)
_PREVIOUS, _STEPS, _CHECKPOINT = -6, -2, -1


class ClaimRequest(NamedTuple):
    """The arguments of one call."""

    token: str  # a UUID
    n: int
    worker: str
    lease_us: int
    kinds: list[str] | None  # None: every kind
    at_most: dict[str, int]  # documents of a kind
    given_now: int | None  # None: the clock of the server
    uptime: Uptime | None  # None: the same
    budget: int


class Granted(NamedTuple):
    """The result of one call."""

    claims: list[Claim]
    lost: list[Fence]  # of outcomes that did not count
    cancelled: list[Document]
    changed: bool
    more: bool  # events are left to fold: another call may find documents
    suspects: list[int]  # customers whose counters need a repair


class PostgresClaimer:
    """Claims documents for one store, and calls `changed` after each transaction with a change."""

    def __init__(
        self,
        database: PostgresDatabase,
        clock: Clock | None,
        random: Random,
        budget: int,
        changed: Callable[[], None],
    ) -> None:
        if budget < BUDGET_MIN:
            raise ValueError(f"budget is {budget}; it must be at least {BUDGET_MIN}")
        self._database = database
        self._clock = clock
        self._random = random
        self._budget = budget
        self._changed = changed
        self._repair_after_s = 0.0  # by the stopwatch

    def claim(
        self,
        n: int,
        *,
        worker: str,
        lease_us: int,
        kinds: Sequence[str] | None,
        at_most: Mapping[str, int],
        outcomes: Sequence[Outcome],
        key: IdKey,
    ) -> Claimed:
        """Record outcomes and claim up to `n` documents, in one transaction per `budget` of events
        to fold. An error after the first transaction ends the claim early and is not raised."""
        claimed = Claimed([], [], [])
        is_first = True
        while True:
            taken = Counter(claim.document.kind for claim in claimed.claims)
            request = ClaimRequest(
                str(UUID(int=self._random.getrandbits(128), version=4)),
                n - len(claimed.claims),
                worker,
                lease_us,
                None if kinds is None else [*kinds],
                {kind: most - taken[kind] for kind, most in at_most.items()},
                now_of(self._clock),
                uptime_of(self._clock),
                self._budget,
            )
            try:
                granted = self._claim(request, outcomes, key)
            except StoreError:
                if is_first:
                    raise
                return claimed
            claimed.claims.extend(granted.claims)
            claimed.lost.extend(granted.lost)
            claimed.cancelled.extend(granted.cancelled)
            if not granted.more or len(claimed.claims) == n:
                return claimed
            outcomes, is_first = (), False

    def _claim(self, request: ClaimRequest, outcomes: Sequence[Outcome], key: IdKey) -> Granted:
        granted = self._database.transact(
            lambda session: claim(session, request, key, outcomes), Use.WORK
        )
        if granted.suspects:
            self._repair(granted.suspects[:REPAIRS_MAX])
        if granted.changed:
            self._changed()
        return granted

    def _repair(self, customers: list[int]) -> None:
        """Rebuild the counters of a few customers without waiting for locks, because the leases of
        this claim are running. Later claims find the other customers again."""
        now = stopwatch()
        if now < self._repair_after_s:
            return
        try:
            for _ in range(REPAIRS_MAX):
                if self._database.transact(
                    lambda session: repair_customers(session, customers, self._budget), wait_s=0
                ):
                    _LOG.warning("rebuilt the flows and counters of %d customers", len(customers))
                    return
        except StoreError as error:
            _LOG.warning(
                "cannot rebuild the counters of %d customers yet: %s", len(customers), error
            )
        self._repair_after_s = now + REPAIR_PAUSE_S


def claim(
    session: Session, request: ClaimRequest, key: IdKey, outcomes: Sequence[Outcome] = ()
) -> Granted:
    """Record outcomes and claim up to `n` documents in one transaction, then read them."""
    uptime = request.uptime
    values = (
        request.token,
        request.n,
        request.worker,
        request.lease_us,
        request.given_now,
        uptime.at if uptime else None,
        uptime.boot if uptime else SERVER_BOOT,
        request.budget,
        request.kinds,
        [*request.at_most] or None,
        [*request.at_most.values()] or None,
    )
    session.unsure = bool(outcomes)  # without outcomes a repeated call returns the same documents
    crash.point("claim-before-commit")
    # No pipeline: until its end arrived, the server would hold the lock of claims.
    if outcomes:
        rows = session.fetch(CLAIM_AFTER, (*values, *outcome_columns(outcomes, key)))
    else:
        rows = session.fetch(CLAIM, values)
    ((claimed, more, changed, repaired, suspects, cancels, lost),) = rows
    if claimed or cancels or outcomes:
        crash.point("claim-after-commit")
    rows = session.fetch(DOCUMENTS, (request.token,)) if claimed else []
    cancelled = numbered(session, key, cancels) if cancels else []
    if repaired:
        _LOG.warning("corrected %d sums of weights that did not agree with the flows", repaired)
    superseded = [outcomes[position - 1].fence for position in lost]
    return Granted(_claims(rows, request, key), superseded, cancelled, changed, more, suspects)


def _claims(rows: list[Row], request: ClaimRequest, key: IdKey) -> list[Claim]:
    if not rows:
        return []
    at = rows[0][_CLAIMED_AT]
    claims = to_claims(
        [row if row[_BYTES] is None else _with_bytes(row) for row in rows],
        [row[_NAME] for row in rows],
        key,
        fence=rows[0][_FENCE],
        worker=request.worker,
        at=at,
        lease_ends_at=at + request.lease_us,
    )
    return [
        each if row[_STEPS] is None and row[_CHECKPOINT] is None else _continued(each, row)
        for each, row in zip(claims, rows, strict=True)
    ]


def _continued(claim: Claim, row: Row) -> Claim:
    """Return the claim of a document that has finished a step, or has a checkpoint."""
    previous, *content, steps, checkpoint = row[_PREVIOUS:]
    return claim._replace(
        previous=previous,
        previous_content=None if content[0] is None else ContentRef(*content),
        steps=tuple(FinishedStep(*step) for step in json.loads(steps or "[]")),
        checkpoint=checkpoint,
    )


def _with_bytes(row: Row) -> Row:
    """Return the row with its bytes as the body."""
    return (*row[:BODY], row[_BYTES], *row[BODY + 1 :])
