"""The queue that a command works on, found by its settings."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fairturn.cli.exit_codes import NOT_FOUND, Ending, misuse_is_wrong_use, wrong_use
from fairturn.cli.options import setting_options
from fairturn.cli.settings import (
    QUEUE,
    Found,
    known_settings,
    read_file,
    resolve,
    strength_of,
    values_of,
    variable_of,
    worded,
)
from fairturn.errors import SettingsConflict
from fairturn.urls import is_address, without_password

if TYPE_CHECKING:  # loaded when a queue is opened
    from fairturn.config import Queue
    from fairturn.model import Settings

IN_MEMORY = ":memory:"
QUEUE_OPTIONS = ("database", "synchronous", "allow_network", "contents", "contents_shared")
# Settings that choose the queue and its contents. The others are arguments of `Queue`.
_PLACES = ("database", "contents", "contents_shared", "url", "key", "key_file")


queue_options = setting_options(*QUEUE_OPTIONS)


def settings_here(flags: Mapping[str, Any]) -> dict[str, Found]:
    """Every setting, with the environment of this process and the file of its working folder."""
    with misuse_is_wrong_use():
        return resolve(flags, os.environ, read_file(os.environ, Path()))


def service_of(settings: Mapping[str, Found]) -> str | None:
    """The url of the service that is meant; None if it is a database. Who says so more strongly is
    believed: a flag before the environment before the file."""
    url, database = settings["url"], settings["database"]
    if not url.given:
        return None
    if database.given and strength_of(url) == strength_of(database):
        both = "and" if url.origin == database.origin else f"in {url.origin} and"
        wrong_use(
            f"url {both} database in {database.origin} were given; one queue can be meant: leave "
            "one of them out"
        )
    value: str = url.value
    return value if strength_of(url) > strength_of(database) else None


def database_of(settings: Mapping[str, Found]) -> Path | str:
    """The file, or the address of a server; a queue in memory would end with the command."""
    url = settings["url"]
    if strength_of(url) > strength_of(settings["database"]):
        name = click.get_current_context().command_path
        wrong_use(
            f"`{name}` works on a queue itself and not over HTTP ({url.origin} names a service): "
            "run it where the queue is, and name that with --database"
        )
    database: str = settings["database"].value
    if database == IN_MEMORY:
        wrong_use("a queue in memory ends with its process; name a file, such as documents.db")
    return database if is_address(database) else Path(database).expanduser()


def refuse_absent(settings: Mapping[str, Found]) -> Path | str:
    """The file, which is there: a command that only looks must not make it. What is at an address
    shows when it is opened."""
    path = database_of(settings)
    if isinstance(path, str):
        return path
    try:
        if path.stat().st_size:
            return path
        what = f"{path} is empty: there is no queue in it"
    except FileNotFoundError:
        what = f"there is no queue {path}"
    except OSError as error:
        what = f"{path} cannot be read: {error.strerror}"
    found = settings["database"]
    raise Ending(
        f"{what} (the setting database, from {found.origin if found.given else 'its default'}); "
        f"name it with --database, {variable_of('database')} or in fairturn.toml, "
        "or make it with fairturn submit",
        NOT_FOUND,
    )


@contextmanager
def opened(flags: Mapping[str, Any], *, make: bool = False) -> Iterator["Queue"]:
    """The queue of the settings; only with `make` it is made if it is not there."""
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
    path: Path | str, settings: Mapping[str, Found], new: Mapping[str, Any], *, make: bool = False
) -> Iterator["Queue"]:
    """The queue at a place; the settings in `new` are those of one that is made by this."""
    from fairturn.config import Queue, open_contents

    given = {name: value for name, value in values_of("", settings).items() if name not in _PLACES}
    place, shared = settings["contents"].value, settings["contents_shared"].value
    if place is not None and not isinstance(path, str):
        wrong_use(f"the contents of a queue in a file lie beside it, in {path}.contents")
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
            kept = present.settings
        raise Ending(_conflict(without_password(str(path)), kept, settings, new)) from error
    with queue:
        yield queue


def _conflict(
    path: Path | str, kept: "Settings", settings: Mapping[str, Found], new: Mapping[str, Any]
) -> str:
    """Which settings of a new queue this one has not, who gave them, and what to do."""
    differing = [name for name in new if getattr(kept, name) != new[name]]
    said = (
        f"{name} is {worded(getattr(kept, name))} and {settings[name].origin} says "
        f"{worded(new[name])}"
        for name in differing
    )
    change = " ".join(f"{name}={worded(new[name])}" for name in differing)
    return (
        f"{path} exists with other settings: {'; '.join(said)}. Leave that out, or change them "
        f"for every process: fairturn config set {change}"
    )
