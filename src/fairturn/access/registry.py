"""The access keys of a queue: create, check, list, rotate, revoke."""

import secrets
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
from fairturn.model import CUSTOMER_BYTES_MAX
from fairturn.stores.contract import AccessKeyStore
from fairturn.validation import text
from fairturn.validation.filters import page_size

# Recording the last use with every request would make each request a write.
USE_NOTED_EVERY_US = 60 * SECOND_US
OVERLAP_S_MAX = 30 * 86_400.0


class NewKey(NamedTuple):
    """A new key. `shown` is the key itself, which cannot be retrieved again."""

    key: AccessKey
    shown: str

    def __repr__(self) -> str:
        """Omit the secret, so that a log line does not contain it."""
        return f"NewKey(key={self.key!r}, shown='ft_{self.key.id}_…')"


class KeyRegistry:
    """The access keys of a queue."""

    def __init__(self, store: AccessKeyStore, *, clock: Clock | None = None) -> None:
        self._store = store
        self._clock = clock or SystemClock()

    def make(self, role: Role | str, *, name: str = "", customer: str | None = None) -> NewKey:
        """Create a key. `customer` is required with the role customer, and only allowed there."""
        role = refuse_role(role, customer)
        shown = random_key()
        presented = read_key(shown)
        assert presented is not None
        key = AccessKey(
            id=presented.id,
            role=role,
            customer=customer,
            name=text.description(name, KEY_NAME_BYTES_MAX),
            digest=digest_of(presented.secret),
            made_at_us=self._clock.now(),
        )
        self._store.add_key(key)
        return NewKey(key, shown)

    def check(self, shown: str) -> AccessKey | None:
        """Return the key that a client presents; None if malformed, unknown, expired or revoked."""
        presented = read_key(shown)
        if presented is None:
            return None
        key = self._store.access_key(presented.id)
        now = self._clock.now()
        if not matches(key, presented) or key is None or not key.opens(now):
            return None
        if key.used_at_us is None or now - key.used_at_us >= USE_NOTED_EVERY_US:
            self._store.note_use(key.id, now)
        return key

    def find(self, id: str) -> AccessKey | None:
        """Return a key, including an expired or revoked one; None if there is none."""
        return self._store.access_key(id) if text.storable(id) else None

    def get(self, id: str) -> AccessKey:
        """Return a key, as `find` does; raise `NotFound` if there is none."""
        key = self.find(id)
        if key is None:
            raise NotFound(f"there is no key {id!r}")
        return key

    def list(
        self, *, customer: str | None = None, after: str | None = None, size: int = 100
    ) -> list[AccessKey]:
        """Return a page of keys by id, including expired and revoked ones."""
        if customer is not None:
            text.identity(customer, "customer", CUSTOMER_BYTES_MAX)
        if after is not None and not text.storable(after):
            raise ValueError(f"after is {after!r}; it must be the id of a key")
        return self._store.access_keys(customer=customer, after=after, size=page_size(size))

    def are_required(self) -> bool:
        """Return whether the service requires a key: from the first key on, also when all keys are
        revoked. Revoking the last key must not make the service public."""
        return bool(self._store.access_keys(size=1))

    def rotate(self, id: str, *, overlap_s: float = 0.0) -> NewKey:
        """Create a key with the name, role and customer of an old one, which expires after
        `overlap_s`. Raise `WrongState` if the old one has expired or was revoked."""
        if not 0 <= overlap_s <= OVERLAP_S_MAX:
            raise ValueError(f"overlap_s is {overlap_s}; it must be from 0 to {OVERLAP_S_MAX:,.0f}")
        old, now = self.get(id), self._clock.now()
        if not old.opens(now):
            raise WrongState(f"the key {id} has expired or was revoked; create a new one")
        made = self.make(old.role, name=old.name, customer=old.customer)
        self._store.end_key(id, now + round(overlap_s * SECOND_US))
        return made

    def revoke(self, id: str) -> AccessKey:
        """Revoke a key; raise `NotFound` if there is none."""
        key = self._store.end_key(id, self._clock.now()) if text.storable(id) else None
        if key is None:
            raise NotFound(f"there is no key {id!r}")
        return key


def random_key() -> str:
    """Return the text of a new key, `ft_ID_SECRET`. Nothing is stored."""
    return write_key(secrets.token_bytes(ID_BYTES), secrets.token_bytes(SECRET_BYTES))


def refuse_role(role: str, customer: str | None) -> Role:
    """Return the role; raise `ValueError` if it is unknown or does not match `customer`."""
    try:
        known = Role(role)
    except ValueError:
        raise ValueError(f"role is {role!r}; it must be one of: {', '.join(Role)}") from None
    if (known is Role.CUSTOMER) != (customer is not None):
        raise ValueError(
            f"role is {role!r} and customer is {customer!r}; the role customer requires a customer "
            "and the other roles allow none"
        )
    if customer is not None:
        text.identity(customer, "customer", CUSTOMER_BYTES_MAX)
    return known
