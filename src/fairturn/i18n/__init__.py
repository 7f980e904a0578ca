"""Languages: one catalogue each, `LANGUAGE.po`. English texts are in the code."""

from collections.abc import Mapping
from functools import cache
from gettext import NullTranslations
from importlib import resources

from fairturn.i18n import catalogue

ENGLISH = "en"
# Catalogues translate these to give their number format.
SHORT_NUMBER, LONG_NUMBER = "1,234.5", "12,345.6"
# By precedence, as in GNU gettext. The first is a list of languages.
_VARIABLES = ("LANGUAGE", "LC_ALL", "LC_MESSAGES", "LANG")


class Language:
    """The texts and the number format of one language."""

    def __init__(self, name: str, catalogue: NullTranslations) -> None:
        self.name = name
        self._catalogue = catalogue
        short = catalogue.gettext(SHORT_NUMBER)
        long = catalogue.gettext(LONG_NUMBER)
        self._decimal = long[-2]
        self._thousands = long[2]
        self._short_is_grouped = not short[1].isdigit()

    def find(self, one: str, many: str | None = None, n: int = 1) -> str:
        """Return the translation of a message, in the plural form for `n`."""
        if many is None:
            return self._catalogue.gettext(one)
        return self._catalogue.ngettext(one, many, n)

    def number(self, value: float) -> str:
        """Format a number, with up to three decimals."""
        whole, _, fraction = f"{abs(value):,.3f}".partition(".")
        if len(whole) == len("1,234") and not self._short_is_grouped:
            whole = whole.replace(",", "")
        fraction = fraction.rstrip("0")
        text = whole.replace(",", self._thousands) + (fraction and self._decimal + fraction)
        return f"-{text}" if value < 0 else text


def languages() -> list[str]:
    """Return the names of all languages, English first."""
    files = (entry.name for entry in resources.files(__name__).iterdir())
    return [ENGLISH, *sorted(name.removesuffix(".po") for name in files if name.endswith(".po"))]


@cache
def load(language: str) -> Language:
    """Return a language by name. Raises `ValueError` if it is not one of `languages()`."""
    if language == ENGLISH:
        return Language(ENGLISH, NullTranslations())
    if language not in languages():
        raise ValueError(f"language is {language!r}; it must be one of: {', '.join(languages())}")
    text = (resources.files(__name__) / f"{language}.po").read_text("utf-8")
    return Language(language, catalogue.translations(catalogue.read(text)))


def preferred(environ: Mapping[str, str]) -> str:
    """Return the language of the environment, or English if there is no catalogue for it."""
    known = languages()
    locale = next((environ[name] for name in _VARIABLES[1:] if environ.get(name)), "")
    if _code(locale) in ("", "c", "posix"):
        return ENGLISH  # as in GNU gettext, LANGUAGE is ignored in the C locale
    for name in [*environ.get(_VARIABLES[0], "").split(":"), locale]:
        if _code(name) in known:
            return _code(name)
    return ENGLISH


def _code(locale: str) -> str:
    """Return `de` for `de_DE.UTF-8`."""
    return locale.partition(".")[0].partition("@")[0].partition("_")[0].lower()
