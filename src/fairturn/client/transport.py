"""What both clients need of httpx: where it connects to, and its errors in our words."""

import os
import secrets
import socket
import ssl
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from fairturn.access.keys import read_key
from fairturn.client.exchange import Ask, Asker, Tries, Upload
from fairturn.client.problems import Answer, Broken, Place, Trouble
from fairturn.errors import StoreRefused

if TYPE_CHECKING:
    import httpx

CONNECT_S = 10.0
# Shorter than the service keeps a connection that nobody uses, so that none is used that it has
# just closed.
KEEP_S = 3.0
CHUNK_BYTES = 262_144


class Connection(NamedTuple):
    """A service, and how to connect to it."""

    place: Place
    options: Mapping[str, Any]  # of a client of httpx
    timeout_s: float

    def asker(self, tries: Tries | None) -> Asker:
        return Asker(self.place, tries or Tries())


def random_name() -> str:
    """A name that nothing else has: for idempotency keys, and what stands between parts."""
    return secrets.token_hex(16)


def load_httpx() -> Any:
    """The library, which is an extra: loaded when a client is made, and not before."""
    try:
        import httpx
    except ModuleNotFoundError as error:
        raise StoreRefused(
            f"a client needs the package {error.name}; install it with: "
            "pip install 'fairturn[client]'"
        ) from error
    return httpx


def connection(
    url: str, key: str | None, *, ca: str | None, timeout_s: float, allow_http: bool
) -> Connection:
    """What is needed to connect, or the error that says what is wrong with it."""
    httpx = load_httpx()
    url, key_id = check_url(url), None
    headers = {"User-Agent": f"fairturn/{version('fairturn')}", "Accept": "*/*"}
    if key is not None:
        presented = read_key(key) if isinstance(key, str) else None
        if presented is None:
            raise ValueError(
                "the access key does not read ft_ID_SECRET, as `fairturn keys make` shows it; "
                "perhaps a part of it is missing"
            )
        if not allow_http and not url.startswith("https:") and not _is_local(url):
            raise ValueError(
                f"an access key must not travel unencrypted to {url}: use https://, or say "
                "allow_http=True where something else encrypts it"
            )
        key_id = presented.id
        headers["Authorization"] = f"Bearer {key}"
    if not 0 < timeout_s < float("inf"):
        raise ValueError(f"timeout_s is {timeout_s}; it must be a number of seconds above 0")
    options = {
        "base_url": url,
        "headers": headers,
        "verify": _trusted(url, ca),
        # What stays on this machine must not go through a proxy that the environment names.
        "trust_env": not _is_local(url),
        "limits": httpx.Limits(max_connections=100, keepalive_expiry=KEEP_S),
        "follow_redirects": False,  # the key is for this service, and not for wherever it leads
    }
    return Connection(Place(url, key_id), options, timeout_s)


def check_url(url: str) -> str:
    """The address of a service without a slash at its end, if it is one."""
    if not isinstance(url, str):
        raise TypeError(f"url must be a text, not {type(url).__name__}")
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"url is {url!r}, which is no address: {error}") from None
    if parts.username is not None or parts.password is not None:
        raise ValueError("the url has a name or a password in it; the access key is all it needs")
    if parts.scheme not in ("http", "https") or not host:
        raise ValueError(f"url is {url!r}; it must begin as in http://localhost:8750")
    if parts.query or parts.fragment:
        raise ValueError(f"url is {url!r}; the address of a service ends before ? and #")
    return url.rstrip("/")


def _is_local(url: str) -> bool:
    """Whether it is a service of this machine, so that nobody can listen on the way."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _trusted(url: str, ca: str | None) -> ssl.SSLContext | bool:
    if ca is None and url.startswith("http:"):
        # It is not used. To load all the authorities of the world takes longer than a request.
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    named = ca or (os.environ.get("SSL_CERT_FILE") if _is_local(url) else None)
    return True if named is None else ssl.create_default_context(cafile=named)


def arguments_of(ask: Ask, timeout_s: float) -> dict[str, Any]:
    """A request for `build_request`, without its body."""
    httpx = load_httpx()
    headers = dict(ask.headers)
    if isinstance(ask.body, Upload) and ask.body.size_bytes is not None:
        headers["Content-Length"] = str(ask.body.size_bytes)
    return {
        "method": ask.method,
        "url": ask.path,
        "params": list(ask.query) or None,
        "headers": headers,
        "timeout": httpx.Timeout(
            timeout_s, connect=min(CONNECT_S, timeout_s), read=timeout_s + ask.wait_s, pool=None
        ),
    }


def answer_of(response: "httpx.Response", body: bytes) -> Answer:
    headers = {name.lower(): value for name, value in response.headers.items()}
    return Answer(response.status_code, headers, body)


def broken_by(error: "httpx.RequestError") -> Broken:
    """Why there is no answer."""
    httpx = load_httpx()
    causes = list(_causes(error))
    said = next((str(cause) for cause in reversed(causes) if str(cause)), type(error).__name__)
    if any(isinstance(cause, ssl.SSLError) for cause in causes):
        return Broken(Trouble.TLS, said)
    if any(isinstance(cause, socket.gaierror) for cause in causes):
        return Broken(Trouble.UNKNOWN_NAME, said)
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.ProxyError):
        return Broken(Trouble.UNREACHABLE, said)
    if isinstance(error, httpx.TimeoutException):
        return Broken(Trouble.SLOW, said)
    return Broken(Trouble.CUT, said)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
