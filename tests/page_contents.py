"""A queue with content for every page, hostile names included."""

import json

from fairturn import Queue
from fairturn.clock import SECOND_US
from fairturn.model import Completed, Failed, Filter, Outcome, Progress, State
from tests.commands import hold

LEASE_US = 3_600 * SECOND_US
_SCRIPT = "window.hacked=1"
HOSTILE = [
    f"<script>{_SCRIPT}</script>",
    f"<img src=x onerror={_SCRIPT}>",
    f"\"><svg onload={_SCRIPT}>",
    f"' onmouseover='{_SCRIPT}' x='",
    f"javascript:{_SCRIPT}",
    "{{ 7 * 7 }}{% raw %}",
    "${7*7} #{7*7} <%= 7*7 %>",
    "</title></textarea></style></script><h1>free",
    "]]><!--",
    "&lt;b&gt;&amp;&#60;",
    "a" * 240,
    "W" * 200,
    "\u202eright to left\u202d",
    "مرحبا بالعالم",
    "\u0301\u0302\u0303" * 30 + "zalgo",
    "👩‍👩‍👧‍👦" * 9,
    "文" * 80,
    "-1", "=cmd|' /C calc'!A0", "+1", "@SUM(A1)",
    "..", "../../etc/passwd", "con", "%2e%2e%2f", "a/b?c=d&e=f#g",
    "null", "undefined", "NaN", "true", "0",
    "line\u2028break", "tab\tin", "new\nline",
    *(f"<b id=x{n}>\"'`{n}</b><script>{_SCRIPT}//{n}</script>" for n in range(66)),
]  # fmt: skip


def fill(queue: Queue, hostile: int = 12) -> dict[str, str]:
    """Submit documents in every state and return the ids of some by description."""
    for number in range(max(48, hostile)):
        name = HOSTILE[number % hostile]
        queue.submit(name, payload={"n": number, "text": name}, name=name, metadata={name: name})
    store = queue.store
    store.sign_on("<i>worker</i>", 40, ["default", "ocr"])
    claimed = store.claim(40, worker="<i>worker</i>", lease_us=LEASE_US).claims
    outcomes: list[Outcome] = []
    for number, claim in enumerate(claimed[:30]):
        if number % 3 == 2:
            outcomes.append(Failed(claim.fence, HOSTILE[number]))
        else:
            result = json.dumps({HOSTILE[number]: HOSTILE[:5]})
            outcomes.append(Completed(claim.fence, result, real_cost=1_000_000))
    store.finish(outcomes)
    running = claimed[30]
    store.renew([running.fence], lease_us=LEASE_US, progress={running.fence: Progress(3, 4)})
    for number in range(40):
        queue.submit("Acme Logistics", payload=number, name=f"scan-{number:04}.pdf")
    queue.submit("Elmira Foods", content=b"%PDF-1.7", name="po-77124.pdf", metadata={"pages": 3})
    found = {
        state.value: store.find(Filter(states=(state,)), size=1).documents[0].id
        for state in (State.WAITING, State.RUNNING, State.COMPLETED, State.DEAD)
    }
    queue.set_customer("paused one", paused=True)
    queue.set_kind("ocr", limit=2)
    queue.set_kind("export", paused=True)
    queue.set_kind("classify")  # which no worker serves
    for kind in ("ocr", "ocr", "export", "classify"):
        queue.submit("Elmira Foods", payload=kind, name=f"{kind}.pdf", kind=kind)
    hold(queue, "<i>ocr</i> " + "x" * 40)
    return found
