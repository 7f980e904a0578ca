"""Cancels and retries, settings of customers and of the queue: each one function call."""

from collections.abc import Sequence
from enum import IntEnum

from fairturn import crash, ids
from fairturn.clock import Uptime
from fairturn.model import CustomerSettings, Settings, State, weight_in_thousandths
from fairturn.stores.postgres.claim import SERVER_BOOT
from fairturn.stores.postgres.rows import settings_columns
from fairturn.stores.postgres.session import Session
from fairturn.stores.values import STATES, Row

_CANCEL = "SELECT fairturn.cancel(%s::int8, %s::int8[])"
_RETRY = "SELECT fairturn.retry(%s::int8, %s::int8[])"
_ADJUST = """
    SELECT fairturn.adjust(%s::int8, %s::text, %s::int4, %s::int4, %s::bool,
        %s::bool, %s::int4, %s::int4, %s::bool)"""
_CONFIGURE = """
    SELECT fairturn.configure(%s::int8, %s::int8, %s::text, %s::int4, %s::int8, %s::text,
        %s::int8[], %s::int8, %s::bool, %s::bool, %s::int8, %s::int8, %s::text, %s::text, %s::int8,
        %s::int4)"""
_CONVERT = "SELECT fairturn.convert_next(%s::int4)"
REPAIR_CUSTOMERS = "SELECT fairturn.repair_customers(%s::int8[], %s::int4)"
_COUNT_TIMEOUT = "SET LOCAL statement_timeout = '5s'"
_WRONG_COUNTERS = """
    SELECT EXISTS (
        SELECT FROM fairturn.audit_queue() a
        WHERE a.kind IN ('queue.waiting', 'queue.delayed'))"""
REPAIR_QUEUE = "SELECT fairturn.repair_queue(%s::int4)"
_NO_DOCUMENT = 0  # a number that no document has


def cancel(
    session: Session, documents: Sequence[str], key: int, moment: int | None
) -> list[State | None]:
    """End documents that have not begun, ask running ones to stop; the states afterwards."""
    crash.point("cancel-before-commit")
    states = _states(session, _CANCEL, documents, key, moment)
    crash.point("cancel-after-commit")
    return states


def retry(
    session: Session, documents: Sequence[str], key: int, moment: int | None
) -> list[State | None]:
    """Let dead documents wait again; the states before."""
    crash.point("retry-before-commit")
    states = _states(session, _RETRY, documents, key, moment)
    crash.point("retry-after-commit")
    return states


def _states(
    session: Session, statement: str, documents: Sequence[str], key: int, moment: int | None
) -> list[State | None]:
    numbers = [ids.decode(id, key) or _NO_DOCUMENT for id in documents]
    ((states,),) = session.fetch(statement, (moment, numbers))
    return [None if state is None else STATES[state] for state in states]


def adjust(
    session: Session,
    name: str,
    settings: CustomerSettings,
    expected: CustomerSettings | None,
    moment: int | None,
) -> bool:
    """Change a customer's settings, if they are as expected."""
    old = (None, None, None) if expected is None else _customer_columns(expected)
    values = (moment, name, *_customer_columns(settings), expected is not None, *old)
    crash.point("configure-before-commit")
    ((applied,),) = session.fetch(_ADJUST, values)
    crash.point("configure-after-commit")
    return bool(applied)


def _customer_columns(settings: CustomerSettings) -> Row:
    return weight_in_thousandths(settings.weight), settings.limit, settings.paused


class ConfigureResult(IntEnum):
    """The result of one call of `configure`."""

    STALE_VERSION = 0  # other settings are in force than those that were expected
    IN_FORCE = 1
    AGAIN = 2  # more events must be applied before the mode can change: call it again


def configure(
    session: Session,
    settings: Settings,
    expected_version: int | None,
    *,
    moment: int | None,
    uptime: Uptime | None,
    budget: int,
) -> ConfigureResult:
    """Put other settings in force, if those in force have the expected version."""
    at, boot = (uptime.at, uptime.boot) if uptime else (None, SERVER_BOOT)
    values = (moment, at, boot, budget, expected_version, *settings_columns(settings))
    crash.point("configure-before-commit")
    ((answer,),) = session.fetch(_CONFIGURE, values)
    crash.point("configure-after-commit")
    return ConfigureResult(answer)


def convert(session: Session, budget: int) -> bool:
    """Convert the next customers to the flows of a new mode; whether all are converted."""
    ((done,),) = session.fetch(_CONVERT, (budget,))
    return bool(done)


def repair(session: Session, customers: Sequence[int], budget: int) -> bool:
    """Rebuild what is derived from the documents of these customers. False if this call has only
    applied events: call it again."""
    ((done,),) = session.fetch(REPAIR_CUSTOMERS, ([*customers], budget))
    return bool(done)


def has_wrong_counters(session: Session) -> bool:
    """Return whether the numbers of waiting and delayed documents of the whole queue are wrong, in
    the snapshot of the session. Counting the documents takes 5 s at most."""
    session.ask(_COUNT_TIMEOUT)
    ((wrong,),) = session.fetch(_WRONG_COUNTERS)
    return bool(wrong)


def repair_queue(session: Session, budget: int) -> bool:
    """Recount how many documents wait and are delayed in the whole queue. The documents are counted
    before the queue is locked."""
    ((done,),) = session.fetch(REPAIR_QUEUE, (budget,))
    return bool(done)
