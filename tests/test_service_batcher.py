"""Small documents of many callers are stored together, and an error of one affects no other."""

import asyncio
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from fairturn import Queue
from fairturn.errors import StoreUnavailable
from fairturn.model import Receipt, Submission
from fairturn.service.app import make_app
from fairturn.service.batcher import SubmissionBatcher
from tests.http_server import TOKEN, bearer, code_of, key_for


def asked_at_once(app: FastAPI, requests: list[dict[str, Any]]) -> list[httpx.Response]:
    """Return the responses to requests that are sent at the same time."""

    async def ask() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=app, client=("127.0.0.1", 50_000))
        async with httpx.AsyncClient(
            transport=transport, base_url="http://127.0.0.1", headers=bearer(TOKEN)
        ) as client:
            return await asyncio.gather(
                *(client.post("/v1/documents", **request) for request in requests)
            )

    return asyncio.run(ask())


class Noting(Queue):
    """A queue that records how many documents were submitted together."""

    def __init__(self, place: Path) -> None:
        super().__init__(place)
        self.together: list[int] = []

    def submit_many(self, submissions: Any, *, connection: Any = None) -> list[Receipt]:
        given: list[Submission] = list(submissions)
        self.together.append(len(given))
        return super().submit_many(given, connection=connection)


def test_documents_that_come_at_once_are_stored_together(tmp_path: Path) -> None:
    with Noting(tmp_path / "documents.db") as queue:
        keys = [bearer(key_for(queue, f"c{n}")) for n in range(5)]
        requests = [{"content": b"%d" % n, "headers": keys[n % 5]} for n in range(50)]

        answers = asked_at_once(make_app(queue, token=TOKEN), requests)

        assert {answer.status_code for answer in answers} == {201}
        for n, answer in enumerate(answers):
            document = queue.get(answer.json()["id"])
            assert (document.customer, queue.read(document.id)) == (f"c{n % 5}", b"%d" % n)
        assert sum(queue.together) == 50
        assert len(queue.together) <= 5


def test_one_who_is_refused_does_not_make_all_others_be_stored_alone(tmp_path: Path) -> None:
    with Noting(tmp_path / "documents.db") as queue:
        queue.configure(waiting_per_customer_max=3)
        for n in range(3):
            queue.submit("full", payload=n)
        customers = ["full" if n == 30 else f"c{n}" for n in range(64)]
        requests = [{"content": b"x", "params": {"customer": customer}} for customer in customers]
        queue.together.clear()

        answers = asked_at_once(make_app(queue, token=TOKEN), requests)

        assert [n for n, answer in enumerate(answers) if answer.status_code != 201] == [30]
        assert code_of(answers[30]) == (429, "queue_full")
        assert len(queue.together) <= 20


def test_what_one_caller_does_wrong_is_its_own_matter(tmp_path: Path) -> None:
    with Queue(tmp_path / "documents.db") as queue:
        queue.configure(waiting_per_customer_max=3)
        acme, full, reader = (
            bearer(key_for(queue, "acme")),
            bearer(key_for(queue, "full")),
            bearer(key_for(queue, role="reader")),
        )
        for n in range(3):
            queue.submit("full", payload=n)
        queue.submit("acme", content=b"first", key="k")
        wrong: dict[tuple[int, str], dict[str, Any]] = {
            (401, "key_unknown"): {"headers": bearer("ft_nonsense")},
            (403, "not_allowed"): {"headers": reader},
            (422, "invalid"): {"headers": acme, "params": {"cost": "-1"}},
            (429, "queue_full"): {"headers": full},
            (422, "key_reused"): {"headers": {**acme, "Idempotency-Key": "k"}},
        }
        right: list[dict[str, Any]] = [{"headers": acme} for _ in range(2)]

        answers = asked_at_once(
            make_app(queue, token=TOKEN),
            [{"content": b"x", **each} for each in [*wrong.values(), *right]],
        )

        assert [code_of(answer) for answer in answers[:5]] == list(wrong)
        assert [answer.status_code for answer in answers[5:]] == [201, 201]
        assert [answer.json()["count"] for answer in answers[5:]] == [-1, -2]
        assert queue.customer("acme").waiting == 3
        assert queue.customer("full").count == -2


def test_the_same_key_at_once_is_one_document(tmp_path: Path) -> None:
    with Queue(tmp_path / "documents.db") as queue:
        headers = {**bearer(key_for(queue, "acme")), "Idempotency-Key": "k"}

        answers = asked_at_once(
            make_app(queue, token=TOKEN), [{"content": b"x", "headers": headers}] * 10
        )

        statuses = Counter(answer.status_code for answer in answers)
        assert statuses == {201: 1, 200: 9}
        assert len({answer.content for answer in answers}) == 1
        assert queue.summary().waiting == 1


class Slow(Queue):
    """A queue that blocks submissions until it is released."""

    def __init__(self, place: Path) -> None:
        super().__init__(place)
        self.asked, self.go_on = threading.Event(), threading.Event()

    def submit_many(self, submissions: Any, *, connection: Any = None) -> list[Receipt]:
        self.asked.set()
        assert self.go_on.wait(30)
        return super().submit_many(submissions, connection=connection)


def test_nobody_is_left_waiting_when_handing_over_is_stopped(tmp_path: Path) -> None:
    with Slow(tmp_path / "documents.db") as queue:
        collector: SubmissionBatcher = make_app(queue, token=TOKEN).state.collector

        async def stop() -> list[Receipt | BaseException]:
            before = asyncio.all_tasks()
            first = asyncio.create_task(collector.submit(lambda: Submission("a", payload=1)))
            await asyncio.to_thread(queue.asked.wait, 30)
            (handing_over,) = asyncio.all_tasks() - before - {first}
            second = asyncio.create_task(collector.submit(lambda: Submission("b", payload=1)))
            await asyncio.to_thread(int)  # until the other request has arrived too
            handing_over.cancel()
            queue.go_on.set()
            left = await asyncio.gather(first, second, return_exceptions=True)
            return [*left, await collector.submit(lambda: Submission("c", payload=1))]

        first, second, after = asyncio.run(stop())

        assert isinstance(first, StoreUnavailable)
        assert isinstance(second, StoreUnavailable)
        assert isinstance(after, Receipt)


def test_who_comes_when_the_last_was_just_answered_is_stored_too(tmp_path: Path) -> None:
    with Queue(tmp_path / "documents.db") as queue:
        collector: SubmissionBatcher = make_app(queue, token=TOKEN).state.collector

        async def one_after_the_other(customer: str) -> list[Receipt]:
            return [
                await collector.submit(lambda: Submission(customer, payload=1)) for _ in range(20)
            ]

        async def ask() -> list[list[Receipt]]:
            return await asyncio.gather(*map(one_after_the_other, "abc"))

        assert sum(map(len, asyncio.run(ask()))) == queue.summary().waiting == 60


def test_a_store_that_fails_is_told_to_all(tmp_path: Path) -> None:
    with Queue(tmp_path / "documents.db") as queue:
        app = make_app(queue, token=TOKEN)
        queue.close()

        answers = asked_at_once(app, [{"content": b"x", "params": {"customer": "a"}}] * 5)

        assert [code_of(answer) for answer in answers] == [(503, "unavailable")] * 5
