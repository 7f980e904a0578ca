"""Parser for `LANGUAGE.po` files, used when a language is loaded.

It accepts a subset of GNU gettext: no contexts, no obsolete messages and no flags. Catalogues are
not compiled in advance, so that no compiled file can be stale.
"""

import ast
import re
import struct
from collections.abc import Iterable
from gettext import GNUTranslations
from io import BytesIO
from typing import NamedTuple

_MAGIC = 0x950412DE
_LINE = re.compile(r'(?:(msgid|msgid_plural|msgstr(?:\[\d\])?) )?(".*")')


class Entry(NamedTuple):
    """A message and its translations: one, or one for each plural form."""

    one: str
    many: str | None
    texts: tuple[str, ...]


def read(text: str) -> list[Entry]:
    """Return the entries of a catalogue, its header first. Raises `ValueError`."""
    entries: list[Entry] = []
    for block in text.split("\n\n"):
        fields: dict[str, str] = {}
        name = ""
        for line in block.strip().splitlines():
            if line.startswith("#,"):
                raise ValueError(f"flags are not supported: {line}")
            if line.startswith("#"):
                continue
            match = _LINE.fullmatch(line)
            if match is None:
                raise ValueError(f"invalid line: {line}")
            name = match[1] or name
            fields[name] = fields.get(name, "") + ast.literal_eval(match[2])
        if not fields:
            continue
        many = fields.get("msgid_plural")
        forms = [key for key in fields if key.startswith("msgstr")]
        if forms != (["msgstr"] if many is None else [f"msgstr[{n}]" for n in range(len(forms))]):
            raise ValueError(
                f"{fields['msgid']!r} has an incomplete or misordered set of forms: {forms}"
            )
        entries.append(Entry(fields["msgid"], many, tuple(fields[form] for form in forms)))
    return entries


def translations(entries: Iterable[Entry]) -> GNUTranslations:
    """Convert entries for Python's gettext, which reads only the binary format of GNU gettext: two
    tables and the texts, sorted by message."""
    pairs = sorted(
        (
            (one if many is None else f"{one}\0{many}").encode(),
            "\0".join(texts).encode(),
        )
        for one, many, texts in entries
    )
    begin = 28
    tables, texts, at = [], b"", begin + 16 * len(pairs)
    for column in (0, 1):
        for pair in pairs:
            tables.append(struct.pack("<II", len(pair[column]), at + len(texts)))
            texts += pair[column] + b"\0"
    header = (_MAGIC, 0, len(pairs), begin, begin + 8 * len(pairs), 0, at)
    return GNUTranslations(BytesIO(struct.pack("<7I", *header) + b"".join(tables) + texts))
