"""How a customer looks everywhere: one colour and two letters. The letters carry the meaning when
the colour does not."""

import unicodedata
from typing import NamedTuple
from zlib import crc32

COLOURS = 12
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


class Face(NamedTuple):
    """Two letters, and the number of a colour in the style sheet."""

    letters: str
    colour: int


def face_of(name: str) -> Face:
    """The face of a customer, the same in every process."""
    letters = [c for c in unicodedata.normalize("NFC", name) if c.isalnum()]
    shown = "".join(letters[:2]).upper()[:2]
    return Face(shown or "··", crc32(name.encode("utf-8", "replace")) % COLOURS)


def plain(text: str) -> str:
    """Text from outside, with a sign in the place of what would steer the layout unseen."""
    return "".join("\N{REPLACEMENT CHARACTER}" if _steers(c) else c for c in text)


def _steers(c: str) -> bool:
    # U+200D joins emoji, and a soft hyphen does no harm.
    return c not in "\n\t\u200d\u00ad" and unicodedata.category(c) in _HIDDEN
