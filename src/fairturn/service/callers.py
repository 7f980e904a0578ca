"""Authentication and authorisation: the identity behind an access key, and what it may see."""

import hmac
from functools import lru_cache
from ipaddress import ip_address
from typing import Annotated, NamedTuple

from fastapi import Depends, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from fairturn.access.keys import Role
from fairturn.model import Document, Filter, Stored
from fairturn.service.concurrency import hold, network_of
from fairturn.service.problems import Problem, ProblemCode
from fairturn.service.service import Service, service_of

_BEARER = HTTPBearer(
    auto_error=False,
    scheme_name="key",
    description="An access key, `ft_…`. It determines the role and the customer. While no keys "
    "exist: the token that the service printed when it started.",
)
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")
# Headers that proxies add. Behind an untrusted proxy on this machine every client looks local.
_PROXY_HEADERS = {
    b"forwarded",
    b"via",
    b"x-forwarded-for",
    b"x-forwarded-host",
    b"x-forwarded-proto",
    b"x-real-ip",
}


class Caller(NamedTuple):
    """The identity behind an access key."""

    role: Role
    customer: str | None  # the only one that it may see; None: all
    key: str | None  # the id of the key; None if no key is required
    key_name: str | None

    @property
    def sees_all(self) -> bool:
        return self.role is not Role.CUSTOMER


_LOCAL_OPERATOR = Caller(Role.OPERATOR, None, None, None)
_TOKEN_NEEDED = (
    "there are no access keys; pass the token that the service printed when it started as "
    "Authorization: Bearer"
)


async def caller_of(
    request: Request, credentials: Annotated[HTTPAuthorizationCredentials | None, Security(_BEARER)]
) -> Caller:
    """Return the caller, as one of the requests in progress of its key. Raises `Problem`."""
    service = service_of(request)
    shown = None if credentials is None else credentials.credentials
    # Before the key is read from the store: a flood of requests must not delay the authentication
    # of others.
    known = None if shown is None else service.known_keys.id_of(shown)
    if known is not None:
        if _is_poll(request):
            service.polls.check(known)
        permit = await service.requests.wait(known)
    else:
        permit = await service.newcomers.wait(network_of(address_of(request)))
    hold(request.scope, permit)
    # A client that has disconnected meanwhile needs no answer: 800 polls that hung up took a victim
    # from 8 ms to 370 ms.
    if permit.has_waited and request.method == "GET" and await request.is_disconnected():
        raise Problem(ProblemCode.CUT_OFF)
    caller = await service.run(_authenticate, request, shown)
    if known is None and shown is not None and caller.key is not None:
        service.known_keys.add(shown, caller.key)
    return caller


def _is_poll(request: Request) -> bool:
    try:
        return float(request.query_params.get("wait_s", 0)) > 0
    except ValueError:
        return False  # the route answers it


def submitter_of(request: Request) -> Caller:
    """Return the caller of a route that parses its own headers. Raises `Problem` for readers."""
    scheme, _, shown = request.headers.get("authorization", "").partition(" ")
    return _refuse_reader(_authenticate(request, shown if scheme.lower() == "bearer" else None))


def _authenticate(request: Request, shown: str | None) -> Caller:
    """Return the caller. It reads the store: run it in a thread. Raises `Problem`."""
    service = service_of(request)
    if "authorization" not in request.headers:
        count_anonymous(request)
        raise Problem(ProblemCode.KEY_MISSING, _TOKEN_NEEDED if takes_token(service) else None)
    if request.scope["scheme"] != "https" and not is_local(request):
        raise Problem(ProblemCode.HTTPS_NEEDED)
    if shown is not None and is_token(service, shown):
        return local_operator(request)
    key = None if shown is None else service.keys.check(shown)
    if key is None:
        raise_if_limited(service.rates.seconds_refused(network_of(address_of(request))))
        raise Problem(ProblemCode.KEY_UNKNOWN)
    raise_if_limited(service.rates.seconds_to_wait(key.id))
    request.state.key = key.id
    return Caller(key.role, key.customer, key.id, key.name)


def takes_token(service: Service) -> bool:
    """Return whether the token of the process is accepted: until the first key exists, and never
    again, so that the deletion of a customer with the only keys does not reopen the service."""
    if service.token is not None and service.keys.are_required():
        service.token = None
    return service.token is not None


def is_token(service: Service, shown: str) -> bool:
    """Return whether a client presents the token of the process, and it is accepted."""
    token = service.token
    if token is None or not hmac.compare_digest(shown.encode(errors="replace"), token.encode()):
        return False
    return takes_token(service)


def local_operator(request: Request) -> Caller:
    """Return the operator of a service without keys, for a client that has presented the token.
    Requests from other machines are rejected, and so are requests that a web page of another
    origin makes in a local browser."""
    headers = request.headers
    if not is_local(request):
        raise Problem(ProblemCode.KEY_MISSING)
    host = headers.get("host", "")
    if _without_port(host) not in _LOCAL_HOSTS:
        raise Problem(ProblemCode.ORIGIN_UNKNOWN)
    origin = headers.get("origin")
    if origin is not None and origin != f"{request.scope['scheme']}://{host}":
        raise Problem(ProblemCode.ORIGIN_UNKNOWN)
    # A followed link shows the page to the user; the linking site cannot read it.
    followed = request.method == "GET" and headers.get("sec-fetch-mode") == "navigate"
    if not followed and headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        raise Problem(ProblemCode.ORIGIN_UNKNOWN)
    return _LOCAL_OPERATOR


def count_anonymous(request: Request) -> None:
    """Count a request without a key or a session. Raises `Problem` above the limit."""
    rates = service_of(request).rates
    raise_if_limited(rates.seconds_anonymous(network_of(address_of(request))))


def raise_if_limited(wait_s: int) -> None:
    """Raise `Problem` unless the request is allowed now."""
    if wait_s:
        raise Problem(ProblemCode.RATE_LIMITED, retry_after_s=wait_s)


def _without_port(host: str) -> str:
    name, _, port = host.rpartition(":")
    return name if port.isdecimal() else host


def address_of(request: Request) -> str:
    return "" if request.client is None else request.client.host


def is_local(request: Request) -> bool:
    """Return whether the client is a program on this machine and not a proxy."""
    names = {name for name, _ in request.scope["headers"]}  # lower case, by the ASGI specification
    return names.isdisjoint(_PROXY_HEADERS) and _is_loopback(address_of(request))


@lru_cache(1_000)
def _is_loopback(address: str) -> bool:
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return False


Anybody = Annotated[Caller, Depends(caller_of)]


async def public(request: Request) -> None:
    """Accept a request without a key, up to the limit of its address."""
    count_anonymous(request)


async def changing(caller: Anybody) -> Caller:
    """Require a role that may change documents."""
    return _refuse_reader(caller)


def _refuse_reader(caller: Caller) -> Caller:
    if caller.role is Role.READER:
        raise Problem(ProblemCode.NOT_ALLOWED)
    return caller


async def overseeing(caller: Anybody) -> Caller:
    """Require a role that may see the whole queue."""
    if not caller.sees_all:
        raise Problem(ProblemCode.NOT_ALLOWED)
    return caller


async def operating(caller: Anybody) -> Caller:
    """Require the role of an operator."""
    if caller.role is not Role.OPERATOR:
        raise Problem(ProblemCode.NOT_ALLOWED)
    return caller


Public = Depends(public)  # of a route that needs no key
Submitter = Annotated[Caller, Depends(changing)]
Overseer = Annotated[Caller, Depends(overseeing)]
Operator = Annotated[Caller, Depends(operating)]


def customer_for(caller: Caller, named: str | None) -> str:
    """Return the customer of a submission: that of the key, or the one that an operator names."""
    customer = scope_of(caller, named)
    if customer is None:
        raise Problem(
            ProblemCode.INVALID, "customer is missing; it is required with an operator's key"
        )
    return customer


def scope_of(caller: Caller, named: str | None) -> str | None:
    """Return the customer that a request is limited to, or None for all."""
    if caller.customer is None:
        return named
    if named is not None:
        raise Problem(ProblemCode.INVALID, "customer is determined by the access key; omit it")
    return caller.customer


def document_of(service: Service, caller: Caller, id: str) -> Document | None:
    """Return a document that the caller may see, without its body; None for a missing one and for
    one of another customer. The body of the latter is never read, so that response times are
    indistinguishable."""
    found = service.queue.queries.find(Filter(customer=caller.customer, ids=(id,)), size=1)
    return found.documents[0] if found.documents else None


def document_for(service: Service, caller: Caller, id: str) -> Document:
    """Return what `document_of` returns; raise `Problem` for None."""
    document = document_of(service, caller, id)
    if document is None:
        raise Problem(ProblemCode.NOT_FOUND)
    return document


def stored_for(service: Service, caller: Caller, id: str) -> Stored:
    """Return a document that the caller may see, with its body. Raises the same `Problem` for a
    missing document and for one of another customer."""
    if not caller.sees_all:
        document_for(service, caller, id)
    stored = service.queue.queries.read(id)
    if stored is None:
        raise Problem(ProblemCode.NOT_FOUND)
    return stored


def refuse_foreign_cursor(service: Service, caller: Caller, after: str | None) -> None:
    """Reject a cursor of another customer, which would reveal that document and its order."""
    if after is None or caller.customer is None or document_of(service, caller, after) is not None:
        return
    raise Problem(
        ProblemCode.INVALID, "after is not the `next` of a page, or its document was deleted"
    )
