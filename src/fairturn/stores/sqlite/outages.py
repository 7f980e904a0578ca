"""The rows of services: which kinds need them, and which of them are unavailable."""

from collections import defaultdict
from collections.abc import Iterable

import apsw

from fairturn.model import ServiceOutage
from fairturn.scheduling.outages import ServiceState
from fairturn.stores.services import ServiceTable
from fairturn.stores.sqlite.rows import QueueRow, fetch

_COLUMNS = ", ".join(ServiceState._fields)
_STATES = f"SELECT service, {_COLUMNS} FROM outages"
_SAVE = f"""
    INSERT OR REPLACE INTO outages (service, {_COLUMNS})
    VALUES (?{", ?" * len(ServiceState._fields)})"""
_DROP = "DELETE FROM outages WHERE service = ?"
_NEEDS = """
    SELECT k.name, s.service FROM kind_services s JOIN kinds k ON k.number = s.kind
    ORDER BY k.name, s.service"""
_CLEAR_NEEDS = "DELETE FROM kind_services WHERE kind = ?"
_ADD_NEED = "INSERT OR IGNORE INTO kind_services (kind, service) VALUES (?, ?)"
_KINDS = "SELECT name FROM kinds"


class StoredServices(ServiceTable):
    """The table of services in one transaction."""

    def __init__(self, connection: apsw.Connection) -> None:
        self._connection = connection
        self._stored = {
            service: ServiceState._make(state) for service, *state in fetch(connection, _STATES)
        }
        needs: defaultdict[str, list[str]] = defaultdict(list)
        for kind, service in fetch(connection, _NEEDS):
            needs[kind].append(service)
        super().__init__({kind: tuple(each) for kind, each in needs.items()}, self._stored)

    def save(self) -> None:
        """Write the states that have changed."""
        for service in self._stored.keys() - self.states.keys():
            self._connection.execute(_DROP, (service,))
        for service, state in self.states.items():
            if state != self._stored.get(service):
                self._connection.execute(_SAVE, (service, *state))


def register(connection: apsw.Connection, kind: int, services: Iterable[str]) -> None:
    """Replace the services that a kind needs."""
    connection.execute(_CLEAR_NEEDS, (kind,))
    connection.executemany(_ADD_NEED, [(kind, service) for service in services])


def resume(connection: apsw.Connection, queue: QueueRow, service: str, now: int) -> bool:
    """End the hold of a service; return whether it was held."""
    services = StoredServices(connection)
    was_held = services.resume(service, queue.fence, now)
    services.save()
    return was_held


def outages(connection: apsw.Connection, now: int) -> list[ServiceOutage]:
    """Return the services that are held or that work resumes from, ordered by name."""
    kinds = [name for (name,) in fetch(connection, _KINDS)]
    return StoredServices(connection).outages(kinds, now)
