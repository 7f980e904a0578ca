"""The public id of a document: its number in the queue, obfuscated with the queue's key.

Plain numbers would reveal to each customer how many documents the others submit. The mapping is a
bijection: ids are unique without an index, and decode to the row number. An id is not a secret and
grants no access (decision 0001).
"""

import re
from collections.abc import Iterable, Sequence

BITS = 60
_MASK = (1 << BITS) - 1
_HALF = BITS // 2
# Odd, so that each has an inverse modulo 2^60.
_FIRST, _SECOND = 0x9E3779B97F4A7C5, 0xBF58476D1CE4E5B
_FIRST_BACK, _SECOND_BACK = pow(_FIRST, -1, 1 << BITS), pow(_SECOND, -1, 1 << BITS)
_DIGITS = BITS // 4
_FORM = re.compile(rf"[0-9a-f]{{{_DIGITS}}}", re.ASCII)
_FORMS = re.compile(r"[0-9a-f]+", re.ASCII)


def encode(number: int, key: int) -> str:
    """Return the id of a document's number: 15 hexadecimal digits."""
    x = ((number ^ key) * _FIRST) & _MASK
    x = ((x ^ (x >> _HALF)) * _SECOND) & _MASK
    return f"{x ^ (x >> _HALF):015x}"


def encode_all(numbers: Iterable[int], key: int) -> list[str]:
    """`encode` for many numbers, without a call for each."""
    first, second, half, mask = _FIRST, _SECOND, _HALF, _MASK
    mixed = [((number ^ key) * first) & mask for number in numbers]
    mixed = [((x ^ (x >> half)) * second) & mask for x in mixed]
    return [f"{x ^ (x >> half):015x}" for x in mixed]


def decode(id: str, key: int) -> int | None:
    """Return the number behind an id; None if the text is malformed."""
    if not isinstance(id, str) or not _FORM.fullmatch(id):
        return None
    x = int(id, 16)
    x = ((x ^ (x >> _HALF)) * _SECOND_BACK) & _MASK
    x = ((x ^ (x >> _HALF)) * _FIRST_BACK) & _MASK
    return x ^ key


def decode_all(ids: Sequence[str], key: int) -> list[int] | list[int | None]:
    """`decode` for many ids, without a call for each."""
    if set(map(len, ids)) != {_DIGITS} or not _FORMS.fullmatch("".join(ids)):
        return [decode(id, key) for id in ids]
    first, second, half, mask = _FIRST_BACK, _SECOND_BACK, _HALF, _MASK
    mixed = [int(id, 16) for id in ids]
    mixed = [((x ^ (x >> half)) * second) & mask for x in mixed]
    return [(((x ^ (x >> half)) * first) & mask) ^ key for x in mixed]
