"""The tables of request fields have every field of the installed clients."""

from __future__ import annotations

import pytest

from kvtier.server.agent_fields import MESSAGES_FIELDS, RESPONSES_FIELDS
from kvtier.server.fields import FIELDS

anthropic = pytest.importorskip("anthropic")
openai = pytest.importorskip("openai")


def keys(params: type) -> set[str]:
    found = {*params.__required_keys__, *params.__optional_keys__}  # type: ignore[attr-defined]
    assert len(found) > 9  # otherwise this type does not have the fields of a request
    return found


@pytest.mark.parametrize("module_name", ["message_create_params", "message_count_tokens_params"])
def test_messages_table_has_every_field_of_the_client(module_name):
    for types in (anthropic.types, anthropic.types.beta):
        module = getattr(types, module_name)
        name = "MessageCreateParamsBase" if module_name == "message_create_params" else "MessageCountTokensParams"
        assert keys(getattr(module, name)) <= {*MESSAGES_FIELDS}


def test_openai_tables_have_every_field_of_the_client():
    chat = openai.types.chat.completion_create_params.CompletionCreateParamsBase
    text = openai.types.completion_create_params.CompletionCreateParamsBase
    # in `places`, c stands for /v1/chat/completions and t for /v1/completions
    assert keys(chat) <= {name for name, field in FIELDS.items() if "c" in field.places}
    assert keys(text) <= {name for name, field in FIELDS.items() if "t" in field.places}
    assert keys(openai.types.responses.response_create_params.ResponseCreateParamsBase) <= {*RESPONSES_FIELDS}
