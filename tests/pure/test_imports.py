"""The modules that an import of kvtier loads, and the tree of the error classes in kvtier.errors."""

from __future__ import annotations

import builtins
import inspect
import re
import subprocess
import sys

import pytest

from kvtier import errors


def run_python(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def docstring_tree() -> dict[str, set[str]]:
    """Parse the class tree in the docstring of errors.py. Return the names of the base classes by class name."""
    tree: dict[str, set[str]] = {}
    open_branches: list[tuple[int, str]] = []
    for line in errors.__doc__.splitlines():
        match = re.match(r"([│├└─ ]*)(\w+Error)\b(?: \((\w+)\))?", line)
        if match is None:
            continue
        depth, name, builtin = len(match[1]), match[2], match[3]
        while open_branches and open_branches[-1][0] >= depth:
            open_branches.pop()
        parent = open_branches[-1][1] if open_branches else "Exception"
        tree[name] = {parent} | ({builtin} if builtin else set())
        open_branches.append((depth, name))
    return tree


TREE = docstring_tree()


def test_base_modules_can_be_imported_without_torch():
    run_python(
        "import sys; sys.modules['torch'] = None\n"
        "import kvtier, kvtier.dtype, kvtier.errors\n"
        "assert kvtier.__version__ and kvtier.dtype.dtype('bf16').bits == 16"
    )


def test_base_modules_do_not_import_torch():
    run_python("import sys, kvtier, kvtier.dtype, kvtier.errors\nassert 'torch' not in sys.modules")


def test_errors_module_imports_no_third_party_package():
    run_python("import sys, kvtier, kvtier.errors\nassert not {'torch', 'numpy', 'ml_dtypes'} & set(sys.modules)")


def test_errors_docstring_lists_every_exception():
    defined = {name for name, each in vars(errors).items() if inspect.isclass(each) and issubclass(each, Exception)}
    assert defined == set(TREE)
    assert len(TREE) > 10


@pytest.mark.parametrize("name", TREE)
def test_exception_bases_match_docstring_tree(name):
    bases = {getattr(errors, base, None) or getattr(builtins, base) for base in TREE[name]}
    assert set(getattr(errors, name).__bases__) == bases


@pytest.mark.parametrize("name", TREE)
def test_exception_is_kvtier_error_and_keeps_message(name):
    with pytest.raises(errors.KvtierError, match="the message"):
        raise getattr(errors, name)("the message")


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("RangeError", ValueError),  # inherited through ArgumentError
        ("RangeError", IndexError),
        ("DTypeError", TypeError),
        ("ClosedError", RuntimeError),
        ("OutOfMemoryError", MemoryError),
        ("FormatError", ValueError),
    ],
)
def test_exception_is_subclass_of_builtin(name, builtin):
    assert issubclass(getattr(errors, name), builtin)


def test_copy_error_contains_index_of_entry():
    assert errors.CopyError("entry 7", index=7).index == 7
    assert errors.CopyError("entry unknown").index is None
