"""The dashboard: one page put together from the files in static/, with headers that let in nothing else."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from starlette.responses import Response

_STATIC = Path(__file__).parent / "static"
_SCRIPTS = ("format.js", "history.js", "charts.js", "panels.js", "page.js")


def load_page() -> Response:
    """The page and its headers, to be given as often as it is asked for.

    The policy names the hash of the one script and the one style there is: what found its way into the page otherwise
    does not run, and the page talks to this server only.
    """
    style = (_STATIC / "dashboard.css").read_text()
    script = "\n".join((_STATIC / name).read_text() for name in _SCRIPTS)
    page = (_STATIC / "dashboard.html").read_text().replace("@STYLE@", style).replace("@SCRIPT@", script)
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    )
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return Response(page, media_type="text/html", headers=headers)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
