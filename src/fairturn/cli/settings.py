"""Settings of a process, from options, the environment, `fairturn.toml` or defaults.

The file is the one that FAIRTURN_CONFIG names, or `fairturn.toml` in the working folder. No other
folder is searched, so that a file of another user cannot choose the queue of a command.
"""

import re
import tomllib
from collections.abc import Callable, Mapping
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from fairturn.cli.terminal import plain_number, printable
from fairturn.stores.urls import is_address, without_password

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
_GIB = 1_073_741_824
_NONE = "none"  # lifts a limit
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}
_VARIABLES = "FAIRTURN_"
_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


class SettingDefinition(NamedTuple):
    """A setting: its table in the file, the reader of its values, its default, and the help text
    and the placeholder of its option."""

    table: str
    read: Callable[[Any], Any]  # a string or TOML value; its ValueError completes "it must be ..."
    default: Any
    about: str = ""
    metavar: str | None = None  # None for a flag, and for a setting without an option


class SettingValue(NamedTuple):
    """The value of a setting, and its origin."""

    value: Any
    origin: str

    @property
    def given(self) -> bool:
        return self.origin != DEFAULT


class SettingsFile(NamedTuple):
    """A parsed settings file."""

    path: Path
    values: Mapping[str, Any]


class InvalidSetting(ValueError):
    """A setting is unknown or has an invalid value; the message includes where it was set."""


def resolve(
    flags: Mapping[str, Any], environ: Mapping[str, str], file: SettingsFile | None
) -> dict[str, SettingValue]:
    """Return every setting with its value and origin; a flag that is None was not given."""
    known = known_settings()
    in_file = {} if file is None else _in_file(file, known)
    found: dict[str, SettingValue] = {}
    for name, setting in known.items():
        variable = variable_of(name)
        if flags.get(name) is not None:
            origin, value = flag_of(name), flags[name]
        elif environ.get(variable):
            origin, value = variable, environ[variable]
        elif file is not None and name in in_file:
            origin, value = str(file.path), in_file[name]
        else:
            found[name] = SettingValue(setting.default, DEFAULT)
            continue
        in_the_file = file is not None and origin == str(file.path)
        try:
            read = setting.read(value)
        except (ValueError, TypeError) as error:
            subject = f"{name} in {origin}" if in_the_file else origin
            raise InvalidSetting(f"{subject} is {value!r}; it must be {error}") from None
        if in_the_file and name in ("database", "key_file") and not is_address(read):
            # Relative to the file, so that it names the same one from every working folder.
            read = str(Path(origin).parent / Path(read).expanduser())
        found[name] = SettingValue(read, origin)
    return found


def read_file(environ: Mapping[str, str], folder: Path) -> SettingsFile | None:
    """Read the settings file, if there is one; one that FAIRTURN_CONFIG names must exist."""
    named = environ.get(FILE_VARIABLE)
    path = Path(named) if named else folder / FILE
    try:
        with path.open("rb") as stream:
            content = stream.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        if named:
            raise InvalidSetting(f"{FILE_VARIABLE} names {named}, which does not exist") from None
        return None
    except OSError as error:
        raise InvalidSetting(f"{path} cannot be read: {error.strerror}") from error
    if len(content) > FILE_BYTES_MAX:
        raise InvalidSetting(f"{path} has more than {FILE_BYTES_MAX:,} bytes")
    try:
        return SettingsFile(path if named else Path(FILE), tomllib.loads(content.decode()))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidSetting(f"{path} is not TOML: {error}") from None


def known_settings() -> dict[str, SettingDefinition]:
    """Return every setting by name. Those of [queue] are the settings of a new queue."""
    from fairturn.model import SETTING_NAMES, Settings

    defaults = {name: getattr(Settings(), name) for name in SETTING_NAMES}
    of_a_queue = {
        name: SettingDefinition(QUEUE, _reader_like(default), default)
        for name, default in defaults.items()
    }
    return option_settings() | of_a_queue


def option_settings() -> dict[str, SettingDefinition]:
    """Return every setting that is not a queue's, by name. The options of commands and the
    arguments of the worker and the service derive from this list."""
    process = partial(SettingDefinition, "")
    worker = partial(SettingDefinition, WORKER)  # with the defaults of `Worker` and `Backoff`
    service = partial(SettingDefinition, SERVICE)  # with those of its address and limits
    return {
        "database": process(
            _text,
            "documents.db",
            "The queue: a file or a postgresql:// URL; documents.db by default.",
            "FILE|URL",
        ),
        "synchronous": process(
            _synchronous,
            "FULL",
            "FULL by default; with NORMAL a power cut can lose the last documents.",
            "FULL|NORMAL",
        ),
        "allow_network": process(
            _yes_or_no, False, "Open a file on a network file system: slow and unsafe."
        ),
        "contents": process(
            _text,
            None,
            "For large documents, with PostgreSQL: a folder shared by all machines, or a bucket.",
            "FOLDER|s3://...",
        ),
        "contents_shared": process(
            _yes_or_no, False, "Give the group of the contents folder access to it."
        ),
        "schema": process(
            _text, None, "The schema of a queue in PostgreSQL; fairturn by default.", "NAME"
        ),
        "listen_url": process(_text, None),
        "url": process(_text, None, "The service, instead of a database.", "URL"),
        KEY: process(_text, None),
        "key_file": process(_text, None, "Its access key; or set FAIRTURN_KEY.", FILE_METAVAR),
        "handler": worker(_handler, None, "", "[MODULE:FUNCTION]"),
        "kind": worker(
            _kinds,
            (),
            "A kind of work to serve; may be given several times. All by default.",
            "KIND",
        ),
        "concurrency": worker(_count, 4, "Slots of the worker; 4.", "N"),
        "threads": worker(_yes_or_no, False, "Threads instead of processes."),
        "time_limit_s": worker(_seconds, None, "For one document; none by default.", "SECONDS"),
        "memory_limit": worker(
            _limit_of(_size), 4 * _GIB, "For one process; 4GiB; none lifts it.", "SIZE"
        ),
        "process_limit": worker(
            _limit_of(_count),
            1_000,
            "Processes and threads of one child; 1000; none lifts it.",
            "N",
        ),
        "file_limit": worker(
            _limit_of(_size), 8 * _GIB, "For one file; 8GiB; none lifts it.", "SIZE"
        ),
        "pass_env": worker(
            _variables,
            (),
            "A variable of the environment for handlers; may be given several times.",
            "NAME",
        ),
        "namespace": worker(_yes_or_no, True, "A PID namespace for each child, where possible."),
        "recycle_after": worker(_count, 10_000, "Replace a child after N documents; 10000.", "N"),
        "lease_s": worker(_seconds, 30.0, "Length of a lease; 30.", "SECONDS"),
        "grace_s": worker(_seconds, 30.0, "Grace period after a SIGTERM; 30.", "SECONDS"),
        "retry_first_s": worker(
            _delay, 20.0, "Backoff after the first failed attempt; 20.", "SECONDS"
        ),
        "retry_factor": worker(
            _factor, 7.0, "Growth of the backoff with each attempt; 7.", "FACTOR"
        ),
        "retry_most_s": worker(_delay, 3_600.0, "Maximum of the backoff; 3600.", "SECONDS"),
        "host": service(_text, "127.0.0.1", "Address to listen on; 127.0.0.1.", "ADDRESS"),
        "port": service(_port, PORT, "Port to listen on; 8750; 0 for a free one.", "PORT"),
        "certificate": service(_text, None, "Serve https.", FILE_METAVAR),
        "private_key": service(_text, None, "The key of the certificate.", FILE_METAVAR),
        "trusted_proxy": service(
            _addresses, (), "A proxy that terminates https; may be given several times.", "ADDRESS"
        ),
        "size_limit": service(_size, 8 * _GIB, "Maximum size of a document; 8GiB.", "SIZE"),
        "rate": service(_rate, "6000/minute", "Rate limit of one key; 6000/minute.", "RATE"),
        "positions": service(_yes_or_no, True, "Show customers their queue position."),
        "customers_in_metrics": service(
            _customers, 0, "Number of customers with their own metrics; 0.", "N"
        ),
    }


def names_of(table: str) -> tuple[str, ...]:
    """Return the names of the settings of a table other than [queue]."""
    return tuple(name for name, known in option_settings().items() if known.table == table)


def values_of(table: str, settings: Mapping[str, SettingValue]) -> dict[str, Any]:
    """Return the values of all settings of a table. A command that passes all of them on cannot
    miss a new setting."""
    return {name: settings[name].value for name in names_of(table)}


def shown_of(name: str, value: Any) -> Any:
    """Return a value without secrets: of an access key only its id, of a URL no password."""
    if name != KEY or value is None:
        return without_password(value) if isinstance(value, str) else value
    from fairturn.access.keys import read_key

    presented = read_key(value)
    return "***" if presented is None else f"ft_{presented.id}_***"


def strength_of(found: SettingValue) -> int:
    """Return the precedence of an origin: 3 for a flag, 2 for the environment, 1 for the file."""
    if not found.given:
        return 0
    if found.origin.startswith("-"):
        return 3
    return 2 if found.origin.startswith(_VARIABLES) else 1


def read_queue_setting(name: str, value: str) -> Any:
    """Parse a setting of the queue; raise `InvalidSetting` if it is unknown or malformed."""
    known = {n: setting for n, setting in known_settings().items() if setting.table == QUEUE}
    if name not in known:
        raise InvalidSetting(
            f"{name!r} is not a setting of the queue; the settings are: {', '.join(known)}"
        )
    try:
        return known[name].read(value)
    except (ValueError, TypeError) as error:
        raise InvalidSetting(f"{name} is {value!r}; it must be {error}") from None


def variable_of(name: str) -> str:
    return f"{_VARIABLES}{name.upper()}"


def flag_of(name: str) -> str:
    """Return the option of a setting, without the unit `_s`. The handler is an argument."""
    return (
        "MODULE:FUNCTION" if name == "handler" else "--" + name.removesuffix("_s").replace("_", "-")
    )


def worded(value: Any) -> str:
    """Return a value as `config set` accepts it."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return plain_number(value) if isinstance(value, float) else printable(str(value))


def _in_file(file: SettingsFile, known: Mapping[str, SettingDefinition]) -> dict[str, Any]:
    """Return the values of a file by name; raise `InvalidSetting` for one in a wrong table."""
    tables: dict[str, Any] = {"": dict(file.values)}
    for table in (WORKER, SERVICE, QUEUE):
        tables[table] = tables[""].pop(table, {})
        if not isinstance(tables[table], Mapping):
            raise InvalidSetting(f"{file.path}: {table} must be a table, [{table}]")
    values: dict[str, Any] = {}
    for table, inner in tables.items():
        for name, value in inner.items():
            if name not in known:
                raise InvalidSetting(
                    f"{file.path}: {name!r} is not a setting; the settings are: {', '.join(known)}"
                )
            if known[name].table != table:
                place = f"in [{known[name].table}]" if known[name].table else "above all tables"
                raise InvalidSetting(f"{file.path}: {name!r} belongs {place}")
            values[name] = value
    return values


def _reader_like(default: Any) -> Callable[[Any], Any]:
    """Return the reader for the type of a default; the queue itself checks the range."""
    if isinstance(default, tuple):
        return _whole_numbers
    if isinstance(default, str):
        return _text
    return _whole if isinstance(default, int) else _number


# ── Readers ──────────────────────────────────────────────────────────────────────────────────────


def _matching(pattern: str, expected: str) -> Callable[[Any], str]:
    """Return the reader of a string that the pattern matches."""

    def read(value: Any) -> str:
        if not isinstance(value, str) or not re.fullmatch(pattern, value, re.ASCII | re.DOTALL):
            raise ValueError(expected)
        return value

    return read


_text = _matching(".+", "a non-empty string")
_handler = _matching("[^:]+:[^:]+", "a function, written as module:function")
_rate = _matching(
    r"[1-9]\d{0,8}/(second|minute|hour)", "a number per second, minute or hour, such as 600/minute"
)


def _synchronous(value: Any) -> str:
    if not isinstance(value, str) or value.upper() not in SYNCHRONOUS:
        raise ValueError(" or ".join(SYNCHRONOUS))
    return value.upper()


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


def _number(value: Any) -> float:
    try:
        if isinstance(value, bool):
            raise ValueError
        return float(value)
    except (ValueError, TypeError):
        raise ValueError("a number") from None


def _only(
    read: Callable[[Any], float], accepts: Callable[[Any], bool], expected: str
) -> Callable[[Any], Any]:
    """Return the reader of the numbers that `accepts` accepts."""

    def read_accepted(value: Any) -> float:
        number = read(value)
        if not accepts(number):
            raise ValueError(expected)
        return number

    return read_accepted


_count = _only(_whole, lambda n: n >= 1, "a positive whole number")
_port = _only(_whole, lambda n: 0 <= n <= 65_535, "a port, from 0 (a free one) to 65535")
_customers = _only(_whole, lambda n: 0 <= n <= 1_000, "a whole number from 0 to 1000")
_delay = _only(_number, lambda s: 0 <= s < inf, "a number of seconds, at least 0")
_factor = _only(_number, lambda x: 1 <= x < inf, "a number, at least 1")
_seconds = _only(_number, lambda s: 0 < s < inf, "a positive number of seconds")


def _size(value: Any) -> int:
    """Parse a number of bytes, or one with a binary unit. MB is rejected as ambiguous: 1,000,000 or
    1,048,576 bytes."""
    match = _SIZE.fullmatch(str(value).strip())
    if match is None:
        raise ValueError("a size, such as 512MiB or 2GiB")
    factor: int = 1024 ** _POWERS.get((match[2] or "").lower(), 0)
    if float(match[1]) * factor < 1:
        raise ValueError("a size of at least 1 byte")
    return round(float(match[1]) * factor)


def _limit_of(read: Callable[[Any], int]) -> Callable[[Any], int | None]:
    """Return the reader of a limit that the word `none` lifts."""

    def read_limit(value: Any) -> int | None:
        if str(value).lower() == _NONE:
            return None
        try:
            return read(value)
        except ValueError as error:
            raise ValueError(f"{error}, or none") from None

    return read_limit


def _list_of(read: Callable[[Any], Any], expected: str) -> Callable[[Any], tuple[Any, ...]]:
    """Return the reader of a list, or of a string with commas."""

    def read_list(value: Any) -> tuple[Any, ...]:
        try:
            parts = value.split(",") if isinstance(value, str) else list(value)
            return tuple(read(part) for part in parts)
        except (ValueError, TypeError, AttributeError):
            raise ValueError(expected) from None

    return read_list


def _variable(part: Any) -> str:
    from fairturn.worker.isolation import check_names

    (name,) = check_names([part.strip()])
    return name


def _address(part: Any) -> str:
    from ipaddress import ip_network

    return str(ip_network(part.strip()))


def _kind(part: Any) -> str:
    from fairturn.validation.text import kind_name

    return kind_name(part.strip())


_kinds = _list_of(_kind, "kinds of work, such as text,ocr")
_variables = _list_of(_variable, "names of environment variables, such as TESSDATA_PREFIX,HF_*")
_addresses = _list_of(_address, "addresses or networks, such as 10.0.0.7 or 10.0.0.0/24")
_whole_numbers = _list_of(_whole, "whole numbers, such as -2,-4,-6,-8,-10,-12,-14,-20")
