"""Every gap of the ancestors has a test, and docs/gaps.md names it."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
GAPS = (ROOT / "docs" / "gaps.md").read_text()
FASTDEPLOY = GAPS.partition("## FastDeploy")[2].partition("## kvtier's own")[0]


def defined() -> set[str]:
    return {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)\(", path.read_text())
    }


def test_every_test_that_closes_a_gap_is_there():
    named = set(re.findall(r"`(test_\w+)`", GAPS))
    assert len(named) > 90
    assert sorted(named - defined()) == []


def test_every_gap_of_fastdeploy_has_a_row_with_a_test():
    rows = {
        match[1]: match[2] for match in re.finditer(r"^\| ((?:fix|C) ?\d+) \|.*\| (.*) \|$", FASTDEPLOY, re.MULTILINE)
    }
    assert list(rows) == [f"fix {n}" for n in range(1, 30)] + [f"C{n}" for n in range(1, 18)]
    assert [name for name, here in rows.items() if not re.search(r"`test_\w+`|`make check`", here)] == []


def test_every_test_of_a_fastdeploy_defect_is_named():
    named = set(re.findall(r"`(test_\w+)`", FASTDEPLOY))
    for path in (ROOT / "tests" / "pure").rglob("test_fastdeploy_*.py"):
        written = re.findall(r"def (test_\w+)\(", path.read_text())
        assert written
        assert sorted(set(written) - named) == []


def test_every_claim_about_the_tiers_names_a_test_that_is_there():
    text = (ROOT / "docs" / "tiers.md").read_text()
    named = set(re.findall(r"`(test_\w+)`", text))
    assert len(named) > 40
    assert sorted(named - defined()) == []
