"""Take pictures of the dashboard for the documentation. Chromium shows the dashboard of a server under load.

python tests/dashboard_pictures.py docs/images [--model smollm2 --chars 5000] [--seconds 100]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from dashboard_support import LOOKS, Traffic, chromium, random_texts, take_picture
from server_support import ServerProcess
from tiny_model import make_tiny_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", help="default: the tiny model of the tests")
    parser.add_argument("--seconds", type=float, default=100, help="duration of the load before the pictures")
    parser.add_argument("--chars", type=int, default=1300, help="length of each text in the prompts")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = options.model or str(make_tiny_model(folder / "tiny"))
        tiers = ("--blocks", "256", "--host-blocks", "512", "--disk", str(folder / "kv"), "--disk-bytes", "32MiB")
        server = ServerProcess(folder / "log", "--model", model, "--threads", "1", *tiers)
        try:
            _take_all(server, options)
        finally:
            server.stop()


def _take_all(server: ServerProcess, options: argparse.Namespace) -> None:
    with chromium() as browser, Traffic(server, random_texts(16, options.chars)):
        page = browser.new_page()
        page.goto(server.url)
        page.wait_for_timeout(options.seconds * 1000)
        for name, look in LOOKS.items():
            page.set_viewport_size(look["viewport"])
            page.emulate_media(color_scheme=look["color_scheme"])
            take_picture(page, options.folder / f"dashboard-{name}.png")


if __name__ == "__main__":
    main()
