"""Access keys: who may ask the service for what. Values without I/O.

A key reads `ft_ID_SECRET`. The id finds it; of the secret only a hash is kept, so that a copy of
the database opens nothing. A secret has 256 random bits, which is why one fast hash is enough:
nobody can try them all, and a slow one would be a lever against the service.
"""

import hashlib
import hmac
import re
from enum import StrEnum
from typing import NamedTuple

ID_BYTES, SECRET_BYTES = 6, 32
KEY_NAME_BYTES_MAX = 255
ACCESS_KEYS_MAX = 100_000

_FORM = re.compile(r"ft_([0-9a-f]{12})_([0-9a-f]{64})", re.ASCII)


class Role(StrEnum):
    """What a key is for."""

    CUSTOMER = "customer"  # submits and sees the documents of one customer
    OPERATOR = "operator"  # does everything
    READER = "reader"  # sees everything and changes nothing


class AccessKey(NamedTuple):
    """A key as it is kept: everything but the secret."""

    id: str
    role: Role
    customer: str | None  # of the role customer: whose
    name: str  # for people
    digest: bytes  # SHA-256 of the secret
    made_at: int
    used_at: int | None = None
    ends_at: int | None = None  # from this moment on it opens nothing

    def opens(self, now: int) -> bool:
        """Whether it has not ended."""
        return self.ends_at is None or now < self.ends_at


class Presented(NamedTuple):
    """A key as somebody shows it."""

    id: str
    secret: str


def write_key(id: bytes, secret: bytes) -> str:
    """A key from random bytes, as it is shown once."""
    assert (len(id), len(secret)) == (ID_BYTES, SECRET_BYTES)
    return f"ft_{id.hex()}_{secret.hex()}"


def read_key(text: str) -> Presented | None:
    """The parts of a key; None if the text is none."""
    match = _FORM.fullmatch(text)
    return None if match is None else Presented(match[1], match[2])


def digest_of(secret: str) -> bytes:
    """What is kept of a secret."""
    return hashlib.sha256(secret.encode("ascii")).digest()


def matches(key: AccessKey | None, presented: Presented) -> bool:
    """Whether the secret is that of the key. Without a key the same work is done, so that the time
    does not tell whether the id exists."""
    digest = digest_of(presented.secret)
    return hmac.compare_digest(digest, bytes(32) if key is None else key.digest) and key is not None
