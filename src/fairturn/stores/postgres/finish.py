"""Outcomes, which end attempts exactly once, and renewals of leases."""

from collections.abc import Mapping, Sequence
from json import dumps
from typing import Any

from fairturn.model import (
    ERROR_BYTES_MAX,
    Completed,
    Failed,
    Fence,
    Outcome,
    Progress,
    Released,
    Renewed,
    Stopped,
    kept_cost,
)
from fairturn.stores import crash, ids
from fairturn.stores.ids import IdKey
from fairturn.stores.postgres.rows import columns
from fairturn.stores.postgres.session import Session
from fairturn.stores.values import Row
from fairturn.validation.text import description

# The function `finish` identifies the kind of an outcome by its position here.
_KINDS = (Completed, Failed, Released, Stopped)
_TYPES = (
    *("int8[]", "int8[]", "int2[]", "text[]", "int8[]", "int8[]", "int8[]"),
    *("text[]", "text[]", "int8[]", "bytea[]"),
)
OUTCOME_TYPES = ", ".join(f"%s::{kind}" for kind in _TYPES)
FINISH = f"SELECT fairturn.finish(%s::int8, {OUTCOME_TYPES})"

_RENEW = """
    SELECT its_number, its_fence, is_cancelled
    FROM fairturn.renew(%s::int8, %s::int8, %s::int8[], %s::int8[], %s::text[])"""


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
    return columns([_row(n, outcome) for n, outcome in zip(numbers, outcomes, strict=True)])


def _row(number: int | None, outcome: Outcome) -> Row:
    error = retry_in = kept = real = result = None
    content: Row = (None, None, None)
    if isinstance(outcome, Completed):
        kept, real, result = kept_cost(outcome), outcome.real_cost, outcome.result
        content = outcome.content or content
    elif isinstance(outcome, Failed):
        error, retry_in = description(outcome.error, ERROR_BYTES_MAX), outcome.retry_in_us
    kind = _KINDS.index(type(outcome))
    return (number, outcome.fence.number, kind, error, retry_in, kept, real, result, *content)


def renew(
    session: Session,
    key: IdKey,
    fences: Sequence[Fence],
    progress: Mapping[Fence, Progress],
    *,
    lease_us: int,
    at: int | None,
) -> Renewed:
    """Renew leases, and store the progress of their attempts."""
    rows = sorted(
        {
            (number, fence.number, dumps(progress[fence]) if fence in progress else None)
            for fence in fences
            if (number := ids.decode(fence.document, key)) is not None
        }
    )
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
