"""The HTML report in an offline browser: plots equal the JSON result, no errors, keyboard access and dark mode."""

from __future__ import annotations

import json
import shutil

import pytest

from kvtier.cli import main
from kvtier.replay import SyntheticTrace, generate
from trace_support import write_trace

GIB = 1 << 30
MODEL = {"layers": 4, "heads": 8, "kv_heads": 2, "head_dim": 64, "params": 1e9, "kv_bytes": 64.0}
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (apt-get install chromium)")


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Run `kvtier replay` and `kvtier plan`. Return the path of the HTML page and the JSON result of each command."""
    folder = tmp_path_factory.mktemp("reports")
    # the report must show the name of the trace as text, not as an HTML element <t>
    write_trace(generate(SyntheticTrace(sessions=25, seed=3)), folder / "<t>.jsonl")
    (folder / "model.json").write_text(json.dumps(MODEL))
    common = [str(folder / "<t>.jsonl"), "--model", str(folder / "model.json"), "--device", "4GiB", "--jobs", "1"]
    reports = {}
    for name, options in {
        "replay": ["--host", "4GiB", "--disk", "64GiB", "--policy", "lru,arc,s3fifo", "--capacities", "8"],
        "plan": ["--ttft-p99", "500ms", "--limit", "60"],
    }.items():
        with pytest.MonkeyPatch.context() as patch:
            printed: list[str] = []
            patch.setattr("builtins.print", lambda *what, to=printed, **_: to.append(str(what[0])))
            page = folder / f"{name}.html"
            assert main([name, *common, *options, "--json", "--html", str(page)]) == 0
        reports[name] = page, json.loads(printed[-1])
    return reports


@pytest.fixture
def opened(browser, reports):
    """Return a function that opens a report offline. A page must log nothing, raise no errors and load only files."""
    contexts, errors, urls = [], [], []

    def open_page(name: str, **options):
        context = browser.new_context(offline=True, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: errors.append(message.text))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: urls.append(request.url))
        path, result = reports[name]
        page.goto(path.as_uri())
        return page, result

    yield open_page
    for context in contexts:
        context.close()
    assert errors == []
    assert all(url.startswith("file:") for url in urls), urls


def marks(page, chart: str) -> dict[str, list[tuple[str, float]]]:
    """Return the (x, y) pairs that the page draws for each series."""
    pairs: dict[str, list[tuple[str, float]]] = {}
    for series, x, y in page.eval_on_selector_all(
        f"#chart-{chart} .mark", "all => all.map(m => [m.dataset.series, m.dataset.x, m.dataset.y])"
    ):
        pairs.setdefault(series, []).append((x, float(y)))
    return pairs


def numbers(pairs) -> list[tuple[float, float]]:
    return [(float(x), y) for x, y in pairs]


def test_replay_plots_match_json(opened):
    page, result = opened("replay")
    curve = marks(page, "curve")
    assert list(curve) == ["lru", "arc", "s3fifo", "optimum"]
    for policy, pairs in curve.items():
        expected = [(p["capacity_bytes"] / GIB, p["hit_rate"]) for p in result["curve"] if p["policy"] == policy]
        assert numbers(pairs) == expected
    runs = result["results"]
    tiers = [tier for tier in ("device", "host", "disk") if any(tier in run["hit_rates"] for run in runs)]
    assert {"device", "host"} <= set(tiers)
    assert marks(page, "tiers") == {
        tier: [(run["policy"], run["hit_rates"].get(tier, 0.0)) for run in runs] for tier in tiers
    }
    assert marks(page, "ttft") == {
        share: [(run["policy"], run["ttft"][share]) for run in runs] for share in ("p50", "p90", "p99")
    }
    assert sorted(marks(page, "links")) == ["disk", "to device", "to host"]
    assert json.loads(page.text_content("#json")) == result


def test_plan_plots_match_json(opened):
    page, result = opened("plan")
    without_disk = [run for run in result["results"] if not run["disk_bytes"]]
    ttft = marks(page, "host-ttft")
    for share in ("p50", "p90", "p99"):
        assert numbers(ttft[share]) == [(run["host_bytes"] / GIB, run["ttft"][share]) for run in without_disk]
    assert numbers(marks(page, "host-hits")["host only"]) == [
        (r["host_bytes"] / GIB, r["hit_rate"]) for r in without_disk
    ]
    assert result["advice"]["text"][0] in page.text_content("#intro")
    drawn = sum(len(pairs) for pairs in marks(page, "disk-ttft").values())
    hosts = {run["host_bytes"] for run in result["results"] if run["disk_bytes"]}
    assert drawn == sum(run["host_bytes"] in hosts for run in result["results"]) > 0


@pytest.mark.parametrize("name", ["replay", "plan"])
def test_plot_marks_are_visible_inside_their_frame(opened, name):
    page, _ = opened(name)
    charts = page.query_selector_all("figure svg")
    assert len(charts) >= 3
    for svg in charts:
        frame = svg.bounding_box()
        drawn = [mark.bounding_box() for mark in svg.query_selector_all(".mark")]
        assert drawn
        assert any(box["height"] > 2 for box in drawn)
        for box in drawn:  # a mark on the edge extends beyond the frame by its radius and its outline, at most 6 pixels
            assert frame["x"] - 6 <= box["x"]
            assert box["x"] + box["width"] <= frame["x"] + frame["width"] + 6
            assert frame["y"] - 6 <= box["y"]
            assert box["y"] + box["height"] <= frame["y"] + frame["height"] + 6


def test_report_table_lists_every_run(opened):
    page, result = opened("replay")
    rows = page.eval_on_selector_all(
        "#tables tbody tr", "all => all.map(r => [r.cells[0].textContent, Number(r.cells[1].dataset.value)])"
    )
    assert rows == [[run["policy"], run["hit_rate"]] for run in result["results"]]


def test_report_can_hide_a_series_and_change_the_axis(opened):
    page, _ = opened("replay")
    page.get_by_role("checkbox", name="optimum").uncheck()
    assert list(marks(page, "curve")) == ["lru", "arc", "s3fifo"]
    before = page.eval_on_selector("#chart-curve .mark:nth-of-type(3)", "mark => mark.getAttribute('cx')")
    page.locator("#chart-curve").get_by_label("logarithmic").uncheck()
    assert page.eval_on_selector("#chart-curve .mark:nth-of-type(3)", "mark => mark.getAttribute('cx')") != before


def test_report_marks_are_accessible_by_keyboard(opened):
    page, result = opened("replay")
    page.locator("#chart-ttft .mark").first.focus()
    reading = page.text_content("#chart-ttft .reading")
    assert reading.startswith("lru, p50: ")
    assert reading.endswith(" seconds")
    assert page.get_attribute("#chart-ttft .mark >> nth=0", "aria-label") == reading
    assert page.eval_on_selector_all("svg", "all => all.every(svg => svg.getAttribute('aria-label'))")
    assert page.eval_on_selector_all("input", "all => all.every(input => input.closest('label').textContent.trim())")
    assert page.eval_on_selector_all("table", "all => all.every(table => table.caption.textContent)")
    assert page.get_attribute("html", "lang") == "en"
    assert "<t>.jsonl" in page.title()
    assert result["trace"]["files"][0].endswith("<t>.jsonl")


def test_report_supports_dark_mode_and_narrow_screens(opened):
    backgrounds = set()
    for scheme in ("light", "dark"):
        page, _ = opened("plan", color_scheme=scheme, viewport={"width": 400, "height": 800})
        backgrounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
    assert len(backgrounds) == 2
