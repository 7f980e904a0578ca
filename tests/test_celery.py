"""`stamp` in a publisher: the priority of each publish, whatever happens to the counts."""

import json
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from celery import Celery, chain, chord, group

from fairturn.clock import ManualClock, stopwatch
from fairturn.errors import BrokerRefused, StoreUnavailable
from fairturn.integrations import brokers
from fairturn.integrations.celery import stamp
from fairturn.integrations.counts import TIMEOUT_S
from fairturn.integrations.counts.redis import RedisCounts
from fairturn.priority import Reset, Rule
from tests import celery_app
from tests.celery_app import stamp_of
from tests.servers import valkey
from tests.servers.lifetime import free_port
from tests.servers.valkey import Valkey
from tests.wait import wait_until

VECTORS = json.loads((Path(__file__).parent / "vectors" / "priority.json").read_text("utf-8"))
QUEUE = "documents"
# Connections that Celery leaves open are closed after each test, where this applies too.
pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    celery_app.close_all()


@pytest.fixture(scope="module")
def server() -> Iterator[Valkey]:
    with valkey.started() as started:
        yield started


@pytest.fixture
def broker(server: Valkey) -> Valkey:
    server.client().flushall()
    return server


@pytest.fixture
def app(broker: Valkey) -> Celery:
    return celery_app.make(broker.url, broker.url, QUEUE)


def messages(broker: Valkey) -> list[dict[str, Any]]:
    """Return the waiting messages, in the order in which they were published, at each step."""
    client = broker.client()
    keys = [QUEUE, *(f"{QUEUE}\x06\x16{step}" for step in range(1, 10))]
    return [json.loads(text) for key in keys for text in reversed(client.lrange(key, 0, -1))]


def decided(message: dict[str, Any]) -> tuple[int, int]:
    """Return count and priority in the header, after checking that the broker's number agrees."""
    header = message["headers"]["fairturn"]
    assert message["properties"]["priority"] == header["priority"]
    return header["count"], header["priority"]


def in_order(broker: Valkey) -> list[tuple[int, int]]:
    return sorted((decided(message) for message in messages(broker)), reverse=True)


# ── The rule ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda case: case["name"])
def test_every_published_task_has_the_count_and_the_priority_of_the_vectors(
    broker: Valkey, case: dict[str, Any]
) -> None:
    clock = ManualClock()
    rule = Rule(
        reset=Reset(case["config"]["reset"]),
        reset_interval_us=round(case["config"]["reset_interval_s"] * 1_000_000),
    )
    counts = RedisCounts(broker.url, rule=rule, clock=clock, timeout_s=30)
    app = celery_app.make(broker.url, counts, QUEUE, rule=rule)
    process = app.tasks["process"]

    for number, step in enumerate(case["steps"]):
        clock.set(round(step["at"] * 1_000_000))
        process.delay(customer_id=step["customer"], number=number)

    waiting = messages(broker)
    found = {message["headers"]["id"]: decided(message) for message in waiting}
    by_number = {number_of(message): found[message["headers"]["id"]] for message in waiting}
    assert [by_number[number] for number in range(len(case["steps"]))] == [
        (step["count"], step["priority"]) for step in case["steps"]
    ]


def number_of(message: dict[str, Any]) -> int:
    import base64

    _, kwargs, _ = json.loads(base64.b64decode(message["body"]))
    number: int = kwargs["number"]
    return number


def publish_plainly(app: Celery) -> None:
    app.tasks["process"].delay(customer_id="acme")


def publish_with_options(app: Celery) -> None:
    app.tasks["process"].apply_async(kwargs={"customer_id": "acme"}, queue=QUEUE)


def publish_by_name(app: Celery) -> None:
    app.send_task("unknown here", kwargs={"customer_id": "acme"})


def publish_for_later(app: Celery) -> None:
    app.tasks["process"].apply_async(kwargs={"customer_id": "acme"}, countdown=3_600)


def publish_a_signature(app: Celery) -> None:
    app.tasks["process"].s(customer_id="acme").apply_async()


def publish_a_chain(app: Celery) -> None:
    chain(*(app.tasks["process"].s(customer_id="acme") for _ in range(3))).apply_async()


PUBLISHES = [
    publish_plainly,
    publish_with_options,
    publish_by_name,
    publish_for_later,
    publish_a_signature,
    publish_a_chain,
]


@pytest.mark.parametrize("publish", PUBLISHES)
def test_every_way_to_publish_is_one_check(
    app: Celery, broker: Valkey, publish: Callable[[Celery], None]
) -> None:
    for _ in range(4):
        publish(app)

    assert in_order(broker) == [(0, 1), (-1, 1), (-2, 1), (-3, 2)]


def test_each_task_of_a_group_and_of_a_chord_is_a_check(app: Celery, broker: Valkey) -> None:
    process = app.tasks["process"]

    group(process.s(customer_id="acme") for _ in range(4)).apply_async()
    chord(
        [process.s(customer_id="acme").set(ignore_result=False) for _ in range(3)],
        process.s(customer_id="acme"),
    ).apply_async()

    assert in_order(broker) == [(0, 1), (-1, 1), (-2, 1), (-3, 2), (-4, 2), (-5, 3), (-6, 3)]


@pytest.mark.parametrize("customer", [17, UUID(int=17), "Bäckerei Müller"])
def test_a_customer_may_be_a_number_a_uuid_or_any_text(
    app: Celery, broker: Valkey, customer: object
) -> None:
    app.tasks["process"].delay(customer_id=customer)

    (message,) = messages(broker)
    assert message["headers"]["fairturn"]["customer"] == str(customer)


def test_sixty_four_publishers_at_once_give_the_sequential_counts(broker: Valkey) -> None:
    app = celery_app.make(broker.url, RedisCounts(broker.url, timeout_s=30), QUEUE)
    app.conf.broker_pool_limit = 64
    assert app.producer_pool.limit == 64  # Celery cannot create it safely in many threads at once
    process, barrier = app.tasks["process"], threading.Barrier(64)

    def publish() -> None:
        barrier.wait()
        for _ in range(5):
            process.delay(customer_id="acme")

    threads = [threading.Thread(target=publish) for _ in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    rule = Rule()
    assert in_order(broker) == [(-n, rule.priority(-n)) for n in range(64 * 5)]


# ── What the rule leaves alone ───────────────────────────────────────────────────────────────────


def test_a_priority_by_hand_stays_and_makes_no_check(app: Celery, broker: Valkey) -> None:
    app.conf.task_routes = {"routed": {"priority": 7}}

    app.tasks["process"].apply_async(kwargs={"customer_id": "acme"}, priority=0)
    app.tasks["process"].apply_async(kwargs={"customer_id": "acme"}, priority=4)
    app.send_task("routed", kwargs={"customer_id": "acme"})
    # A retry of a task that was published before the app was stamped has no priority.
    app.send_task("process", kwargs={"customer_id": "acme"}, retries=1)
    by_hand = messages(broker)
    app.tasks["process"].delay(customer_id="acme")

    assert [message["properties"]["priority"] for message in by_hand] == [0, 0, 4, 7]
    assert not any("fairturn" in message["headers"] for message in by_hand)
    (checked,) = [message for message in messages(broker) if "fairturn" in message["headers"]]
    assert decided(checked) == (0, 1)
    assert stamp_of(app).totals()._asdict() == {
        **dict.fromkeys(("inherited", "fallback", "without_customer"), 0),
        **{"checked": 1, "reset": 1, "by_hand": 4},
    }


def test_a_task_that_goes_on_with_the_headers_of_another_keeps_what_was_decided(
    app: Celery, broker: Valkey
) -> None:
    header = {"customer": "acme", "count": -9, "priority": 5, "by": "check"}

    app.tasks["process"].apply_async((), {"customer_id": "acme"}, headers={"fairturn": header})

    (message,) = messages(broker)
    assert decided(message) == (-9, 5)
    assert stamp_of(app).totals().checked == 0


def test_a_task_without_a_customer_is_left_alone(app: Celery, broker: Valkey) -> None:
    app.tasks["process"].delay()
    app.tasks["process"].delay(customer_id="")

    assert [message["properties"]["priority"] for message in messages(broker)] == [0, 0]
    assert stamp_of(app).totals().without_customer == 2


def test_tasks_without_a_customer_can_be_given_a_priority(broker: Valkey) -> None:
    app = celery_app.make(broker.url, broker.url, QUEUE, without_customer=6)

    app.tasks["process"].delay()

    assert [message["properties"]["priority"] for message in messages(broker)] == [6]


def test_two_apps_in_one_process_have_nothing_to_do_with_each_other(broker: Valkey) -> None:
    stamped = celery_app.make(broker.url, broker.url, QUEUE)
    plain = Celery("plain", broker=broker.url, set_as_current=False)
    plain.conf.task_default_queue = QUEUE

    plain.send_task("process", kwargs={"customer_id": "acme"})
    stamped.send_task("process", kwargs={"customer_id": "acme"})

    assert ["fairturn" in message["headers"] for message in messages(broker)] == [False, True]


def test_an_app_is_stamped_once(app: Celery, broker: Valkey) -> None:
    with pytest.raises(ValueError, match="the app 'tests' is already stamped"):
        stamp(app, customer=lambda *_: None, counts=broker.url)


def test_an_app_stays_one_that_can_be_pickled(app: Celery) -> None:
    assert pickle.loads(pickle.dumps(app)).main == "tests"


def test_flower_is_shown_count_and_priority_among_the_keyword_arguments(
    app: Celery, broker: Valkey
) -> None:
    app.tasks["process"].delay(customer_id="acme", number=3)
    app.send_task("other", kwargs={"customer_id": "acme"}, kwargsrepr="hidden")

    shown = {message["headers"]["kwargsrepr"] for message in messages(broker)}
    assert shown == {
        "{'customer_id': 'acme', 'number': 3, 'fairturn': 'priority 1, count 0'}",
        "hidden",
    }


# ── When the counts do not answer ────────────────────────────────────────────────────────────────


def test_without_counts_a_task_is_published_with_priority_5_at_once(
    broker: Valkey, caplog: pytest.LogCaptureFixture
) -> None:
    with valkey.started() as lost:
        app = celery_app.make(broker.url, lost.url, QUEUE, timeout_s=TIMEOUT_S)
        process = app.tasks["process"]
        process.delay(customer_id="acme")
        lost.freeze()  # the worst failure: it accepts connections and answers nothing

        took = []
        for _ in range(100):
            begun = stopwatch()
            process.delay(customer_id="acme")
            took.append(stopwatch() - begun)
        lost.thaw()

    headers = [message["headers"]["fairturn"] for message in messages(broker)]
    assert [header["priority"] for header in headers] == [1] + [5] * 100
    assert headers[-1] == {"customer": "acme", "count": None, "priority": 5, "by": "fallback"}
    assert stamp_of(app).totals().fallback == 100
    assert max(took) < TIMEOUT_S + 2  # slack for a busy machine
    assert sorted(took)[90] < 0.25
    assert [record.message[:41] for record in caplog.records] == [
        "published with priority 5 without a count"
    ]


class Defective:
    """Counts with a defect, in either half of a check."""

    def __init__(self, *, at_once: bool) -> None:
        self._at_once = at_once

    def begin(self, customer: str) -> Callable[[], int]:
        if self._at_once:
            self._fail()
        return self._fail

    def _fail(self) -> int:
        raise ValueError("not enough values to unpack")

    def concerns(self) -> list[str]:
        return []

    def close(self) -> None: ...


@pytest.mark.parametrize("at_once", [True, False])
def test_no_error_of_the_counts_ever_fails_a_publish(broker: Valkey, at_once: bool) -> None:
    app = celery_app.make(broker.url, Defective(at_once=at_once), QUEUE)

    for _ in range(2):
        app.tasks["process"].delay(customer_id="acme")

    assert [message["properties"]["priority"] for message in messages(broker)] == [5, 5]
    assert stamp_of(app).totals().fallback == 2


def test_without_a_fallback_a_defect_of_the_counts_is_raised_as_one_of_our_errors(
    broker: Valkey,
) -> None:
    app = celery_app.make(broker.url, Defective(at_once=True), QUEUE, fallback=None)

    with pytest.raises(StoreUnavailable, match="the counts failed: ValueError"):
        app.tasks["process"].delay(customer_id="acme")


@pytest.mark.parametrize(
    "fallback, meaning",
    [(7, "are published with priority 7"), (None, "tasks with a customer cannot be published")],
)
def test_counts_that_do_not_answer_at_the_start_are_told_with_what_that_means(
    fallback: int | None, meaning: str, broker: Valkey, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    app = celery_app.make(broker.url, f"redis://127.0.0.1:{port}/0", QUEUE, fallback=fallback)

    stamp_of(app).check()

    (said,) = [record.message for record in caplog.records]
    assert said.startswith(f"no counts: Redis at 127.0.0.1:{port} is unavailable")
    assert meaning in said


def test_publishers_ask_again_when_the_counts_are_back(broker: Valkey) -> None:
    with valkey.started() as lost:
        app = celery_app.make(broker.url, lost.url, QUEUE)
        process, stamped = app.tasks["process"], stamp_of(app)
        lost.kill()
        process.delay(customer_id="acme")
        lost.start()

        def decides() -> bool:
            process.delay(customer_id="acme")
            return stamped.totals().checked > 0

        wait_until(decides, "the rule decides again")
        assert stamped.totals().fallback + stamped.totals().checked == len(messages(broker))


def test_who_wants_the_error_gets_it_and_nothing_is_published(broker: Valkey) -> None:
    nowhere = f"redis://127.0.0.1:{free_port()}/0"
    app = celery_app.make(broker.url, nowhere, QUEUE, fallback=None)

    with pytest.raises(StoreUnavailable):
        app.tasks["process"].delay(customer_id="acme")

    assert messages(broker) == []


def test_a_customer_that_cannot_be_told_never_stops_a_publish(
    broker: Valkey, caplog: pytest.LogCaptureFixture
) -> None:
    def customer(task: str, args: Any, kwargs: Any) -> str:
        return str(kwargs["customer_id"])

    app = celery_app.make(broker.url, broker.url, QUEUE, customer=customer)

    app.tasks["process"].delay()
    app.tasks["process"].delay(customer_id="x" * 256)

    assert [message["properties"]["priority"] for message in messages(broker)] == [5, 5]
    assert stamp_of(app).totals().fallback == 2
    told, too_long = [record.message for record in caplog.records]
    assert "customer= failed: KeyError('customer_id')" in told
    assert "customer= failed: ValueError" in too_long


# ── Settings ─────────────────────────────────────────────────────────────────────────────────────

WRONG = [
    ("redis://h", {}, ["Celery's default [0, 3, 6, 9]", '{"priority_steps": list(range(10))}']),
    (
        "redis://h",
        {"broker_transport_options": {"priority_steps": list(range(1, 10))}},
        ["priority_steps of broker_transport_options is [1, 2, 3, 4, 5, 6, 7, 8, 9]"],
    ),
    (
        "redis://h",
        {
            "broker_transport_options": {"priority_steps": list(range(10))},
            "task_default_priority": 5,
        },
        ["task_default_priority is 5", "remove the setting"],
    ),
    ("amqp://h", {}, ["queue 'celery' has no x-max-priority", "task_queue_max_priority = 10"]),
    ("amqp://h", {"task_queue_max_priority": 5}, ["queue 'celery' has x-max-priority 5"]),
    ("filesystem://", {}, ["the broker 'filesystem' is not supported"]),
]


@pytest.mark.parametrize("broker_url, conf, sentences", WRONG)
def test_settings_that_make_priorities_meaningless_are_refused_at_the_first_publish(
    broker_url: str, conf: dict[str, Any], sentences: list[str]
) -> None:
    app = Celery("wrong", broker=broker_url, set_as_current=False)
    stamp(app, customer=lambda *_: "acme", counts=":memory:")
    app.conf.update(conf)  # after stamp: settings are read when they are needed

    for _ in range(2):
        with pytest.raises(BrokerRefused) as refused:
            app.send_task("process")
        assert [sentence in str(refused.value) for sentence in sentences] == [True] * len(sentences)


@pytest.mark.parametrize(
    "conf, sentence",
    [
        ({"task_acks_late": False}, "task_acks_late is off"),
        ({"worker_prefetch_multiplier": 4}, "is 4: it prefetches 4 tasks per process"),
        ({"worker_prefetch_multiplier": 0}, "is 0: it prefetches all waiting tasks"),
    ],
)
def test_what_would_let_a_worker_undo_the_order_is_refused(
    app: Celery, conf: dict[str, Any], sentence: str
) -> None:
    assert app.conf.task_acks_late  # as configured; the following setting is changed later
    app.conf.update(conf)

    with pytest.raises(BrokerRefused, match=sentence):
        stamp_of(app).check(prefetch=app.conf.worker_prefetch_multiplier)


def test_a_wrong_option_of_the_command_is_refused_by_its_own_name(app: Celery) -> None:
    with pytest.raises(BrokerRefused, match="start it with --prefetch-multiplier=1"):
        stamp_of(app).check(prefetch=4)


@pytest.mark.parametrize("configure", [False, True])
def test_configure_is_advised_only_where_it_was_not_asked_for(
    configure: bool, broker: Valkey
) -> None:
    app = celery_app.make(broker.url, broker.url, QUEUE, configure=configure)
    assert app.conf.task_acks_late is configure
    app.conf.task_default_priority = 3

    for check in (stamp_of(app).check, lambda: app.send_task("process")):
        with pytest.raises(BrokerRefused) as refused:
            check()
        assert ("configure=True" in str(refused.value)) is not configure


def test_a_worker_of_redis_that_takes_nothing_ahead_needs_no_late_acknowledgement(
    app: Celery,
) -> None:
    assert app.conf.task_acks_late
    app.conf.update(task_acks_late=False, worker_disable_prefetch=True)

    stamp_of(app).check(prefetch=4)


@pytest.mark.parametrize("already_loaded", [True, False])
def test_configure_sets_what_can_be_set_and_keeps_what_was_right(already_loaded: bool) -> None:
    redis = Celery("redis", broker="redis://h", set_as_current=False)
    rabbit = Celery("rabbit", broker="amqp://h", set_as_current=False)
    redis.conf.broker_transport_options = {"visibility_timeout": 60}
    rabbit.conf.task_queue_max_priority = 9
    if already_loaded:
        assert [app.conf.task_acks_late for app in (redis, rabbit)] == [False, False]

    for app in (redis, rabbit):
        stamp(app, customer=lambda *_: None, counts=":memory:", configure=True)

    assert redis.conf.broker_transport_options == {
        "visibility_timeout": 60,
        "priority_steps": list(range(10)),
    }
    assert rabbit.conf.task_queue_max_priority == 9
    for app, driver in ((redis, "redis"), (rabbit, "amqp")):
        prefetch = app.conf.worker_prefetch_multiplier
        assert list(brokers.problems_for_workers(app, driver, prefetch)) == []


def test_a_thread_that_publishes_while_another_loads_the_settings_finds_them_configured(
    broker: Valkey,
) -> None:
    app = Celery("threads", broker=broker.url, set_as_current=False)
    loaded, go_on = threading.Event(), threading.Event()

    def hold(**_: Any) -> None:
        loaded.set()
        assert go_on.wait(30)

    app.on_after_configure.connect(hold, weak=False)  # before `stamp` is called
    stamp(app, customer=lambda *_: "acme", counts=":memory:", configure=True)
    app.conf.task_default_queue = QUEUE
    loading = threading.Thread(target=lambda: app.conf.task_acks_late)
    loading.start()
    assert loaded.wait(30)

    try:
        app.send_task("process")
    finally:
        go_on.set()
        loading.join(30)

    assert [decided(message) for message in messages(broker)] == [(0, 1)]
    assert app.conf.broker_transport_options["priority_steps"] == brokers.STEPS


def test_the_check_can_be_left_out(broker: Valkey) -> None:
    app = celery_app.make(broker.url, broker.url, QUEUE, configure=False, check=False)

    app.tasks["process"].delay(customer_id="acme")

    assert len(messages(broker)) == 1


@pytest.mark.parametrize("wrong", [{"fallback": 0}, {"fallback": 10}, {"without_customer": 0}])
def test_a_priority_that_does_not_exist_is_refused_by_name(wrong: dict[str, Any]) -> None:
    (name,) = wrong

    with pytest.raises(ValueError, match=name):
        stamp(Celery(set_as_current=False), customer=lambda *_: None, counts=":memory:", **wrong)
