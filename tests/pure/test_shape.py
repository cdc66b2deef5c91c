"""Size limits of src, unique class names, imports without cycles, and docstrings of exported names."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SRC = Path(__file__).resolve().parents[2] / "src"
# A commit that adds a capability may raise the next three limits if its message states the reason.
MAX_FILES = 272
MAX_LINES = 49_200
MAX_CLASSES = 572
MAX_FUNCTION_LINES = 60
MAX_P90_FUNCTION_LINES = 20


@cache
def trees() -> dict[str, ast.Module]:
    """Return the syntax tree of each module in src by module name. Names of packages end in `.__init__`."""
    return {
        ".".join(path.relative_to(SRC).with_suffix("").parts): ast.parse(path.read_text())
        for path in sorted(SRC.rglob("*.py"))
    }


def nodes(*kinds: type[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    return ((name, node) for name, tree in trees().items() for node in ast.walk(tree) if isinstance(node, kinds))


def imports(name: str, tree: ast.Module) -> set[str]:
    """Return the modules of src that are imported when module `name` is loaded. Ignore imports under TYPE_CHECKING."""
    known = {module.removesuffix(".__init__") for module in trees()}
    found: set[str] = set()
    todo: list[ast.stmt] = list(tree.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.dump(node.test):
            todo += node.body + node.orelse
        elif isinstance(node, ast.Try):
            todo += node.body + node.orelse + node.finalbody + [s for handler in node.handlers for s in handler.body]
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {each if each in known else node.module for each in whole}
    return (found & known) - {name.removesuffix(".__init__")}


def test_class_names_under_src_are_unique():
    places = defaultdict(list)
    for name, node in nodes(ast.ClassDef):
        places[node.name].append(f"{name}:{node.lineno}")
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_src_size_stays_within_limits():
    num_lines = sum(len(path.read_text().splitlines()) for path in SRC.rglob("*.py"))
    num_classes = sum(1 for _ in nodes(ast.ClassDef))
    assert (len(trees()) <= MAX_FILES, num_lines <= MAX_LINES, num_classes <= MAX_CLASSES) == (True, True, True), (
        f"{len(trees())} files, {num_lines} lines, {num_classes} classes; "
        f"the limits are {MAX_FILES}, {MAX_LINES} and {MAX_CLASSES}"
    )


def test_functions_stay_short():
    lengths = Counter(
        {
            f"{name}:{node.lineno} {node.name}": node.end_lineno - node.lineno + 1
            for name, node in nodes(ast.FunctionDef, ast.AsyncFunctionDef)
        }
    )
    assert {where: length for where, length in lengths.items() if length > MAX_FUNCTION_LINES} == {}
    assert sorted(lengths.values())[len(lengths) * 9 // 10] <= MAX_P90_FUNCTION_LINES


def test_imports_have_no_cycle():
    graph = {name.removesuffix(".__init__"): imports(name, tree) for name, tree in trees().items()}
    is_done: dict[str, bool] = {}

    def visit(module: str, path: tuple[str, ...]) -> None:
        if is_done.get(module):
            return
        assert module not in path, " -> ".join((*path[path.index(module) :], module))
        for other in sorted(graph[module]):
            visit(other, (*path, module))
        is_done[module] = True

    for module in graph:
        visit(module, ())


def test_exported_names_have_docstrings():
    """Only the public API needs docstrings. Elsewhere, names and types can suffice."""
    public = {}
    for name, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                public[name.removesuffix(".__init__")] = set(ast.literal_eval(node.value))
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    missing = [
        f"{name}:{node.lineno} {node.name}"
        for name, tree in trees().items()
        for node in tree.body
        if isinstance(node, kinds)
        and any(node.name in names and name.startswith(package) for package, names in public.items())
        and not ast.get_docstring(node)
        and "overload" not in map(ast.unparse, node.decorator_list)
    ]
    assert missing == []
