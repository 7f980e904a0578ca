"""Content negotiation by `Accept-Language`."""

from collections.abc import Iterator
from functools import cache

from fairturn.i18n import ENGLISH, Language, languages, load

_HEADER_MAX = 1_024
_RANGES_MAX = 16


def preferred_of(header: str | None) -> str:
    """Return the supported language with the highest quality, or English. Malformed parts of the
    header are ignored."""
    known = _known()
    for tag, quality in sorted(_ranges(header or ""), key=lambda each: -each[1]):
        if quality > 0 and tag.partition("-")[0] in known:
            return tag.partition("-")[0]
        if quality > 0 and tag == "*":
            return ENGLISH
    return ENGLISH


def _ranges(header: str) -> Iterator[tuple[str, float]]:
    for part in header[:_HEADER_MAX].split(",")[:_RANGES_MAX]:
        tag, _, weight = part.partition(";")
        name, _, value = weight.strip().partition("=")
        try:
            quality = float(value) if name.strip() == "q" else 1.0
        except ValueError:
            continue
        yield tag.strip().lower(), quality


@cache
def _known() -> tuple[str, ...]:
    return tuple(languages())


@cache
def language(name: str) -> Language:
    """Load a language, cached."""
    return load(name)
