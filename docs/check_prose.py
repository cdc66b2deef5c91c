"""Check the wording of comments, docstrings, messages and pages against limits.

python docs/check_prose.py                  print every measure; exit code 1 if one exceeds its limit
python docs/check_prose.py --list PATH...   list the marked texts of these files and folders

A marker is a phrase that rarely occurs in technical English: a component that talks or listens, a wh-clause in place of
a noun, an archaism. A marked text may be correct, so the limits are low and not zero.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

MARKERS = re.compile(
    "|".join(
        [
            r"\b(told|tells?|hear[ds]?|reckon\w*|wish|patience|dearer|beside|meanwhile|anew)\b",
            r"\b(whoever|nobody|somebody)\b",
            r"\b(is|are|was|were) over\b",
            r"\b(is|are|has|have) gone\b",
            r"\b(is|are) fine\b",
            r"(?<!there )\bis no (?!longer\b)[a-z]+",
            r"\b(any|so|once) (more|many)\b(?<!any many)(?<!so more)(?<!once many)",
            r"\b(by and by|for ever|but for|for want of|in vain|under way|to be had|became of|goes for it|of now)\b",
            r"\bon (its|their) way\b",
            r"\blets? go\b",
            r"'s to (say|know|keep|take|change)\b",
            r"\bstands? (there|here|still)\b",
            r"\bas (many|much) as\b.*\bdo(es)?\b",
        ]
    ),
    re.IGNORECASE,
)
OPENERS = re.compile(r"(Whether|What|Why|How|Where|Which|Who|Whose|When)\b")
SHORT_DOCSTRING_WORDS = 4
MAX_TEST_NAME = 60
MAX_COLUMNS = 120


@dataclass(frozen=True)
class Text:
    """A docstring, comment, message or sentence of a page."""

    path: Path
    line: int
    kind: str  # docstring, comment, message or sentence
    words: str

    @property
    def marker(self) -> str | None:
        match = MARKERS.search(self.words)
        return match[0] if match else None


@dataclass(frozen=True)
class Measure:
    """A number that must not exceed `limit`."""

    name: str
    limit: float
    measure: Callable[[], float]


def files(*roots: str, suffixes: tuple[str, ...] = (".py", ".md")) -> list[Path]:
    """Files below these folders of the repository, without the lab notebook."""
    paths = [
        path for root in roots for path in ([ROOT / root] if (ROOT / root).is_file() else (ROOT / root).rglob("*"))
    ]
    return sorted(path for path in paths if path.suffix in suffixes and not path.name.startswith("log"))


def pages() -> list[Path]:
    return files("docs", *(path.name for path in ROOT.glob("*.md")))


@cache
def all_texts(path: Path) -> tuple[Text, ...]:
    return tuple(_sentences(path) if path.suffix == ".md" else _texts_of_python(path))


def texts(path: Path) -> list[Text]:
    """Return the texts of a file that have at least three words."""
    return [text for text in all_texts(path) if len(text.words.split()) >= 3]


def _sentences(path: Path) -> Iterator[Text]:
    in_code = False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code:
            yield from (Text(path, number, "sentence", part) for part in re.split(r"(?<=[.;:|])\s", line))


def _texts_of_python(path: Path) -> Iterator[Text]:
    source = path.read_text()
    docstrings = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(words)) as constant):  # docstring or attribute docstring
                docstrings.add(constant)
                yield Text(path, node.lineno, "docstring", words.strip())
            case ast.Constant(value=str(words)) if node not in docstrings and len(words.split()) >= 4:
                yield Text(path, node.lineno, "message", words.strip())
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith(("# type", "# noqa", "# ----", "#!")):
            yield Text(path, token.start[0], "comment", token.string.lstrip("# "))


def marked_percent(*roots: str) -> float:
    found = [text for path in (files(*roots) if roots else pages()) for text in texts(path)]
    return 100 * sum(text.marker is not None for text in found) / len(found)


def count_openers(*roots: str) -> int:
    return sum(
        text.kind in ("docstring", "comment") and OPENERS.match(text.words) is not None
        for path in files(*roots)
        for text in texts(path)
    )


def count_short_docstrings(*roots: str) -> int:
    return sum(
        text.kind == "docstring" and len(text.words.split()) <= SHORT_DOCSTRING_WORDS
        for path in files(*roots, suffixes=(".py",))
        for text in all_texts(path)
    )


def count_long_test_names() -> int:
    names = [name for path in files("tests") for name in re.findall(r"def (test_\w+)", path.read_text())]
    return sum(len(name) > MAX_TEST_NAME for name in names)


def count_long_lines() -> int:
    lines = [line for path in pages() if path.suffix == ".md" for line in path.read_text().splitlines()]
    return sum(len(line) > MAX_COLUMNS for line in lines)


MEASURES = (
    Measure("marked texts in src, %", 1.0, lambda: marked_percent("src")),
    Measure("marked texts in tests, %", 1.0, lambda: marked_percent("tests")),
    Measure("marked texts in benchmarks, %", 1.0, lambda: marked_percent("benchmarks")),
    Measure("marked texts in pages without the notebook, %", 1.5, marked_percent),
    Measure("texts in src that open with a wh-word", 40, lambda: count_openers("src")),
    Measure("docstrings in src of at most 4 words", 40, lambda: count_short_docstrings("src")),
    Measure("test names of more than 60 characters", 0, count_long_test_names),
    Measure("lines of pages over 120 columns", 0, count_long_lines),
)


def main(arguments: list[str]) -> int:
    write = sys.stdout.write
    if arguments[:1] == ["--list"]:
        for path in files(*arguments[1:]):
            for text in texts(path):
                if text.marker:
                    words = " ".join(text.words.split())[:140]
                    write(f"{path.relative_to(ROOT)}:{text.line}: [{text.marker}] {words}\n")
        return 0
    exceeded = False
    for measure in MEASURES:
        value = measure.measure()
        exceeded |= value > measure.limit
        verdict = "above" if value > measure.limit else "within"
        write(f"{value:7.1f}  {verdict} {measure.limit:g}  {measure.name}\n")
    return int(exceeded)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
