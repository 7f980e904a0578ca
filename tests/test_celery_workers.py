"""The order in which real workers, on Valkey and on RabbitMQ, run tasks."""

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from celery import Celery, chain, chord, group

from fairturn.errors import BrokerRefused
from fairturn.priority import Rule
from tests import celery_app
from tests.celery_app import stamp_of
from tests.servers import rabbitmq, valkey
from tests.servers.rabbitmq import Rabbit
from tests.servers.valkey import Valkey
from tests.wait import wait_until

ROOT = Path(__file__).parent.parent
SEED = 20_261_116
# Connections that Celery leaves open are closed after each test, where this applies too.
pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    celery_app.close_all()


@pytest.fixture(scope="module")
def redis() -> Iterator[Valkey]:
    with valkey.started() as server:
        yield server


@pytest.fixture(scope="module")
def rabbit() -> Iterator[Rabbit]:
    with rabbitmq.of_this_run() as server:
        yield server


class Place(NamedTuple):
    """The broker, counts, queue and record of one test."""

    broker: str
    counts: str
    queue: str
    record: Path

    def app(self, **options: Any) -> Celery:
        return celery_app.make(self.broker, self.counts, self.queue, **options)

    def ran(self) -> list[dict[str, Any]]:
        """Return what workers have run so far, in order."""
        if not self.record.exists():
            return []
        # A worker may be in the middle of a write: skip a line without its end.
        complete = self.record.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in complete.splitlines()]

    def wait_for(self, n: int, worker: subprocess.Popen[str]) -> list[dict[str, Any]]:
        def enough() -> bool:
            if worker.poll() is not None:
                raise AssertionError(f"the worker ended: {worker.communicate()[0]}")
            return len(self.ran()) >= n

        wait_until(enough, f"{n} tasks run")
        return self.ran()

    @contextmanager
    def worker(self, pool: str = "", **options: Any) -> Iterator[subprocess.Popen[str]]:
        """Run a worker with one task at a time until the end of the block."""
        # A worker without a child starts and stops faster, but is slow on RabbitMQ.
        pool = pool or ("prefork" if self.broker.startswith("amqp") else "solo")
        command = [sys.executable, "-W", "ignore", "-m", "celery", "-A", "tests.celery_app"]
        quiet = ["--without-gossip", "--without-mingle", "--without-heartbeat"]
        name = f"--hostname={self.queue}@%h"  # other workers run at the same time
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "FAIRTURN_TEST_BROKER": self.broker,
            "FAIRTURN_TEST_COUNTS": self.counts,
            "FAIRTURN_TEST_QUEUE": self.queue,
            "FAIRTURN_TEST_RECORD": str(self.record),
            "FAIRTURN_TEST_OPTIONS": json.dumps(options),
        }
        with subprocess.Popen(
            [
                *command,
                "worker",
                f"--pool={pool}",
                "--concurrency=1",
                "--loglevel=WARNING",
                name,
                *quiet,
            ],
            cwd=self.record.parent,
            env=environment,
            stdout=subprocess.PIPE,  # these workers log only warnings, which fit the pipe
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                yield process
            finally:
                # Kill its children too. A worker that is asked to stop at once may deadlock.
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(params=["redis", "rabbitmq"])
def place(request: pytest.FixtureRequest, redis: Valkey, tmp_path: Path) -> Place:
    redis.client().flushall()
    on_rabbit = request.param == "rabbitmq"
    broker = request.getfixturevalue("rabbit").url if on_rabbit else redis.url
    return Place(broker, redis.url, f"documents-{os.getpid()}-{tmp_path.name}", tmp_path / "record")


# ── The order ────────────────────────────────────────────────────────────────────────────────────


def test_a_worker_runs_all_nine_levels_in_their_order(place: Place) -> None:
    """While the upload of one customer waits, others arrive: the order is the rule's."""
    process = place.app().tasks["process"]
    rule, published = Rule(), Counter[str]()
    choice = random.Random(SEED)
    expected = []
    for number in range(80):
        customer = choice.choices(["dump", "quiet 1", "quiet 2", "quiet 3"], [12, 3, 2, 1])[0]
        priority = rule.priority(-published[customer])
        published[customer] += 1
        expected.append((priority, number))
        process.delay(customer_id=customer, number=number)
    assert {priority for priority, _ in expected} == set(range(1, 10))

    with place.worker(pool="prefork") as worker:
        ran = place.wait_for(80, worker)

    assert [(line["fairturn"]["priority"], line["number"]) for line in ran] == sorted(expected)


# ── What tasks make ──────────────────────────────────────────────────────────────────────────────


def test_a_task_s_own_tasks_take_its_priority_without_a_check_for_the_first_20(
    place: Place,
) -> None:
    app = place.app()
    for _ in range(5):  # so that the next one has priority 3
        app.send_task("nobody runs this", kwargs={"customer_id": "acme"}, queue=f"{place.queue}-x")
    app.tasks["unpack"].delay(25, customer_id="acme")

    with place.worker() as worker:
        parent, *children = sorted(
            place.wait_for(26, worker), key=lambda line: line["number"] or -1
        )

    assert parent["task"] == "unpack"
    found = [(line["fairturn"]["count"], line["fairturn"]["by"]) for line in children]
    assert parent["fairturn"]["priority"] == 3
    assert found == [(-5, "parent")] * 20 + [(-count, "check") for count in range(6, 11)]
    assert all(line["fairturn"]["priority"] == 3 for line in children[:20])


def test_the_steps_of_a_chain_are_one_check_and_a_retry_is_none(place: Place) -> None:
    app = place.app()
    process, unsteady = app.tasks["process"], app.tasks["unsteady"]
    chain(
        process.s(number=1, customer_id="acme"),
        process.s(number=2, customer_id="acme"),
        process.s(number=3),  # without a customer: that of its parent
    ).apply_async()
    unsteady.apply_async((4,), {"customer_id": "acme"})

    with place.worker() as worker:
        ran = place.wait_for(6, worker)

    steps = sorted(line["number"] for line in ran)
    assert steps == [1, 2, 3, 4, 4, 4]
    by_number = {line["number"]: line["fairturn"]["count"] for line in ran}
    assert by_number == {1: 0, 2: 0, 3: 0, 4: -1}
    tries = [line for line in ran if line["number"] == 4]
    assert [line["retries"] for line in tries] == [0, 1, 2]
    assert len({line["priority"] for line in tries}) == 1
    assert stamp_of(app).totals().checked == 2


def test_a_chord_s_body_takes_the_priority_of_the_task_that_ended_it(
    redis: Valkey, tmp_path: Path
) -> None:
    redis.client().flushall()
    place = Place(redis.url, redis.url, "chords", tmp_path / "record")
    app = place.app()
    process = app.tasks["process"]
    for number in range(2):
        process.delay(number=number, customer_id="acme")

    header = [process.s(number=n, customer_id="acme").set(ignore_result=False) for n in (2, 3)]
    chord(group(header), process.s(number=4)).apply_async()

    with place.worker() as worker:
        ran = {line["number"]: line["fairturn"] for line in place.wait_for(5, worker)}

    assert [ran[number]["count"] for number in range(4)] == [0, -1, -2, -3]
    assert (ran[4]["by"], ran[4]["customer"]) == ("parent", "acme")
    assert ran[4]["count"] in (-2, -3)


# ── Loss ─────────────────────────────────────────────────────────────────────────────────────────


def test_counts_that_are_flushed_restarted_and_lost_mid_run_lose_no_task(place: Place) -> None:
    with valkey.started() as counts:
        apart = place._replace(counts=counts.url)
        app = apart.app()
        process = app.tasks["process"]
        with apart.worker() as worker:
            for number in range(200):
                process.delay(customer_id=f"customer {number % 3}", number=number)
                if number == 50:
                    counts.client().flushall()
                elif number == 100:
                    counts.kill()
                    counts.start()
                elif number == 150:
                    counts.kill()
            ran = apart.wait_for(200, worker)

    assert sorted(line["number"] for line in ran) == list(range(200))
    assert {line["fairturn"]["priority"] for line in ran} <= set(range(1, 10))
    totals = stamp_of(app).totals()
    assert totals.checked + totals.fallback == 200
    assert totals.reset >= 9  # new, after the flush, after the restart: three customers each
    assert {line["fairturn"]["by"] for line in ran if line["number"] > 150} == {"fallback"}


# ── Settings and queues ──────────────────────────────────────────────────────────────────────────


def test_a_worker_with_wrong_settings_says_so_in_sentences_and_does_not_start(
    place: Place,
) -> None:
    with place.worker(configure=False) as worker:
        said, _ = worker.communicate(timeout=60)

    assert worker.returncode == 1
    assert "Traceback" not in said
    assert "worker_prefetch_multiplier is 4" in said
    assert "task_acks_late is off" in said
    steps = "priority_steps of broker_transport_options is Celery's default [0, 3, 6, 9]"
    assert (steps if "redis" in place.broker else "has no x-max-priority") in said


def test_a_queue_that_exists_without_priorities_is_refused_with_the_way_out(
    rabbit: Rabbit, tmp_path: Path
) -> None:
    place = Place(rabbit.url, ":memory:", f"old-{os.getpid()}", tmp_path / "record")
    with Celery(broker=rabbit.url, set_as_current=False).connection_for_write() as connection:
        connection.default_channel.queue_declare(place.queue, durable=True, auto_delete=False)
        its_refusals = connection.channel_errors

    with pytest.raises(BrokerRefused) as refused:
        stamp_of(place.app()).check()
    with pytest.raises(its_refusals) as failed:
        place.app().send_task("process")
    with place.worker() as worker:
        said, _ = worker.communicate(timeout=60)

    sentence = (
        f"queue '{place.queue}' exists in RabbitMQ with another x-max-priority than the app's"
    )
    assert sentence in str(refused.value)
    assert f"rabbitmqctl delete_queue {place.queue}" in str(refused.value)
    assert "but current is none" in str(refused.value)
    assert "configure=True" not in str(refused.value)  # it was asked for, and changes no queue
    assert ["drain and delete it" in note for note in failed.value.__notes__] == [True]
    assert worker.returncode == 1
    assert sentence in said


def test_a_quorum_queue_of_an_old_rabbitmq_is_refused_by_its_version(rabbit: Rabbit) -> None:
    app = celery_app.make(rabbit.url, ":memory:", f"quorum-{os.getpid()}")
    app.conf.task_default_queue_type = "quorum"
    app.conf.task_default_exchange_type = "topic"

    with pytest.raises(BrokerRefused, match=r"is a quorum queue, which in RabbitMQ 3\.") as no:
        stamp_of(app).check()

    assert "app.conf.task_default_queue_type = 'classic'" in str(no.value)


def test_looking_at_the_queues_makes_none(rabbit: Rabbit) -> None:
    name = f"nowhere-{os.getpid()}"
    app = celery_app.make(rabbit.url, ":memory:", name)

    stamp_of(app).check()

    with app.connection_for_write() as connection, pytest.raises(connection.channel_errors):
        connection.default_channel.queue_declare(name, passive=True)


def test_a_broker_that_is_not_there_yet_is_no_reason_to_refuse(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = celery_app.make("amqp://guest@127.0.0.1:1//", ":memory:", "nowhere")

    stamp_of(app).check()

    assert any("queues could not be checked" in record.message for record in caplog.records)
