"""Prevent the text of a special token in a message from becoming that token in a chat prompt.

A template renders special tokens ("<|im_start|>") between the strings of a request. The same text inside a string must
not become a special token, because users could then open a turn in another role. `hide` replaces the first character of
such a text with a mark. A mark is a private-use character that templates do not change. `show` restores the character
after the special tokens of the template have been found.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

_LAST_MARK, _NUM_MARKS = 0x10FFFD, 0x1000  # marks are the last characters of the last private-use plane


def show(text: str, marks: Mapping[str, str]) -> str:
    """Replace marks by the original characters.

    A template that uses `tojson(ensure_ascii=true)` writes marks as JSON escapes. The escapes are replaced too.
    """
    for mark, char in marks.items():
        text = text.replace(mark, char).replace(json.dumps(mark)[1:-1], char)
    return text


class SpecialText:
    """Finds the texts of special tokens in strings. Ignores case, because a template can change the case."""

    def __init__(self, tokens: Collection[str]) -> None:
        ordered = sorted(filter(None, tokens), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, ordered)) or r"(?!)", re.IGNORECASE)
        folded = [token.lower() for token in ordered]
        self._prefixes = frozenset(token[:end] for token in folded for end in range(1, len(token)))
        self._longest = max(map(len, folded), default=0)
        self._first = {case for token in ordered for case in (token[0].lower(), token[0].upper())}

    def hide(self, value: Any) -> tuple[Any, Mapping[str, str]] | None:
        """Mark the special tokens in all strings of a JSON value. Return None if there is nothing to mark.

        Otherwise return the changed value, and a map from marks to characters for `show`. The beginning of a special
        token at the end of a string is marked too, because a template may append the rest of the token.
        """
        strings: list[str] = []
        _with_strings(value, strings.append)
        chars = {string[at] for string in strings for at in self._positions(string)}
        if not chars:
            return None
        used = set().union(*strings)
        free = (chr(_LAST_MARK - i) for i in range(_NUM_MARKS) if chr(_LAST_MARK - i) not in used)
        mark_of = dict(zip(sorted(chars), free, strict=False))

        def marked(string: str) -> str:
            letters = list(string)
            for at in self._positions(string):
                letters[at] = mark_of[letters[at]]
            return "".join(letters)

        return _with_strings(value, marked), {mark: char for char, mark in mark_of.items()}

    def _positions(self, string: str) -> list[int]:
        """Return the positions of special tokens, and of trailing text that may become a special token."""
        if not any(char in string for char in self._first):  # a fast test that often saves the slow search below
            return []
        positions = [match.start() for match in self._pattern.finditer(string)]
        end = len(string.rstrip())  # templates may trim strings
        for size in range(1, min(self._longest, end + 1)):
            if string[end - size : end].lower() in self._prefixes:
                positions.append(end - size)
        return positions


def _with_strings(value: Any, change: Callable[[str], Any]) -> Any:
    """Apply `change` to all strings of a JSON value. Return the new value."""
    match value:
        case str():
            return change(value)
        case Mapping():
            return {_with_strings(key, change): _with_strings(inner, change) for key, inner in value.items()}
        case Sequence():
            return [_with_strings(inner, change) for inner in value]
    return value
