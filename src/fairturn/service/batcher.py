"""Group commit of small submissions: one thread, one transaction, one fsync for many requests.

With a single-writer store (SQLite) this halves the cost of a submission and adds no latency.
PostgreSQL accepts submissions concurrently: there each one has its own transaction, so that no
request waits for the row lock of another customer.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from fairturn.errors import NotFound, StoreError, StoreUnavailable
from fairturn.model import Receipt, Submission
from fairturn.queue import Receipts
from fairturn.service.problems import Problem, ProblemCode, refusing_misuse
from fairturn.service.service import Service
from fairturn.service.uploads import refusing_without_a_place

TOGETHER_MAX = 200

Prepare = Callable[[], Submission]  # authenticates and validates; its exception is the response


def submit_documents(service: Service, submissions: Iterable[Submission]) -> Receipts:
    """Submit all of the documents or none. Raises `Problem` if the queue rejects one."""
    with refusing_misuse(), refusing_without_a_place():
        try:
            return service.queue.submit_many(submissions)
        except NotFound as error:  # it can only be the parent
            raise Problem(ProblemCode.PARENT_UNKNOWN) from error


class _PendingSubmission(NamedTuple):
    prepare: Prepare
    answer: asyncio.Future[Receipt]


class SubmissionBatcher:
    """Submits together the documents that arrived while the previous batch was being stored."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._waiting: list[_PendingSubmission] = []
        self._flushing: asyncio.Task[None] | None = None

    async def submit(self, prepare: Prepare) -> Receipt:
        """Return the receipt once the document is durable."""
        if not self._service.queue.single_writer:
            return await self._service.run(self._submit_one, prepare)
        answer: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()
        self._waiting.append(_PendingSubmission(prepare, answer))
        if self._flushing is None:
            self._flushing = asyncio.create_task(self._flush())
        return await answer

    async def _flush(self) -> None:
        batch: list[_PendingSubmission] = []
        try:
            while self._waiting:
                batch = self._waiting[:TOGETHER_MAX]
                del self._waiting[:TOGETHER_MAX]
                prepares = [each.prepare for each in batch]
                answers = await self._service.run(self._submit_all, prepares)
                for each, answer in zip(batch, answers, strict=True):
                    if each.answer.done():
                        continue  # the client has disconnected
                    if isinstance(answer, Receipt):
                        each.answer.set_result(answer)
                    else:
                        each.answer.set_exception(answer)
        finally:
            # No await since the last check of `_waiting`: the next submission starts a new task.
            self._flushing = None
            self._fail_pending(batch)

    def _fail_pending(self, batch: list[_PendingSubmission]) -> None:
        """Fail the requests whose batch was cancelled or failed, so that none waits forever."""
        pending, self._waiting = [*batch, *self._waiting], []
        for each in pending:
            if not each.answer.done():  # the document may have been stored
                each.answer.set_exception(
                    StoreUnavailable("the submission was interrupted; retry with the same key")
                )

    def _submit_all(self, prepares: list[Prepare]) -> list[Receipt | Exception]:
        """Return a receipt or an error for each; one invalid request does not fail the others."""
        prepared: list[Submission | Exception] = []
        for prepare in prepares:
            try:
                prepared.append(prepare())
            except Exception as error:
                prepared.append(error)
        valid = [each for each in prepared if isinstance(each, Submission)]
        stored = iter(self._store_all(valid))
        return [next(stored) if isinstance(each, Submission) else each for each in prepared]

    def _store_all(self, submissions: list[Submission]) -> Sequence[Receipt | Exception]:
        """Store a batch in one transaction. If one document is rejected none is stored: bisect, so
        that one client's rejected documents do not force one transaction per document."""
        try:
            return submit_documents(self._service, submissions)
        except Exception as error:
            # After a store error the documents may have been stored: do not submit them again.
            if len(submissions) <= 1 or isinstance(error, StoreError):
                return [error] * len(submissions)
        half = len(submissions) // 2
        return [*self._store_all(submissions[:half]), *self._store_all(submissions[half:])]

    def _submit_one(self, prepare: Prepare) -> Receipt:
        (receipt,) = submit_documents(self._service, [prepare()])
        return receipt
