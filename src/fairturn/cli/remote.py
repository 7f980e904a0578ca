"""The queue that a command works on, here or at a service: for commands that can do both."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairturn.cli.exit_codes import misuse_is_wrong_use, wrong_use
from fairturn.cli.options import setting_options
from fairturn.cli.settings import Found, strength_of
from fairturn.cli.target import QUEUE_OPTIONS, opened, service_of, settings_here

if TYPE_CHECKING:  # loaded when a queue is reached
    from fairturn.access.registry import Keys
    from fairturn.client.sync_client import Client, ClientKeys
    from fairturn.queue import Queue

TRIES = 4  # of one request: somebody sits and waits
_KEY_BYTES_MAX = 1_024


# Of a command that works on a queue here or at a service.
place_options = setting_options(*QUEUE_OPTIONS, "url", "key_file")


@contextmanager
def reached(flags: Mapping[str, Any], *, make: bool = False) -> Iterator["Queue | Client"]:
    """The queue of the settings. One in a database is made by this only with `make`."""
    settings = settings_here(flags)
    url = service_of(settings)
    if url is None:
        with opened(flags, make=make) as queue:
            yield queue
        return
    with client_of(url, settings) as client:
        yield client


def client_of(url: str, settings: Mapping[str, Found]) -> "Client":
    """A client of the service at a url, with the key of the settings."""
    from fairturn.client.exchange import Tries
    from fairturn.client.sync_client import Client

    with misuse_is_wrong_use():
        return Client(url, _key_in(settings), tries=Tries(most=TRIES))


def keys_of(queue: "Queue | Client") -> "Keys | ClientKeys":
    """The access keys of a queue."""
    from fairturn.queue import Queue

    if not isinstance(queue, Queue):
        return queue.keys
    from fairturn.access.registry import Keys

    return Keys(queue.store)


def _key_in(settings: Mapping[str, Found]) -> str | None:
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
        wrong_use(f"the key file {file.value} has something else than an access key in it")
