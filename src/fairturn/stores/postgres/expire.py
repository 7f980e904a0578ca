"""Expiry: documents that were not started before their time, recorded in bounded steps."""

from fairturn.stores import crash
from fairturn.stores.postgres.session import Session

_EXPIRE = "SELECT expired, more FROM fairturn.expire_next(%s::int8, %s::int4)"


def expire(session: Session, most: int, given_now: int | None) -> tuple[int, bool]:
    """Record up to `most` documents that have expired, in one transaction. Return how many, and
    whether others may have expired."""
    crash.point("expire-before-commit")
    ((expired, more),) = session.fetch(_EXPIRE, (given_now, most))
    crash.point("expire-after-commit")
    return expired, more
