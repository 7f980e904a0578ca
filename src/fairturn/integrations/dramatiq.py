"""The nine priorities in Dramatiq, on RabbitMQ, its only broker with priorities:

    broker = RabbitmqBroker(url="amqp://…", max_priority=10)
    broker.add_middleware(
        DramatiqPriorityMiddleware(
            customer=lambda actor, args, kwargs: kwargs.get("customer_id"), counts="redis://…"
        )
    )

Run workers with `dramatiq_queue_prefetch=1` in their environment. See docs/integrations.md.
"""

from typing import Any

from dramatiq import Broker, Message, Middleware, Worker
from dramatiq.middleware import MiddlewareError

from fairturn.errors import BrokerRefused
from fairturn.integrations.brokers import RABBITMQ, as_number
from fairturn.integrations.decision import DecidingMiddleware
from fairturn.priority import LEVELS


class PrioritiesRefused(BrokerRefused, MiddlewareError):
    """A `MiddlewareError`, because Dramatiq swallows other exceptions of middleware."""


class DramatiqPriorityMiddleware(DecidingMiddleware, Middleware):
    """Gives every message of a customer the priority of the rule when it is sent."""

    def before_enqueue(self, broker: Broker, message: Message[Any], delay: int) -> None:
        maximum = getattr(broker, "max_priority", None) or 0
        if maximum < LEVELS:
            raise PrioritiesRefused(
                f"{type(broker).__name__} has max_priority {maximum} and nine levels need {LEVELS} "
                "or more; use RabbitmqBroker(…, max_priority=10) and new queues"
            )
        if "broker_priority" in message.options:
            self._decider.add("by_hand")  # explicit, or a retry, or a delayed message that is due
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
                f"this worker prefetches {worker.queue_prefetch} messages, outside the broker's "
                "order; set dramatiq_queue_prefetch=1 in its environment"
            )
