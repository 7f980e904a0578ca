"""Priorities of Celery's brokers, and the settings that they need.

On Redis the lowest number is first; Celery keeps a list per step, four by default and ten with
`priority_steps`. On RabbitMQ the highest number is first, in queues declared with `x-max-priority`.
Messages that a worker has prefetched are in no order.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from fairturn.errors import BrokerRefused
from fairturn.priority import LEVELS

REDIS, RABBITMQ, MEMORY = "redis", "amqp", "memory"
STEPS = list(range(10))
MAX_PRIORITY = 10  # as in Celery's documentation, so that existing queues match
QUORUM_PRIORITIES_SINCE = (4, 3)
NOT_FOUND, NOT_AS_DECLARED = 404, 406  # AMQP's codes
CONFIGURE = "\nstamp(…, configure=True) changes the settings of the app."


def driver_of(app: Any) -> str:
    """Return the driver of the app's broker, without connecting to it."""
    driver: str = app.connection_for_write().transport.driver_type
    return driver


def as_number(priority: int, driver: str) -> int:
    """Convert a priority from 1 (first) to 9 (last) to the broker's number.

    0 stays free: on Redis for tasks before those of all customers, on RabbitMQ for messages without
    a priority, which come last.
    """
    return LEVELS + 1 - priority if driver == RABBITMQ else priority


def configure(app: Any) -> None:
    """Set the settings that priorities need, in an app whose settings have just been loaded."""
    conf, driver = app.conf, driver_of(app)
    conf.task_default_priority = None
    conf.task_acks_late = True
    conf.worker_prefetch_multiplier = 1
    if driver == REDIS:
        options = dict(conf.broker_transport_options or {})
        conf.broker_transport_options = {**options, "priority_steps": STEPS}
    elif driver == RABBITMQ and getattr(conf, "task_default_queue_type", "classic") == "classic":
        # RabbitMQ rejects a quorum queue that is declared with this argument.
        conf.task_queue_max_priority = conf.task_queue_max_priority or MAX_PRIORITY


def refuse(problems: Iterable[str], advice: str = "") -> None:
    """Raise `BrokerRefused` with all problems, if there are any."""
    found = [f"\n- {problem}" for problem in problems]
    if found:
        raise BrokerRefused(
            f"priorities have no effect with the settings of this app:{''.join(found)}{advice}"
        )


def explain(error: Exception) -> None:
    """Add advice to RabbitMQ's error about a queue that exists with another `x-max-priority`."""
    if getattr(error, "code", 0) == NOT_AS_DECLARED and "x-max-priority" in str(error):
        error.add_note(
            "fairturn: a queue that exists in RabbitMQ keeps the priorities it was declared with; "
            "drain and delete it, or use another one: "
            "app.conf.task_default_queue = 'documents'"
        )


def problems_for_publishers(app: Any, driver: str) -> Iterator[str]:
    """Yield the settings with which published priorities have no effect."""
    conf = app.conf
    if driver not in (REDIS, RABBITMQ, MEMORY):
        yield (f"the broker {driver!r} is not supported; use Redis, Valkey or RabbitMQ")
        return
    if conf.task_default_priority is not None:
        yield (
            f"task_default_priority is {conf.task_default_priority}, so every task has an explicit "
            f"priority and the rule is never applied; remove the setting"
        )
    if driver == REDIS:
        yield from _problems_of_steps(conf)
    elif driver == RABBITMQ:
        for queue in app.amqp.queues.values():
            yield from _problems_of_declaration(queue)


def problems_for_workers(app: Any, driver: str, prefetch: int) -> Iterator[str]:
    """Yield the settings with which a worker takes tasks outside the broker's order."""
    yield from problems_for_publishers(app, driver)
    if driver == REDIS and getattr(app.conf, "worker_disable_prefetch", False):
        return
    if prefetch != 1:
        prefetched = "all waiting tasks" if prefetch == 0 else f"{prefetch} tasks per process"
        if prefetch == app.conf.worker_prefetch_multiplier:
            cause = f"worker_prefetch_multiplier is {prefetch}"
            remedy = "set app.conf.worker_prefetch_multiplier = 1"
        else:
            cause = f"the worker was started with --prefetch-multiplier={prefetch}"
            remedy = "start it with --prefetch-multiplier=1"
        yield f"{cause}: it prefetches {prefetched}, outside the broker's order; {remedy}"
    if not app.conf.task_acks_late:
        yield (
            "task_acks_late is off: each process prefetches one more task, outside the broker's "
            "order, while it runs one; set app.conf.task_acks_late = True"
        )


def problems_of_queues(app: Any, connection: Any) -> Iterator[str]:
    """Yield the problems of the queues in RabbitMQ. Missing queues are not created."""
    version = str(connection.connection.server_properties.get("version", ""))
    for queue in app.amqp.queues.consume_from.values():
        kind = _kind(queue)
        if kind == "quorum" and _numbers(version) < QUORUM_PRIORITIES_SINCE:
            yield (
                f"queue {queue.name!r} is a quorum queue, which in RabbitMQ {version} has two "
                "priorities at most (nine need 4.3); use a classic queue: "
                "app.conf.task_default_queue_type = 'classic'"
            )
        else:
            yield from _problems_of_real(queue, connection)


def _problems_of_steps(conf: Any) -> Iterator[str]:
    steps = (conf.broker_transport_options or {}).get("priority_steps")
    if steps is None or list(steps) != STEPS:
        current = "Celery's default [0, 3, 6, 9]" if steps is None else list(steps)
        yield (
            f"priority_steps of broker_transport_options is {current}, so Redis merges levels; "
            'set app.conf.broker_transport_options = {"priority_steps": list(range(10))} in '
            "publishers and workers"
        )


def _problems_of_declaration(queue: Any) -> Iterator[str]:
    kind = _kind(queue)
    if kind == "stream":
        yield f"queue {queue.name!r} is a stream, which has no priorities; use a classic queue"
    if kind in ("stream", "quorum"):
        return  # a quorum queue has no x-max-priority; `problems_of_queues` checks the server
    declared = _max_priority(queue)
    if declared is None or declared < LEVELS:
        has = "has no x-max-priority" if declared is None else f"has x-max-priority {declared}"
        yield (
            f"queue {queue.name!r} {has}, and nine levels need {LEVELS} or more; set "
            f"app.conf.task_queue_max_priority = {MAX_PRIORITY} (if the queue exists in RabbitMQ, "
            "delete it or use another one)"
        )


def _problems_of_real(queue: Any, connection: Any) -> Iterator[str]:
    """Declare an existing queue as the app does; RabbitMQ rejects other arguments."""
    try:
        for passive in (True, False):
            with connection.channel() as channel:
                queue(channel).queue_declare(passive=passive)
    except connection.channel_errors as error:
        code, text = getattr(error, "code", 0), str(error)
        if code == NOT_FOUND:
            return  # it does not exist yet
        if code != NOT_AS_DECLARED:
            raise
        if "x-max-priority" in text:
            yield (
                f"queue {queue.name!r} exists in RabbitMQ with another x-max-priority than the "
                f"app's {_max_priority(queue)} ({_difference(text)}), and it cannot be changed; "
                f"drain and delete it (rabbitmqctl delete_queue {queue.name}), or use another one: "
                f"app.conf.task_default_queue = '{queue.name}-fair'"
            )
        else:
            yield (
                f"queue {queue.name!r} exists in RabbitMQ with other arguments: {_difference(text)}"
            )


def _difference(text: str) -> str:
    """Return the part of RabbitMQ's error that names the difference."""
    found = re.search(r"received .*?(?= \(|$)", text) or re.search(r"PRECONDITION_FAILED.*", text)
    return found[0].strip() if found else text


def _kind(queue: Any) -> str:
    return str((queue.queue_arguments or {}).get("x-queue-type", "classic"))


def _max_priority(queue: Any) -> int | None:
    declared = (queue.queue_arguments or {}).get("x-max-priority", queue.max_priority)
    return None if declared is None else int(declared)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
