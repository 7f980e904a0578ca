"""Small documents of many callers, handed over together: one thread, one transaction, one fsync.

Where one writes at a time anyway, as into a file, nobody waits longer by that, and a submission
costs half. A database server takes submissions side by side; there each goes on its own, so that
nobody waits for the lock of somebody else's customer.
"""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from fairturn.errors import StoreError, StoreUnavailable
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
        taken: list[_Waiting] = []
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
            # In the same step as the last look at who waits: whoever comes next begins anew.
            self._handing_over = None
            self._let_go(taken)

    def _let_go(self, taken: list[_Waiting]) -> None:
        """Leave nobody waiting for a task that was stopped, or has failed."""
        left, self._waiting = [*taken, *self._waiting], []
        for each in left:
            if not each.answer.done():  # whether it was stored is not known
                each.answer.set_exception(StoreUnavailable("handing over documents was stopped"))

    def _submit_all(self, prepares: list[Prepare]) -> list[Receipt | Exception]:
        """In a thread. What one caller did wrong is no matter of the others."""
        answers: dict[int, Receipt | Exception] = {}
        ready: list[tuple[int, Submission]] = []
        for place, prepare in enumerate(prepares):
            try:
                ready.append((place, prepare()))
            except Exception as error:
                answers[place] = error
        self._store_all(ready, answers)
        return [answers[place] for place in range(len(prepares))]

    def _store_all(
        self, ready: list[tuple[int, Submission]], answers: dict[int, Receipt | Exception]
    ) -> None:
        """Store them together. If one is refused none is stored; halves find out which it was, so
        that somebody who is always refused does not make all others be stored one by one."""
        if not ready:
            return
        try:
            receipts = self._store([submission for _, submission in ready])
        except Exception as error:
            # After an error of the store nobody knows whether they were stored.
            if len(ready) > 1 and not isinstance(error, StoreError):
                half = len(ready) // 2
                self._store_all(ready[:half], answers)
                self._store_all(ready[half:], answers)
            else:
                answers.update((place, error) for place, _ in ready)
        else:
            places = (place for place, _ in ready)
            answers.update(zip(places, receipts, strict=True))

    def _submit_one(self, prepare: Prepare) -> Receipt:
        (receipt,) = self._store([prepare()])
        return receipt

    def _store(self, submissions: list[Submission]) -> list[Receipt]:
        with refusing_misuse(), refusing_parents(), refusing_without_a_place():
            return self._service.queue.submit_many(submissions)
