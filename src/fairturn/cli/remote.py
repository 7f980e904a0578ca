"""The queue of a command that works with a database or with a service."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairturn.cli.exit_codes import CommandExit, misuse_is_wrong_use, wrong_use
from fairturn.cli.options import setting_options
from fairturn.cli.settings import SettingValue, strength_of
from fairturn.cli.target import QUEUE_OPTIONS, opened, service_of, settings_here

if TYPE_CHECKING:
    from fairturn.client.sync_client import Client
    from fairturn.queue import Queue

TRIES = 4  # attempts of one request; few, because a user waits
_KEY_BYTES_MAX = 1_024

place_options = setting_options(*QUEUE_OPTIONS, "url", "key_file")


@contextmanager
def reached(flags: Mapping[str, Any], *, make: bool = False) -> Iterator["Queue | Client"]:
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
