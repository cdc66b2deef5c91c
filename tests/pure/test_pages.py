"""Links, commands and headings in CONTRIBUTING.md, CHANGELOG.md and the decision records are valid.

No tracked file contains a path that matches OUTSIDE, a pattern for two folders outside the repository.
"""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DECISIONS = ROOT / "docs" / "decisions"
RECORDS = sorted(DECISIONS.glob("0*.md"))
PAGES = [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *DECISIONS.glob("*.md")]
# The pattern is written in parts, so that it does not match this file.
OUTSIDE = re.compile(r"\.\./" + r"shared|seeds" + r"/")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_targets_of_links_exist(page):
    links = re.findall(r"\]\((?!https?://)([^)#\s]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_make_targets_in_contributing_page_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    mentioned = set(re.findall(r"`make ([a-z-]+)", (ROOT / "CONTRIBUTING.md").read_text()))
    assert {"venv", "check", "test", "bench"} <= mentioned <= targets


def test_paths_in_contributing_page_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    paths = re.findall(r"`((?:docs|tests|benchmarks)/[\w./-]+)`|pytest ([\w./]+) ", text)
    assert [path for pair in paths for path in pair if path and not (ROOT / path).exists()] == []


def test_decision_records_are_numbered_and_listed():
    assert [int(path.name[:4]) for path in RECORDS] == list(range(1, len(RECORDS) + 1))
    index = (DECISIONS / "README.md").read_text()
    listed = re.findall(r"^\| \[(\d+)\]\((.*?)\) \|", index, re.MULTILINE)
    assert listed == [(str(int(path.name[:4])), path.name) for path in RECORDS]


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.name)
def test_decision_record_has_required_parts(path):
    text = path.read_text()
    assert text.startswith(f"# {int(path.name[:4])}. ")
    assert re.search(r"^Status: (accepted|superseded by \d+), \d{4}-\d\d-\d\d\.$", text, re.MULTILINE)
    headings = re.findall(r"^## (\w+)$", text, re.MULTILINE)
    assert headings[:3] == ["Context", "Decision", "Consequences"]
    assert headings[3:] in ([], ["Figures"])
    assert len(text.splitlines()) <= 50


def test_changelog_has_unreleased_and_dated_headings():
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert all(re.fullmatch(r"\d+\.\d+\.\d+ - \d{4}-\d\d-\d\d", heading) for heading in headings[1:])


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a git checkout")
def test_no_file_refers_to_paths_outside_repository():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    paths = [ROOT / name for name in listed.decode().split("\0") if name]
    texts = [(path, path.read_bytes().decode(errors="replace")) for path in paths if path.is_file()]
    assert texts
    assert [str(path.relative_to(ROOT)) for path, text in texts if OUTSIDE.search(text)] == []
