"""Where a setting comes from: a flag, the environment, `fairturn.toml`, or its default.

`resolve` is a function of what it is given; `read_file` alone looks at the disk. The file is the
one that FAIRTURN_CONFIG names, or `fairturn.toml` in the working folder: no other folder is
searched, so that nobody else's file can decide which queue a command works on.
"""

import re
import tomllib
from collections.abc import Callable, Mapping
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from fairturn.cli.terminal import plain_number, printable
from fairturn.urls import is_address, without_password

FILE = "fairturn.toml"
FILE_VARIABLE = "FAIRTURN_CONFIG"
FILE_BYTES_MAX = 1_048_576
DEFAULT = "default"
SYNCHRONOUS = ("FULL", "NORMAL")
WORKER, SERVICE, QUEUE = "worker", "service", "queue"  # the tables of the file
PORT = 8750
KEY = "key"
FILE_METAVAR = "FILE"

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(?:([kmgt])(?:ib)?)?", re.IGNORECASE | re.ASCII)
_RATE = re.compile(r"[1-9]\d{0,8}/(second|minute|hour)", re.ASCII)
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}
_VARIABLES = "FAIRTURN_"
_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


class Known(NamedTuple):
    """A setting: its table in the file, the reader of its values, its default, and the help text
    and the placeholder of its option."""

    table: str
    read: Callable[[Any], Any]  # of a text, or of what TOML has; a ValueError says what is wrong
    default: Any
    about: str = ""
    metavar: str | None = None  # None: a flag, or no option at all


class Found(NamedTuple):
    """A value, and who said so."""

    value: Any
    origin: str

    @property
    def given(self) -> bool:
        """Whether anybody said so."""
        return self.origin != DEFAULT


class File(NamedTuple):
    """A file of settings, as TOML reads it."""

    path: Path
    values: Mapping[str, Any]


class WrongSetting(ValueError):
    """A setting that is not one, or has a value that it cannot have; the sentence says where."""


def resolve(
    flags: Mapping[str, Any], environ: Mapping[str, str], file: File | None
) -> dict[str, Found]:
    """Every setting with its value and where it came from; a flag that is None was not given."""
    known = known_settings()
    in_file = {} if file is None else _in_file(file, known)
    found: dict[str, Found] = {}
    for name, setting in known.items():
        variable = variable_of(name)
        if flags.get(name) is not None:
            origin, value = flag_of(name), flags[name]
        elif environ.get(variable):
            origin, value = variable, environ[variable]
        elif file is not None and name in in_file:
            origin, value = str(file.path), in_file[name]
        else:
            found[name] = Found(setting.default, DEFAULT)
            continue
        try:
            read = setting.read(value)
        except (ValueError, TypeError) as error:
            said = f"{name} in {origin}" if file and origin == str(file.path) else origin
            raise WrongSetting(f"{said} is {value!r}; it must be {error}") from None
        found[name] = Found(read, origin)
    if file is not None and found["database"].origin == str(file.path):
        # A file means the same queue wherever it is read from.
        named = found["database"].value
        beside = named if is_address(named) else str(file.path.parent / named)
        found["database"] = Found(beside, str(file.path))
    if file is not None and found["key_file"].origin == str(file.path):
        beside = str(file.path.parent / Path(found["key_file"].value).expanduser())
        found["key_file"] = Found(beside, str(file.path))
    return found


def read_file(environ: Mapping[str, str], folder: Path) -> File | None:
    """The file of settings, if there is one; one that was named must be there."""
    named = environ.get(FILE_VARIABLE)
    path = Path(named) if named else folder / FILE
    try:
        with path.open("rb") as stream:
            content = stream.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        if named:
            raise WrongSetting(f"{FILE_VARIABLE} names {named}, which does not exist") from None
        return None
    except OSError as error:
        raise WrongSetting(f"{path} cannot be read: {error.strerror}") from error
    if len(content) > FILE_BYTES_MAX:
        raise WrongSetting(f"{path} has more than {FILE_BYTES_MAX:,} bytes")
    try:
        return File(path if named else Path(FILE), tomllib.loads(content.decode()))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise WrongSetting(f"{path} is not TOML: {error}") from None


def known_settings() -> dict[str, Known]:
    """Every setting by its name."""
    return {**option_settings(), **_of_a_new_queue()}


def option_settings() -> dict[str, Known]:
    """Every setting of the commands by its name. The options of the commands, the arguments of the
    worker and those of the service are derived from this list."""
    return {
        "database": Known(
            "",
            _text,
            "documents.db",
            "The queue, a file or postgresql://...; documents.db by default.",
            "FILE|URL",
        ),
        "synchronous": Known(
            "",
            _synchronous,
            "FULL",
            "FULL by default; with NORMAL a power cut can lose the last documents.",
            "FULL|NORMAL",
        ),
        "allow_network": Known(
            "", _yes_or_no, False, "Open a file on a network file system: slow, and a risk."
        ),
        "contents": Known(
            "",
            _text,
            None,
            "Of large documents, with PostgreSQL: shared by all machines.",
            "FOLDER|s3://...",
        ),
        "contents_shared": Known(
            "", _yes_or_no, False, "Let the group of the contents' folder use it, too."
        ),
        "listen_url": Known("", _text, None),
        "url": Known("", _text, None, "A service, instead of a database.", "URL"),
        KEY: Known("", _text, None),
        "key_file": Known("", _text, None, "The access key for it; or FAIRTURN_KEY.", FILE_METAVAR),
        # The defaults of `Worker`.
        "handler": Known(WORKER, _handler, None, "", "[MODULE:FUNCTION]"),
        "concurrency": Known(WORKER, _count, 4, "Documents at once; 4.", "N"),
        "threads": Known(WORKER, _yes_or_no, False, "Threads instead of processes."),
        "time_limit_s": Known(
            WORKER, _seconds, None, "For one document; none by default.", "SECONDS"
        ),
        "memory_limit": Known(WORKER, _size, None, "Of one process, such as 512MiB.", "SIZE"),
        "lease_s": Known(
            WORKER, _seconds, 30.0, "How long a claim lasts without renewal; 30.", "SECONDS"
        ),
        "grace_s": Known(WORKER, _seconds, 30.0, "To finish in after a SIGTERM; 30.", "SECONDS"),
        # The defaults of `Delays`.
        "retry_first_s": Known(
            WORKER, _delay, 20.0, "Delay after the first failed attempt; 20.", "SECONDS"
        ),
        "retry_factor": Known(
            WORKER, _factor, 7.0, "Growth of the delay with each attempt; 7.", "FACTOR"
        ),
        "retry_most_s": Known(WORKER, _delay, 3_600.0, "Longest such delay; 3600.", "SECONDS"),
        # The defaults of `Address` and `Plan` of the service.
        "host": Known(SERVICE, _text, "127.0.0.1", "Where to listen; 127.0.0.1.", "ADDRESS"),
        "port": Known(SERVICE, _port, PORT, "8750; 0 for any that is free.", "PORT"),
        "certificate": Known(SERVICE, _text, None, "To speak https.", FILE_METAVAR),
        "private_key": Known(SERVICE, _text, None, "Of the certificate.", FILE_METAVAR),
        "trusted_proxy": Known(
            SERVICE,
            _addresses,
            (),
            "A proxy that speaks https; may be given several times.",
            "ADDRESS",
        ),
        "size_limit": Known(
            SERVICE, _size, 8 * 1_073_741_824, "Of the largest document; 8GiB.", "SIZE"
        ),
        "rate": Known(SERVICE, _rate, "6000/minute", "Requests of one key; 6000/minute.", "RATE"),
        "positions": Known(
            SERVICE, _yes_or_no, True, "Tell customers how many documents are ahead of theirs."
        ),
        "customers_in_metrics": Known(
            SERVICE, _customers, 0, "Customers with metrics of their own; 0.", "N"
        ),
    }


def names_of(table: str) -> tuple[str, ...]:
    """The names of all settings of a table, but for those of the queue."""
    return tuple(name for name, known in option_settings().items() if known.table == table)


def values_of(table: str, settings: Mapping[str, Found]) -> dict[str, Any]:
    """The values of all settings of a table. A command that passes on all of them cannot ignore a
    setting that is added to the list."""
    return {name: settings[name].value for name in names_of(table)}


def shown_of(name: str, value: Any) -> Any:
    """A setting as it may be shown: of an access key only its id, which opens nothing."""
    if name != KEY or value is None:
        return without_password(value) if isinstance(value, str) else value
    from fairturn.access.keys import read_key

    presented = read_key(value)
    return "***" if presented is None else f"ft_{presented.id}_***"


def strength_of(found: Found) -> int:
    """How much somebody's word counts: a flag before the environment before the file."""
    if not found.given:
        return 0
    if found.origin.startswith("-"):
        return 3
    return 2 if found.origin.startswith(_VARIABLES) else 1


def read_queue_setting(name: str, value: str) -> Any:
    """A setting of the queue that was given as a text; a `WrongSetting` says what it must be."""
    known = {n: setting for n, setting in known_settings().items() if setting.table == QUEUE}
    if name not in known:
        raise WrongSetting(f"{name!r} is not a setting of the queue; they are: {', '.join(known)}")
    try:
        return known[name].read(value)
    except (ValueError, TypeError) as error:
        raise WrongSetting(f"{name} is {value!r}; it must be {error}") from None


def variable_of(name: str) -> str:
    """The environment variable of a setting."""
    return f"{_VARIABLES}{name.upper()}"


def flag_of(name: str) -> str:
    """The option of a setting: the unit at its end is left out. The handler is an argument."""
    return (
        "MODULE:FUNCTION" if name == "handler" else "--" + name.removesuffix("_s").replace("_", "-")
    )


def worded(value: Any) -> str:
    """A value as it is written in `config set`."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return plain_number(value) if isinstance(value, float) else printable(str(value))


def _in_file(file: File, known: Mapping[str, Known]) -> dict[str, Any]:
    """The values of the file by name, each in the table where it belongs."""
    tables = {"": file.values}
    for table in (WORKER, SERVICE, QUEUE):
        inner = file.values.get(table, {})
        if not isinstance(inner, Mapping):
            raise WrongSetting(f"{file.path}: {table} must be a table, [{table}]")
        tables[table] = inner
    values: dict[str, Any] = {}
    for table, inner in tables.items():
        for name, value in inner.items():
            if not table and name in (WORKER, SERVICE, QUEUE):
                continue
            if name not in known:
                raise WrongSetting(
                    f"{file.path}: {name!r} is not a setting; they are: {', '.join(known)}"
                )
            if known[name].table != table:
                place = f"in [{known[name].table}]" if known[name].table else "above all tables"
                raise WrongSetting(f"{file.path}: {name!r} belongs {place}")
            values[name] = value
    return values


def _of_a_new_queue() -> dict[str, Known]:
    from fairturn.model import SETTING_NAMES, Settings

    defaults = Settings()
    return {
        name: Known(QUEUE, _reader_like(getattr(defaults, name)), getattr(defaults, name))
        for name in SETTING_NAMES
    }


def _reader_like(default: Any) -> Callable[[Any], Any]:
    """What reads a value of the kind of a default; whether it is allowed, the queue itself says."""
    if isinstance(default, tuple):
        return _whole_numbers
    if isinstance(default, str):
        return _text
    return _whole if isinstance(default, int) else _number


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("a text that is not empty")
    return value


def _synchronous(value: Any) -> str:
    if not isinstance(value, str) or value.upper() not in SYNCHRONOUS:
        raise ValueError(" or ".join(SYNCHRONOUS))
    return value.upper()


def _handler(value: Any) -> str:
    parts = value.split(":") if isinstance(value, str) else []
    if len(parts) != 2 or not all(parts):
        raise ValueError("a function, written as module:function")
    return str(value)


def _yes_or_no(value: Any) -> bool:
    word = str(value).lower()
    if word not in _YES + _NO or not isinstance(value, str | bool):
        raise ValueError("true or false")
    return word in _YES


def _whole(value: Any) -> int:
    try:
        if isinstance(value, bool | float):
            raise ValueError
        return int(value)
    except (ValueError, TypeError):
        raise ValueError("a whole number") from None


def _count(value: Any) -> int:
    if _whole(value) < 1:
        raise ValueError("a whole number from 1 on")
    return _whole(value)


def _port(value: Any) -> int:
    if not 0 <= _whole(value) <= 65_535:
        raise ValueError("a port, from 0 (any that is free) to 65535")
    return _whole(value)


def _customers(value: Any) -> int:
    if not 0 <= _whole(value) <= 1_000:
        raise ValueError("a whole number from 0 to 1000")
    return _whole(value)


def _addresses(value: Any) -> tuple[str, ...]:
    from ipaddress import ip_network

    parts = value.split(",") if isinstance(value, str) else list(value)
    try:
        return tuple(str(ip_network(part.strip())) for part in parts)
    except (ValueError, AttributeError):
        raise ValueError("addresses or networks, such as 10.0.0.7 or 10.0.0.0/24") from None


def _rate(value: Any) -> str:
    if not isinstance(value, str) or not _RATE.fullmatch(value):
        raise ValueError("a number for a second, minute or hour, such as 600/minute")
    return value


def _number(value: Any) -> float:
    try:
        if isinstance(value, bool):
            raise ValueError
        return float(value)
    except (ValueError, TypeError):
        raise ValueError("a number") from None


def _delay(value: Any) -> float:
    if not 0 <= _number(value) < inf:
        raise ValueError("a number of seconds from 0 on")
    return _number(value)


def _factor(value: Any) -> float:
    if not 1 <= _number(value) < inf:
        raise ValueError("a number from 1 on")
    return _number(value)


def _seconds(value: Any) -> float:
    if not 0 < _number(value) < inf:
        raise ValueError("a number of seconds above 0")
    return _number(value)


def _size(value: Any) -> int:
    """Bytes: a number of them, or one with a unit. MB is refused, because some mean 1,000,000 bytes
    by it and some 1,048,576."""
    match = _SIZE.fullmatch(str(value).strip())
    if match is None:
        raise ValueError("a size, such as 512MiB or 2GiB")
    factor: int = 1024 ** _POWERS.get((match[2] or "").lower(), 0)
    if float(match[1]) * factor < 1:
        raise ValueError("a size of at least a byte")
    return round(float(match[1]) * factor)


def _whole_numbers(value: Any) -> tuple[int, ...]:
    try:
        parts = value.split(",") if isinstance(value, str) else list(value)
        return tuple(_whole(part) for part in parts)
    except (ValueError, TypeError):
        raise ValueError("whole numbers, such as -2,-4,-6,-8,-10,-12,-14,-20") from None
