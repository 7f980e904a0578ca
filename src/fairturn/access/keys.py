"""Access keys of the service: values, without I/O.

A key has the form `ft_ID_SECRET`. The id is looked up; only a SHA-256 of the secret is stored, so
that a copy of the database grants no access. A secret has 256 random bits and cannot be guessed; a
slow password hash would only make the service easier to overload.
"""

import hashlib
import hmac
import re
from datetime import datetime
from enum import StrEnum
from typing import NamedTuple

from fairturn.clock import datetime_or_none, to_datetime

ID_BYTES, SECRET_BYTES = 6, 32
KEY_NAME_BYTES_MAX = 255
ACCESS_KEYS_MAX = 100_000

_FORM = re.compile(r"ft_([0-9a-f]{12})_([0-9a-f]{64})", re.ASCII)


class Role(StrEnum):
    """The permissions of a key."""

    CUSTOMER = "customer"  # submit and read the documents of one customer
    OPERATOR = "operator"  # everything
    READER = "reader"  # read everything, change nothing


class AccessKey(NamedTuple):
    """A key as it is stored, without the secret."""

    id: str
    role: Role
    customer: str | None  # only with the role customer
    name: str  # a free description
    digest: bytes  # SHA-256 of the secret
    made_at_us: int
    used_at_us: int | None = None
    ends_at_us: int | None = None  # when it expires or was revoked

    @property
    def made_at(self) -> datetime:
        return to_datetime(self.made_at_us)

    @property
    def used_at(self) -> datetime | None:
        return datetime_or_none(self.used_at_us)

    @property
    def ends_at(self) -> datetime | None:
        return datetime_or_none(self.ends_at_us)

    def opens(self, now: int) -> bool:
        """Return whether the key is valid: neither expired nor revoked."""
        return self.ends_at_us is None or now < self.ends_at_us


class KeyCredentials(NamedTuple):
    """The parts of a key that a client presents."""

    id: str
    secret: str


def write_key(id: bytes, secret: bytes) -> str:
    """Format a key from random bytes."""
    assert (len(id), len(secret)) == (ID_BYTES, SECRET_BYTES)
    return f"ft_{id.hex()}_{secret.hex()}"


def read_key(text: str) -> KeyCredentials | None:
    """Parse a key; return None if it is malformed."""
    match = _FORM.fullmatch(text)
    return None if match is None else KeyCredentials(match[1], match[2])


def digest_of(secret: str) -> bytes:
    """Return the hash of a secret."""
    return hashlib.sha256(secret.encode("ascii")).digest()


def matches(key: AccessKey | None, presented: KeyCredentials) -> bool:
    """Return whether the secret is that of the key, in time that does not depend on `key`: the
    duration must not reveal whether an id exists."""
    digest = digest_of(presented.secret)
    return hmac.compare_digest(digest, bytes(32) if key is None else key.digest) and key is not None
