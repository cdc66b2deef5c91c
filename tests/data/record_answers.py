"""Record 200 answers of SmolLM2 to prompts that offer tools. The tests of the parser use these answers.

python tests/data/record_answers.py    writes tests/data/answers.jsonl (about 10 minutes on two x86-64 cores)

The model is small, so its calls are often incomplete, invalid or embedded in text. The parser must handle such calls.
Each line contains the call format, the tools, and the answer as a list of texts: `Case.begin`, one text per generated
token, and the text that the token stream held back until the end. Empty texts are left out.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from kvtier.engine import LLM, SamplingParams
from kvtier.engine.schemas import Grammar, SchemaCompiler
from kvtier.server.tool_schemas import arguments_schema, calls_schema

FILE = Path(__file__).with_name("answers.jsonl")
TOKENS = 56
_CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}
_SUM = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 999}, "b": {"type": "integer", "maximum": 999}},
    "required": ["a", "b"],
}
TOOLS: dict[str, dict[str, Any]] = {"get_weather": _CITY, "add": _SUM}
QUESTIONS = [
    "What is the weather in Paris?",
    "Add 17 and 25.",
    "Is it raining in Rome and in Oslo?",
    "What is 3 plus 4? Then tell me the weather in Berlin.",
    "Write a haiku about \u96ea and the city of Z\u00fcrich.",
    "Show me a JSON object with a name, and explain the sign < in a <tag>.",
    "Say hello.",
    "Find the weather of S\u00e3o Paulo \u2600\ufe0f and add 1 and 2.",
]
HERMES = (
    "You call functions. The functions are: {tools}. For each call, return a JSON object with the name and the "
    "arguments between <tool_call> and </tool_call>. Example:\n"
    '<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "Madrid"}}}}\n</tool_call>'
)
LLAMA = (
    "You call functions. The functions are: {tools}. Answer with nothing but a JSON object for the call. Example:\n"
    '{{"name": "get_weather", "parameters": {{"city": "Madrid"}}}}'
)


class Case(NamedTuple):
    """A prompt, the sampling parameters, and the format in which the answer is parsed.

    The prompt ends with `begin`. The recorded answer consists of `begin` and the generated text.
    """

    form: str
    tools: list[str]
    system: str
    question: str
    params: SamplingParams
    begin: str = ""


def cases(compiler: SchemaCompiler) -> Iterator[Case]:
    """Yield 200 cases: 8 questions, each with 25 combinations of system prompt, `begin`, sampling and grammar."""
    tools = json.dumps([{"name": name, "parameters": schema} for name, schema in TOOLS.items()])
    hermes, llama = HERMES.format(tools=tools), LLAMA.format(tools=tools)
    all_calls = json.dumps(calls_schema([*TOOLS.items()], max_calls=2))
    for number, question in enumerate(QUESTIONS):

        def params(seed: int, schema: str = "", number: int = number) -> SamplingParams:
            constraint = compiler.constraint(Grammar("json", schema)) if schema else None
            temperature = 0.0 if seed == 0 else 0.9
            return SamplingParams(temperature, seed=100 * number + seed, max_tokens=TOKENS, constraint=constraint)

        names = [*TOOLS]
        for begin, seed in itertools.product(("", "<tool_call>\n", "I will call a function.\n<tool_call>"), range(3)):
            yield Case("tagged", names, hermes, question, params(seed), begin)
        for begin, seed in itertools.product(("", '{"name": "', '{"name": "get_weather", "parameters": {'), range(3)):
            yield Case("bare", names, llama, question, params(seed), begin)
        for seed in range(4):
            yield Case("list", names, hermes, question, params(seed, all_calls))
        for seed, (name, schema) in zip((0, 1, 2), itertools.cycle(TOOLS.items()), strict=False):
            forced = json.dumps(arguments_schema(schema))
            yield Case("arguments", [name], llama, question, params(seed, forced))


def main() -> None:
    with closing(LLM()) as llm:
        tokenizer, config = llm.tokenizer, llm.engine.model.config
        all_cases = [*cases(SchemaCompiler(tokenizer.to_json(), config.vocab_size, config.eos_token_ids))]
        prompts = []
        for case in all_cases:
            messages = [{"role": "system", "content": case.system}, {"role": "user", "content": case.question}]
            prompts.append(tokenizer.encode_chat(messages) + tokenizer.encode(case.begin, add_special=False))
        answers = llm.generate(prompts, [case.params for case in all_cases])
    lines = []
    for case, (answer,) in zip(all_cases, answers, strict=True):
        stream = tokenizer.stream()
        pieces = [case.begin, *(stream.add(token) for token in answer.token_ids), stream.finish()]
        record = {"form": case.form, "tools": case.tools, "pieces": [piece for piece in pieces if piece]}
        lines.append(json.dumps(record, ensure_ascii=False))
    FILE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
