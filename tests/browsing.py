"""A real Chromium for tests, and a service with the page for it to look at."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import FastAPI
from playwright.sync_api import Browser, Dialog, Page, sync_playwright

from fairturn import Queue
from fairturn.clock import Clock
from fairturn.dashboard.language import Tongue
from fairturn.dashboard.routes import install
from fairturn.i18n import ENGLISH, Language, load
from fairturn.service.app import make_app
from tests.servers.keeping import absent
from tests.serving import served_app

PSEUDO = "zz"


class Pseudo(Language):
    """A language in which every text that was translated can be told from one that was not."""

    def __init__(self) -> None:
        english = load(ENGLISH)
        super().__init__(PSEUDO, english._catalogue)

    def find(self, one: str, many: str | None = None, n: int = 1) -> str:
        """The text in brackets, and longer, as most languages are."""
        return f"⟦{super().find(one, many, n)} ~~⟧"


def page_app(queue: Queue, clock: Clock | None = None) -> FastAPI:
    """A service with the page, where the pseudo-language can be chosen too."""
    app = make_app(queue, clock=clock)
    install(app)
    app.state.page.tongues[PSEUDO] = Tongue(Pseudo())
    return app


@contextmanager
def page_served(queue: Queue) -> Iterator[str]:
    """The address of such a service."""
    with served_app(page_app(queue)) as url:
        yield url


def chromium_path() -> str | None:
    """Where the system has Chromium; None if it has not."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


@contextmanager
def browser() -> Iterator[Browser]:
    """Chromium, as the system has it."""
    path = chromium_path()
    if path is None:
        absent("there is no Chromium; install it, for example: apt-get install chromium")
    with sync_playwright() as playwright:
        # Root, as in a container, has no sandbox; only pages of ours are opened.
        found = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield found
        finally:
            found.close()


def watched(page: Page) -> list[str]:
    """What goes wrong on a page: errors of scripts, refusals by the policy, dialogs."""
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(f"error: {error}"))

    def refuse(dialog: Dialog) -> None:
        wrong.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    page.on("dialog", refuse)
    page.on(
        "console",
        lambda said: wrong.append(f"console: {said.text}") if said.type == "error" else None,
    )
    return wrong


def texts_of(page: Page) -> list[str]:
    """Every text that a reader or a screen reader meets, but for what is marked as given."""
    found: list[str] = page.evaluate(READ_TEXTS)
    return found


READ_TEXTS = """() => {
  const texts = [];
  const given = "bdi, code, pre, kbd, time, .chip, .brand, .menu ul, [lang], [data-given]";
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const node = walk.currentNode;
    if (!node.parentElement.closest(given)) texts.push(node.textContent.trim());
  }
  for (const each of document.querySelectorAll("[title], [aria-label], [placeholder]"))
    for (const name of ["title", "aria-label", "placeholder"])
      if (each.hasAttribute(name) && !each.closest("time, [data-given]"))
        texts.push(each.getAttribute(name));
  return texts.filter(Boolean);
}"""
