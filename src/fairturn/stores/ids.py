"""The public id of a document: its number in the queue, enciphered with the queue's secret.

Plain numbers would reveal to each customer how many documents the others submit. An id is a Feistel
network of two rounds on a tag of 56 zero bits and a number of 56 bits, written as 28 hexadecimal
digits. The round functions are SHA-256 with the secret:

    tag = bytes 7 w to 7 w + 6 of SHA-256(secret, 1, number div 4), where w = number mod 4
    id  = tag, number XOR the first 7 bytes of SHA-256(secret, 2, tag)

The number div 4 has 8 bytes, the most significant first. `decode` computes the tag again and
rejects every other text: ids are unique without an index, decode to the row number and cannot be
invented. An id is not a secret and grants no access (decision 0001). The function `public_id` of
PostgreSQL is the same; `tests/vectors/ids.json` has examples for both.

Numbers below `IdKey.legacy_below` keep the ids that earlier releases issued: 15 digits, a bijection
whose key can be computed from a few ids.
"""

import re
from collections.abc import Iterable, Sequence
from hashlib import sha256
from secrets import randbits, token_bytes
from struct import Struct, pack, unpack
from typing import NamedTuple

SECRET_BYTES = 32
LEGACY_BITS = 60
BITS = 56  # of the tag, and of the number
_DIGITS, _LEGACY_DIGITS = 2 * BITS // 4, LEGACY_BITS // 4
FORM = rf"(?:[0-9a-f]{{{_DIGITS}}}|[0-9a-f]{{{_LEGACY_DIGITS}}})"  # a regular expression
_FORM = re.compile(FORM, re.ASCII)
_FORMS = re.compile(r"[0-9a-f]+", re.ASCII)
_HALF_BYTES, _HALF_DIGITS = BITS // 8, BITS // 4
_ID_BYTES = 2 * _HALF_BYTES
_FOUR_TAGS = Struct("7s7s7s7s4x")  # of consecutive numbers
_TAG, _PLAIN = "7s7x", "6xq"  # parts of an id in `struct`: its tag, and a number after zero bits

_LEGACY_MASK = (1 << LEGACY_BITS) - 1
_LEGACY_HALF = LEGACY_BITS // 2
# Odd, so that each has an inverse modulo 2^60.
_FIRST, _SECOND = 0x9E3779B97F4A7C5, 0xBF58476D1CE4E5B
_FIRST_BACK, _SECOND_BACK = pow(_FIRST, -1, 1 << LEGACY_BITS), pow(_SECOND, -1, 1 << LEGACY_BITS)


class IdKey(NamedTuple):
    """The keys with which a queue converts between document numbers and ids."""

    secret: bytes
    legacy_key: int = 0
    legacy_below: int = 0  # the first number with an id of the present form

    @classmethod
    def new(cls, seed: int | None = None) -> "IdKey":
        """Return a random key for a new queue, or the one of a seed, for tests."""
        if seed is None:
            return cls(token_bytes(SECRET_BYTES), randbits(LEGACY_BITS))
        return cls(sha256(b"seed %d" % seed).digest(), seed)

    @property
    def fingerprint(self) -> int:
        """A number that identifies the secret and does not reveal it."""
        return int.from_bytes(sha256(self.secret + b"\0").digest()[:_HALF_BYTES], "big")


def is_id(text: object) -> bool:
    """Return whether a value has the form of an id."""
    return isinstance(text, str) and _FORM.fullmatch(text) is not None


def encode(number: int, key: IdKey) -> str:
    """Return the id of a document's number."""
    if number < key.legacy_below:
        return _encode_legacy(number, key.legacy_key)
    tag = _tag(number, key.secret)
    return f"{tag.hex()}{number ^ _pad(tag, key.secret):014x}"


def _tag(number: int, secret: bytes) -> bytes:
    at = _HALF_BYTES * (number & 3)
    hashed = sha256(secret + b"\1" + (number >> 2).to_bytes(8, "big")).digest()
    return hashed[at : at + _HALF_BYTES]


def _pad(tag: bytes, secret: bytes) -> int:
    return int.from_bytes(sha256(secret + b"\2" + tag).digest()[:_HALF_BYTES], "big")


def encode_all(numbers: Sequence[int], key: IdKey) -> list[str]:
    """`encode` for many numbers: four consecutive ones share a hash, and the work per number is
    left to functions written in C."""
    if len(numbers) < 2 or min(numbers) < key.legacy_below:
        return [encode(number, key) for number in numbers]
    tags, second = _tags(numbers, key.secret), key.secret + b"\2"
    masks = b"".join([tag + sha256(second + tag).digest()[:_HALF_BYTES] for tag in tags])
    plain = pack(">" + _PLAIN * len(tags), *numbers)
    mixed = int.from_bytes(masks, "big") ^ int.from_bytes(plain, "big")
    return mixed.to_bytes(len(plain), "big").hex(" ", _ID_BYTES).split()


def _tags(numbers: Iterable[int], secret: bytes) -> list[bytes]:
    first = secret + b"\1"
    block = -1
    four: tuple[bytes, ...] = ()
    tags = []
    for number in numbers:
        if number >> 2 != block:
            block = number >> 2
            four = _FOUR_TAGS.unpack(sha256(first + block.to_bytes(8, "big")).digest())
        tags.append(four[number & 3])
    return tags


def decode(id: str, key: IdKey) -> int | None:
    """Return the number behind an id; None if the text is not an id of this queue."""
    if not is_id(id):
        return None
    if len(id) == _LEGACY_DIGITS:
        number = _decode_legacy(id, key.legacy_key)
        return number if number < key.legacy_below else None
    tag = bytes.fromhex(id[:_HALF_DIGITS])
    number = int(id[_HALF_DIGITS:], 16) ^ _pad(tag, key.secret)
    return number if number >= key.legacy_below and tag == _tag(number, key.secret) else None


def decode_all(ids: Sequence[str], key: IdKey) -> list[int | None]:
    """`decode` for many ids, without a call for each."""
    if len(ids) < 2 or set(map(len, ids)) != {_DIGITS} or not _FORMS.fullmatch("".join(ids)):
        return [decode(id, key) for id in ids]
    mixed, second = bytes.fromhex("".join(ids)), key.secret + b"\2"
    tags = unpack(_TAG * len(ids), mixed)
    masks = b"".join([tag + sha256(second + tag).digest()[:_HALF_BYTES] for tag in tags])
    plain = int.from_bytes(masks, "big") ^ int.from_bytes(mixed, "big")
    numbers = unpack(">" + _PLAIN * len(ids), plain.to_bytes(len(mixed), "big"))
    lowest = key.legacy_below
    return [
        number if tag == expected and lowest <= number else None
        for number, tag, expected in zip(numbers, tags, _tags(numbers, key.secret), strict=True)
    ]


# ── Ids of earlier releases ──────────────────────────────────────────────────────────────────────


def _encode_legacy(number: int, key: int) -> str:
    x = ((number ^ key) * _FIRST) & _LEGACY_MASK
    x = ((x ^ (x >> _LEGACY_HALF)) * _SECOND) & _LEGACY_MASK
    return f"{x ^ (x >> _LEGACY_HALF):015x}"


def _decode_legacy(id: str, key: int) -> int:
    x = int(id, 16)
    x = ((x ^ (x >> _LEGACY_HALF)) * _SECOND_BACK) & _LEGACY_MASK
    x = ((x ^ (x >> _LEGACY_HALF)) * _FIRST_BACK) & _LEGACY_MASK
    return x ^ key
