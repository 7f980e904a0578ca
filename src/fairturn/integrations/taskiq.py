"""The nine priorities in Taskiq, on RabbitMQ through taskiq-aio-pika:

    queue = Queue(name="documents", type=QueueType.CLASSIC, max_priority=10)
    broker = AioPikaBroker("amqp://…", qos=1).with_queue(queue)
    broker.add_middlewares(
        Fairturn(customer=lambda task, args, kwargs: kwargs.get("customer_id"), counts="redis://…")
    )

docs/integrations.md has more.
"""

import asyncio

from taskiq import TaskiqMessage, TaskiqMiddleware

from fairturn.errors import BrokerRefused
from fairturn.integrations.brokers import RABBITMQ, as_number
from fairturn.integrations.decision import FALLBACK, Customer, Decider, Place, Totals
from fairturn.priority import LEVELS, Rule


class Fairturn(TaskiqMiddleware):
    """Gives every message of a customer the priority of the rule when it is sent."""

    def __init__(
        self,
        *,
        customer: Customer,
        counts: Place,
        rule: Rule | None = None,
        fallback: int = FALLBACK,
    ) -> None:
        super().__init__()
        self._customer = customer
        self._decider = Decider(counts, rule=rule, fallback=fallback)

    def totals(self) -> Totals:
        """How many messages this process has sent, by how their priority came about."""
        return self._decider.totals()

    def startup(self) -> None:
        # Taskiq has no public way to look at the queues and at what a worker takes ahead.
        queues = getattr(self.broker, "_task_queues", None)
        if not queues or any(
            queue.type != "classic" or (queue.max_priority or 0) < LEVELS for queue in queues
        ):
            raise BrokerRefused(
                f"{type(self.broker).__name__} needs classic queues with {LEVELS} priorities or "
                "more; use AioPikaBroker(…, qos=1).with_queue("
                "Queue(name=…, type=QueueType.CLASSIC, max_priority=10))"
            )
        ahead = getattr(self.broker, "_qos", 1)
        if ahead != 1:
            raise BrokerRefused(
                f"workers take {ahead} messages ahead, out of the broker's order; use "
                "AioPikaBroker(…, qos=1)"
            )

    async def pre_send(self, message: TaskiqMessage) -> TaskiqMessage:
        if message.labels.get("priority") is not None:
            self._decider.add("by_hand")  # or a retry
            return message
        # The counts wait; an event loop must not.
        decision = await asyncio.to_thread(
            self._decider.decide, self._customer, message.task_name, message.args, message.kwargs
        )
        if decision is not None:
            message.labels["priority"] = as_number(decision.priority, RABBITMQ)
            message.labels["fairturn_priority"] = decision.priority
            if decision.count is not None:
                message.labels["fairturn_count"] = decision.count
        return message
