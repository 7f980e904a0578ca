"""The queue of a command, opened by its settings, or a client of its service."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from fairturn.cli.exit_codes import NOT_FOUND, CommandExit, misuse_is_wrong_use, wrong_use
from fairturn.cli.options import Flags, json_option, setting_options
from fairturn.cli.settings import (
    QUEUE,
    SettingValue,
    known_settings,
    read_file,
    resolve,
    strength_of,
    values_of,
    variable_of,
    worded,
)
from fairturn.errors import SettingsConflict
from fairturn.model import Settings
from fairturn.stores.urls import is_address, without_password

if TYPE_CHECKING:
    from fairturn.client.sync_client import Client
    from fairturn.queue import Queue

QueueOrClient: TypeAlias = "Queue | Client"

IN_MEMORY = ":memory:"
QUEUE_OPTIONS = (
    "database",
    "schema",
    "synchronous",
    "allow_network",
    "contents",
    "contents_shared",
)
# Settings that choose the queue and its contents. The others are arguments of `Queue`.
_PLACES = ("database", "contents", "contents_shared", "url", "key", "key_file")
TRIES = 4  # attempts of one request; few, because a user waits
_KEY_BYTES_MAX = 1_024


def queue_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --json, and the options of a queue."""
    return json_option(setting_options(*QUEUE_OPTIONS)(command))


def place_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --json, and the options of a queue or of a service."""
    return json_option(setting_options(*QUEUE_OPTIONS, "url", "key_file")(command))


def settings_here(flags: Flags) -> dict[str, SettingValue]:
    """Resolve the settings with the environment of this process and its settings file."""
    with misuse_is_wrong_use():
        return resolve(flags, os.environ, read_file(os.environ, Path()))


def service_of(settings: Mapping[str, SettingValue]) -> str | None:
    """Return the URL of the service; None for a database. If both are set, a flag takes precedence
    over the environment, and the environment over the file."""
    url, database = settings["url"], settings["database"]
    if not url.given:
        return None
    if database.given and strength_of(url) == strength_of(database):
        both = "and" if url.origin == database.origin else f"in {url.origin} and"
        wrong_use(f"url {both} database in {database.origin} are both set; leave one of them out")
    value: str = url.value
    return value if strength_of(url) > strength_of(database) else None


def database_of(settings: Mapping[str, SettingValue]) -> Path | str:
    """Return the path of the database file, or the URL of the server."""
    url = settings["url"]
    if strength_of(url) > strength_of(settings["database"]):
        name = click.get_current_context().command_path
        wrong_use(
            f"`{name}` needs direct access to a queue and does not work over HTTP ({url.origin} is "
            "set); pass the queue with --database"
        )
    database: str = settings["database"].value
    if database == IN_MEMORY:
        wrong_use("a queue in memory ends with its process; use a file, such as documents.db")
    return database if is_address(database) else Path(database).expanduser()


def refuse_absent(settings: Mapping[str, SettingValue]) -> Path | str:
    """Return the path of an existing file, or a URL, unchecked. A missing or empty file ends the
    command, so that a command that only reads does not create it."""
    path = database_of(settings)
    if isinstance(path, str):
        return path
    try:
        if path.stat().st_size:
            return path
        problem = f"{path} is empty: it contains no queue"
    except FileNotFoundError:
        problem = f"there is no queue {path}"
    except OSError as error:
        problem = f"{path} cannot be read: {error.strerror}"
    found = settings["database"]
    raise CommandExit(
        f"{problem} (the setting database, from {found.origin if found.given else 'its default'}); "
        f"set it with --database, {variable_of('database')} or in fairturn.toml, or create the "
        "queue with fairturn submit",
        NOT_FOUND,
    )


@contextmanager
def reached(flags: Flags, *, make: bool = False) -> Iterator[QueueOrClient]:
    """Open the queue of the settings, or a client of its service. With `make`, create a queue that
    does not exist in the database. If the service rejects the request or sends an invalid response,
    the command ends with a message. It prints no traceback, which could contain unescaped text of
    the response."""
    settings = settings_here(flags)
    url = service_of(settings)
    if url is None:
        with opened(flags, make=make) as queue:
            yield queue
        return
    with client_of(url, settings) as client, misuse_is_wrong_use():
        try:
            yield client
        except LookupError as error:
            raise CommandExit(
                f"the service at {url} returned an unexpected response "
                f"({type(error).__name__}: {error})"
            ) from error


def client_of(url: str, settings: Mapping[str, SettingValue]) -> "Client":
    """Return a client of a service, with the access key of the settings."""
    from fairturn.client.request import RetryPolicy
    from fairturn.client.sync_client import Client

    with misuse_is_wrong_use():
        return Client(url, _key_in(settings), retry_policy=RetryPolicy(attempts_max=TRIES))


@contextmanager
def opened(flags: Flags, *, make: bool = False) -> Iterator["Queue"]:
    """Open the queue of the settings; with `make`, create it if it does not exist."""
    settings = settings_here(flags)
    path = database_of(settings) if make else refuse_absent(settings)
    new = {
        name: settings[name].value
        for name, known in known_settings().items()
        if make and known.table == QUEUE and settings[name].given
    }
    with opened_at(path, settings, new, make=make) as queue:
        yield queue


@contextmanager
def opened_at(
    path: Path | str,
    settings: Mapping[str, SettingValue],
    new: Mapping[str, Any],
    *,
    make: bool = False,
) -> Iterator["Queue"]:
    """Open the queue at a path or URL; the settings in `new` apply if this call creates it."""
    from fairturn.config import open_contents
    from fairturn.queue import Queue

    given = {name: value for name, value in values_of("", settings).items() if name not in _PLACES}
    place, shared = settings["contents"].value, settings["contents_shared"].value
    if place is not None and not isinstance(path, str):
        wrong_use(
            f"a queue in a file stores its contents in {path}.contents; leave out the setting "
            "contents"
        )
    try:
        with misuse_is_wrong_use():
            queue = Queue(
                path,
                contents=None if place is None else open_contents(place, shared=shared),
                contents_shared=shared and place is None,
                migrate=make,
                **given,
                **new,
            )
    except SettingsConflict as error:
        with opened_at(path, settings, {}) as present:
            stored = present.settings
        raise CommandExit(_conflict(without_password(str(path)), stored, settings, new)) from error
    with queue:
        yield queue


def _key_in(settings: Mapping[str, SettingValue]) -> str | None:
    key, file = settings["key"], settings["key_file"]
    if not file.given or (key.given and strength_of(key) >= strength_of(file)):
        value: str | None = key.value
        return value
    try:
        with Path(file.value).expanduser().open("rb") as stream:
            content = stream.read(_KEY_BYTES_MAX)
        return content.decode("ascii").strip()
    except OSError as error:
        wrong_use(f"the key file {file.value} cannot be read: {error.strerror}")
    except UnicodeDecodeError:
        wrong_use(f"the key file {file.value} does not contain an access key")


def _conflict(
    path: str, stored: Settings, settings: Mapping[str, SettingValue], new: Mapping[str, Any]
) -> str:
    """Return the message for settings that differ from those of an existing queue."""
    differing = [name for name in new if getattr(stored, name) != new[name]]
    differences = (
        f"{name} is {worded(getattr(stored, name))}, and {worded(new[name])} in "
        f"{settings[name].origin}"
        for name in differing
    )
    change = " ".join(f"{name}={worded(new[name])}" for name in differing)
    return (
        f"{path} exists with other settings: {'; '.join(differences)}. Leave them out, or change "
        f"them for every process: fairturn config set {change}"
    )
