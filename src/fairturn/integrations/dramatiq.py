"""The nine priorities in Dramatiq, on RabbitMQ, the one of its brokers that has priorities:

    broker = RabbitmqBroker(url="amqp://…", max_priority=10)
    broker.add_middleware(
        Fairturn(customer=lambda actor, args, kwargs: kwargs.get("customer_id"), counts="redis://…")
    )

Workers run with `dramatiq_queue_prefetch=1` in their environment. docs/integrations.md has more.
"""

from typing import Any

from dramatiq import Broker, Message, Middleware, Worker
from dramatiq.middleware import MiddlewareError

from fairturn.errors import BrokerRefused
from fairturn.integrations.brokers import RABBITMQ, as_number
from fairturn.integrations.decision import FALLBACK, Customer, Decider, Place, Totals
from fairturn.priority import LEVELS, Rule


class PrioritiesRefused(BrokerRefused, MiddlewareError):
    """Dramatiq lets an error through only if it is one of its own."""


class Fairturn(Middleware):
    """Gives every message of a customer the priority of the rule when it is sent."""

    def __init__(
        self,
        *,
        customer: Customer,
        counts: Place,
        rule: Rule | None = None,
        fallback: int = FALLBACK,
    ) -> None:
        self._customer = customer
        self._decider = Decider(counts, rule=rule, fallback=fallback)

    def totals(self) -> Totals:
        """How many messages this process has sent, by how their priority came about."""
        return self._decider.totals()

    def before_enqueue(self, broker: Broker, message: Message[Any], delay: int) -> None:
        most = getattr(broker, "max_priority", None) or 0
        if most < LEVELS:
            raise PrioritiesRefused(
                f"{type(broker).__name__} has max_priority {most} and nine levels need {LEVELS} or "
                "more; use RabbitmqBroker(…, max_priority=10), with queues that are new"
            )
        if "broker_priority" in message.options:
            self._decider.add("by_hand")  # or a retry, or a delayed message that is due
            return
        decision = self._decider.decide(
            self._customer, message.actor_name, message.args, message.kwargs
        )
        if decision is not None:
            message.options["broker_priority"] = as_number(decision.priority, RABBITMQ)
            message.options["fairturn"] = decision.as_header()

    def before_worker_boot(self, broker: Broker, worker: Worker) -> None:
        if worker.queue_prefetch != 1:
            raise PrioritiesRefused(
                f"this worker takes {worker.queue_prefetch} messages ahead, out of the broker's "
                "order; set dramatiq_queue_prefetch=1 in its environment"
            )
