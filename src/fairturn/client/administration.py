"""The exchanges of operators: customers, the whole queue, access keys."""

from typing import Any

from fairturn.access.keys import AccessKey, Role
from fairturn.access.registry import NewKey, refuse_role
from fairturn.client import values
from fairturn.client.exchange import Ask, Asker, Exchange, json_ask
from fairturn.errors import NotFound
from fairturn.model import (
    CUSTOMER_BYTES_MAX,
    Customer,
    CustomerPage,
    CustomerSettings,
    Settings,
    Summary,
)
from fairturn.priority import Rule
from fairturn.validation import text
from fairturn.validation.changes import SettingChanges, changed, customer_changes
from fairturn.validation.filters import page_size

Keys = list[AccessKey]


class Operating:
    """What operators ask, and some of it readers."""

    def __init__(self, asker: Asker) -> None:
        self._asker = asker

    def customers(self, after: str | None, size: int) -> Exchange[CustomerPage]:
        query = [("size", str(page_size(size)))]
        if after is not None:
            query.append(("after", text.identity(after, "after", CUSTOMER_BYTES_MAX)))
        answer = yield from self._asker.ask(Ask("GET", "/v1/customers", tuple(query)))
        return values.customers_of(answer.json)

    def customer(self, name: str) -> Exchange[Customer]:
        text.identity(name, "customer", CUSTOMER_BYTES_MAX)
        answer = yield from self._asker.ask(Ask("GET", "/v1/customers", (("name", name),)))
        for customer in values.customers_of(answer.json).customers:
            return customer
        raise NotFound(f"there is no customer {name!r}")

    def set_customer(self, name: str, weight: Any, limit: Any, paused: Any) -> Exchange[Customer]:
        text.identity(name, "customer", CUSTOMER_BYTES_MAX)
        changes = customer_changes(weight, limit, paused)
        CustomerSettings(**changes)  # refuses what is out of bounds, in the words of the queue
        if "limit" in changes:
            changes["limit"] = changes["limit"] or 0  # no limit
        answer = yield from self._asker.ask(
            json_ask("POST", "/v1/customers", {"name": name, **changes})
        )
        return values.customer_of(answer.json)

    def purge(self, name: str) -> Exchange[None]:
        text.identity(name, "customer", CUSTOMER_BYTES_MAX)
        ask = json_ask(
            "POST",
            "/v1/customers/purge",
            {"name": name, "dry_run": False},
            not_found=f"there is no customer {name!r}",
        )
        yield from self._asker.ask(ask._replace(again=False))

    def summary(self) -> Exchange[Summary]:
        answer = yield from self._asker.ask(Ask("GET", "/v1/summary"))
        return values.summary_of(answer.json)

    def settings(self) -> Exchange[Settings]:
        answer = yield from self._asker.ask(Ask("GET", "/v1/settings"))
        return values.settings_of(answer.json)

    def rule(self) -> Exchange[Rule]:
        answer = yield from self._asker.ask_anybody(Ask("GET", "/v1/rule"))
        return values.rule_of(answer.json)

    def configure(self, changes: SettingChanges) -> Exchange[Settings]:
        before = yield from self.settings()
        after = changed(before, changes)  # what is wrong is refused in the words of the queue
        given = {name: getattr(after, name) for name in changes}
        answer = yield from self._asker.ask(json_ask("PATCH", "/v1/settings", given))
        return values.settings_of(answer.json)


class KeyExchanges:
    """Access keys, as `fairturn.access.registry.Keys` has them."""

    def __init__(self, asker: Asker) -> None:
        self._asker = asker

    def make(self, role: Role | str, name: str, customer: str | None) -> Exchange[NewKey]:
        wanted = {"role": refuse_role(role, customer).value, "name": name, "customer": customer}
        ask = json_ask("POST", "/v1/keys", wanted)._replace(again=False)
        answer = yield from self._asker.ask(ask)
        return values.new_key_of(answer.json)

    def list(self, customer: str | None, after: str | None, size: int) -> Exchange[Keys]:
        query = [("size", str(page_size(size)))]
        query += [] if customer is None else [("customer", customer)]
        query += [] if after is None else [("after", after)]
        answer = yield from self._asker.ask(Ask("GET", "/v1/keys", tuple(query)))
        return [values.key_of(each) for each in answer.json["keys"]]

    def rotate(self, id: str, overlap_s: float) -> Exchange[NewKey]:
        ask = json_ask(
            "POST", f"{_path(id)}/rotate", {"overlap_s": overlap_s}, **_missing(id)
        )._replace(again=False)
        answer = yield from self._asker.ask(ask)
        return values.new_key_of(answer.json)

    def revoke(self, id: str) -> Exchange[AccessKey]:
        answer = yield from self._asker.ask(Ask("POST", f"{_path(id)}/revoke", said=_missing(id)))
        return values.key_of(answer.json)


def _path(id: str) -> str:
    if not id.isalnum() or not id.isascii():
        raise NotFound(f"there is no key {id!r}")
    return f"/v1/keys/{id}"


def _missing(id: str) -> dict[str, str]:
    return {"not_found": f"there is no key {id!r}"}
