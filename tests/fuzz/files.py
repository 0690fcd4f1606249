"""Fuzz targets: settings, model files, key files, traces, cost models and event streams."""

import logging
import struct
from contextlib import suppress

from compare.load.outcome import CompletionReader, Outcome
from compare.load.traces import read_trace
from engine.emulation import load_emulation
from engine.formats.gguf_config import config_of
from engine.models.families import read_model_config
from engine.weights import INDEX, fingerprint, stored_dtype, tensor_files
from router.http.auth import ApiKeys
from router.text.model_files import read_model
from router.text.regex_safety import may_backtrack_exponentially
from shared import failpoints
from shared.config.settings import NodeSettings, RouterSettings, resolve
from shared.errors import ConfigError
from tests.cluster.harness import ROOT
from tests.engine.checkpoint_files import CONFIG, entry, raw
from tests.engine.gguf_files import header
from tests.fuzz.target import as_json, target, written

FIELDS = [(kind, name) for kind in (RouterSettings, NodeSettings) for name in kind.model_fields]


def _setting(name: str, value: bytes) -> bytes:
    number = next(at for at, (_, field) in enumerate(FIELDS) if field == name)
    return bytes([number]) + value


@target(
    *(_setting(name, value) for name, value in (
        ("port", b"8000"), ("kv_cache_memory", b"512MiB"), ("cpus", b"0-1,1"), ("device", b"cuda:0"), ("host", b"::1"),
        ("registry", b"redis://u:p@h:1/0"), ("heartbeat_s", b"1e-1"), ("cluster", b"a.b-c"), ("log_level", b"INFO"),
    )),
    bytes_per_byte=2000, rejects=ConfigError,
)  # fmt: skip
def setting_values(data: bytes) -> None:
    """Resolve a setting. The first byte selects the setting, and the remaining bytes are its value."""
    if not data:
        return
    kind, name = FIELDS[data[0] % len(FIELDS)]
    text = data[1:].decode("utf-8", "replace")
    settings, _ = resolve(kind, {name: text}, {})
    again, _ = resolve(kind, {}, settings.environment())
    assert again == settings or not text


@target(b"prefill.after_chunk:3@cmpl-1=kill, engine.step:*=sleep-0.5", b"decode.token=raise")
def failpoint_texts(data: bytes) -> None:
    logging.getLogger("baton.failpoint").disabled = True
    try:
        with suppress(ConfigError):
            failpoints.configure(data.decode("utf-8", "replace"), allowed=True)
    finally:
        failpoints.configure("", allowed=False)


@target(b"tenant:%b:admin # it\nother:%b\n" % (b"a" * 64, b"b" * 64), rejects=ConfigError, secret="a" * 60)
def key_files(data: bytes) -> None:
    ApiKeys(str(written("keys", data)))


TENSORS = raw({"a": entry(0, 8, [2]), "b": entry(8, 16, [2, 1], "F32")}, bytes(16))


@target(TENSORS, raw({"__metadata__": {"x": "y"}}), rejects=ValueError)
def safetensors_files(data: bytes) -> None:
    written("weights/config.json", b"{}")
    stored_dtype(written("weights/model.safetensors", data).parent)


ONES = struct.pack("<2f", 1.0, 1.0)


@target(
    header([("token_embd.weight", [2, 32], 2, 0), ("rope_freqs.weight", [2], 0, 64)], "llama") + bytes(64) + ONES,
    rejects=ValueError,
)
def gguf_files(data: bytes) -> None:
    file = written("gguf/model.gguf", data)
    tensor_files(file.parent)
    config_of(file)


@target(TENSORS, rejects=ValueError)
def fingerprints(data: bytes) -> None:
    written("fingerprint/config.json", b"{}")
    fingerprint(written("fingerprint/model.safetensors", data).parent)


CONFIGS = (as_json(CONFIG), as_json(CONFIG | {"rope_scaling": {"type": "linear", "factor": 2}, "eos_token_id": [1, 2]}))


@target(*CONFIGS, rejects=ValueError)
def model_configs(data: bytes) -> None:
    read_model_config(written("config/config.json", data).parent)


@target(*CONFIGS, rejects=ValueError)
def router_model_configs(data: bytes) -> None:
    read_model(written("model/config.json", data).parent, "m", 0, 0)


@target(as_json({"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}), rejects=ValueError)
def weight_indices(data: bytes) -> None:
    stored_dtype(written(f"index/{INDEX}", data).parent)


@target(rb"(?i:'s|'t)|[^\r\n\p{L}]?\p{L}+|\s+(?!\S)", b"(a+)+$", b"[[a]&&[^b]]+")
def tokenizer_patterns(data: bytes) -> None:
    may_backtrack_exponentially(data.decode("utf-8", "replace"))


TRACES = (
    b'{"t": 0.5, "prompt_len": 9, "max_tokens": 4, "prefix_id": "a", "prefix_len": 3, "slo": {"ttft_ms": 9}}\n',
    b'{"timestamp": 27482, "input_length": 600, "output_length": 52, "hash_ids": [46, 47]}\n',
    b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n",
    b"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,log\n",
    b"num_prefill_tokens,num_decode_tokens,arrived_at\n9,4,0.5\n",
)


@target(*TRACES, bytes_per_byte=4000, rejects=ConfigError)
def trace_files(data: bytes) -> None:
    read_trace(written("trace", data))


@target(next((ROOT / "engine" / "costs").glob("*.json")).read_bytes(), rejects=ValueError)
def cost_files(data: bytes) -> None:
    load_emulation(str(written("cost.json", data)))


# Errors that the load generator reports as "not a stream of completions" (compare/load/client.py).
STREAM_ERRORS = (ValueError, TypeError, AttributeError, RecursionError)
EVENTS = (
    b'data: {"id": "1", "choices": [{"text": "a", "token_ids": [1, 2], "finish_reason": "stop"}], "usage": null}\n\n'
)


@target(EVENTS + b"data: [DONE]\n\n", b'data: {"error": {"message": "x"}}\n\n', b": comment\n" + EVENTS * 2)
def event_streams(data: bytes) -> None:
    reader = CompletionReader(Outcome(0, "", 0.0, max_tokens=8), exact=True)
    with suppress(*STREAM_ERRORS):
        for piece in (data[: len(data) // 2], data[len(data) // 2 :]):
            reader.feed(piece, 1.0)
