"""The middlewares of Dramatiq and Taskiq, on a real RabbitMQ."""

import asyncio
import json
import os
import threading
from collections.abc import Iterator
from typing import Any

import dramatiq
import pika
import pytest
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.brokers.stub import StubBroker
from taskiq import InMemoryBroker
from taskiq_aio_pika import AioPikaBroker, Queue, QueueType

from fairturn.errors import BrokerRefused
from fairturn.integrations import dramatiq as for_dramatiq
from fairturn.integrations import taskiq as for_taskiq
from fairturn.priority import Rule
from tests.servers import rabbitmq
from tests.servers.rabbitmq import Rabbit

DOCUMENTS = [("dump" if number % 3 else f"quiet {number % 2}", number) for number in range(45)]


@pytest.fixture(scope="module")
def rabbit() -> Iterator[Rabbit]:
    with rabbitmq.of_this_run() as server:
        yield server


def customer_of(name: str, args: Any, kwargs: Any) -> object:
    return kwargs.get("customer_id")


def in_the_order_of_the_rule() -> list[int]:
    rule, before, found = Rule(), dict[str, int](), []
    for customer, number in DOCUMENTS:
        found.append((rule.priority(-before.get(customer, 0)), number))
        before[customer] = before.get(customer, 0) + 1
    assert {priority for priority, _ in found} == set(range(1, 10))
    return [number for _, number in sorted(found)]


# ── Dramatiq ─────────────────────────────────────────────────────────────────────────────────────


def test_a_dramatiq_worker_runs_all_nine_levels_in_their_order(rabbit: Rabbit) -> None:
    fairturn = for_dramatiq.DramatiqPriorityMiddleware(customer=customer_of, counts=":memory:")
    broker = RabbitmqBroker(url=rabbit.url, max_priority=10)
    broker.add_middleware(fairturn)
    queue, done, ran = f"dramatiq-{os.getpid()}", threading.Event(), list[int]()

    def process(number: int, customer_id: str | None = None) -> None:
        ran.append(number)
        if len(ran) == len(DOCUMENTS) + 2:
            done.set()

    actor = dramatiq.actor(broker=broker, queue_name=queue)(process)
    for customer, number in DOCUMENTS:
        actor.send(number, customer_id=customer)
    actor.send_with_options(args=(100,), kwargs={"customer_id": "dump"}, broker_priority=10)
    actor.send(101)  # without a customer: Dramatiq's default, after all others
    worker = dramatiq.Worker(broker, worker_threads=1)
    worker.queue_prefetch = 1
    worker.start()
    assert done.wait(30)
    worker.stop()
    broker.close()

    assert ran == [100, *in_the_order_of_the_rule(), 101]
    totals = fairturn.totals()
    assert (totals.checked, totals.by_hand, totals.without_customer) == (45, 1, 1)


def test_a_dramatiq_broker_without_priorities_is_refused_when_a_message_is_sent() -> None:
    broker = StubBroker(middleware=[])
    broker.add_middleware(
        for_dramatiq.DramatiqPriorityMiddleware(customer=customer_of, counts=":memory:")
    )
    actor = dramatiq.actor(actor_name="process", broker=broker)(lambda: None)

    with pytest.raises(BrokerRefused, match="StubBroker has max_priority 0 and nine levels need 9"):
        actor.send()


def test_a_dramatiq_worker_that_takes_messages_ahead_does_not_start(rabbit: Rabbit) -> None:
    broker = RabbitmqBroker(url=rabbit.url, max_priority=10)
    broker.add_middleware(
        for_dramatiq.DramatiqPriorityMiddleware(customer=customer_of, counts=":memory:")
    )

    with pytest.raises(BrokerRefused, match="this worker prefetches 16 messages"):
        dramatiq.Worker(broker, worker_threads=8).start()


# ── Taskiq ───────────────────────────────────────────────────────────────────────────────────────


def classic(name: str, max_priority: int = 10) -> Queue:
    return Queue(name=name, type=QueueType.CLASSIC, max_priority=max_priority)


def test_taskiq_messages_come_out_of_the_queue_in_the_order_of_the_rule(rabbit: Rabbit) -> None:
    fairturn = for_taskiq.TaskiqPriorityMiddleware(customer=customer_of, counts=":memory:")
    name = f"taskiq-{os.getpid()}"

    async def publish() -> None:
        broker = AioPikaBroker(rabbit.url, qos=1).with_queue(classic(name))
        broker.add_middlewares(fairturn)

        @broker.task(task_name="process")
        async def process(number: int, customer_id: str | None = None) -> None: ...

        await broker.startup()
        for customer, number in DOCUMENTS:
            await process.kiq(number, customer_id=customer)
        await process.kicker().with_labels(priority=10).kiq(100, customer_id="dump")
        await process.kiq(101)
        await broker.shutdown()

    asyncio.run(publish())

    assert [number for number, _ in taken_from(rabbit, name)] == [
        100,
        *in_the_order_of_the_rule(),
        101,
    ]
    totals = fairturn.totals()
    assert (totals.checked, totals.by_hand, totals.without_customer) == (45, 1, 1)


def taken_from(rabbit: Rabbit, queue: str) -> Iterator[tuple[int, dict[str, Any]]]:
    connection = pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", rabbit.port))
    channel = connection.channel()
    while True:
        method, properties, body = channel.basic_get(queue, auto_ack=True)
        if method is None:
            break
        yield json.loads(body)["args"][0], properties.headers
    connection.close()


NEEDED = "needs classic queues with 9 priorities or more"


@pytest.mark.parametrize(
    "broker, sentence",
    [
        (InMemoryBroker(), f"InMemoryBroker {NEEDED}"),
        (AioPikaBroker(qos=1), NEEDED),
        (AioPikaBroker(qos=1).with_queue(Queue(name="quorum", max_priority=9)), NEEDED),
        (AioPikaBroker(qos=1).with_queue(classic("few", max_priority=5)), NEEDED),
        (AioPikaBroker(qos=10).with_queue(classic("all")), "workers prefetch 10 messages"),
    ],
)
def test_a_taskiq_broker_without_an_order_is_refused_at_its_start(
    broker: Any, sentence: str
) -> None:
    broker.add_middlewares(
        for_taskiq.TaskiqPriorityMiddleware(customer=customer_of, counts=":memory:")
    )

    with pytest.raises(BrokerRefused, match=sentence):
        asyncio.run(broker.startup())
