"""Reads the files of sentence-transformers that define how a model computes embeddings or scores.

`modules.json` lists the decoder (Transformer) and the modules after it: Pooling and, optionally, Normalize in an
embedding model, or LogitScore in a reranker. Any other model refuses requests for embeddings and scores.
"""

import json
from pathlib import Path
from typing import Any

from router.dispatch.requests import PoolingRule
from shared.errors import ConfigError
from shared.model_files import MAX_CONFIG_BYTES, read_object

# Maps the names that sentence-transformers uses to values of `SamplingParams.pooling`
KINDS = {"lasttoken": "last", "mean_tokens": "mean", "mean": "mean"}
NONE = "This model is neither an embedding model nor a reranker: its directory has no modules.json."


def read_pooling(directory: Path, vocab_size: int) -> PoolingRule:
    """Return a model's pooling rule. Raises ConfigError if a file is malformed."""
    file = directory / "modules.json"
    if not file.is_file():
        return PoolingRule(refusal=NONE)
    config = read_object(directory / "config.json")
    if config.get("is_causal") is False or config.get("use_bidirectional_attention"):
        return PoolingRule(refusal="This model's attention is bidirectional, which is not supported.")
    rule = PoolingRule(refusal="This model's modules.json has neither a Pooling nor a LogitScore module.")
    for name, own in _modules(file):
        values = read_object(own / "config.json") if (own / "config.json").is_file() and own != directory else {}
        if name == "Pooling":
            rule = _pooled(values)
        elif name == "LogitScore":
            rule = PoolingRule("logits", tokens=_tokens(values, own, vocab_size), prompts=_prompts(directory))
        elif name == "Normalize" and rule.kind in {"last", "mean"}:
            rule = PoolingRule(rule.kind, normalizes=True)
        elif name != "Transformer":
            return PoolingRule(refusal=f"This model has a module of the type {name}, which is not supported.")
        if rule.refusal and name != "Transformer":
            return rule
    return rule


def _modules(file: Path) -> list[tuple[str, Path]]:
    """Return the class name and the directory of each module."""
    try:
        listed: Any = json.loads(file.read_text(encoding="utf-8")) if file.stat().st_size <= MAX_CONFIG_BYTES else None
        found = [(each["type"].rpartition(".")[2][:60], Path(each["path"])) for each in listed]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ConfigError(f"{file} is not a list of modules, each with `type` and `path`") from None
    if any(path.is_absolute() or ".." in path.parts for _, path in found):
        raise ConfigError(f"{file}: each `path` must be inside the model's directory")
    return [(name, file.parent / path) for name, path in found]


def _pooled(values: dict[str, Any]) -> PoolingRule:
    """Return the rule of a Pooling module. Older versions of sentence-transformers write a flag for each pooling
    mode, and newer versions write the name of the mode."""
    named = values.get("pooling_mode")
    modes = [key.removeprefix("pooling_mode_") for key, value in values.items() if value is True]
    modes = [mode for mode in modes if f"pooling_mode_{mode}" in values] if named is None else [str(named)]
    kind = KINDS.get(modes[0], "") if len(modes) == 1 else ""
    shown = ", ".join(modes)[:60] or "none"
    return PoolingRule(
        kind, refusal="" if kind else f"This model pools by {shown}; only lasttoken and mean_tokens are supported."
    )


def _tokens(values: dict[str, Any], own: Path, vocab_size: int) -> tuple[int, ...]:
    """Return the id of the token for "relevant" and, if it exists, the id of the token for "not relevant"."""
    ids = (values.get("true_token_id"), values.get("false_token_id"))
    found = tuple(token for token in ids if type(token) is int and 0 <= token < vocab_size)
    if ids[0] is None or list(found) != [token for token in ids if token is not None]:
        file = own / "config.json"
        raise ConfigError(f"{file}: true_token_id and false_token_id must be token ids below {vocab_size}")
    return found


def _prompts(directory: Path) -> bool:
    """Return whether the chat template is rendered with a generation prompt."""
    file = directory / "sentence_bert_config.json"
    value: Any = read_object(file) if file.is_file() else {}
    for key in ("processing_kwargs", "chat_template", "add_generation_prompt"):
        value = value.get(key) if isinstance(value, dict) else None
    return value is True
