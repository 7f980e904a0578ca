"""Text that comes from outside, before it is stored.

Some texts are identities: a customer's name, an idempotency key. In them a character that a
database cannot hold is refused, because replacing it could make two identities one. Every other
text is a description, and there it is replaced: recording a failure must never fail itself.
"""

import json
import re
import string
from collections.abc import Callable
from typing import Any

_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
_SMALL = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)
REPLACEMENT = "\ufffd"


def storable(value: str) -> bool:
    """Whether every database can hold the text as it is."""
    return "\x00" not in value and (value.isascii() or _UNSTORABLE.search(value) is None)


def identity(value: str, what: str, bytes_max: int) -> str:
    """The text unchanged, or a `ValueError` that says what is wrong with it."""
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a text, not {type(value).__name__}")
    if not value:
        raise ValueError(f"{what} is empty")
    size = len(value) if value.isascii() else len(value.encode("utf-8", "surrogatepass"))
    if not storable(value):
        raise ValueError(
            f"{what} {value!r} has a NUL character or a lone surrogate; remove it: "
            "replacing it could make two names one"
        )
    if size > bytes_max:
        raise ValueError(f"{what} has {size:,} bytes; at most {bytes_max:,} are allowed")
    return value


def spellings(part: str) -> tuple[str, ...]:
    """What to look for in a name whose ASCII letters were made small, to find this part of it.

    Letters of ASCII match in either case. Every database agrees on those; of other letters some
    know the case and some do not, so they are looked for as they were typed, all small, all large.
    """
    typed = (part, part.lower(), part.upper())
    return tuple(dict.fromkeys(small(each) for each in typed))


def small(value: str) -> str:
    """The text with small letters for those of ASCII; all others stay."""
    return value.lower() if value.isascii() else value.translate(_SMALL)


def description(value: str, bytes_max: int) -> str:
    """The text in a form that every store can hold, cut to the limit at a whole character."""
    if "\x00" in value or not value.isascii():
        value = _UNSTORABLE.sub(REPLACEMENT, value)
        encoded = value.encode()
        return value if len(encoded) <= bytes_max else encoded[:bytes_max].decode(errors="ignore")
    return value[:bytes_max]


def _json_writer() -> Callable[[Any], str]:
    """The encoder of the standard library, made once: its public form makes it for each value,
    which takes longer than the encoding of a small one."""
    encoder = json.JSONEncoder(
        ensure_ascii=True, allow_nan=False, separators=(",", ":"), check_circular=False
    )
    make = getattr(json.encoder, "c_make_encoder", None)
    if make is None:
        return encoder.encode
    quote = json.encoder.encode_basestring_ascii
    parts = make(None, encoder.default, quote, None, ":", ",", False, False, False)
    return lambda value: "".join(parts(value, 0))


# A value as JSON in ASCII without a blank too many, or the error of the standard library.
compact_json = _json_writer()
