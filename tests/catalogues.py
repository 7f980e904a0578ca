"""The catalogues of `fairturn/i18n`: read, checked, and compiled (`python -m tests.catalogues`).

What a catalogue may contain is a small part of what GNU gettext allows: no contexts, no old
messages, and nothing fuzzy. The compiled form is that of GNU gettext, which Python reads by itself.
"""

import ast
import re
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from string import Formatter
from typing import NamedTuple

from fairturn.dashboard.texts import TEXTS
from fairturn.explain import sentences
from fairturn.explain.sentences import Message
from fairturn.i18n import LONG_NUMBER, SHORT_NUMBER
from fairturn.service import problems as service_problems

FOLDER = Path(__file__).parent.parent / "src" / "fairturn" / "i18n"
_MAGIC = 0x950412DE
_LINE = re.compile(r'(?:(msgid|msgid_plural|msgstr(?:\[\d\])?) )?(".*")')


class Entry(NamedTuple):
    """A message and its translations: one, or one for each plural form."""

    one: str
    many: str | None
    texts: tuple[str, ...]


def read(text: str) -> list[Entry]:
    """The entries of a catalogue; the first is its header. A line that is not one is an error."""
    entries: list[Entry] = []
    for block in text.split("\n\n"):
        fields: dict[str, str] = {}
        name = ""
        for line in block.strip().splitlines():
            if line.startswith("#,"):
                raise ValueError(f"a flag: {line}")
            if line.startswith("#"):
                continue
            match = _LINE.fullmatch(line)
            if match is None:
                raise ValueError(f"not a line of a catalogue: {line}")
            name = match[1] or name
            fields[name] = fields.get(name, "") + ast.literal_eval(match[2])
        if not fields:
            continue
        many = fields.get("msgid_plural")
        forms = [key for key in fields if key.startswith("msgstr")]
        if forms != (["msgstr"] if many is None else [f"msgstr[{n}]" for n in range(len(forms))]):
            raise ValueError(f"the forms of {fields['msgid']!r} are {forms}")
        entries.append(Entry(fields["msgid"], many, tuple(fields[form] for form in forms)))
    return entries


def compiled(entries: Iterable[Entry]) -> bytes:
    """The catalogue as Python's gettext reads it: two tables and the texts, sorted by message."""
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
    return struct.pack("<7I", *header) + b"".join(tables) + texts


def messages() -> list[Message]:
    """Every message that can be asked for."""
    numbers = [Message(SHORT_NUMBER), Message(LONG_NUMBER)]
    tables = (
        sentences.STATES,
        sentences.MESSAGES,
        sentences.PHRASES,
        service_problems.MESSAGES,
        TEXTS,
    )
    everything = numbers + [message for table in tables for message in table.values()]
    return list({(message.one, message.many): message for message in everything}.values())


def problems(entries: list[Entry], language: str) -> Iterator[str]:
    """What is wrong with a catalogue, in sentences."""
    header, *rest = entries
    forms = re.search(r"nplurals=(\d)", header.texts[0])
    if forms is None or f"Language: {language}\n" not in header.texts[0]:
        yield "the header must name the language and its plural forms"
        return
    known = {(message.one, message.many) for message in messages()}
    there = [(entry.one, entry.many) for entry in rest]
    for one, _ in known - set(there):
        yield f"it lacks: {one}"
    for one, _ in set(there) - known:
        yield f"nobody asks for: {one}"
    if len(there) != len(set(there)):
        yield "a message is there twice"
    for one, many, texts in rest:
        if len(texts) != (1 if many is None else int(forms[1])):
            yield f"it has {len(texts)} forms of: {one}"
        for form, text in enumerate(texts):
            english = one if form == 0 or many is None else many
            if not text.strip():
                yield f"it has no text for: {one}"
            elif placeholders(text) != placeholders(english):
                yield f"other placeholders than in English: {text}"


def placeholders(text: str) -> set[str | None]:
    """The names in braces."""
    return {name for _, name, _, _ in Formatter().parse(text) if name is not None}


def main() -> None:
    """Compile every catalogue."""
    for source in sorted(FOLDER.glob("*.po")):
        source.with_suffix(".mo").write_bytes(compiled(read(source.read_text("utf-8"))))


if __name__ == "__main__":
    main()
