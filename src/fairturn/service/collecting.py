"""Small documents of many callers, handed over together: one thread, one transaction, one fsync.

Where one writes at a time anyway, as into a file, nobody waits longer by that, and a submission
costs half. A database server takes submissions side by side; there each goes on its own, so that
nobody waits for the lock of somebody else's customer.
"""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from fairturn.errors import StoreError
from fairturn.model import Receipt, Submission
from fairturn.service.problems import refusing_misuse, refusing_parents
from fairturn.service.service import Service
from fairturn.service.uploads import refusing_without_a_place

TOGETHER_MAX = 200

Prepare = Callable[[], Submission]  # checks who asks and what; what it raises is the answer


class _Waiting(NamedTuple):
    prepare: Prepare
    answer: asyncio.Future[Receipt]


class Collector:
    """Takes submissions, and hands over those that have come while others were being stored."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._waiting: list[_Waiting] = []
        self._handing_over: asyncio.Task[None] | None = None

    async def submit(self, prepare: Prepare) -> Receipt:
        """The receipt, when the document is stored."""
        if not self._service.queue.store.one_writer:
            return await self._service.run(self._submit_one, prepare)
        answer: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(prepare, answer))
        if self._handing_over is None:
            self._handing_over = asyncio.create_task(self._hand_over())
        return await answer

    async def _hand_over(self) -> None:
        try:
            while self._waiting:
                taken = self._waiting[:TOGETHER_MAX]
                del self._waiting[:TOGETHER_MAX]
                prepares = [each.prepare for each in taken]
                answers = await self._service.run(self._submit_all, prepares)
                for each, answer in zip(taken, answers, strict=True):
                    if each.answer.done():
                        continue  # whoever asked has gone
                    if isinstance(answer, Receipt):
                        each.answer.set_result(answer)
                    else:
                        each.answer.set_exception(answer)
        finally:
            self._handing_over = None

    def _submit_all(self, prepares: list[Prepare]) -> list[Receipt | Exception]:
        """In a thread. What one caller did wrong is no matter of the others."""
        answers: list[Receipt | Exception | None] = [None] * len(prepares)
        ready: dict[int, Submission] = {}
        for place, prepare in enumerate(prepares):
            try:
                ready[place] = prepare()
            except Exception as error:
                answers[place] = error
        try:
            receipts = self._service.queue.submit_many(ready.values())
        except StoreError as error:  # whether they were stored is not known
            answers = [answer or error for answer in answers]
        except Exception:  # one of them was refused, and none was stored
            for place, submission in ready.items():
                answers[place] = self._answer(submission)
        else:
            for place, receipt in zip(ready, receipts, strict=True):
                answers[place] = receipt
        return [answer for answer in answers if answer is not None]

    def _answer(self, submission: Submission) -> Receipt | Exception:
        try:
            return self._store(submission)
        except Exception as error:
            return error

    def _submit_one(self, prepare: Prepare) -> Receipt:
        return self._store(prepare())

    def _store(self, submission: Submission) -> Receipt:
        with refusing_misuse(), refusing_parents(), refusing_without_a_place():
            (receipt,) = self._service.queue.submit_many([submission])
        return receipt
