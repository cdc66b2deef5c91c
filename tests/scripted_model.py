"""Write a model that always generates the same text. Tests of tool calls and reasoning use the model."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

from tiny_model import CHAT_TEMPLATE, make_tiny_model

_HIDDEN = 64


def make_scripted_model(folder: Path, script: Sequence[str], chat_template: str = CHAT_TEMPLATE) -> Path:
    """Write a tiny model that answers every chat with the texts of `script`. Each text is one token.

    Attention and MLP add nothing, so the next token depends only on the last token. The tokens form a chain: a line
    feed, the texts of the script, the end token. The embedding of the chain's token i is unit vector i. In the output
    matrix, the row of token i + 1 has the same direction, so token i + 1 always follows token i. A generation prompt
    ends with a line feed, so the answer begins with the first text.
    """
    import tokenizers
    import torch
    import transformers

    make_tiny_model(folder)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    first = backend.get_vocab_size()
    backend.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in script])
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(backend.get_vocab_size(), mean_resizing=False)
    chain = [backend.encode("\n").ids[-1], *range(first, first + len(script)), model.config.eos_token_id]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
            elif name.endswith("norm.weight"):
                parameter.fill_(1.0)
        embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        embeddings.zero_()
        head.zero_()
        embeddings[:, _HIDDEN - 1] = 1.0
        for index, (token, successor) in enumerate(itertools.pairwise(chain)):
            embeddings[token] = 0.0
            embeddings[token, index] = 1.0
            head[successor, index] = 10.0
    model.save_pretrained(folder)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(chat_template)
    return folder
