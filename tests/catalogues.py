"""Checks of the catalogues of `fairturn/i18n`: complete, with the right placeholders and forms."""

import ast
import re
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from string import Formatter

from jinja2 import Environment, nodes

from fairturn.dashboard.texts import LABELS
from fairturn.explain import sentences
from fairturn.explain.sentences import Message
from fairturn.i18n import LONG_NUMBER, SHORT_NUMBER
from fairturn.i18n.catalogue import Entry
from fairturn.service.problems import ProblemCode

FOLDER = Path(__file__).parent.parent / "src" / "fairturn" / "i18n"


def messages() -> list[Message]:
    """Return every message that the package can request."""
    plain = [SHORT_NUMBER, LONG_NUMBER, *(code.sentence for code in ProblemCode)]
    tables = (
        sentences.MESSAGES,
        sentences.PHRASES,
        LABELS,
    )
    everything = [*map(Message, plain)] + [texts.sentence for texts in sentences.STATES.values()]
    everything += [message for table in tables for message in table.values()]
    everything += page_messages()
    return list({(message.one, message.many): message for message in everything}.values())


def page_messages() -> list[Message]:
    """Return the texts in the templates, as `t("one", "many")`, and those that the pages' code
    passes to `say`. Both must be literals, because others could not be found here."""
    folder = resources.files("fairturn.dashboard")
    found = []
    for file in (folder / "templates").iterdir():
        for call in Environment().parse(file.read_text("utf-8")).find_all(nodes.Call):
            if isinstance(call.node, nodes.Name) and call.node.name == "t":
                found.append(Message(*(each.as_const() for each in call.args)))
    for file in folder.iterdir():
        if file.name.endswith(".py") and file.name != "language.py":
            for node in ast.walk(ast.parse(file.read_text("utf-8"))):
                if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "say":
                    found.append(Message(*(ast.literal_eval(each) for each in node.args)))
    return found


def problems(entries: list[Entry], language: str) -> Iterator[str]:
    """Return what is wrong with a catalogue, in sentences."""
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
    """Return the names in braces."""
    return {name for _, name, _, _ in Formatter().parse(text) if name is not None}
