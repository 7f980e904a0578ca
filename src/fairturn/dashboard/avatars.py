"""Avatars of customers: a colour, and two letters that do not depend on seeing the colour."""

import unicodedata
from typing import NamedTuple
from zlib import crc32

COLOURS = 12
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


class Avatar(NamedTuple):
    letters: str
    colour: int  # its number in the style sheet


def face_of(name: str) -> Avatar:
    """Return the avatar of a customer, the same in every process."""
    letters = [c for c in unicodedata.normalize("NFC", name) if c.isalnum()]
    shown = "".join(letters[:2]).upper()[:2]
    return Avatar(shown or "··", crc32(name.encode("utf-8", "replace")) % COLOURS)


def plain(text: str) -> str:
    """Replace invisible characters, such as those that reverse the direction of the layout."""
    return "".join("\N{REPLACEMENT CHARACTER}" if _is_hidden(c) else c for c in text)


def _is_hidden(c: str) -> bool:
    # U+200D joins emoji, and a soft hyphen is harmless.
    return c not in "\n\t\u200d\u00ad" and unicodedata.category(c) in _HIDDEN
