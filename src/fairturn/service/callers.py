"""Who asks: found from the access key alone, before anything else is looked at."""

from functools import lru_cache
from ipaddress import ip_address
from typing import Annotated, NamedTuple

from fastapi import Depends, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from fairturn.access.keys import Role
from fairturn.model import Document, Stored
from fairturn.service.problems import Code, Problem
from fairturn.service.service import Service, service_of

_BEARER = HTTPBearer(
    auto_error=False,
    scheme_name="key",
    description="An access key, `ft_…`. It says who the customer is; nothing else does.",
)
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")
# What a proxy adds. One on this machine that is not trusted would make everybody look local.
_OF_PROXIES = {
    b"forwarded",
    b"via",
    b"x-forwarded-for",
    b"x-forwarded-host",
    b"x-forwarded-proto",
    b"x-real-ip",
}


class Caller(NamedTuple):
    """Who asks, and what that lets them see."""

    role: Role
    customer: str | None  # all that a customer can see is of this one
    key: str | None  # the id of the key; None where no key is asked for
    key_name: str | None

    @property
    def sees_all(self) -> bool:
        return self.role is not Role.CUSTOMER


_NOBODY_ELSE_IS_HERE = Caller(Role.OPERATOR, None, None, None)


def caller_of(
    request: Request,
    credentials: Annotated[HTTPAuthorizationCredentials | None, Security(_BEARER)],
) -> Caller:
    """Whoever asks, or a problem. It asks the store, so it is called in a thread."""
    return _found(request, None if credentials is None else credentials.credentials)


def submitter_of(request: Request) -> Caller:
    """The same for an operation that reads its headers itself, and for who may submit."""
    scheme, _, shown = request.headers.get("authorization", "").partition(" ")
    return _refuse_reader(_found(request, shown if scheme.lower() == "bearer" else None))


def _found(request: Request, shown: str | None) -> Caller:
    service = service_of(request)
    if "authorization" not in request.headers:
        return _without_key(service, request)
    address = address_of(request)
    if request.scope["scheme"] != "https" and not is_local(request):
        raise Problem(Code.HTTPS_NEEDED)
    shut_out_s = service.rates.seconds_shut_out(address)
    if shut_out_s:
        raise Problem(Code.RATE_LIMITED, retry_after_s=shut_out_s)
    key = None if shown is None else service.keys.check(shown)
    if key is None:
        service.rates.refuse(address)
        raise Problem(Code.KEY_UNKNOWN)
    wait_s = service.rates.seconds_to_wait(key.id)
    if wait_s:
        raise Problem(Code.RATE_LIMITED, retry_after_s=wait_s)
    request.state.key = key.id
    return Caller(key.role, key.customer, key.id, key.name)


def _without_key(service: Service, request: Request) -> Caller:
    """While there are no keys, whoever sits at this machine is the operator; nobody else, and no
    web page that such a person has open."""
    if service.keys.are_asked_for():
        raise Problem(Code.KEY_MISSING)
    headers = request.headers
    if not is_local(request):
        raise Problem(Code.KEY_MISSING)
    host = headers.get("host", "")
    if _without_port(host) not in _LOCAL_HOSTS:
        raise Problem(Code.ORIGIN_UNKNOWN)
    origin = headers.get("origin")
    if origin is not None and origin != f"{request.scope['scheme']}://{host}":
        raise Problem(Code.ORIGIN_UNKNOWN)
    followed = request.method == "GET" and headers.get("sec-fetch-mode") == "navigate"
    if not followed and headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        raise Problem(Code.ORIGIN_UNKNOWN)  # who follows a link sees the page; the link does not
    return _NOBODY_ELSE_IS_HERE


def _without_port(host: str) -> str:
    name, _, port = host.rpartition(":")
    return name if port.isdecimal() else host


def address_of(request: Request) -> str:
    """From where a request came."""
    return "" if request.client is None else request.client.host


def is_local(request: Request) -> bool:
    """Whether it comes from a program of this machine, and from nobody behind that."""
    names = {name for name, _ in request.scope["headers"]}  # in lower case, says ASGI
    return names.isdisjoint(_OF_PROXIES) and _is_loopback(address_of(request))


@lru_cache(1_000)
def _is_loopback(address: str) -> bool:
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return False


Anybody = Annotated[Caller, Depends(caller_of)]


async def changing(caller: Anybody) -> Caller:
    """Who may change documents: all but readers."""
    return _refuse_reader(caller)


def _refuse_reader(caller: Caller) -> Caller:
    if caller.role is Role.READER:
        raise Problem(Code.NOT_ALLOWED)
    return caller


async def overseeing(caller: Anybody) -> Caller:
    """Who may see the whole queue."""
    if not caller.sees_all:
        raise Problem(Code.NOT_ALLOWED)
    return caller


async def operating(caller: Anybody) -> Caller:
    """Who may change the whole queue."""
    if caller.role is not Role.OPERATOR:
        raise Problem(Code.NOT_ALLOWED)
    return caller


Submitter = Annotated[Caller, Depends(changing)]
Overseer = Annotated[Caller, Depends(overseeing)]
Operator = Annotated[Caller, Depends(operating)]


def customer_for(caller: Caller, named: str | None) -> str:
    """Whose document is submitted: that of the key. Only an operator names one."""
    whose = scope_of(caller, named)
    if whose is None:
        raise Problem(Code.INVALID, "customer is missing; an operator says whose document it is")
    return whose


def scope_of(caller: Caller, named: str | None) -> str | None:
    """Whose documents are looked at; None: everybody's."""
    if caller.customer is None:
        return named
    if named is not None:
        raise Problem(Code.INVALID, "the access key says who the customer is; leave customer out")
    return caller.customer


def stored_for(service: Service, caller: Caller, id: str) -> Stored:
    """A document that the caller may see. Another's is answered like one that is not there."""
    stored = service.queue.store.read(id)
    if stored is None or not _may_see(caller, stored.document):
        raise Problem(Code.NOT_FOUND)
    return stored


def _may_see(caller: Caller, document: Document) -> bool:
    return caller.sees_all or document.customer == caller.customer
