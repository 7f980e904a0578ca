"""Asking the service: the steps that an exchange is made of, and when to ask again. Pure."""

import json
from collections.abc import Callable, Generator, Iterator, Mapping
from random import random
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from fairturn.client import problems
from fairturn.client.download import Sink
from fairturn.client.problems import Answer, Broken, Trouble, problem_in
from fairturn.client.values import Me, me_of
from fairturn.clock import SECOND_US
from fairturn.wire import JSON
from fairturn.worker.backoff import Delays, delay_us

T = TypeVar("T")


class Tries(NamedTuple):
    """How often to ask again, and how long to wait before: growing delays, spread by `random`. If
    the service asks for a longer delay, that is used, up to `after_s_max`."""

    most: int = 6
    delays: Delays = Delays(first_s=0.5, factor=2.0, most_s=10.0)
    after_s_max: float = 120.0
    random: Callable[[], float] = random


class Upload(NamedTuple):
    """A body that is sent piece by piece; `pieces` gives them from the beginning."""

    pieces: Callable[[], Iterator[bytes]]
    size_bytes: int | None  # None: nobody knows before it ends
    again: bool = True  # whether it can be read a second time


class Ask(NamedTuple):
    """One request. `said` has the sentence for a code of refusal where only who asks knows it."""

    method: str
    path: str
    query: tuple[tuple[str, str], ...] = ()
    headers: Mapping[str, str] = MappingProxyType({})
    body: bytes | Upload | None = None
    into: Sink | None = None  # where the bytes of a good answer go, instead of into memory
    again: bool = True  # whether the service may get it twice: that does the same as once
    wait_s: float = 0.0  # how long the service may take on top of its usual time
    said: Mapping[str, str] = MappingProxyType({})


def json_ask(method: str, path: str, value: Mapping[str, Any], **said: str) -> Ask:
    """A request with a JSON object."""
    body = json.dumps(value).encode()
    return Ask(method, path, headers={"Content-Type": JSON}, body=body, said=said)


class Pause(NamedTuple):
    """Do nothing for so long."""

    seconds: float


class Work(NamedTuple):
    """Do something that may wait for a disk, where nobody else has to wait for it."""

    do: Callable[[], Any]


Step = Ask | Pause | Work
# What a step gives back: an answer or why there is none, nothing, or what the work gave.
Exchange = Generator[Step, Any, T]


class Asker:
    """Asks one service with one key, and again where that may help."""

    def __init__(self, place: problems.Place, tries: Tries) -> None:
        self.place = place
        self._tries = tries
        self._me: Me | None = None

    def ask(self, ask: Ask) -> Exchange[Answer]:
        """The good answer to a request; every other one is raised as an error."""
        yield from self.me()
        return (yield from self.ask_anybody(ask))

    def me(self) -> Exchange[Me]:
        """Who the key says that I am. It is asked once, before anything else: so that what is wrong
        with the address, the key or the service is told as that, whatever was called."""
        if self._me is None:
            self._me = yield from self.me_now()
        return self._me

    def me_now(self) -> Exchange[Me]:
        """The same, asked again: what waits and runs has changed."""
        answer = yield from self.ask_anybody(Ask("GET", "/v1/me"))
        problems.refuse_old(answer, self.place)
        return me_of(answer.json)

    def ask_anybody(self, ask: Ask) -> Exchange[Answer]:
        """The same for what needs no key."""
        tried = 0
        while True:
            got: Answer | Broken = yield ask
            tried += 1
            after_s = _after_s(ask, got)
            if after_s is None or tried >= self._tries.most or after_s > self._tries.after_s_max:
                return problems.good(got, ask.said, self.place)
            spread = self._tries.random
            yield Pause(delay_us(self._tries.delays, tried, spread, after_s or None) / SECOND_US)


# Answers that say that nothing was done, and those after which that is not sure.
_NOTHING_DONE = ("rate_limited", "too_many_at_once")
_PASSING = ("unavailable", "too_slow", "cut_off")
_OF_GATEWAYS = (502, 503, 504)


def _after_s(ask: Ask, got: Answer | Broken) -> float | None:
    """After how long the same request may do better; None: it will not, or must not be sent."""
    body = ask.body
    if isinstance(body, Upload) and not body.again:
        return None
    if isinstance(got, Broken):
        sent = got.trouble in (Trouble.CUT, Trouble.SLOW)
        passing = got.trouble is Trouble.UNREACHABLE or (sent and ask.again)
        return 0.0 if passing else None
    if got.is_good:
        return None
    code = problem_in(got).get("code")
    nothing_done = code in _NOTHING_DONE
    passing = code in _PASSING or (code is None and got.status in _OF_GATEWAYS)
    if nothing_done or (passing and ask.again):
        return got.retry_after_s
    return None
