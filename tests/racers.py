"""The children of `tests/test_races.py`: `python -m tests.racers WHAT`.

They import little, because there are many of them: only the store that they open.
"""

import fcntl
import json
import os
import sys
from pathlib import Path
from random import Random
from typing import Any

from fairturn.clock import SECOND_US, ManualClock
from fairturn.errors import StoreError
from fairturn.model import (
    Completed,
    Failed,
    Fence,
    Filter,
    NewDocument,
    Outcome,
    Receipt,
    Released,
    State,
    Stopped,
)
from tests.servers.places import AnyStore, opened, opener

START = 1_700_000_000 * SECOND_US
LEASE_S = 30
LEASE_US = LEASE_S * SECOND_US


def new(customer: str = "acme", **fields: Any) -> NewDocument:
    return NewDocument(customer, "1", **fields)


def say(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def hear() -> Any:
    return json.loads(sys.stdin.readline())


def open_files() -> None:
    """Open each file when its gate opens, submit one document and print its id."""
    say("ready")
    while (named := hear()) is not None:
        place, gate = named
        open_it = opener(place)
        with Path(gate).open() as shut:
            say("at the gate")
            fcntl.flock(shut, fcntl.LOCK_SH)
        store = open_it()
        (receipt,) = store.submit([new()])
        say([receipt.id, receipt.count])
        store.close()


def started() -> tuple[AnyStore, Random, int]:
    """Return the store, a random generator and the number of documents when all others are
    ready."""
    place, seed, wanted = hear()
    store = opened(place)
    say("ready")
    hear()
    return store, Random(seed), wanted


def submit() -> None:
    """Submit for several customers, alone and in batches, and print the receipts."""
    store, random, documents = started()
    receipts: list[Receipt] = []
    while len(receipts) < documents:
        n = random.choice([1, 1, 1, 7])
        receipts += store.submit([new(random.choice("abc")) for _ in range(n)])
    say(receipts)


def claim() -> None:
    """Claim and end attempts until enough documents are completed, and print each."""
    store, random, wanted = started()
    claimed: list[Fence] = []
    ended: list[tuple[str, Fence]] = []
    outcomes: list[Outcome] = []
    while store.find(Filter(states=(State.COMPLETED,)), size=wanted).documents[wanted - 1 :] == []:
        version = store.version()
        claims, lost, _ = store.claim(
            random.randint(1, 9),
            worker=str(os.getpid()),
            lease_us=600 * SECOND_US,
            outcomes=outcomes,
        )
        assert lost == []
        ended += [(type(outcome).__name__, outcome.fence) for outcome in outcomes]
        claimed += [each.fence for each in claims]
        outcomes = [end(each.fence, random) for each in claims]
        if outcomes and random.random() < 0.5:
            assert store.finish(outcomes) == []
            ended += [(type(outcome).__name__, outcome.fence) for outcome in outcomes]
            outcomes = []
        if not claims:
            store.wait(version, 0.05)
    say([claimed, ended])


def end(fence: Fence, random: Random) -> Outcome:
    outcomes: list[Outcome] = [Completed(fence), Failed(fence, "x", 0), Released(fence)]
    return random.choice([*outcomes, Completed(fence)])


def freeze() -> None:
    """Claim, be frozen by the parent, then try every way to record an outcome."""
    place, real, lease_us = hear()
    store = opened(place) if real else opened(place, clock=ManualClock(START))
    claims = store.claim(5, worker="frozen", lease_us=lease_us).claims
    a, b, c, d, e = (each.fence for each in claims)
    say([a, b, c, d, e])
    hear()
    renewed = store.renew([a, b, c, d, e], lease_us=LEASE_US)
    late: list[Outcome] = [
        Completed(a, "1"),
        Failed(b, "late"),
        Failed(c, "late", 0),
        Released(d),
        Stopped(e),
    ]
    say([renewed.lost, store.finish(late)])


def fork() -> None:
    """Use the store in a forked child and print the result."""
    place = hear()
    store = opened(place)
    (receipt,) = store.submit([new()])
    store.summary()
    read, write = os.pipe()
    if os.fork() == 0:
        answers = []
        for call in (
            lambda: store.submit([new()]),
            lambda: store.claim(1, worker="w", lease_us=LEASE_US),
            lambda: store.renew([], lease_us=LEASE_US),
            lambda: store.finish([]),
            lambda: store.read(receipt.id),
            store.summary,
            store.version,
            store.prune,
        ):
            try:
                call()
                answers.append("nothing")
            except StoreError as error:
                answers.append(str(error))
        store.close()
        os.write(write, json.dumps(answers).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        answers = json.loads(pipe.read())
    os.wait()
    (again,) = store.submit([new()])
    say([answers, [receipt.count, again.count], store.summary().waiting])
    store.close()


CHILDREN = {each.__name__: each for each in (open_files, submit, claim, freeze, fork)}


if __name__ == "__main__":
    CHILDREN[sys.argv[1]]()
