"""A real Chromium for tests, and a service with the page."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import FastAPI
from playwright.sync_api import Browser, Dialog, Page, sync_playwright

from fairturn import Queue
from fairturn.clock import Clock
from fairturn.dashboard.language import PageLanguage
from fairturn.dashboard.routes import install
from fairturn.i18n import ENGLISH, Language, load
from fairturn.service.app import make_app
from tests.http_server import TOKEN, served_app
from tests.servers.lifetime import absent

PSEUDO = "zz"


class Pseudo(Language):
    """A language in which translated texts can be distinguished from untranslated ones."""

    def __init__(self) -> None:
        english = load(ENGLISH)
        super().__init__(PSEUDO, english._catalogue)

    def find(self, one: str, many: str | None = None, n: int = 1) -> str:
        """Return the text in brackets, and longer, as in most languages."""
        return f"⟦{super().find(one, many, n)} ~~⟧"


def page_app(queue: Queue, clock: Clock | None = None) -> FastAPI:
    """Return a service with the page, in which the pseudo-language can be chosen."""
    app = make_app(queue, clock=clock, token=TOKEN)
    install(app)
    app.state.page.tongues[PSEUDO] = PageLanguage(Pseudo())
    return app


@contextmanager
def page_served(queue: Queue) -> Iterator[str]:
    """Serve such an application and yield its URL."""
    with served_app(page_app(queue)) as url:
        yield url


def chromium_path() -> str | None:
    """Return the path of the system's Chromium; None if there is none."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


@contextmanager
def browser() -> Iterator[Browser]:
    """Start the system's Chromium."""
    path = chromium_path()
    if path is None:
        absent("there is no Chromium; install it, for example: apt-get install chromium")
    with sync_playwright() as playwright:
        # Root, as in a container, has no sandbox; only our own pages are opened.
        found = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield found
        finally:
            found.close()


def watched(page: Page) -> list[str]:
    """Collect script errors, policy violations and dialogs of a page."""
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
    """Return every text that a reader or a screen reader meets, except elements marked as given."""
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
