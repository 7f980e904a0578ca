"""Operations on customers, on kinds of work, on the whole queue and on access keys."""

from functools import partial
from typing import Any, Unpack

from fairturn.access.keys import AccessKey, Role
from fairturn.access.registry import NewKey, refuse_role
from fairturn.client import values
from fairturn.client.request import (
    HttpRequest,
    Operation,
    ServiceSession,
    json_request,
    query_of,
)
from fairturn.client.transport import client_method
from fairturn.client.values import Identity
from fairturn.errors import NotFound
from fairturn.model import (
    CUSTOMER_BYTES_MAX,
    RESUMABLE_BYTES_MAX,
    Customer,
    CustomerPage,
    CustomerSettings,
    Kind,
    KindSettings,
    ServiceOutage,
    SettingChanges,
    Settings,
    Summary,
)
from fairturn.priority import Rule
from fairturn.validation import text
from fairturn.validation.changes import UNCHANGED, Unchanged, changed, setting_changes
from fairturn.validation.filters import page_size

# In a class with a method `list`, that name is the method.
AccessKeys = list[AccessKey]


class AdminOperations:
    """Customers, kinds of work, the whole queue and its settings."""

    _session: ServiceSession

    @client_method
    def me(self) -> Operation[Identity]:
        """Return the identity behind the access key, with the numbers of its customer."""
        return self._session.fetch_identity()

    @client_method
    def customers(self, *, after: str | None = None, size: int = 100) -> Operation[CustomerPage]:
        """Return one page of the customers, by name."""
        if after is not None:
            text.identity(after, "after", CUSTOMER_BYTES_MAX)
        query = query_of(size=page_size(size), after=after)
        read = partial(values.customers_of, after=after)
        return self._session.send(HttpRequest("GET", "/v1/customers", query), read)

    @client_method
    def customer(self, name: str) -> Operation[Customer]:
        """Return one customer; `NotFound` if there is none of this name."""
        request = HttpRequest("GET", "/v1/customers", query_of(name=check_name(name)))
        page = yield from self._session.send(request, values.customers_of)
        if not page.customers:
            raise NotFound(f"there is no customer {name!r}")
        return page.customers[0]

    @client_method
    def set_customer(
        self,
        name: str,
        *,
        weight: float | Unchanged = UNCHANGED,
        limit: int | Unchanged | None = UNCHANGED,
        paused: bool | Unchanged = UNCHANGED,
        bytes_max: int | Unchanged | None = UNCHANGED,
    ) -> Operation[Customer]:
        """Change a customer's weight, its concurrency limit (None: no limit) or the bytes that its
        documents may have (None: `bytes_per_customer_max`), or pause it.

        Parameters that are not given stay as they are. A new name creates the customer.
        """
        changes = setting_changes(weight=weight, limit=limit, paused=paused, bytes_max=bytes_max)
        CustomerSettings(**changes)  # raises the errors of the queue for values out of range
        for setting in changes.keys() & {"limit", "bytes_max"}:
            changes[setting] = changes[setting] or 0  # 0: none
        request = json_request("POST", "/v1/customers", {"name": check_name(name), **changes})
        return self._session.send(request, values.customer_of)

    @client_method
    def purge(self, customer: str) -> Operation[None]:
        """Delete a customer with its documents, settings, count and keys; running work is lost."""
        request = json_request(
            "POST", "/v1/customers/purge", {"name": check_name(customer), "dry_run": False}
        )
        missing = {"not_found": f"there is no customer {customer!r}"}
        yield from self._session.exchange(request._replace(is_idempotent=False, messages=missing))

    @client_method
    def kinds(self) -> Operation[list[Kind]]:
        """Return all kinds of work, by name."""
        return self._session.send(HttpRequest("GET", "/v1/kinds"), values.kinds_of)

    @client_method
    def kind(self, name: str) -> Operation[Kind]:
        """Return one kind of work; `NotFound` if there is none of this name."""
        missing = {"not_found": f"there is no kind {name!r}"}
        request = HttpRequest("GET", _kind_path(name), messages=missing)
        return self._session.send(request, values.kind_of)

    @client_method
    def set_kind(
        self,
        name: str,
        *,
        limit: int | Unchanged | None = UNCHANGED,
        paused: bool | Unchanged = UNCHANGED,
        attempts_max: int | Unchanged | None = UNCHANGED,
        expires_in_s: float | Unchanged | None = UNCHANGED,
    ) -> Operation[Kind]:
        """Change the concurrency limit of a kind over all machines (None: no limit), its maximum
        of attempts (None: that of the queue), or after what time its documents expire if they are
        submitted without an expiry (None: never); or pause it.

        Parameters that are not given stay as they are. A new name creates the kind; raises
        `KindRefused` if the queue has the maximum of kinds.
        """
        changes = setting_changes(
            limit=limit, paused=paused, attempts_max=attempts_max, expires_in_s=expires_in_s
        )
        KindSettings(**changes)  # raises the errors of the queue for values out of range
        for setting in changes.keys() & {"limit", "attempts_max", "expires_in_s"}:
            changes[setting] = changes[setting] or 0  # 0: none
        request = json_request("PATCH", _kind_path(name), changes)
        return self._session.send(request, values.kind_of)

    @client_method
    def outages(self) -> Operation[list[ServiceOutage]]:
        """Return the services that hold kinds of work, or that work resumes from, by name."""
        return self._session.send(HttpRequest("GET", "/v1/outages"), values.outages_of)

    @client_method
    def resume(self, service: str) -> Operation[None]:
        """End the hold of a service; the work of all kinds that need it resumes over some seconds.
        Raises `NotFound` if the service is not held."""
        text.identity(service, "service", RESUMABLE_BYTES_MAX)
        missing = f"no service {service!r} is held; outages() returns those that are"
        request = json_request("POST", "/v1/outages/resume", {"service": service})
        yield from self._session.exchange(
            request._replace(is_idempotent=False, messages={"not_found": missing})
        )

    @client_method
    def summary(self) -> Operation[Summary]:
        """Return how many documents wait at each priority, are delayed, run and have ended."""
        return self._session.send(HttpRequest("GET", "/v1/summary"), values.summary_of)

    @client_method
    def configure(self, **changes: Unpack[SettingChanges]) -> Operation[Settings]:
        """Change settings for every process. Existing priorities and counts stay as they are."""
        after = changed((yield from self._settings()), changes)  # raises the errors of the queue
        value = {name: getattr(after, name) for name in changes}
        request = json_request("PATCH", "/v1/settings", value)
        return (yield from self._session.send(request, values.settings_of))

    def _settings(self) -> Operation[Settings]:
        return self._session.send(HttpRequest("GET", "/v1/settings"), values.settings_of)

    def _rule(self) -> Operation[Rule]:
        return self._session.send_public(HttpRequest("GET", "/v1/rule"), values.rule_of)


class KeyOperations:
    """Access keys, with the methods of `fairturn.access.registry.KeyRegistry`."""

    _session: ServiceSession

    @client_method
    def make(
        self, role: Role | str, *, name: str = "", customer: str | None = None
    ) -> Operation[NewKey]:
        """Create an access key. Its text, `shown`, cannot be retrieved later."""
        value = {"role": refuse_role(role, customer).value, "name": name, "customer": customer}
        request = json_request("POST", "/v1/keys", value)._replace(is_idempotent=False)
        return self._session.send(request, values.new_key_of)

    @client_method
    def list(
        self, *, customer: str | None = None, after: str | None = None, size: int = 100
    ) -> Operation[AccessKeys]:
        """Return keys by id, including those that have expired or were revoked."""
        query = query_of(size=page_size(size), customer=customer, after=after)
        read = partial(values.keys_of, after=after)
        return self._session.send(HttpRequest("GET", "/v1/keys", query), read)

    @client_method
    def rotate(self, id: str, *, overlap_s: float = 0.0) -> Operation[NewKey]:
        """Create a key that replaces one; the old key expires after `overlap_s`."""
        request = _key_request(id, "rotate", {"overlap_s": overlap_s})
        return self._session.send(request._replace(is_idempotent=False), values.new_key_of)

    @client_method
    def revoke(self, id: str) -> Operation[AccessKey]:
        """Revoke a key now."""
        return self._session.send(_key_request(id, "revoke", {}), values.key_of)


def check_name(customer: str) -> str:
    return text.identity(customer, "customer", CUSTOMER_BYTES_MAX)


def _kind_path(name: str) -> str:
    return f"/v1/kinds/{text.kind_name(name)}"


def _key_request(id: str, action: str, value: dict[str, Any]) -> HttpRequest:
    missing = f"there is no key {id!r}"
    if not id.isalnum() or not id.isascii():
        raise NotFound(missing)
    request = json_request("POST", f"/v1/keys/{id}/{action}", value)
    return request._replace(messages={"not_found": missing})
