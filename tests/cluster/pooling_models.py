"""Tiny random embedding models and rerankers, in the format of sentence-transformers, and their expected results."""

import json
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

from tests.cluster.harness import DEMO, DEMO_VOCABULARY, copy_tokenizer
from tests.engine.families import CONFIGS, save

TYPES = {
    "Transformer": "sentence_transformers.models.Transformer",
    "Pooling": "sentence_transformers.models.Pooling",
    "Normalize": "sentence_transformers.models.Normalize",
    "LogitScore": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore",
    "Dense": "sentence_transformers.models.Dense",
}
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}Answer: {% endif %}"
)


def write_modules(directory: Path, *modules: tuple[str, dict[str, Any]]) -> None:
    listed = []
    for number, (name, config) in enumerate([("Transformer", {}), *modules]):
        path = f"{number}_{name}" if number else ""
        listed.append({"idx": number, "name": str(number), "path": path, "type": TYPES[name]})
        if path:
            (directory / path).mkdir()
            (directory / path / "config.json").write_text(json.dumps(config))
    (directory / "modules.json").write_text(json.dumps(listed))


def make(directory: Path, *modules: tuple[str, dict[str, Any]], name: str = "qwen3", positions: int = 512) -> Any:
    """Write a model, and return it as a transformers model."""
    config = deepcopy(CONFIGS[name])
    config.vocab_size, config.max_position_embeddings = DEMO_VOCABULARY, positions
    model = save(config, directory)
    copy_tokenizer(directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    (directory / "sentence_bert_config.json").write_text(
        json.dumps({"processing_kwargs": {"chat_template": {"add_generation_prompt": True}}})
    )
    write_modules(directory, *modules)
    return model


def remove_head(directory: Path) -> None:
    """Rewrite the weights as if the model had been saved without its output head."""
    file = directory / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if name != "lm_head.weight"}
    save_file({name.removeprefix("model."): tensor for name, tensor in tensors.items()}, file, {"format": "pt"})


def ids_of(text: str | Sequence[int]) -> list[int]:
    if not isinstance(text, str):
        return list(text)
    return list(PreTrainedTokenizerFast(tokenizer_file=str(DEMO / "tokenizer.json"))(text)["input_ids"])


@torch.inference_mode()
def embedded(
    model: Any, text: str | Sequence[int], pooling: str, normalizes: bool, size: int | None = None
) -> list[float]:
    """Return the embedding as sentence-transformers computes it from the model's last hidden states."""
    hidden = model.model(input_ids=torch.tensor([ids_of(text)])).last_hidden_state[0]
    vector = (hidden[-1] if pooling == "last" else hidden.mean(0))[:size]
    return list((torch.nn.functional.normalize(vector, dim=0) if normalizes else vector).tolist())


@torch.inference_mode()
def log_odds(model: Any, query: str, document: str, tokens: Sequence[int], instruction: str = "") -> float:
    """Return the score that the module LogitScore gives without an activation."""
    system = f"<system>: {instruction}\n" if instruction else ""
    text = f"{system}<query>: {query}\n<document>: {document}\nAnswer: "
    ids = PreTrainedTokenizerFast(tokenizer_file=str(DEMO / "tokenizer.json"))(text, add_special_tokens=False)
    logits = model(input_ids=torch.tensor([ids["input_ids"]])).logits[0, -1]
    return float(logits[tokens[0]] - sum(logits[token] for token in tokens[1:]))
