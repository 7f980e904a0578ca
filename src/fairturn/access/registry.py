"""Access keys over a store: made, shown once, checked, replaced, ended."""

import secrets
from collections.abc import Callable
from typing import NamedTuple

from fairturn.access.keys import (
    ID_BYTES,
    KEY_NAME_BYTES_MAX,
    SECRET_BYTES,
    AccessKey,
    Role,
    digest_of,
    matches,
    read_key,
    write_key,
)
from fairturn.clock import SECOND_US, Clock, SystemClock
from fairturn.errors import NotFound, WrongState
from fairturn.model import CUSTOMER_BYTES_MAX, PAGE_MAX
from fairturn.stores.contract import Store
from fairturn.validation import text

# The last use is noted at most so often: a write for each request would be the dearest part of it.
USE_NOTED_EVERY_US = 60 * SECOND_US
OVERLAP_S_MAX = 30 * 86_400.0


class NewKey(NamedTuple):
    """A key that was made just now. `shown` is the key itself; nobody can ask for it again."""

    key: AccessKey
    shown: str

    def __repr__(self) -> str:
        """Without the key: what is printed or logged by chance must open nothing."""
        return f"NewKey(key={self.key!r}, shown='ft_{self.key.id}_…')"


class Keys:
    """The access keys of a queue."""

    def __init__(
        self,
        store: Store,
        *,
        clock: Clock | None = None,
        random_bytes: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self._store = store
        self._clock = clock or SystemClock()
        self._random_bytes = random_bytes

    def make(self, role: Role | str, *, name: str = "", customer: str | None = None) -> NewKey:
        """A new key. One of a customer names whose it is; the others name nobody."""
        role = refuse_role(role, customer)
        shown = write_key(self._random_bytes(ID_BYTES), self._random_bytes(SECRET_BYTES))
        presented = read_key(shown)
        assert presented is not None
        key = AccessKey(
            id=presented.id,
            role=role,
            customer=customer,
            name=text.description(name, KEY_NAME_BYTES_MAX),
            digest=digest_of(presented.secret),
            made_at=self._clock.now(),
        )
        self._store.add_key(key)
        return NewKey(key, shown)

    def check(self, shown: str) -> AccessKey | None:
        """The key that somebody shows; None if it is none, is not known, or has ended."""
        presented = read_key(shown)
        if presented is None:
            return None
        key = self._store.access_key(presented.id)
        now = self._clock.now()
        if not matches(key, presented) or key is None or not key.opens(now):
            return None
        if key.used_at is None or now - key.used_at >= USE_NOTED_EVERY_US:
            self._store.note_use(key.id, now)
        return key

    def get(self, id: str) -> AccessKey:
        """One key; `NotFound` if there is none of this id."""
        key = self._store.access_key(id)
        if key is None:
            raise NotFound(f"there is no key {id!r}")
        return key

    def list(
        self, *, customer: str | None = None, after: str | None = None, size: int = 100
    ) -> list[AccessKey]:
        """Keys by their ids, also those that have ended."""
        if not 1 <= size <= PAGE_MAX:
            raise ValueError(f"size is {size}; a page has from 1 to {PAGE_MAX:,}")
        return self._store.access_keys(customer=customer, after=after, size=size)

    def are_asked_for(self) -> bool:
        """Whether a key was ever made. From then on one is asked for: who ends the last key shuts
        the service and must not open it to everybody."""
        return bool(self._store.access_keys(size=1))

    def rotate(self, id: str, *, overlap_s: float = 0.0) -> NewKey:
        """A new key in place of one, with its name and role. The old one ends after the overlap,
        in which whoever uses it can change to the new one."""
        if not 0 <= overlap_s <= OVERLAP_S_MAX:
            raise ValueError(f"overlap_s is {overlap_s}; it must be from 0 to {OVERLAP_S_MAX:,.0f}")
        old, now = self.get(id), self._clock.now()
        if not old.opens(now):
            raise WrongState(f"the key {id} has ended; make a new one")
        made = self.make(old.role, name=old.name, customer=old.customer)
        self._store.end_key(id, now + round(overlap_s * SECOND_US))
        return made

    def revoke(self, id: str) -> AccessKey:
        """Let a key end now."""
        key = self._store.end_key(id, self._clock.now())
        if key is None:
            raise NotFound(f"there is no key {id!r}")
        return key


def refuse_role(role: str, customer: str | None) -> Role:
    """The role, if it is one and goes with this customer."""
    try:
        known = Role(role)
    except ValueError:
        raise ValueError(f"role is {role!r}; it must be one of: {', '.join(Role)}") from None
    if (known is Role.CUSTOMER) != (customer is not None):
        raise ValueError(
            "a key of the role customer names a customer, and a key of another role names none"
        )
    if customer is not None:
        text.identity(customer, "customer", CUSTOMER_BYTES_MAX)
    return known
