"""Services that were reported unavailable (`functions/outage.sql`)."""

from collections import defaultdict

from fairturn.model import ServiceOutage
from fairturn.scheduling.outages import ServiceState
from fairturn.stores import crash
from fairturn.stores.postgres.session import Session
from fairturn.stores.services import ServiceTable

_STATES = f"SELECT service, {', '.join(ServiceState._fields)} FROM fairturn.outages"
_NEEDS = """
    SELECT k.name, s.service
    FROM fairturn.kinds k LEFT JOIN fairturn.kind_services s ON s.kind = k.number"""
_RESUME = "SELECT fairturn.resume(%s::int8, %s::text)"


def outages(session: Session, now: int) -> list[ServiceOutage]:
    """Return the services that are held or that work resumes from, ordered by name."""
    states = {service: ServiceState._make(rest) for service, *rest in session.fetch(_STATES)}
    if not states:
        return []
    needs: defaultdict[str, list[str]] = defaultdict(list)
    for kind, service in session.fetch(_NEEDS):
        needs[kind] += [] if service is None else [service]
    table = ServiceTable({kind: tuple(services) for kind, services in needs.items()}, states)
    return table.outages(list(needs), now)


def resume(session: Session, service: str, given_now: int | None) -> bool:
    """End the hold of a service; return whether it was held."""
    crash.point("configure-before-commit")
    ((was_held,),) = session.fetch(_RESUME, (given_now, service))
    crash.point("configure-after-commit")
    return bool(was_held)
