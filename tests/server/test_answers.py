"""AnswerParser splits an answer into content, reasoning and tool calls.

The result does not depend on the pieces in which the text arrives.
"""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.server.answers import AnswerDelta, AnswerParser, AnswerSyntax, TextDelta, syntax_of_template

NAMES = ("search", "read_file")
TAGGED = AnswerSyntax("tagged", NAMES, has_reasoning=True)
BARE = AnswerSyntax("bare", NAMES)
LIST = AnswerSyntax("list", NAMES)
VALUES = (
    {},
    {"q": "weather in Paris"},
    {"q": 'a "quoted" \\ text', "n": 3},
    {"path": "src/{a}/<tool_call>.py", "lines": [1, [2, {"x": None}]]},
    {"text": "</think> </tool_call> }{ ü \n"},
)


def parse(syntax, pieces):
    """Return the content, the reasoning and the calls of a text that arrives in pieces."""
    parser, total = AnswerParser(syntax, "call-"), AnswerDelta()
    for piece in pieces:
        total += parser.feed(piece)
    total += parser.finish()
    calls: list[list[str]] = []
    for call in total.calls:
        if call.id is None:
            calls[call.index][1] += call.arguments
        else:
            assert call.index == len(calls)
            calls.append([call.name, call.arguments])
    return total.content, total.reasoning, calls


def make_answer(random_: random.Random):
    """Return a syntax, an answer in this syntax, and its content, reasoning and calls."""
    form = random_.choice(["tagged", "bare", "list"])
    calls = [(random_.choice(NAMES), random_.choice(VALUES)) for _ in range(random_.randrange(form == "list", 4))]
    key = "parameters" if form == "bare" else "arguments"
    written, expected = [], []
    for name, value in calls:
        text = json.dumps(value, ensure_ascii=random_.random() < 0.5, indent=random_.choice([None, 2]))
        fields = [f'"name": "{name}"', f'"{key}": {text}']
        if random_.random() < 0.3:
            fields.reverse()
        if random_.random() < 0.2:
            fields.insert(random_.randrange(3), '"type": "function"')
        written.append("{" + ", ".join(fields) + "}")
        expected.append([name, text])
    if form == "list":
        return LIST, "[" + ", ".join(written) + "]", ("", "", expected)
    content = random_.choice(["", "Let me look.", "a < b, <tool_cal and {x}"]) if form == "tagged" or not calls else ""
    if form == "bare":
        return BARE, content + "; ".join(written), (content, "", expected)
    reasoning = random_.choice(["", "First, <search>.", "1 < 2 </thin>\nyes"])
    before = f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""
    text = before + content + "".join(f"\n<tool_call>\n{call}\n</tool_call>" for call in written)
    return TAGGED, text, (content, reasoning, expected)


ANSWERS = [make_answer(random.Random(seed)) for seed in range(200)]


@pytest.mark.parametrize("first", range(0, 200, 40))
def test_parser_returns_same_parts_for_every_split(first):
    for syntax, text, expected in ANSWERS[first : first + 40]:
        assert parse(syntax, [text]) == expected, text
        assert parse(syntax, text) == expected, text
        for at in range(len(text)):
            assert parse(syntax, [text[:at], text[at:]]) == expected, (text, at)


@given(st.integers(0, 199), st.lists(st.integers(0, 400), max_size=20))
def test_parser_returns_same_parts_for_random_splits(number, cuts):
    syntax, text, expected = ANSWERS[number]
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    assert parse(syntax, [text[a:b] for a, b in itertools.pairwise(edges)]) == expected


LINES = (Path(__file__).parents[1] / "data" / "answers.jsonl").read_text().strip().split("\n")
RECORDED = [json.loads(line) for line in LINES]
"""Answers of SmolLM2 that tests/data/record_answers.py recorded, each in the pieces that the engine returned."""


def merged(syntax, pieces):
    """Return the parts of an answer in order. Adjacent parts of the same kind are merged."""
    parser, parts = AnswerParser(syntax, "call-"), []
    deltas = [*map(parser.feed, pieces), parser.finish()]
    for part in itertools.chain.from_iterable(delta.parts for delta in deltas):
        if isinstance(part, TextDelta):
            key, text = part.kind, part.text
        else:
            key, text = (part.index, *((part.id, part.name) if part.id else parts[-1][0][1:])), part.arguments
        if parts and parts[-1][0] == key:
            parts[-1][1] += text
        else:
            parts.append([key, text])
    return parts


def test_recordings_cover_all_forms_and_results():
    forms = Counter(record["form"] for record in RECORDED)
    assert (forms.total(), min(forms.values()) >= 24) == (200, True), forms
    assert {*forms} == {"tagged", "bare", "list", "arguments"}
    results = Counter()
    for record in RECORDED:
        content, _, calls = parse(AnswerSyntax(record["form"], tuple(record["tools"])), record["pieces"])
        results[bool(content), min(len(calls), 2)] += 1  # 2 stands for two or more calls
    assert {(True, 0), (False, 1), (True, 1), (False, 2)} <= {*results}, results


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_parser_of_recordings_returns_same_parts_for_every_split(first):
    for record in RECORDED[first : first + 50]:
        for has_reasoning in (False, True) if record["form"] in ("tagged", "bare") else (False,):
            syntax = AnswerSyntax(record["form"], tuple(record["tools"]), has_reasoning=has_reasoning)
            text = "".join(record["pieces"])
            expected = merged(syntax, [text])
            assert merged(syntax, record["pieces"]) == expected
            assert merged(syntax, text) == expected
            for at in range(1, len(text)):
                assert merged(syntax, [text[:at], text[at:]]) == expected, (text, at)


@given(st.integers(0, 199), st.lists(st.integers(0, 400), max_size=20))
def test_parser_of_recordings_ignores_random_splits(number, cuts):
    record = RECORDED[number]
    syntax, text = AnswerSyntax(record["form"], tuple(record["tools"])), "".join(record["pieces"])
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    assert merged(syntax, [text[a:b] for a, b in itertools.pairwise(edges)]) == merged(syntax, [text])


def after(syntax: AnswerSyntax, *pieces: str) -> dict:
    """Return the state and the results of a parser that has received some pieces of a text.

    To make states comparable, bound methods are replaced by their names and lists of texts by the joined text.
    """
    parser, total = AnswerParser(syntax, "call-"), AnswerDelta()
    for piece in pieces:
        total += parser.feed(piece)

    def plain(value):
        if hasattr(value, "__func__"):
            return value.__name__
        return "".join(value) if isinstance(value, list) else value

    own, scanner = vars(parser), vars(parser._scanner)
    state = {name: plain(value) for name, value in own.items() if name not in ("_scanner", "_parts")}
    state |= {f"scanner.{name}": plain(value) for name, value in scanner.items()}
    calls = "".join(f"{call.id}{call.name}" * (call.id is not None) + call.arguments for call in total.calls)
    return state | {"content": total.content, "reasoning": total.reasoning, "calls": calls}


SHORT = [record for record in RECORDED if len("".join(record["pieces"])) <= 120]


def test_short_recordings_cover_all_forms():
    assert {record["form"] for record in SHORT} == {"tagged", "bare", "list", "arguments"}


@pytest.mark.parametrize("first", range(0, len(SHORT), 20))
def test_state_of_parser_depends_only_on_the_text_so_far(first):
    """A parser that receives a text in two pieces reaches the same state as with the whole text.

    By induction, the same is true for any number of pieces.
    """
    for record in SHORT[first : first + 20]:
        syntax, text = AnswerSyntax(record["form"], tuple(record["tools"])), "".join(record["pieces"])
        for stop in range(1, len(text) + 1):
            expected = after(syntax, text[:stop])
            for at in range(1, stop):
                assert after(syntax, text[:at], text[at:stop]) == expected, (text, at, stop)


ALPHABET = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    '{"name": "search"',
    ', "arguments": {',
    "}",
    '"',
    " ",
]


@given(st.sampled_from([TAGGED, BARE, LIST]), st.lists(st.sampled_from([*ALPHABET, "\n", "a", "\\", "<", "[", ";"])))
def test_parser_of_any_text_ignores_the_split(syntax, pieces):
    text = "".join(pieces)
    assert parse(syntax, [text]) == parse(syntax, text) == parse(syntax, pieces)


@given(st.text(alphabet="ab <>/{}\n\t"))
def test_parser_returns_text_without_tags_unchanged(text):
    assert parse(AnswerSyntax("tagged", NAMES), [text]) == (text, "", [])


@pytest.mark.parametrize(
    ("syntax", "text", "expected"),
    [
        (TAGGED, "a <tool_call> no JSON </tool_call> b", ("a <tool_call> no JSON </tool_call> b", "", [])),
        (TAGGED, '<tool_call>{"name": "f"}', ("", "", [["f", "{}"]])),
        (TAGGED, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', ("", "", [["f", '{"a": 1}']])),
        (TAGGED, '<tool_call>{"name": "f", "arguments": null}', ("", "", [["f", "{}"]])),
        (TAGGED, '<tool_call>{"name": "f", "arguments": {"a": ', ("", "", [["f", '{"a": ']])),
        (TAGGED, '<tool_call>{"name": 5}</tool_call>', ('<tool_call>{"name": 5}</tool_call>', "", [])),
        (TAGGED, '<tool_call>{"na', ('<tool_call>{"na', "", [])),
        (TAGGED, "<think>still", ("", "still", [])),
        (TAGGED, "<thin", ("<thin", "", [])),
        (
            TAGGED,
            f'<tool_call>{{"{"x" * 300}": 1, "name": "f"}}',
            (f'<tool_call>{{"{"x" * 300}": 1, "name": "f"}}', "", []),
        ),
        (
            TAGGED,
            f'<tool_call>{{"arguments": {{}}, "{"x" * 300}": 1, "name": "f"}}',
            (f'<tool_call>{{"arguments": {{}}, "{"x" * 300}": 1, "name": "f"}}', "", []),
        ),
        (BARE, '{"name": "other", "parameters": {}}', ('{"name": "other", "parameters": {}}', "", [])),
        (BARE, '{"answer": 42}', ('{"answer": 42}', "", [])),
        (AnswerSyntax("arguments", ("f",)), '{"a": 1}', ("", "", [["f", '{"a": 1}']])),
        (
            AnswerSyntax("tagged", NAMES, max_calls=1),
            '<tool_call>{"name": "f"}<tool_call>{"name": "g"}',
            ("", "", [["f", "{}"]]),
        ),
        (AnswerSyntax(has_reasoning=True, starts_in_reasoning=True), "\nso\n</think>\n\nyes", ("yes", "so", [])),
    ],
)
def test_parser_handles_unusual_answers(syntax, text, expected):
    assert parse(syntax, [text]) == parse(syntax, text) == expected


@pytest.mark.parametrize(
    ("syntax", "text", "expected"),
    [
        (TAGGED, '<tool_call>{"name": "f", "arguments": {"a": 1}}', True),
        (TAGGED, '<tool_call>{"name": "f", "arguments": {"a": 1}', False),
        (TAGGED, '<tool_call>{"name": "f"}</tool_call>\n<tool_call>{"name": "g", "arguments": {', False),
        (TAGGED, "no call", False),
        (BARE, '{"name": "search", "parameters": {}}', True),
        (BARE, '{"name": "search", "parameters": {', False),
        (LIST, '[{"name": "search", "arguments": {"a": 1}}]', True),
        (LIST, '[{"name": "search", "argu', False),
        (AnswerSyntax("arguments", ("f",)), '{"a": 1}', True),
        (AnswerSyntax("arguments", ("f",)), '{"a"', False),
        (AnswerSyntax("arguments", ("f",)), "", False),
    ],
)
def test_ends_with_calls_is_false_inside_a_call(syntax, text, expected):
    parser = AnswerParser(syntax, "call-")
    for char in text:
        parser.feed(char)
    parser.finish()
    assert parser.ends_with_calls == expected


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("<tool_call></tool_call>", ("tagged", False)),
        ("<tool_call> <think> </think>", ("tagged", True)),
        ('{"name": function name, "parameters": dictionary}', ("bare", False)),
        ("<|python_tag|>", ("bare", False)),
        ("", ("tagged", False)),
    ],
)
def test_syntax_follows_the_chat_template(template, expected):
    assert syntax_of_template(template) == expected
