"""Workers with a handler for each kind of work: what they claim, and where each kind runs."""

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairturn import Handlers, Queue, State, Submission, Worker
from fairturn.contents.local import NoContents
from fairturn.errors import HandlerNotLoaded, KindRefused
from fairturn.model import KINDS_MAX, Claim, Failed, Fence, KindPolicy, Outcome, Settings
from fairturn.stores.memory import MemoryStore
from fairturn.worker.backoff import Backoff
from fairturn.worker.dispatcher import ClaimLimits, Dispatcher
from fairturn.worker.events import DocumentClaimed, DocumentEnded, WorkerIdle
from fairturn.worker.executor import ActiveClaim, Executor, ExecutorResources, WakeupPipe
from fairturn.worker.kinds import KindOptions
from fairturn.worker.prefetch import PrefetchPolicy
from tests import handlers, pipelines
from tests.test_handlers import until
from tests.test_worker import KINDS as PLACES
from tests.test_worker import InBackground, drain, has_begun


@pytest.fixture(params=["memory", "file"])
def queue(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Queue]:
    database = ":memory:" if request.param == "memory" else tmp_path / "documents.db"
    with Queue(database, kinds="open") as queue:
        yield queue


def submit(queue: Queue, kind: str, n: int = 1, payload: Any = None) -> list[str]:
    submissions = [Submission("acme", payload=payload, kind=kind) for _ in range(n)]
    return [receipt.id for receipt in queue.submit_many(submissions)]


# ── The registry ─────────────────────────────────────────────────────────────────────────────────


def test_a_registered_handler_is_the_function_itself() -> None:
    registry = Handlers()

    assert registry("text")(handlers.nothing) is handlers.nothing
    assert registry.kinds == ("text",)
    assert repr(registry) == "<handlers of text>"


WRONG: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (handlers.nothing, {}, TypeError, r'write @handlers\("text"\) above it'),
    ("Text!", {}, ValueError, "kind 'Text!' is not valid"),
    ("fairturn.text", {}, ValueError, "is reserved"),
    ("ocr", {"concurrency": 0}, ValueError, "concurrency is 0; it must be from 1"),
    ("ocr", {"concurrency": True}, TypeError, "concurrency is True"),
    ("ocr", {"threads": 1}, TypeError, "threads is 1; it must be True or False"),
    ("ocr", {"time_limit_s": 0}, ValueError, "time_limit_s is 0"),
    ("ocr", {"memory_limit_bytes": 0}, ValueError, "memory_limit_bytes is 0"),
    ("ocr", {"retry": Backoff(factor=0)}, ValueError, "factor is 0"),
    ("ocr", {"needs": "azure"}, TypeError, r"needs is 'azure'; it must be a set of names"),
    ("ocr", {"needs": {""}}, ValueError, "service is empty"),
    ("ocr", {"needs": {"kind:ocr"}}, ValueError, "service 'kind:ocr' is reserved"),
    ("ocr", {"needs": map(str, range(17))}, ValueError, "needs has 17 services; at most 16"),
    ("ocr", {"recycle_after": 1}, TypeError, "'recycle_after' is not an option of a handler"),
]


@pytest.mark.parametrize("kind, options, error, message", WRONG)
def test_a_wrong_registration_is_refused_in_a_sentence(
    kind: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Handlers()(kind, **options)


def test_a_kind_is_registered_once() -> None:
    registry = Handlers()
    registry("text")(handlers.nothing)

    with pytest.raises(ValueError, match="'text' already has the handler tests.handlers.nothing;"):
        registry("text")(handlers.fail)
    with pytest.raises(TypeError, match="the handler of kind 'ocr' is 5, not a function"):
        registry("ocr")(5)  # type: ignore[type-var]


def in_a_closure() -> Handlers:
    registry = Handlers()

    @registry("text")
    def local(document: Any) -> None: ...

    return registry


def with_limits_in_threads() -> Handlers:
    registry = Handlers()
    registry("text", threads=True, time_limit_s=5)(handlers.nothing)
    return registry


@pytest.mark.parametrize(
    "handler, options, message",
    [
        (Handlers(), {}, "no handler is registered; register one"),
        (pipelines.fast, {"kinds": ["text", "orc"]}, "kinds has 'orc', .* are: text, ocr$"),
        (pipelines.fast, {"kinds": []}, "kinds is empty"),
        (handlers.nothing, {"kinds": ["Text!"]}, "kind 'Text!' is not valid"),
        ("tests.pipelines:fast", {"kinds": []}, "kinds is empty"),
        (in_a_closure(), {}, "was defined inside a function, so a child process cannot import it"),
        (with_limits_in_threads(), {}, "kind 'text' has time_limit_s, .* apply to threads"),
        (pipelines.pipeline, {"threads": True}, "kind 'ocr' has memory_limit_bytes"),
    ],
)
def test_kinds_and_handlers_that_do_not_fit_are_refused_before_anything_runs(
    handler: Any, options: dict[str, Any], message: str
) -> None:
    with Queue(":memory:") as queue, pytest.raises(ValueError, match=message):
        Worker(queue, handler, **options)


def test_kinds_is_a_list_of_names() -> None:
    with Queue(":memory:") as queue, pytest.raises(TypeError, match=r"kinds is 'text'"):
        Worker(queue, pipelines.fast, kinds="text")


@PLACES
def test_a_kind_that_a_registry_given_by_name_does_not_have_ends_the_worker(
    threads: bool,
) -> None:
    with Queue(":memory:") as queue:
        worker = Worker(queue, "tests.pipelines:fast", kinds=["orc"], threads=threads)

        with pytest.raises(ValueError, match="the registered kinds are: text, ocr"):
            worker.run()

        assert queue.store.workers() == []


def test_a_registry_that_cannot_be_loaded_names_its_kinds_or_its_name() -> None:
    registry = Handlers()
    registry("text")(broken_in_a_child)
    with Queue(":memory:") as queue:
        with pytest.raises(HandlerNotLoaded, match="the handlers of text cannot be loaded"):
            Worker(queue, registry, concurrency=1).run()
        with pytest.raises(HandlerNotLoaded, match="handler tests.pipelines:none cannot be loaded"):
            Worker(queue, "tests.pipelines:none", concurrency=1).run()


def broken_in_a_child(document: Any) -> None: ...


broken_in_a_child.__qualname__ = "no_such_function"


# ── Each kind gets its handler ───────────────────────────────────────────────────────────────────


@PLACES
@pytest.mark.parametrize(
    "handler", [pipelines.fast, "tests.pipelines:fast"], ids=["object", "name"]
)
def test_each_document_gets_the_handler_of_its_kind(
    queue: Queue, handler: Any, threads: bool
) -> None:
    texts, ocrs = submit(queue, "text", 20), submit(queue, "ocr", 20)

    done = Worker(queue, handler, threads=threads).run(until_empty=True)

    assert done.completed == 40
    assert {queue.result(id) for id in texts} == {"text 0"}
    assert {queue.result(id) for id in ocrs} == {"ocr 0"}
    assert {queue.get(id).attempts for id in texts + ocrs} == {1}


@PLACES
@pytest.mark.parametrize(
    "handler", [handlers.nothing, "tests.handlers:nothing"], ids=["object", "name"]
)
def test_one_function_serves_every_kind(queue: Queue, handler: Any, threads: bool) -> None:
    ids = [*submit(queue, "text"), *submit(queue, "ocr"), queue.submit("acme").id]

    done = Worker(queue, handler, threads=threads).run(until_empty=True)

    assert done.completed == 3
    assert {queue.get(id).state for id in ids} == {State.COMPLETED}


@pytest.mark.parametrize(
    "handler",
    [pipelines.fast, "tests.pipelines:fast", handlers.nothing],
    ids=["object", "name", "function"],
)
def test_kinds_restrict_a_worker(queue: Queue, handler: Any) -> None:
    (text,), (ocr,) = submit(queue, "text"), submit(queue, "ocr")

    done = Worker(queue, handler, kinds=["ocr"], threads=True).run(until_empty=True)

    assert done.completed == 1
    assert (queue.get(text).state, queue.get(ocr).state) == (State.WAITING, State.COMPLETED)


SCRIPT = """
from fairturn import Handlers, Queue, Worker

handlers = Handlers()
print("imported as", __name__)

@handlers("text")
def text(document):
    return __name__

@handlers("ocr")
def ocr(document):
    return __name__

if __name__ == "__main__":
    for each in (handlers, "__main__:handlers"):
        with Queue(":memory:", kinds="open") as queue:
            ids = [queue.submit("acme", kind=kind).id for kind in ("text", "ocr")]
            Worker(queue, each, concurrency=1).run(until_empty=True)
            print(*map(queue.result, ids))
"""


def test_each_child_imports_the_script_of_a_registry_once_and_does_not_run_it(
    tmp_path: Path,
) -> None:
    script = tmp_path / "work.py"
    script.write_text(SCRIPT)

    ran = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=30, check=False
    )

    results = 2 * "__fairturn_main__ __fairturn_main__\n"
    assert ran.stdout == f"imported as __main__\n{results}", ran.stderr
    assert ran.stderr.count("imported as __fairturn_main__") == 2


# ── Where a kind runs ────────────────────────────────────────────────────────────────────────────


def test_kinds_with_other_limits_run_in_other_children(queue: Queue) -> None:
    ids = {kind: submit(queue, kind, 4) for kind in pipelines.limited.kinds}

    Worker(queue, pipelines.limited, concurrency=2).run(until_empty=True)

    of_kind = {kind: [queue.result(id) for id in some] for kind, some in ids.items()}
    memory = {kind: {one["memory"] for one in some} for kind, some in of_kind.items()}
    assert all(256 * 2**20 < limit < 512 * 2**20 for limit in memory["small"])
    assert all(1_024 * 2**20 < limit < 1_280 * 2**20 for limit in memory["large"])
    assert all(limit < 0 or limit > 2**50 for limit in memory["unlimited"])
    processes = [{one["process"] for one in some} for some in of_kind.values()]
    assert not set.intersection(*map(set, processes))
    assert sum(map(len, processes)) == len(set.union(*processes))


def test_idle_children_of_one_kind_keep_no_slot_of_another(queue: Queue) -> None:
    """With one slot, documents of three kinds with children of their own run in turn."""
    for _ in range(3):
        for kind in pipelines.limited.kinds:
            submit(queue, kind)

    events = drain(queue, pipelines.limited, concurrency=1)

    running = most = 0
    for event in events:
        running += isinstance(event, DocumentClaimed) - isinstance(event, DocumentEnded)
        most = max(most, running)
    assert queue.summary().completed == 9
    assert most == 1


def test_one_worker_runs_some_kinds_in_threads_and_others_in_processes(queue: Queue) -> None:
    ids = submit(queue, "text", 10, payload=7)

    Worker(queue, pipelines.pipeline).run(until_empty=True)

    for id in ids:
        result = queue.result(id)
        assert result["process"] == handlers.TOKEN
        assert result["previous"]["process"] != handlers.TOKEN


@pytest.mark.parametrize(
    "handler", [pipelines.timed, "tests.pipelines:timed"], ids=["object", "name"]
)
def test_a_time_limit_applies_to_its_kind_alone(handler: Any) -> None:
    with Queue(":memory:", kinds="open", attempts_max=1) as queue:
        (slow,), (patient,) = submit(queue, "slow"), submit(queue, "patient")

        Worker(queue, handler).run(until_empty=True)

        assert queue.get(slow).error == "time limit of 0.2 s"
        assert queue.get(patient).state is State.COMPLETED


@PLACES
def test_a_backoff_applies_to_its_kind_alone(queue: Queue, threads: bool) -> None:
    submit(queue, "text")
    submit(queue, "ocr")
    options: dict[str, Any] = {"threads": threads, "retry": Backoff(first_s=1_000, factor=1)}

    with InBackground(queue, pipelines.backoffs, **options) as background:
        until(lambda: queue.summary().delayed == 2, "both have failed")

    delays = {
        event.document.kind: event.outcome.retry_in_us / 1_000_000
        for event in background.events
        if isinstance(event, DocumentEnded)
        and isinstance(event.outcome, Failed)
        and event.outcome.retry_in_us is not None
    }
    assert 100 <= delays["text"] <= 150
    assert 1_000 <= delays["ocr"] <= 1_500


# ── How many are claimed ─────────────────────────────────────────────────────────────────────────


@PLACES
def test_no_more_documents_of_a_kind_are_claimed_than_its_concurrency(
    queue: Queue, tmp_path: Path, threads: bool
) -> None:
    ocrs = submit(queue, "ocr", 5, payload=str(tmp_path))
    texts = submit(queue, "text", 5, payload=str(tmp_path))

    with InBackground(queue, pipelines.held, threads=threads, concurrency=4):
        has_begun(tmp_path, ocrs[0])
        until(lambda: queue.summary().completed == 5, "the others end")
        kind = queue.kind("ocr")
        begun = [id for id in ocrs if (tmp_path / f"began-{id}-1").exists()]
        (tmp_path / "go on").touch()
        until(lambda: queue.summary().completed == 10, "all have ended")

    assert (kind.running, kind.waiting) == (1, 4)
    assert begun == [ocrs[0]]
    assert {queue.get(id).attempts for id in texts + ocrs} == {1}


class CountingStore(MemoryStore):
    """A store that counts the calls that only record outcomes."""

    finished = 0

    def finish(self, outcomes: Sequence[Outcome]) -> list[Fence]:
        self.finished += 1
        return super().finish(outcomes)


@PLACES
def test_the_next_document_of_a_kind_at_its_concurrency_is_claimed_with_the_outcome_of_the_last(
    threads: bool,
) -> None:
    store = CountingStore(settings=Settings(kinds=KindPolicy.OPEN))
    with Queue(store) as queue:
        submit(queue, "ocr", 60)

        Worker(queue, pipelines.fast, threads=threads, concurrency=4).run(until_empty=True)

        assert queue.summary().completed == 60
    assert store.finished <= 10


def test_a_worker_with_kinds_at_their_concurrency_keeps_serving_the_others(
    queue: Queue, tmp_path: Path
) -> None:
    ocrs = submit(queue, "ocr", 50, payload=str(tmp_path))

    with InBackground(queue, pipelines.held, concurrency=2):
        has_begun(tmp_path, ocrs[0])
        for _ in range(10):
            (text,) = submit(queue, "text", payload=str(tmp_path))
            assert queue.wait(text, 10).state is State.COMPLETED
        assert queue.kind("ocr").running == 1


# ── Heartbeats and the end ───────────────────────────────────────────────────────────────────────


def test_a_heartbeat_states_the_kinds_and_creates_them(tmp_path: Path) -> None:
    with Queue(":memory:") as queue, InBackground(queue, pipelines.services, threads=True):
        until(lambda: len(queue.kinds()) == 3, "the kinds are created")

        (seen,) = queue.store.workers()

    assert (seen.slots, seen.kinds) == (4, ("ocr", "text"))


def test_a_heartbeat_of_a_function_states_the_kinds_that_it_is_restricted_to(
    tmp_path: Path,
) -> None:
    with Queue(":memory:") as queue:
        for kinds, stated in ((None, None), (["ocr"], ("ocr",))):
            with InBackground(queue, handlers.nothing, kinds=kinds, threads=True):
                until(lambda: bool(queue.store.workers()), "it signs on")
                assert queue.store.workers()[0].kinds == stated


def test_more_kinds_than_a_queue_may_have_end_the_worker() -> None:
    registry = Handlers()
    for n in range(KINDS_MAX):
        registry(f"kind-{n}")(handlers.nothing)
    with Queue(":memory:") as queue, pytest.raises(KindRefused):
        Worker(queue, registry, threads=True).run()


def test_a_worker_of_one_kind_is_done_when_no_document_of_that_kind_is_left(queue: Queue) -> None:
    submit(queue, "text", 3)
    delayed = queue.submit(
        "acme", kind="text", due_at=queue.get(submit(queue, "text")[0]).submitted_at_us + 10**12
    )

    done = drain(queue, pipelines.fast, kinds=["ocr"], threads=True)

    assert done == []
    assert queue.get(delayed.id).state is State.DELAYED


def test_a_worker_of_one_kind_waits_for_its_delayed_documents(queue: Queue) -> None:
    submit(queue, "text", 3)
    now = queue.get(submit(queue, "text")[0]).submitted_at_us
    delayed = queue.submit("acme", kind="ocr", due_at=now + 3_000_000)

    events = drain(queue, pipelines.fast, kinds=["ocr"], threads=True)

    assert queue.get(delayed.id).state is State.COMPLETED
    assert WorkerIdle(waiting=0, delayed=1, running=0) in events


# ── The limits of a claim ────────────────────────────────────────────────────────────────────────


class Places(Executor):
    """An executor with a number of idle slots, which starts what it is given."""

    def __init__(self, idle: int, slots: int) -> None:
        wakeup: Any = None
        super().__init__(
            slots,
            ExecutorResources(NoContents(), Path(), PrefetchPolicy(), wakeup, lambda *_: None),
        )
        self.idle = idle
        self.held: list[ActiveClaim] = []

    def free(self) -> int:
        return self.idle

    def running(self) -> list[ActiveClaim]:
        return self.held

    def give(self, documents: list[ActiveClaim]) -> None:
        self.held += documents
        self.idle -= len(documents)

    def tend(self, now_s: float) -> None: ...
    def due_s(self) -> None: ...
    def stop_replacing(self) -> None: ...

    def take_back(self) -> list[ActiveClaim]:
        return []

    def stop(self, held: ActiveClaim) -> bool:
        return False

    def close(self) -> bool:
        return True


@given(st.data())
def test_every_document_of_a_claim_within_the_limits_can_start(data: st.DataObject) -> None:
    """Whatever the store hands out within the limits, each executor has an idle slot for its
    documents, no kind exceeds its concurrency, and the worker does not exceed its slots."""
    slots = data.draw(st.integers(1, 6))
    kinds = [f"k{n}" for n in range(data.draw(st.integers(1, 5)))]
    concurrency = {kind: data.draw(st.integers(1, slots)) for kind in kinds}
    capped = {kind: most for kind, most in concurrency.items() if most < slots}
    where = {kind: data.draw(st.integers(0, 2)) for kind in kinds}
    wakeup = WakeupPipe()
    dispatcher = Dispatcher(slots, PrefetchPolicy(), wakeup)
    executors = {}
    for place in sorted(set(where.values())):
        own = [kind for kind in kinds if where[kind] == place]
        most = min(slots, sum(concurrency[kind] for kind in own))
        executors[place] = Places(data.draw(st.integers(0, most)), most)
        dispatcher.add(executors[place], own, capped)
    running: Counter[str] = Counter()
    arriving: list[ActiveClaim] = []

    for _ in range(3):
        given_later = data.draw(st.booleans())  # as on a server: while the next claim is made
        limits = dispatcher.claimable(arriving)
        taken: Counter[str] = Counter()
        for kind in data.draw(st.lists(st.sampled_from(kinds), max_size=2 * slots)):
            if taken.total() < limits.n and taken[kind] < limits.at_most.get(kind, limits.n):
                taken[kind] += 1
        dispatcher.give(arriving)
        arriving = [claimed(kind) for kind in taken.elements()]
        if not given_later:
            dispatcher.give(arriving)
            arriving = []
        running += taken

        assert running.total() <= slots
        assert all(running[kind] <= concurrency[kind] for kind in kinds)
        assert all(executor.idle >= 0 for executor in executors.values())
    wakeup.close()


@given(st.integers(1, 6), st.data())
def test_a_worker_with_idle_slots_can_always_claim_something(
    slots: int, data: st.DataObject
) -> None:
    kinds = [f"k{n}" for n in range(data.draw(st.integers(1, 4)))]
    capped = {kind: data.draw(st.integers(1, slots)) for kind in kinds}
    wakeup = WakeupPipe()
    dispatcher = Dispatcher(slots, PrefetchPolicy(), wakeup)
    for kind in kinds:
        dispatcher.add(Places(capped[kind], capped[kind]), [kind], capped)
    given_ = [claimed(kind) for kind in kinds[: data.draw(st.integers(0, slots))]][:slots]
    dispatcher.give(given_)

    limits = dispatcher.claimable()

    left = sum(capped.values()) - len(given_)
    assert (limits.n > 0) == (len(given_) < slots and left > 0)
    assert any(map(limits.allow, kinds)) == (limits.n > 0)
    wakeup.close()


def claimed(kind: str) -> ActiveClaim:
    with Queue(":memory:", kinds="open") as queue:
        queue.submit("acme", kind=kind)
        (claim,) = queue.claim(1, worker="w", lease_s=60).claims
    return ActiveClaim(claim, 0.0, KindOptions(1, False, None, None, Backoff()))


def test_a_claim_that_took_all_it_could_of_a_kind_leaves_open_whether_more_wait() -> None:
    limits = ClaimLimits(4, {"ocr": 1, "text": 2, "export": 0})
    claims: Sequence[Claim] = [claimed(kind).claim for kind in ("ocr", "text", "mail")]

    assert limits.reached(claims) == {"ocr", "export"}
    assert [limits.allow(kind) for kind in ("ocr", "export", "mail")] == [True, False, True]
