"""The nine priorities in Taskiq, on RabbitMQ through taskiq-aio-pika:

    queue = Queue(name="documents", type=QueueType.CLASSIC, max_priority=10)
    broker = AioPikaBroker("amqp://…", qos=1).with_queue(queue)
    broker.add_middlewares(
        TaskiqPriorityMiddleware(
            customer=lambda task, args, kwargs: kwargs.get("customer_id"), counts="redis://…"
        )
    )

See docs/integrations.md.
"""

import asyncio

from taskiq import TaskiqMessage, TaskiqMiddleware

from fairturn.errors import BrokerRefused
from fairturn.integrations.brokers import RABBITMQ, as_number
from fairturn.integrations.decision import DecidingMiddleware
from fairturn.priority import LEVELS


class TaskiqPriorityMiddleware(DecidingMiddleware, TaskiqMiddleware):
    """Gives every message of a customer the priority of the rule when it is sent."""

    def startup(self) -> None:
        # Taskiq has no public attributes for the queues and the prefetch.
        queues = getattr(self.broker, "_task_queues", None)
        if not queues or any(
            queue.type != "classic" or (queue.max_priority or 0) < LEVELS for queue in queues
        ):
            raise BrokerRefused(
                f"{type(self.broker).__name__} needs classic queues with {LEVELS} priorities or "
                "more; use AioPikaBroker(…, qos=1).with_queue("
                "Queue(name=…, type=QueueType.CLASSIC, max_priority=10))"
            )
        prefetch = getattr(self.broker, "_qos", 1)
        if prefetch != 1:
            raise BrokerRefused(
                f"workers prefetch {prefetch} messages, outside the broker's order; use "
                "AioPikaBroker(…, qos=1)"
            )

    async def pre_send(self, message: TaskiqMessage) -> TaskiqMessage:
        if message.labels.get("priority") is not None:
            self._decider.add("by_hand")  # explicit, or a retry
            return message
        # In a thread: the counts block.
        decision = await asyncio.to_thread(
            self._decider.decide, self._customer, message.task_name, message.args, message.kwargs
        )
        if decision is not None:
            message.labels["priority"] = as_number(decision.priority, RABBITMQ)
            message.labels["fairturn_priority"] = decision.priority
            if decision.count is not None:
                message.labels["fairturn_count"] = decision.count
        return message
