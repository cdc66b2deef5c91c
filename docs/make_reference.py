"""Generate docs/reference from the docstrings of public names, and the tables of fields in docs/api.md.

Parses the sources; imports only the two modules with the fields, which need no other package.

python docs/make_reference.py            write the pages
python docs/make_reference.py --check    exit code 1 if a page is out of date
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import fill, indent
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "reference"
API = ROOT / "docs" / "api.md"
FIRST_LINE, LAST_LINE = "<!-- table {} of docs/make_reference.py -->\n", "<!-- end of the table -->\n"
ENDPOINTS = {"ct": "both", "c": "chat", "t": "text"}
# Public names are those in __all__, or all definitions of a module without __all__.
CACHE = "config writeback allocation manager admin"
WORKER = "controller layer_waits sharding scrubber store_io"
FIRST = "dtype errors fingerprint layout metrics messages memory state batch index transfer storage events"
PAGES = {
    **{name: (f"kvtier.{name}",) for name in FIRST.split()},
    "cache": tuple(f"kvtier.cache.{name}" for name in CACHE.split()),
    "worker": tuple(f"kvtier.worker.{name}" for name in WORKER.split()),
    "scheduler": ("kvtier.scheduler",),
    "engine": ("kvtier.engine", "kvtier.engine.cache_runtime"),
    "server": ("kvtier.server.config", "kvtier.server.serve", "kvtier.server.load"),
    "replay": ("kvtier.replay",),
}
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Assign | ast.AnnAssign
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def pages() -> dict[str, str]:
    """Return the text of every page by file name."""
    made = {f"{name}.md": page(modules) for name, modules in PAGES.items()}
    first_lines = {name: _doc(_module(modules[0])).splitlines()[0] for name, modules in PAGES.items()}
    lines = [_wrap(f"[`kvtier.{name}`]({name}.md): {line}", "- ", "  ") for name, line in first_lines.items()]
    head = "# Reference\n\nGenerated from the docstrings by `python docs/make_reference.py`.\n\n"
    return made | {"README.md": head + "\n".join(lines) + "\n"}


def page(modules: tuple[str, ...]) -> str:
    """Return the page with the public names of these modules."""
    parts = []
    for module in modules:
        tree = _module(module)
        parts.append(f"# `{module}`\n\n{_doc(tree)}")
        for name in sorted(_public(tree), key=str.lower):
            parts.append(_entry(name, *_definition(module, name)))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def api_page(text: str) -> str:
    """Return docs/api.md with the tables of fields, which replace the lines between two comments each."""
    if str(ROOT / "src") not in sys.path:
        sys.path.insert(0, str(ROOT / "src"))
    from kvtier.server import agent_fields, fields

    tables = {
        "FIELDS": fields.FIELDS,
        "RESPONSES_FIELDS": agent_fields.RESPONSES_FIELDS,
        "MESSAGES_FIELDS": agent_fields.MESSAGES_FIELDS,
    }
    for name, table in tables.items():
        has_places = name == "FIELDS"
        before, first_line, rest = text.partition(FIRST_LINE.format(name))
        after = rest.partition(LAST_LINE)[2]
        text = before + first_line + "\n".join(_field_rows(table, has_places)) + "\n" + LAST_LINE + after
    return text


def _field_rows(table: Mapping[str, Any], has_places: bool) -> Iterator[str]:
    yield f"| field | of |{' endpoints |' if has_places else ''} class | note |"
    yield "|---|---|---|---|" + ("---|" if has_places else "")
    for name, field in table.items():
        note = field.note
        if field.neutral:
            note += f"; {', '.join(f'`{json.dumps(value)}`' for value in field.neutral)} accepted"
        places = f" {ENDPOINTS[field.places]} |" if has_places else ""
        yield f"| `{name}` | {field.origin} |{places} {field.kind} | {note} |"


def _entry(name: str, node: Definition, doc: str) -> str:
    if isinstance(node, FUNCTIONS):
        return f"## `{name}`\n\n{_wrap(_call(name, node), '    ', '        ')}\n\n{doc}"
    if isinstance(node, ast.ClassDef):
        bases = f"({', '.join(map(ast.unparse, node.bases))})" if node.bases else ""
        return f"## class `{name}{bases}`\n\n{doc}\n\n{_members(node)}"
    return f"## `{name}`\n\n{doc or _wrap(f'`{ast.unparse(node)[:200]}`', '', '')}"


def _members(node: ast.ClassDef) -> str:
    """Public fields and methods, in source order."""
    lines = []
    for field, doc in _documented(node.body):
        if not _target(field).startswith("_"):
            lines.append(_item(ast.unparse(field), doc))
    for each in node.body:
        if not isinstance(each, FUNCTIONS) or (each.name.startswith("_") and each.name != "__init__"):
            continue
        shown = node.name if each.name == "__init__" else each.name
        is_property = any(ast.unparse(d) in ("property", "cached_property") for d in each.decorator_list)
        lines.append(_item(_call(shown, each, is_property=is_property), _doc(each)))
    return "\n".join(lines)


def _documented(body: list[ast.stmt]) -> Iterator[tuple[ast.AnnAssign | ast.Assign, str]]:
    """Yield fields, each with the string that follows it."""
    for number, each in enumerate(body):
        if isinstance(each, ast.AnnAssign | ast.Assign):
            after = body[number + 1] if number + 1 < len(body) else None
            is_doc = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            yield each, inspect.cleandoc(str(after.value.value)) if is_doc else ""


def _definition(module: str, name: str) -> tuple[Definition, str]:
    """Return the definition of a name and its docstring; follows imports."""
    tree = _module(module)
    for each in tree.body:
        if isinstance(each, (ast.ClassDef, *FUNCTIONS)) and each.name == name:
            return each, _doc(each)
    for field, doc in _documented(tree.body):
        if _target(field) == name:
            return field, doc
    for each in ast.walk(tree):
        if isinstance(each, ast.ImportFrom) and each.module and any(alias.name == name for alias in each.names):
            return _definition(each.module, name)
    raise SystemExit(f"{module} has no {name}")


def _target(field: ast.AnnAssign | ast.Assign) -> str:
    return ast.unparse(field.target if isinstance(field, ast.AnnAssign) else field.targets[0])


def _public(tree: ast.Module) -> list[str]:
    for each in tree.body:
        if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "__all__":
            return list(ast.literal_eval(each.value))
    return [e.name for e in tree.body if isinstance(e, (ast.ClassDef, *FUNCTIONS)) and not e.name.startswith("_")]


def _module(name: str) -> ast.Module:
    path = ROOT / "src" / Path(*name.split("."))
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())


def _call(name: str, node: ast.FunctionDef | ast.AsyncFunctionDef, *, is_property: bool = False) -> str:
    arguments = ast.unparse(node.args).removeprefix("self").removeprefix("cls").lstrip(", ")
    call = name if is_property else f"{name}({arguments})"
    return call + (f" -> {ast.unparse(node.returns)}" if node.returns and name == node.name else "")


def _doc(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return the docstring, with pictures indented as code."""
    parts = (ast.get_docstring(node) or "").split("\n\n")
    drawn = [any(sign in part for sign in ("-->", "──", "<--")) and not part.startswith("    ") for part in parts]
    return "\n\n".join(indent(part, "    ") if d else part for part, d in zip(parts, drawn, strict=True))


def _item(code: str, doc: str) -> str:
    """Format a list item. Pictures and lists in the docstring keep their lines."""
    first, *rest = doc.split("\n\n")
    keeps_lines = any(line.startswith((" ", "- ")) for line in first.splitlines())
    head = f"`{code}`" if keeps_lines or not first else f"`{code}`: {' '.join(first.split())}"
    parts = [_wrap(head, "- ", "  "), *(indent(part, "  ") for part in ([first] if keeps_lines else []) + rest)]
    return "\n".join(parts)


def _wrap(text: str, first: str, rest: str) -> str:
    width = 120
    return fill(
        text, width, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )


def main() -> int:
    FOLDER.mkdir(exist_ok=True)
    made = pages()
    there = {path.name: path.read_text() for path in FOLDER.glob("*.md")}
    page_text = API.read_text()
    if "--check" in sys.argv[1:]:
        stale = sorted(name for name in {*made, *there} if made.get(name) != there.get(name))
        stale += [API.name] if api_page(page_text) != page_text else []
        if stale:
            sys.stderr.write(f"docs is out of date ({', '.join(stale)}): python docs/make_reference.py\n")
        return bool(stale)
    for name in {*there} - {*made}:
        (FOLDER / name).unlink()
    for name, text in made.items():
        (FOLDER / name).write_text(text)
    API.write_text(api_page(page_text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
