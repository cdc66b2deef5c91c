"""Open the dashboard of a real server in Chromium. The page must show the state of the server and be accessible."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import signal
import uuid
from html.parser import HTMLParser

import httpx
import pytest

from dashboard_support import CHROMIUM, LOOKS, Traffic, chromium, hide, random_texts, take_picture
from server_support import ServerProcess
from support import stop_process

sync_api = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
expect = sync_api.expect
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")
USER, ADMIN = "user-key-of-the-test", "admin-key-of-the-test"
WAIT = 20_000  # milliseconds, much longer than the polling interval of one second, in case the machine is busy


@pytest.fixture(scope="module")
def tiered(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("dashboard")
    tiers = ("--blocks", "128", "--host-blocks", "384", "--disk", str(folder / "kv"), "--disk-bytes", "32MiB")
    process = ServerProcess(folder / "log", "--model", str(tiny_model), "--threads", "1", "--always-load", *tiers)
    yield process
    assert process.stop() == 0
    assert "Traceback" not in process.log, process.log


@pytest.fixture(scope="module")
def browser():
    with chromium() as running:
        yield running


@pytest.fixture
def opened(browser):
    """Yield a function that opens a page. The page must request only /, /state and data URLs, and must raise no error.

    Without `may_log`, the page must log no messages either.
    """
    contexts, messages, requested = [], [], []

    def open_page(url, *, may_log=False, **options):
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        if not may_log:
            page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.on("request", lambda request: requested.append(request.url))
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert messages == []
    assert {re.sub(r"^http://127.0.0.1:\d+", "", url) for url in requested if not url.startswith("data:")} <= {
        "/",
        "/state",
    }


def serious_violations(page):
    """Return the serious and critical accessibility violations that axe finds."""
    from axe_playwright_python.sync_playwright import Axe

    violations = Axe().run(page).response["violations"]
    return [(rule["id"], rule["nodes"][0]["html"]) for rule in violations if rule["impact"] in ("serious", "critical")]


def wait_until_serving(page):
    expect(page.locator("#status")).to_have_text("Serving", timeout=WAIT)
    return page


def chat(server, content, **more):
    body = {"model": server.model, "messages": [{"role": "user", "content": content}], "max_tokens": 2, **more}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text


def new_text(num_chars=300):
    return random_texts(1, num_chars, seed=uuid.uuid4().int)[0]


# ---- the page itself ----


class _Parts(HTMLParser):
    """Collects the scripts, styles, references and inline attributes of a page."""

    def __init__(self):
        super().__init__()
        self.texts, self.references, self.inline, self._within = {"script": [], "style": []}, [], [], ""

    def handle_starttag(self, tag, attrs):
        self._within = tag if tag in self.texts else ""
        self.references += [value for name, value in attrs if name in ("src", "href", "action", "srcset")]
        self.inline += [name for name, _ in attrs if name == "style" or name.startswith("on")]

    def handle_data(self, data):
        if self._within:
            self.texts[self._within].append(data)

    def handle_endtag(self, _tag):
        self._within = ""


def test_dashboard_csp_allows_only_its_own_script_and_style(tiered):
    answer = tiered.get("/")
    parts = _Parts()
    parts.feed(answer.text)
    policy = dict(each.strip().split(" ", 1) for each in answer.headers["content-security-policy"].split(";"))
    for kind in ("script", "style"):
        (text,) = parts.texts[kind]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy[f"{kind}-src"] == f"'sha256-{digest}'"
    assert (policy["default-src"], policy["connect-src"], policy["frame-ancestors"]) == ("'none'", "'self'", "'none'")
    assert "unsafe" not in str(policy)
    assert all(reference.startswith(("data:", "#")) for reference in parts.references)
    assert parts.inline == []
    assert answer.headers["x-content-type-options"] == "nosniff"


# ---- numbers ----


@needs_browser
def test_dashboard_numbers_follow_the_traffic(tiered, opened):
    tiered.post("/control/reset", {"clear_stores": True})
    page = wait_until_serving(opened(tiered.url))
    device = page.locator("[data-tier=device]")
    expect(device).to_contain_text("0 of 128 blocks 0 %", timeout=WAIT)
    text = new_text()
    for _ in range(3):
        chat(tiered, text)
    state = tiered.state()
    newest = state["recent"][0]
    row = page.locator("#recent tbody tr").first
    expect(row).to_contain_text(newest["id"], timeout=WAIT)
    for name, tokens in newest["tokens_from"].items():
        expect(row).to_contain_text(f"{name} {tokens}")
    expect(row.locator(".why")).to_have_text(newest["explanation"])
    expect(row.locator("[data-name=prompt]")).to_have_text(str(newest["prompt_tokens"]))
    used = state["tiers"][0]["num_used"]
    assert used > 0
    expect(device).to_contain_text(f"{used} of 128 blocks {round(used / 128 * 100)} %", timeout=WAIT)
    expect(device.get_by_role("meter")).to_have_attribute("aria-valuenow", str(round(used / 128 * 100)))
    expect(page.locator("#p50")).to_have_attribute("data-text", re.compile(r"^[\d.]+ (ms|s)$"))
    expect(page.locator("#hits-empty")).to_be_hidden()
    assert page.locator("#hits rect").count() > 0
    share = page.locator("#hits").get_attribute("aria-label")
    assert re.search(r"device \d+ %", share), share
    expect(page.locator("[data-way='device → host']")).to_contain_text("in total", timeout=WAIT)

    before = page.locator("#token-note").text_content()
    chat(tiered, new_text())
    expect(page.locator("#token-note")).not_to_have_text(before, timeout=WAIT)
    expect(row).not_to_contain_text(newest["id"])
    tiered.post("/control/reset", {"clear_stores": True})
    expect(device).to_contain_text("0 of 128 blocks 0 %", timeout=WAIT)
    expect(device.get_by_role("meter")).to_have_attribute("aria-valuenow", "0")


@needs_browser
def test_dashboard_counts_running_requests(tiered, opened):
    page = wait_until_serving(opened(tiered.url))
    expect(page.locator("#running")).to_have_text("0", timeout=WAIT)
    # Four long answers do not fit into the device cache together. Some answers must wait for others, so the request
    # runs long enough to appear on the page.
    body = {"model": tiered.model, "prompt": new_text(), "max_tokens": 1500, "n": 4, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{tiered.url}/v1/completions", json=body, timeout=60) as answer:
        assert answer.status_code == 200
        expect(page.locator("#running")).not_to_have_text("0", timeout=WAIT)
    expect(page.locator("#running")).to_have_text("0", timeout=WAIT)
    expect(page.locator("#recent tbody tr").first).to_contain_text("disconnected", timeout=WAIT)


@needs_browser
def test_dashboard_shows_transfer_speed_as_share_of_link_limit(tiered, opened):
    """A server on a CPU has no link limit, so the test adds a limit to the responses of the server."""

    def with_limit(route):
        state = route.fetch().json()
        transfer = {"source": "host", "target": "device", "bytes": 3 << 30, "window_seconds": 5}
        state["transfers"] = [{**transfer, "gb_per_s": 12.5, "limit_gb_per_s": 50.0}]
        route.fulfill(json=state)

    page = opened("about:blank")
    page.route("**/state", with_limit)
    page.goto(tiered.url)
    row = page.locator("[data-way='host → device']")
    expect(row).to_contain_text("12.5 GB/s", timeout=WAIT)
    expect(row).to_contain_text("25 % of 50.0 GB/s · 3.00 GiB in total")
    expect(row.get_by_role("meter")).to_have_attribute("aria-valuenow", "25")
    expect(page.locator("#transfers-note")).to_have_text("Over the last 5 s. ")
    page.unroute_all(behavior="ignoreErrors")


@needs_browser
def test_dashboard_charts_have_tables_and_keyboard_access(tiered, opened):
    texts = random_texts(4, 1400)
    for _ in range(2):
        for text in texts:  # long texts, because the ghost cache has only one mark per 1,021 tokens
            chat(tiered, text)
    page = wait_until_serving(opened(tiered.url, reduced_motion="reduce"))
    expect(page.locator("#ghost-empty")).to_be_hidden(timeout=WAIT)
    chat(tiered, texts[0])
    expect(page.locator("#hits-empty")).to_be_hidden(timeout=WAIT)
    reached = []
    while reached.count("As a table") < 3 and len(reached) < 20:
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.textContent.trim() || document.activeElement.type"))
        if reached[-1] == "As a table":
            assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
            page.keyboard.press("Enter")
    assert reached[:2] == ["Skip to the numbers", "radio"]
    assert reached.count("As a table") == 3
    points = tiered.state()["ghost"]["points"]
    rows = page.locator("#ghost-table tbody tr")
    expect(rows).to_have_count(len(points))
    assert [int(text.split()[0].replace(",", "")) for text in rows.locator("td:first-child").all_text_contents()] == [
        point["num_blocks"] for point in points
    ]
    expect(rows.locator("text=(now)")).to_have_count(1)
    assert page.locator("#hits-table tbody tr").count() > 0
    assert page.locator("#ttft-table tbody tr").count() > 0
    assert page.evaluate("getComputedStyle(document.querySelector('.bar i')).transitionDuration") == "0s"
    assert serious_violations(page) == []


# ---- server status ----


@needs_browser
def test_dashboard_shows_asleep_slow_and_offline_status(tiered, opened):
    page = wait_until_serving(opened(tiered.url, may_log=True))
    status, notice = page.locator("#status"), page.get_by_role("status")
    try:
        tiered.post("/control/sleep")
        expect(status).to_have_text("Asleep", timeout=WAIT)
        expect(notice).to_contain_text("until POST /control/wake")
    finally:
        tiered.post("/control/wake")
    wait_until_serving(page)
    expect(notice).to_be_empty()
    stop_process(tiered.engine_pid)  # the engine does not reply, as during a long step
    try:
        expect(status).to_have_text("Slow", timeout=WAIT)
        expect(notice).to_contain_text(re.compile(r"The data shown is from \d\d:\d\d:\d\d"))
    finally:
        os.kill(tiered.engine_pid, signal.SIGCONT)
    wait_until_serving(page)
    page.context.set_offline(True)
    expect(status).to_have_text("No answer", timeout=WAIT)
    expect(notice).to_contain_text(re.compile(r"The data shown is from \d\d:\d\d:\d\d"))
    expect(page.locator("[data-tier=host]")).to_contain_text("of 384 blocks")
    assert serious_violations(page) == []
    page.context.set_offline(False)
    wait_until_serving(page)
    # simulate this response, because a real server sends it only for a moment before it exits
    broken = {"error": {"message": "the engine has ended; the server is shutting down"}}
    page.route("**/state", lambda route: route.fulfill(status=503, json=broken))
    expect(status).to_have_text("Failing", timeout=WAIT)
    expect(notice).to_have_text("The server returned 503: the engine has ended; the server is shutting down")


@needs_browser
def test_hidden_dashboard_sends_no_requests(tiered, opened):
    page = opened("about:blank")
    page.clock.install()
    requested = []
    page.on("request", lambda request: requested.append(request.url))
    page.goto(tiered.url)
    wait_until_serving(page)
    hide(page, True)
    before = len(requested)
    page.clock.run_for(60_000)
    assert len(requested) == before
    with page.expect_request(f"{tiered.url}/state"):
        hide(page, False)


@needs_browser
def test_dashboard_stores_the_key_in_the_tab_only(start, opened):
    name = "<img src=x onerror=alert(1)>"  # shown as text, not as HTML
    server = start("--name", name, env={"KVTIER_API_KEY": USER, "KVTIER_ADMIN_KEY": ADMIN})
    page = opened(server.url, may_log=True)
    field, notice = page.get_by_label("Admin key"), page.get_by_role("status")
    expect(field).to_be_visible(timeout=WAIT)
    assert serious_violations(page) == []
    for key, answer in (("wrong", "rejected this key"), (USER, "not an admin key")):
        field.fill(key)
        field.press("Enter")
        expect(notice).to_contain_text(answer, timeout=WAIT)
        assert page.evaluate("sessionStorage.length") == 0
    field.fill(ADMIN)
    page.get_by_role("button", name="Show the dashboard").click()
    wait_until_serving(page)
    expect(field).to_be_hidden()
    expect(page.locator("#model")).to_have_text(name)
    expect(page.locator("#recent-empty")).to_be_visible()
    expect(page.locator("#transfers-empty")).to_be_visible()
    expect(page.locator("#ghost-empty")).to_be_visible()
    assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
    assert ADMIN not in page.content()
    page.reload()
    wait_until_serving(page)
    page.get_by_role("button", name="Forget key").click()
    expect(field).to_be_visible(timeout=WAIT)
    field.fill(ADMIN)
    field.press("Enter")
    wait_until_serving(page)
    assert server.stop() == 0
    expect(page.locator("#status")).to_have_text("No answer", timeout=WAIT)


# ---- accessibility ----


@needs_browser
def test_dashboard_fits_phone_and_desktop_in_both_themes(tiered, opened, tmp_path):
    page = opened(tiered.url)
    with Traffic(tiered, random_texts(6, 1300)) as traffic:
        expect(page.locator("#recent tbody tr")).to_have_count(12, timeout=WAIT)
        expect(page.locator("[data-way='device → host']")).to_contain_text("in total", timeout=WAIT)
    assert traffic.failures == []
    backgrounds = set()
    for name, look in LOOKS.items():
        page.set_viewport_size(look["viewport"])
        page.emulate_media(color_scheme=look["color_scheme"])
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        assert serious_violations(page) == []
        backgrounds.add((look["color_scheme"], page.evaluate("getComputedStyle(document.body).backgroundColor")))
        picture = tmp_path / f"dashboard-{name}.png"
        take_picture(page, picture)
        assert picture.stat().st_size > 10_000
    assert len(backgrounds) == 2
