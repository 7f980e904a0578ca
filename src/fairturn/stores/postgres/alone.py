"""A document that waits alone: the server claims it by itself, in one round trip.

Whoever has nothing to do asks here first. A hint wakes every worker that is idle: if each of them
took the lock of claims in order to see that another one was faster, those who do have something to
do would wait for all of them. So the server looks before it locks (`claim_alone` of the schema);
and where one document has arrived and nothing else waits, there is nothing to decide, and it is
claimed at once.
"""

from enum import IntEnum
from typing import NamedTuple

from fairturn.clock import Uptime
from fairturn.flows import Costs, Mode
from fairturn.model import Claim
from fairturn.situation import NOTED_EVERY_US
from fairturn.stores.postgres.rows import Horizon, QueueRow
from fairturn.stores.postgres.session import Answer, Session
from fairturn.stores.postgres.starting import STARTED_COLUMNS, Lease, claims_of
from fairturn.stores.values import Row

SERVER_BOOT = "server"  # where the moments are those of the server
_TYPES = (
    *("int8", "int8", "text", "text::xid8", "xid8[]", "int8", "bool", "int8", "bool", "bool"),
    *("int8", "int8", "text", "int8", "int8", "int8"),
)
CLAIM_ALONE = f"""
    SELECT a.answer, a.its_at, a.first_end, a.seen_since, a.seen_late, a.customer_name,
        d.fence, {STARTED_COLUMNS}
    FROM fairturn.claim_alone({", ".join(f"%s::{kind}" for kind in _TYPES)}) a
        CROSS JOIN LATERAL (SELECT (a.claimed).*) d"""
_CLAIM = slice(7, None)  # where the columns of a claim stand in such a row


class Wanted(NamedTuple):
    """What a claim is asked for."""

    n: int
    worker: str
    lease_us: int
    moment: int | None  # None: the clock of the server
    uptime: Uptime | None  # None: the same


class Found(IntEnum):
    """What there is to claim."""

    NOTHING = 0
    ONE = 1  # and it is claimed
    MORE = 2  # or something else that is not decided here


class Look(NamedTuple):
    """What the server has found."""

    found: Found
    now: int  # 0 if there is more
    first_lease_ends: int | None
    horizon: Horizon | None  # if it had the lock
    claims: list[Claim]


def ask_for_one(
    session: Session,
    wanted: Wanted,
    known: QueueRow,
    horizon: Horizon,
    *,
    leases_from: int,
    thorough: bool,
    noted_at: int | None,
) -> Answer:
    """Ask the server to look, and to claim what waits alone; and to note the worker, if it is time
    for that."""
    uptime, settings = wanted.uptime, known.settings
    return session.ask(
        CLAIM_ALONE,
        (
            wanted.moment,
            uptime.at if uptime else None,
            uptime.boot if uptime else SERVER_BOOT,
            horizon.since,
            horizon.late,
            leases_from,
            thorough,
            known.settings_version,
            settings.mode is not Mode.LEVELS and settings.costs is not Costs.LEARNED,
            settings.costs is Costs.KNOWN,
            settings.patience_us,
            wanted.n,
            wanted.worker,
            wanted.lease_us,
            noted_at,
            NOTED_EVERY_US,
        ),
    )


def to_look(row: Row, wanted: Wanted, key: int) -> Look:
    """What was found, from the one row of `CLAIM_ALONE`."""
    found, now, first_lease_ends, since, late, customer, fence = row[: _CLAIM.start]
    claims: list[Claim] = []
    if found == Found.ONE:
        lease = Lease(wanted.worker, fence, now, now + wanted.lease_us)
        claims = claims_of([row[_CLAIM]], [customer], key, lease)
    horizon = None if since is None else Horizon(since, late)
    return Look(Found(found), now or 0, first_lease_ends, horizon, claims)
