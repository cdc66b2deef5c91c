"""The front end's process: what it imports, and what it does not."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import kvtier.engine
from kvtier.engine import tokenizer


def test_front_end_imports_without_torch():
    code = (
        "import sys; sys.modules['torch'] = None\nimport kvtier.server.serve\nfrom kvtier.engine import load_tokenizer"
    )
    code += "\nassert load_tokenizer('smollm2').encode('hello')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_engine_lazy_names_match_the_typed_imports():
    told = {}
    for node in ast.walk(ast.parse(Path(kvtier.engine.__file__).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("kvtier."):
            told |= {alias.name: node.module for alias in node.names}
    assert {*told} == {*kvtier.engine.__all__}
    for name, module in told.items():
        assert getattr(kvtier.engine, name) is getattr(sys.modules[module], name)
    assert kvtier.engine.load_tokenizer is tokenizer.load_tokenizer
    assert not hasattr(kvtier.engine, "no_such_name")
