"""Write a Hugging Face folder with a tiny model and a byte tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

CHAT_TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTEXT = 2048


def make_tiny_model(folder: Path) -> Path:
    """Write a Llama model of 2 layers with random weights. Its 259 tokens are 256 bytes and 3 special tokens."""
    import tokenizers
    import torch
    import transformers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    special = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(name, normalized=False) for name in special])
    config = transformers.LlamaConfig(
        vocab_size=259,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        eos_token_id=257,
        bos_token_id=None,
    )
    torch.manual_seed(5)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.3 if parameter.ndim == 1 else 0.15
            parameter.copy_(torch.randn_like(parameter) * scale + (parameter.ndim == 1))
    model.save_pretrained(folder)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder
