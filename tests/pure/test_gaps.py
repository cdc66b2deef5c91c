"""Every gap of the ancestor has a test, and docs/gaps.md names it."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_every_test_that_closes_a_gap_is_there():
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "gaps.md").read_text()))
    defined = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)\(", path.read_text())
    }
    assert len(named) > 50
    assert sorted(named - defined) == []
