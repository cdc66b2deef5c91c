"""The scores of lm-evaluation-harness for a local task equal the log-likelihoods that transformers computes."""

from __future__ import annotations

import importlib.util
import json

import pytest

if missing := [name for name in ("lm_eval", "transformers", "datasets") if importlib.util.find_spec(name) is None]:
    pytest.skip(f"needs {', '.join(missing)}: make test-clients", allow_module_level=True)

SHOTS = "Q: Is rain wet? A: yes\nQ: Is ice hot? A: no\n"
QUESTIONS = [
    "Is snow cold?",
    "Is the sun a fish?",
    "Can birds sing?",
    "Is 7 more than 9?",
    "Gr\u00fc\u00dft man in \u00d6sterreich?",
]
CHOICES = [" yes", " no", " maybe not"]


def test_lm_eval_scores_equal_scores_of_transformers(
    random_server, random_model, transformers_scores, tmp_path, monkeypatch
):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import lm_eval
    from transformers import AutoTokenizer

    (random_model / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"})
    )
    data = tmp_path / "task.jsonl"
    data.write_text("".join(json.dumps({"question": question, "label": 0}) + "\n" for question in QUESTIONS))
    task = {
        "task": "local_questions",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": SHOTS + "Q: {{question}} A:",
        "doc_to_target": "label",
        "doc_to_choice": CHOICES,
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }
    arguments = {"model": "tiny", "base_url": f"{random_server}/v1/completions", "tokenizer": str(random_model)}
    results = lm_eval.simple_evaluate(
        model="local-completions", model_args={**arguments, "num_concurrent": 1, "max_retries": 1}, tasks=[task]
    )
    tokenizer = AutoTokenizer.from_pretrained(random_model)
    samples = results["samples"]["local_questions"]
    assert len(samples) == len(QUESTIONS)
    pairs, found = [], []
    for sample in samples:
        for choice, ((value, _),) in zip(CHOICES, sample["resps"], strict=True):
            context = f"{SHOTS}Q: {sample['doc']['question']} A:"
            pairs.append((tokenizer.encode(context), tokenizer.encode(choice)))
            found.append(float(value))
    expected = transformers_scores(pairs)
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 1e-3
    assert len({round(value, 3) for value in expected}) == len(expected)  # so that swapped scores are detected
    assert "acc,none" in results["results"]["local_questions"]
