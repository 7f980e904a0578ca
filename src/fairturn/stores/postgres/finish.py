"""Outcomes, which end attempts exactly once, and renewals of leases."""

from collections.abc import Mapping, Sequence
from json import dumps
from typing import Any, NamedTuple

from fairturn.model import (
    DETAILS_BYTES_MAX,
    ERROR_BYTES_MAX,
    Advanced,
    Completed,
    ContentRef,
    Failed,
    Fence,
    OutageReport,
    Outcome,
    Progress,
    Released,
    Renewed,
    Snoozed,
    Stopped,
    kept_cost,
)
from fairturn.stores import crash, ids
from fairturn.stores.ids import IdKey
from fairturn.stores.postgres.rows import columns
from fairturn.stores.postgres.session import Session
from fairturn.stores.transitions import storable_step
from fairturn.validation.text import description, tail

# The function `finish` identifies an outcome by its position here.
_CODES = (Completed, Failed, Released, Stopped, Advanced, Snoozed, OutageReport)


class _Row(NamedTuple):
    """An outcome, as the function `finish` takes it."""

    number: int | None  # of the document; None: unknown
    fence: int
    code: int
    error: str | None = None
    delay: int | None = None
    kept_cost: int | None = None
    real_cost: int | None = None
    result: str | None = None
    content_name: str | None = None
    content_size: int | None = None
    content_hash: bytes | None = None
    details: str | None = None
    next_kind: str | None = None
    next_cost: int | None = None
    service: str | None = None


_TYPES = {str | None: "text[]", bytes | None: "bytea[]"}
OUTCOME_TYPES = ", ".join(
    f"%s::{'int2[]' if name == 'code' else _TYPES.get(type, 'int8[]')}"
    for name, type in _Row.__annotations__.items()
)
FINISH = f"SELECT fairturn.finish(%s::int8, {OUTCOME_TYPES})"

_RENEW = """
    SELECT its_number, its_fence, is_cancelled
    FROM fairturn.renew(%s::int8, %s::int8, %s::int8[], %s::int8[], %s::text[], %s::text[])"""


def finish(
    session: Session, key: IdKey, outcomes: Sequence[Outcome], given_now: int | None
) -> list[Fence]:
    """Record outcomes; return the fences of those that did not count."""
    if not outcomes:
        return []
    crash.point("finish-before-commit")
    session.unsure = True
    ((lost,),) = session.fetch(FINISH, (given_now, *outcome_columns(outcomes, key)))
    crash.point("finish-after-commit")
    return [outcomes[position - 1].fence for position in lost]


def outcome_columns(outcomes: Sequence[Outcome], key: IdKey) -> list[list[Any]]:
    """Return outcomes as the array arguments of `finish` and `claim_after`."""
    numbers = ids.decode_all([outcome.fence.document for outcome in outcomes], key)
    storable = map(storable_step, outcomes)
    return columns([_row(n, outcome) for n, outcome in zip(numbers, storable, strict=True)])


def _row(number: int | None, outcome: Outcome) -> _Row:
    row = _Row(number, outcome.fence.number, _CODES.index(type(outcome)))
    match outcome:
        case Completed():
            row = row._replace(
                kept_cost=kept_cost(outcome), real_cost=outcome.real_cost, result=outcome.result
            )
            return _with_content(row, outcome.content)
        case Failed():
            details = outcome.details
            return row._replace(
                error=description(outcome.error, ERROR_BYTES_MAX),
                delay=outcome.retry_in_us,
                details=None if details is None else tail(details, DETAILS_BYTES_MAX),
            )
        case Advanced():
            row = row._replace(
                real_cost=outcome.real_cost,
                result=outcome.value,
                next_kind=outcome.kind,
                next_cost=outcome.cost,
            )
            return _with_content(row, outcome.content)
        case Snoozed():
            return row._replace(delay=outcome.delay_us)
        case OutageReport():
            return row._replace(
                error=description(outcome.error, ERROR_BYTES_MAX),
                delay=outcome.retry_after_us,
                service=outcome.service,
            )
    return row


def _with_content(row: _Row, content: ContentRef | None) -> _Row:
    if content is None:
        return row
    name, size_bytes, sha256 = content
    return row._replace(content_name=name, content_size=size_bytes, content_hash=sha256)


def renew(
    session: Session,
    key: IdKey,
    fences: Sequence[Fence],
    progress: Mapping[Fence, Progress],
    checkpoints: Mapping[Fence, str],
    *,
    lease_us: int,
    at: int | None,
) -> Renewed:
    """Renew leases, and store the progress and the checkpoints of their attempts."""
    attempts = {(ids.decode(fence.document, key), fence.number): fence for fence in fences}
    rows = [
        (
            number,
            fence_number,
            dumps(progress[fence]) if fence in progress else None,
            checkpoints.get(fence),
        )
        for (number, fence_number), fence in attempts.items()
        if number is not None
    ]
    kept: dict[tuple[int, int], bool] = {}
    if rows:
        crash.point("renew-before-commit")
        kept = {row[:2]: row[2] for row in session.fetch(_RENEW, (at, lease_us, *columns(rows)))}
        crash.point("renew-after-commit")
    renewed = Renewed([], [])
    for fence in fences:
        state = kept.get((ids.decode(fence.document, key) or 0, fence.number))
        if state is None:
            renewed.lost.append(fence)
        elif state:
            renewed.cancelled.append(fence)
    return renewed
