"""These tests need the sources of SGLang: make test-sglang SGLANG=FOLDER."""

from __future__ import annotations

import pytest

from sglang_pools import SNAPSHOT, load_sglang

if SNAPSHOT:
    load_sglang()


class SkippedModule(pytest.Module):
    def collect(self):
        pytest.skip("needs the sources of SGLang: make test-sglang SGLANG=FOLDER")


def pytest_pycollect_makemodule(module_path, parent):
    """Skip every module of this folder if SGLang's sources are missing, because the modules import SGLang."""
    return None if SNAPSHOT else SkippedModule.from_parent(parent, path=module_path)
