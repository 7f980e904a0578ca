"""The languages: a catalogue each, `LANGUAGE.po`, and what is compiled from it (`make locales`).

English is in the code. The list of languages is this folder.
"""

from collections.abc import Mapping
from gettext import GNUTranslations, NullTranslations
from importlib import resources

ENGLISH = "en"
# How a language writes numbers is in its catalogue too, as the translation of these.
SHORT_NUMBER, LONG_NUMBER = "1,234.5", "12,345.6"
# In the order in which the tools of GNU look at them; the first names several languages.
_VARIABLES = ("LANGUAGE", "LC_ALL", "LC_MESSAGES", "LANG")


class Language:
    """Finds the text of a message in one language, and writes numbers as it does."""

    def __init__(self, name: str, catalogue: NullTranslations) -> None:
        self.name = name
        self._catalogue = catalogue
        short = catalogue.gettext(SHORT_NUMBER)
        long = catalogue.gettext(LONG_NUMBER)
        self._decimal = long[-2]
        self._thousands = long[2]
        self._short_is_grouped = not short[1].isdigit()

    def find(self, one: str, many: str | None = None, n: int = 1) -> str:
        """The text of a message; of two forms or more, the right one for this number."""
        if many is None:
            return self._catalogue.gettext(one)
        return self._catalogue.ngettext(one, many, n)

    def number(self, value: float) -> str:
        """A number as people write it; a fraction with as many digits as it needs, up to three."""
        whole, _, fraction = f"{abs(value):,.3f}".partition(".")
        if len(whole) == len("1,234") and not self._short_is_grouped:
            whole = whole.replace(",", "")
        fraction = fraction.rstrip("0")
        text = whole.replace(",", self._thousands) + (fraction and self._decimal + fraction)
        return f"-{text}" if value < 0 else text


def languages() -> list[str]:
    """The languages that there are, English first."""
    files = (entry.name for entry in resources.files(__name__).iterdir())
    return [ENGLISH, *sorted(name.removesuffix(".mo") for name in files if name.endswith(".mo"))]


def load(language: str) -> Language:
    """A language by its name; `ValueError` if it is not one of `languages()`."""
    if language == ENGLISH:
        return Language(ENGLISH, NullTranslations())
    if language not in languages():
        raise ValueError(f"language is {language!r}; it must be one of: {', '.join(languages())}")
    with (resources.files(__name__) / f"{language}.mo").open("rb") as file:
        return Language(language, GNUTranslations(file))


def preferred(environ: Mapping[str, str]) -> str:
    """The language that the environment asks for, or English."""
    known = languages()
    locale = next((environ[name] for name in _VARIABLES[1:] if environ.get(name)), "")
    if _code(locale) in ("", "c", "posix"):
        return ENGLISH  # LANGUAGE says nothing to a program that is to speak no language
    for wanted in [*environ.get(_VARIABLES[0], "").split(":"), locale]:
        if _code(wanted) in known:
            return _code(wanted)
    return ENGLISH


def _code(locale: str) -> str:
    """`de` of `de_DE.UTF-8`."""
    return locale.partition(".")[0].partition("@")[0].partition("_")[0].lower()
