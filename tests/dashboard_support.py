"""Helpers for tests of the dashboard: Chromium, traffic and pictures.

`python tests/dashboard_pictures.py docs/images` takes the pictures for the documentation.
"""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from server_support import ServerProcess

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DESKTOP, PHONE = (1280, 900), (360, 780)
LOOKS = {
    f"{place}-{scheme}": {"viewport": {"width": width, "height": height}, "color_scheme": scheme}
    for place, (width, height) in {"desktop": DESKTOP, "phone": PHONE}.items()
    for scheme in ("light", "dark")
}
"""Picture name -> options of a browser context."""


@contextmanager
def chromium() -> Iterator[Any]:
    """Start the installed Chromium, and close it at the end of the `with` block."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def random_texts(num: int, num_chars: int, seed: int = 3) -> list[str]:
    """Return `num` different texts of about `num_chars` characters each."""
    words = ["river", "stone", "lamp", "paper", "winter", "harbour", "silver", "garden", "window", "letter"]
    dice = random.Random(seed)
    # a word and a space have 6.6 characters on average, so the texts are about 10% longer than `num_chars`
    return [f"Text {i}: " + " ".join(dice.choices(words, k=num_chars // 6)) for i in range(num)]


class Traffic:
    """Clients that send prompts until the `with` block ends.

    Each prompt contains one of the texts. The first texts are the most frequent.
    """

    def __init__(self, server: ServerProcess, texts: Sequence[str], *, clients: int = 3, max_tokens: int = 12) -> None:
        self._server = server
        self._texts = texts
        self._max_tokens = max_tokens
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._play, args=(seed,)) for seed in range(clients)]
        self.failures: list[str] = []

    def _play(self, seed: int) -> None:
        dice = random.Random(seed)
        while not self._stop.wait(dice.random() * 0.3):
            place = min(int(dice.expovariate(3 / len(self._texts))), len(self._texts) - 1)
            question = f"{self._texts[place]}\nWhat comes {dice.choice(['first', 'last', 'next'])}? {dice.random()}"
            body = {"model": self._server.model, "messages": [{"role": "user", "content": question}]}
            answer = self._server.post("/v1/chat/completions", {**body, "max_tokens": self._max_tokens})
            if answer.status_code != 200:
                self.failures.append(answer.text)

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def hide(page: Any, is_hidden: bool) -> None:
    """Simulate that the tab of the page moves to the background, or to the foreground if `is_hidden` is False."""
    page.evaluate(
        """(is) => {
            Object.defineProperty(document, "hidden", { value: is, configurable: true });
            document.dispatchEvent(new Event("visibilitychange"));
        }""",
        is_hidden,
    )


def take_picture(page: Any, path: Path, max_height: int = 1300) -> None:
    """Save a picture of the page down to the third row of recent requests, at most `max_height` pixels high."""
    hide(page, True)  # stops the updates
    row = page.locator("#recent tbody tr").nth(2).bounding_box()
    assert row is not None, "there is no third request"
    height = min(max_height, row["y"] + row["height"] + page.evaluate("scrollY"))
    clip = {"x": 0, "y": 0, "width": page.viewport_size["width"], "height": height}
    page.screenshot(path=path, full_page=True, clip=clip)
    hide(page, False)
