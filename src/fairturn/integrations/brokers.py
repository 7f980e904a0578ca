"""What a priority is to each of Celery's brokers, and what must be set for it to mean anything.

Redis takes the lowest number first and keeps a list for each of its steps, of which it has four
unless it is told ten. RabbitMQ takes the highest first, in queues that were declared with
`x-max-priority`. Both give a worker messages ahead of need, and what a worker holds is in no order.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from fairturn.errors import BrokerRefused
from fairturn.priority import LEVELS

REDIS, RABBITMQ, MEMORY = "redis", "amqp", "memory"
STEPS = list(range(10))
MAX_PRIORITY = 10  # as in Celery's own documentation, so that queues of others fit
QUORUM_PRIORITIES_SINCE = (4, 3)
NOT_FOUND, NOT_AS_DECLARED = 404, 406  # AMQP's codes
CONFIGURE = "\nstamp(…, configure=True) sets what can be set in the app."


def driver_of(app: Any) -> str:
    """The kind of the app's broker; nothing is connected for it."""
    driver: str = app.connection_for_write().transport.driver_type
    return driver


def as_number(priority: int, driver: str) -> int:
    """A priority from 1 (first) to 9 (last) in the broker's own numbers.

    On Redis 0 stays free, for what must come before all customers, and on RabbitMQ as well, where
    a message without a priority comes after all of them.
    """
    return LEVELS + 1 - priority if driver == RABBITMQ else priority


def configure(app: Any) -> None:
    """Set what can be set in an app whose settings have just been loaded."""
    conf, driver = app.conf, driver_of(app)
    conf.task_default_priority = None
    conf.task_acks_late = True
    conf.worker_prefetch_multiplier = 1
    if driver == REDIS:
        options = dict(conf.broker_transport_options or {})
        conf.broker_transport_options = {**options, "priority_steps": STEPS}
    elif driver == RABBITMQ and getattr(conf, "task_default_queue_type", "classic") == "classic":
        # A quorum queue has its priorities from its server, and would be refused with the argument.
        conf.task_queue_max_priority = conf.task_queue_max_priority or MAX_PRIORITY


def refuse(problems: Iterable[str], advice: str = "") -> None:
    """Raise all that is wrong as one error, so that it can be mended in one go."""
    found = [f"\n- {problem}" for problem in problems]
    if found:
        raise BrokerRefused(
            f"priorities would mean nothing as this app is set up:{''.join(found)}{advice}"
        )


def explain(error: Exception) -> None:
    """Add to RabbitMQ's refusal of a queue with other priorities what can be done about it."""
    if getattr(error, "code", 0) == NOT_AS_DECLARED and "x-max-priority" in str(error):
        error.add_note(
            "fairturn: a queue that exists in RabbitMQ keeps the priorities it was declared with; "
            "let it run empty and delete it, or give the app another one: "
            "app.conf.task_default_queue = 'documents'"
        )


def problems_for_publishers(app: Any, driver: str) -> Iterator[str]:
    """What in the app's settings would make the published priorities meaningless."""
    conf = app.conf
    if driver not in (REDIS, RABBITMQ, MEMORY):
        yield (
            f"fairturn knows no priorities of the broker {driver!r}; use Redis, Valkey or RabbitMQ"
        )
        return
    if conf.task_default_priority is not None:
        yield (
            f"task_default_priority is {conf.task_default_priority}, so every task has a priority "
            f"by hand and the rule decides nothing; remove the setting"
        )
    if driver == REDIS:
        yield from _problems_of_steps(conf)
    elif driver == RABBITMQ:
        for queue in app.amqp.queues.values():
            yield from _problems_of_declaration(queue)


def problems_for_workers(app: Any, driver: str, prefetch: int) -> Iterator[str]:
    """What in the settings of a worker would undo the order of the broker."""
    yield from problems_for_publishers(app, driver)
    if driver == REDIS and getattr(app.conf, "worker_disable_prefetch", False):
        return
    if prefetch != 1:
        held = "all that wait" if prefetch == 0 else f"{prefetch} for each of its processes"
        if prefetch == app.conf.worker_prefetch_multiplier:
            said = f"worker_prefetch_multiplier is {prefetch}"
            mended = "set app.conf.worker_prefetch_multiplier = 1"
        else:
            said = f"the worker was started with --prefetch-multiplier={prefetch}"
            mended = "start it with --prefetch-multiplier=1"
        yield f"{said}: it takes {held} out of the broker's order ahead of need; {mended}"
    if not app.conf.task_acks_late:
        yield (
            "task_acks_late is off: each process holds one more task out of the broker's order "
            "while it works; set app.conf.task_acks_late = True"
        )


def problems_of_queues(app: Any, connection: Any) -> Iterator[str]:
    """What is wrong with the queues that RabbitMQ really has. It makes none that are missing."""
    version = str(connection.connection.server_properties.get("version", ""))
    for queue in app.amqp.queues.consume_from.values():
        kind = _kind(queue)
        if kind == "quorum" and _numbers(version) < QUORUM_PRIORITIES_SINCE:
            yield (
                f"queue {queue.name!r} is a quorum queue, and those of RabbitMQ {version} have at "
                "most two classes of priority (nine need 4.3); use a classic queue: "
                "app.conf.task_default_queue_type = 'classic'"
            )
        else:
            yield from _problems_of_real(queue, connection)


def _problems_of_steps(conf: Any) -> Iterator[str]:
    steps = (conf.broker_transport_options or {}).get("priority_steps")
    if steps is None or list(steps) != STEPS:
        said = "Celery's own [0, 3, 6, 9]" if steps is None else list(steps)
        yield (
            f"priority_steps of broker_transport_options is {said}, so Redis folds or mixes the "
            'nine levels; set app.conf.broker_transport_options = {"priority_steps": '
            "list(range(10))} in publishers and workers alike"
        )


def _problems_of_declaration(queue: Any) -> Iterator[str]:
    kind = _kind(queue)
    if kind == "stream":
        yield f"queue {queue.name!r} is a stream, which has no priorities; use a classic queue"
    if kind in ("stream", "quorum"):
        return  # a quorum queue takes no x-max-priority; its server's version decides
    most = _max_priority(queue)
    if most is None or most < LEVELS:
        said = "has no x-max-priority" if most is None else f"has x-max-priority {most}"
        yield (
            f"queue {queue.name!r} {said}, and nine levels need {LEVELS} or more; set "
            f"app.conf.task_queue_max_priority = {MAX_PRIORITY} (a queue that exists in RabbitMQ "
            "must be deleted for it, or the app be given another one)"
        )


def _problems_of_real(queue: Any, connection: Any) -> Iterator[str]:
    """Declare a queue that exists as the app has it: RabbitMQ refuses it if it is another one."""
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
                f"app's {_max_priority(queue)} ({_said(text)}), and it cannot be changed; "
                f"let it run empty and delete it (rabbitmqctl delete_queue {queue.name}), or use "
                f"another one: app.conf.task_default_queue = '{queue.name}-fair'"
            )
        else:
            yield f"queue {queue.name!r} exists in RabbitMQ as another one: {_said(text)}"


def _said(text: str) -> str:
    """The part of RabbitMQ's answer that says what differs."""
    found = re.search(r"received .*?(?= \(|$)", text) or re.search(r"PRECONDITION_FAILED.*", text)
    return found[0].strip() if found else text


def _kind(queue: Any) -> str:
    return str((queue.queue_arguments or {}).get("x-queue-type", "classic"))


def _max_priority(queue: Any) -> int | None:
    most = (queue.queue_arguments or {}).get("x-max-priority", queue.max_priority)
    return None if most is None else int(most)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
