"""The front-end process runs without torch. In kvtier.engine, names that need torch are imported on first use."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import kvtier.engine
from kvtier.engine import tokenizer


def test_front_end_can_be_imported_without_torch():
    code = (
        "import sys; sys.modules['torch'] = None\nimport kvtier.server.serve\nfrom kvtier.engine import load_tokenizer"
    )
    code += "\nassert load_tokenizer('smollm2').encode('hello')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_imported_names_of_engine_equal_its_public_names():
    modules = {}
    for node in ast.walk(ast.parse(Path(kvtier.engine.__file__).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("kvtier."):
            modules |= {alias.name: node.module for alias in node.names}
    assert {*modules} == {*kvtier.engine.__all__}
    for name, module in modules.items():
        assert getattr(kvtier.engine, name) is getattr(sys.modules[module], name)
    assert kvtier.engine.load_tokenizer is tokenizer.load_tokenizer
    assert not hasattr(kvtier.engine, "no_such_name")
