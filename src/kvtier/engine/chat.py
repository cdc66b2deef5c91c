"""Chat templates: jinja2 in its sandbox, with the few names that templates of Hugging Face checkpoints rely on."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from kvtier.errors import ArgumentError, CheckpointError, UnavailableError


class ChatTemplate:
    """A compiled template."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        """`special`: the names of special tokens that the template may use (bos_token, eos_token)."""
        try:
            import jinja2
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError as error:
            raise UnavailableError("chat templates need the jinja2 package: pip install 'kvtier[engine]'") from error
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson  # jinja2's own escapes for HTML
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _strftime_now
        self._special = dict(special)
        self._failure = (jinja2.TemplateError, jinja2.exceptions.SecurityError)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(
                f"the chat template does not compile, line {error.lineno}: {error.message}"
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation."""
        for index, message in enumerate(messages):
            if "role" not in message:
                raise ArgumentError(f"message {index} has no role; it has {', '.join(message) or 'nothing'}")
        names = {**self._special, **(variables or {})}
        try:
            return self._template.render(
                messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, **names
            )
        except self._failure as error:
            raise ArgumentError(f"the chat template cannot render these messages: {error}") from error


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _refuse(message: str) -> NoReturn:
    raise ArgumentError(f"the chat template refuses these messages: {message}")


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
