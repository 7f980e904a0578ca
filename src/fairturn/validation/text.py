"""Text from callers, made storable.

Identities, such as a customer's name or an idempotency key, are rejected if they contain a
character that a database cannot store: replacing it could make two identities equal. In all other
text such characters are replaced: recording an error message must not fail.
"""

import json
import re
import string
from collections.abc import Callable
from typing import Any

_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
_KIND = re.compile("[a-z0-9._-]{1,64}")
RESERVED_KINDS = "fairturn."
_SMALL = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)
REPLACEMENT = "\ufffd"


def storable(value: str) -> bool:
    """Return whether every database can store the text unchanged."""
    return "\x00" not in value and (value.isascii() or _UNSTORABLE.search(value) is None)


def identity(value: str, what: str, bytes_max: int) -> str:
    """Return an identity unchanged; raise `ValueError` if it is empty, too long or unstorable."""
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a string, not {type(value).__name__}")
    if not value:
        raise ValueError(f"{what} is empty")
    size = len(value) if value.isascii() else len(value.encode("utf-8", "surrogatepass"))
    if not storable(value):
        raise ValueError(
            f"{what} {value!r} has a NUL character or a lone surrogate, which databases cannot "
            "store; remove it"
        )
    if size > bytes_max:
        raise ValueError(f"{what} has {size:,} bytes; at most {bytes_max:,} are allowed")
    return value


def kind_name(value: str) -> str:
    """Return the name of a kind of work unchanged; raise `ValueError` if it is not valid."""
    if not isinstance(value, str):
        raise TypeError(f"kind must be a string, not {type(value).__name__}")
    if not _KIND.fullmatch(value):
        raise ValueError(
            f"kind {value!r} is not valid; a kind has 1 to 64 characters: a to z, 0 to 9, dot, "
            "underscore and hyphen"
        )
    if value in (".", ".."):
        raise ValueError(f"kind {value!r} cannot be part of a URL; choose another name")
    if value.startswith(RESERVED_KINDS):
        raise ValueError(f"kind {value!r} is reserved; choose one without {RESERVED_KINDS!r}")
    return value


def spellings(part: str) -> tuple[str, ...]:
    """Return the substrings to search for in a name converted by `small`.

    ASCII letters match in either case. Databases differ in case folding of other letters, so these
    are searched as typed, in lower case and in upper case.
    """
    typed = (part, part.lower(), part.upper())
    return tuple(dict.fromkeys(small(each) for each in typed))


def small(value: str) -> str:
    """Return the text with its ASCII letters in lower case."""
    return value.lower() if value.isascii() else value.translate(_SMALL)


def description(value: str, bytes_max: int) -> str:
    """Return the text with unstorable characters replaced, truncated to `bytes_max` at a character
    boundary."""
    if "\x00" in value or not value.isascii():
        value = _UNSTORABLE.sub(REPLACEMENT, value)
        encoded = value.encode()
        return value if len(encoded) <= bytes_max else encoded[:bytes_max].decode(errors="ignore")
    return value[:bytes_max]


def tail(value: str, bytes_max: int) -> str:
    """Return the end of the text, of at most `bytes_max`, with unstorable characters replaced."""
    end = _UNSTORABLE.sub(REPLACEMENT, value[-bytes_max:]).encode()
    return end[-bytes_max:].decode(errors="ignore")


def _json_writer() -> Callable[[Any], str]:
    """Return a function that encodes JSON with one shared C encoder. `json.dumps` creates one per
    call, which takes longer than encoding a small value."""
    encoder = json.JSONEncoder(
        ensure_ascii=True, allow_nan=False, separators=(",", ":"), check_circular=False
    )
    make = getattr(json.encoder, "c_make_encoder", None)
    if make is None:
        return encoder.encode
    quote = json.encoder.encode_basestring_ascii
    parts = make(None, encoder.default, quote, None, ":", ",", False, False, False)
    return lambda value: "".join(parts(value, 0))


# Encodes a value as compact ASCII JSON; raises the errors of the standard library.
compact_json = _json_writer()
