"""The mutations of benchmarks.mutate: small changes to a module, one at a time."""

from __future__ import annotations

import ast
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMPARE = {
    ast.Eq: ("==", ["!="]),
    ast.NotEq: ("!=", ["=="]),
    ast.Lt: ("<", ["<=", ">="]),
    ast.LtE: ("<=", ["<", ">"]),
    ast.Gt: (">", [">=", "<="]),
    ast.GtE: (">=", [">", "<"]),
    ast.Is: ("is", ["is not"]),
    ast.IsNot: (r"is\s+not", ["is"]),
    ast.In: ("in", ["not in"]),
    ast.NotIn: (r"not\s+in", ["in"]),
}
ARITHMETIC = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "//"),
    ast.FloorDiv: ("//", "*"),
    ast.Div: ("/", "*"),
    ast.Mod: ("%", "//"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
}
SWAPPED = {"min": "max", "max": "min", "any": "all", "all": "any", "minimum": "maximum", "maximum": "minimum"}


@dataclass(frozen=True)
class Mutant:
    """One mutation. It is identified by the text of its line, so that line numbers may change."""

    file: str
    function: str
    number: int
    line: str
    becomes: str
    source: bytes

    @property
    def key(self) -> tuple[str, str, str]:
        """The identification in the list of equivalent mutants."""
        return self.file, self.line, self.becomes

    def rank(self, seed: int) -> bytes:
        """A random order that does not depend on the rest of the file."""
        return hashlib.sha256(repr((seed, *self.key)).encode()).digest()


class _Finder(ast.NodeVisitor):
    """Collects replacements. Skips code without behaviour: annotations, decorators, assertions and messages.

    Also skips constants and arithmetic outside functions, which only tune the code."""

    def __init__(self, source: bytes) -> None:
        self.found: dict[tuple[int, int, str], tuple[str, int]] = {}
        self._source = source
        self._starts = [0, *(match.end() for match in re.finditer(b"\n", source))]
        self._scope: list[str] = []
        self._in_function = False

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outer, self._scope, self._in_function = self._in_function, [*self._scope, node.name], True
        for each in node.body:
            self.visit(each)
        self._in_function, self._scope = outer, self._scope[:-1]

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._scope.append(node.name)
        for each in node.body:
            self.visit(each)
        self._scope.pop()

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Assert(self, node: ast.Assert) -> None:
        pass

    visit_Raise = visit_JoinedStr = visit_Assert  # type: ignore[assignment]

    def visit_Compare(self, node: ast.Compare) -> None:
        for left, operator, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
            pattern, others = COMPARE[type(operator)]
            for other in others:
                self._between(left, right, pattern, other)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        here, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._between(left, right, here, other)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._replace(node, f"({self._text(node.operand)})")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        text = any(isinstance(each, ast.JoinedStr) or _is_text(each) for each in (node.left, node.right))
        if self._in_function and not text and type(node.op) in ARITHMETIC:
            self._between(node.left, node.right, *map(re.escape, ARITHMETIC[type(node.op)]))
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if type(node.op) in ARITHMETIC:
            self._between(node.target, node.value, *map(re.escape, ARITHMETIC[type(node.op)]))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._replace(node, str(not node.value))
        elif isinstance(node.value, int) and self._in_function:
            self._replace(node, str(node.value + 1))

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg != "strict":  # of zip(): an assertion
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if name in SWAPPED:
            end = self._end(node.func)
            self._add(end - len(name), end, SWAPPED[name], node.func.end_lineno)
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        call = node.value.value if isinstance(node.value, ast.Await) else node.value
        if isinstance(call, ast.Call):
            self._replace(node, "pass")
        self.generic_visit(node)

    def visit_Await(self, node: ast.Await) -> None:
        self._replace(node, self._text(node.value))
        self.generic_visit(node)

    def visit_With(self, node: ast.With) -> None:
        last = node.items[-1]
        if all(each.optional_vars is None and isinstance(each.context_expr, ast.Call) for each in node.items):
            colon = self._source.index(b":", self._end(last.context_expr))
            self._add(self._start(node), colon, "if True", node.lineno)
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is None:
            self._replace(node, "pass")
        elif not (isinstance(node.value, ast.Constant) and node.value.value is None):
            self._replace(node, "return None")
        self.generic_visit(node)

    def visit_Break(self, node: ast.Break) -> None:
        self._replace(node, "continue")

    def visit_Continue(self, node: ast.Continue) -> None:
        self._replace(node, "break")

    def visit_If(self, node: ast.If | ast.While | ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    visit_While = visit_IfExp = visit_If

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for each in node.ifs:
            self._negate(each)
        self.generic_visit(node)

    def _negate(self, test: ast.expr) -> None:
        """Negate conditions that other replacements cannot invert."""
        if not isinstance(test, ast.Compare | ast.Constant) and not _is_not(test):
            self._replace(test, f"not ({self._text(test)})")

    def _between(self, left: ast.AST, right: ast.AST, pattern: str, other: str) -> None:
        begin, end = self._end(left), self._start(right)
        match = re.search(pattern.encode(), self._source[begin:end])
        if match is not None:
            at = begin + match.start()
            self._add(at, begin + match.end(), other.replace("\\", ""), self._source.count(b"\n", 0, at) + 1)

    def _replace(self, node: Any, new: str) -> None:
        self._add(self._start(node), self._end(node), new, node.lineno)

    def _add(self, start: int, end: int, new: str, number: int | None) -> None:
        self.found[start, end, new] = ".".join(self._scope), number or 0

    def _start(self, node: Any) -> int:
        return int(self._starts[node.lineno - 1] + node.col_offset)

    def _end(self, node: Any) -> int:
        return int(self._starts[node.end_lineno - 1] + node.end_col_offset)

    def _text(self, node: Any) -> str:
        return self._source[self._start(node) : self._end(node)].decode()


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_not(node: ast.AST) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)


def find_mutants(root: Path, file: str) -> list[Mutant]:
    """Return every mutant of a file."""
    source = (root / file).read_bytes()
    finder = _Finder(source)
    finder.visit(ast.parse(source))
    mutants = []
    for (start, end, new), (function, number) in sorted(finder.found.items()):
        changed = source[:start] + new.encode() + source[end:]
        line, becomes = (each.split(b"\n")[number - 1].decode().strip() for each in (source, changed))
        mutants.append(Mutant(file, function, number, line, becomes, changed))
    return mutants
