"""Texts, numbers and durations in one language."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from fairturn.clock import SECOND_US, to_datetime
from fairturn.dashboard.texts import LABELS
from fairturn.explain.sentences import duration
from fairturn.i18n import Language, languages, load

NONE = "–"
# International symbols, the same in every language.
_UNITS = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))


class PageLanguage:
    """The formatting functions of templates, for one language."""

    def __init__(self, language: Language) -> None:
        self.language = language
        self.name = language.name

    def say(self, one: str, many: str | None = None, **values: Any) -> str:
        """Return the translation of a text, with localised numbers and the plural form of `n`."""
        text = self.language.find(one, many, values.get("n", 1))
        return text.format_map(self._shown(values)) if values else text

    def label(self, key: str, **values: Any) -> str:
        """Return the text of `LABELS` with this key, as `say` does."""
        one, many, _ = LABELS[key]
        return self.say(one, many, **values)

    def _shown(self, values: Mapping[str, Any]) -> dict[str, str]:
        return {
            name: value if isinstance(value, str) else self.number(value)
            for name, value in values.items()
        }

    def number(self, value: float, digits: int = 3) -> str:
        """Return a number rounded to `digits` decimals, with a true minus sign."""
        return self.language.number(round(value, digits)).replace("-", "\u2212")

    def percent(self, share: float) -> str:
        return f"{self.number(share * 100, 0 if share >= 0.1 else 1)}\u00a0%"

    def short(self, us: float | None) -> str:
        """Return a duration in one or two units, with symbols."""
        if us is None:
            return NONE
        seconds = max(0.0, us / SECOND_US)
        if seconds < 10:
            return f"{self.number(seconds, 1)}\u00a0s"
        left = round(seconds)
        parts: list[str] = []
        for unit, length in _UNITS:
            n, left = divmod(left, length)
            if n or parts:
                parts.append(f"{self.number(n)}\u00a0{unit}")
            if len(parts) == 2 or (parts and n >= 30):
                break
        return " ".join(part for place, part in enumerate(parts) if place == 0 or part[0] != "0")

    def brief(self, us: float | None) -> str:
        """Return a duration in its largest unit, where the exact one is shown as well."""
        if us is None or us < 90 * SECOND_US:
            return self.short(us)
        for unit, length in _UNITS[:3]:
            n = us / SECOND_US / length
            if n >= 1.5:
                return f"{self.number(n, 0 if n >= 10 else 1)}\u00a0{unit}"
        raise AssertionError

    def clock(self, us: float | None) -> str:
        """Return a remaining time such as 24:58."""
        if us is None:
            return NONE
        seconds = max(0, round(us / SECOND_US))
        hours, rest = divmod(seconds, 3_600)
        minutes, seconds = divmod(rest, 60)
        return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"

    def words(self, us: int) -> str:
        return duration(us, self.language)

    def bytes(self, size: int) -> str:
        for unit, length in (("GB", 1_000_000_000), ("MB", 1_000_000), ("kB", 1_000)):
            if size >= length:
                return f"{self.number(size / length, 1)}\u00a0{unit}"
        return f"{self.number(size)}\u00a0B"


def timestamp(us: int) -> str:
    """Return a timestamp in ISO 8601, in UTC."""
    return to_datetime(us).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def day_and_time(us: int) -> str:
    """Return a timestamp to the second; scripts convert it to the reader's time zone."""
    whole = to_datetime(us)
    return (whole - timedelta(microseconds=whole.microsecond)).strftime("%Y-%m-%d %H:%M:%S UTC")


def all_tongues() -> dict[str, PageLanguage]:
    return {name: PageLanguage(load(name)) for name in languages()}
