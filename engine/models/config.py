"""Reads a model's config.json and checks it before memory is allocated. Code that comes with a model is never run."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

MAX_CONFIG_BYTES = 2**20
MAX_SIZE = 2**31 - 1
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotary embedding. `kind` is "default", "linear" or "llama3". Some fields apply to only some kinds."""

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The configuration of a decoder of the Llama family.

    `windows` has one entry per layer: the number of tokens that a query attends to, or 0 for all tokens.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope: Rope
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int, ...]
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_directory(cls, directory: Path) -> "ModelConfig":
        """Read config.json and the end tokens of generation_config.json. Raises ValueError if a value is invalid."""
        keys = ConfigReader(read_json(directory / "config.json"), directory / "config.json")
        architecture = _architecture(keys)
        hidden, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
        kv_heads = keys.size("num_key_value_heads", heads)
        if heads % kv_heads:
            keys.refuse("num_key_value_heads", f"num_attention_heads ({heads}) must be a multiple of it")
        layers, vocab_size = keys.size("num_hidden_layers"), keys.size("vocab_size")
        bias = architecture != "MistralForCausalLM" and keys.flag("attention_bias")
        return cls(
            architecture=architecture,
            hidden_size=hidden,
            intermediate_size=keys.size("intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=_head_dim(keys, architecture, hidden, heads),
            vocab_size=vocab_size,
            rms_norm_eps=keys.positive("rms_norm_eps", 1e-6),
            rope=_rope(keys),
            tie_word_embeddings=keys.flag("tie_word_embeddings"),
            qkv_bias=bias or architecture == "Qwen2ForCausalLM",
            output_bias=bias and architecture != "Qwen2ForCausalLM",
            mlp_bias=architecture == "LlamaForCausalLM" and keys.flag("mlp_bias"),
            qk_norm=architecture == "Qwen3ForCausalLM",
            windows=_windows(keys, architecture, layers),
            max_position_embeddings=keys.size("max_position_embeddings"),
            bos_token_id=next(iter(keys.token_ids("bos_token_id", vocab_size)), None),
            eos_token_ids=_eos_token_ids(keys, directory, vocab_size),
        )


class ConfigReader:
    """Gives access to a JSON object. For invalid values, methods raise ValueError with the file, key and fix."""

    def __init__(self, values: dict[str, Any], file: Path, prefix: str = "") -> None:
        self.values = values
        self._file = file
        self._prefix = prefix

    def refuse(self, key: str, fix: str) -> NoReturn:
        value = repr(self.values[key])[:60] if key in self.values else "missing"
        raise ValueError(f"{self._file}: {self._prefix}{key} is {value}: {fix}")

    def _read(self, key: str, default: T | None, fits: Callable[[Any], bool], fix: str) -> Any:
        """Return the key's value, or `default` if it is missing or null. If `default` is None, it is required."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not fits(value):
            self.refuse(key, fix)
        return value

    def size(self, key: str, default: int | None = None) -> int:
        fix = f"it must be an integer from 1 to {MAX_SIZE}"
        return int(self._read(key, default, lambda value: type(value) is int and 0 < value <= MAX_SIZE, fix))

    def positive(self, key: str, default: float | None = None) -> float:
        def fits(value: Any) -> bool:
            return type(value) in {int, float} and 0 < value < 1e30

        return float(self._read(key, default, fits, "it must be a positive finite number"))

    def flag(self, key: str) -> bool:
        return bool(self._read(key, False, lambda value: type(value) is bool, "it must be true or false"))

    def text(self, key: str, default: str | None = None) -> str:
        return str(self._read(key, default, lambda value: type(value) is str, "it must be a string"))

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """Return the token ids under a key, whose value is one id or a list of ids, or which is missing or null."""
        value = self.values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(type(token) is not int or not 0 <= token < vocab_size for token in ids):
            self.refuse(key, f"it must be a token id below vocab_size ({vocab_size}), or a list of such ids")
        return tuple(ids)

    def nested(self, key: str) -> "ConfigReader":
        """Return a reader of the object under `key`, or of an empty object if the key is missing."""
        values = self._read(key, {}, lambda value: isinstance(value, dict), "it must be an object")
        return ConfigReader(values, self._file, f"{self._prefix}{key}.")


def read_json(file: Path) -> dict[str, Any]:
    """Read a file. Raises ValueError if it is missing, unreadable, over 1 MiB, or not a JSON object."""
    try:
        size = file.stat().st_size
        data = file.read_bytes() if size <= MAX_CONFIG_BYTES else b""
    except FileNotFoundError:
        raise ValueError(f"{file}: missing; a model directory has config.json and *.safetensors") from None
    except OSError as error:
        raise ValueError(f"{file}: cannot be read: {error.strerror}") from None
    if size > MAX_CONFIG_BYTES:
        raise ValueError(f"{file}: larger than {MAX_CONFIG_BYTES} bytes")
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:  # ValueError also if a number has more than 4,300 digits
        raise ValueError(f"{file}: not valid JSON ({str(error)[:100]}); download it again") from None
    if not isinstance(values, dict):
        raise ValueError(f"{file}: not a JSON object")
    return values


def _architecture(keys: ConfigReader) -> str:
    names = keys.values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in ARCHITECTURES:
        keys.refuse("architectures", f"it must be one of {', '.join(ARCHITECTURES)}")
    if "auto_map" in keys.values:
        keys.refuse("auto_map", "code that comes with a model is never run; use a model without auto_map")
    if keys.values.get("quantization_config") is not None:
        keys.refuse("quantization_config", "use the unquantized model (fp32, bf16 or fp16 weights)")
    if keys.text("hidden_act", "silu") != "silu":
        keys.refuse("hidden_act", 'only "silu" is supported')
    return str(names[0])


def _head_dim(keys: ConfigReader, architecture: str, hidden: int, heads: int) -> int:
    if keys.values.get("head_dim") is None and architecture != "Qwen3ForCausalLM" and hidden % heads:
        keys.refuse("num_attention_heads", f"hidden_size ({hidden}) must be a multiple of it, unless head_dim is given")
    # In transformers, Qwen3's default head_dim is 128 for all hidden sizes.
    head_dim = keys.size("head_dim", 128 if architecture == "Qwen3ForCausalLM" else max(1, hidden // heads))
    if head_dim % 2:
        keys.refuse("head_dim", "it must be even, for rotary embedding")
    return head_dim


def _rope(keys: ConfigReader) -> Rope:
    """Read `rope_parameters` (written by transformers 5), or `rope_theta` and `rope_scaling` (older versions)."""
    name = "rope_parameters" if keys.values.get("rope_parameters") is not None else "rope_scaling"
    given = keys.nested(name)
    theta = given.positive("rope_theta", keys.positive("rope_theta", 10_000.0))
    for where in (keys, given):
        if where.positive("partial_rotary_factor", 1.0) != 1.0:
            where.refuse("partial_rotary_factor", "only a rotation of the whole head (1.0) is supported")
    key = "rope_type" if "rope_type" in given.values else "type"
    kind = given.text(key, "default")
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, kind, given.positive("factor"))
    if kind != "llama3":
        given.refuse(key, "supported are default, linear and llama3")
    low, high = given.positive("low_freq_factor"), given.positive("high_freq_factor")
    if low >= high:
        given.refuse("high_freq_factor", f"it must be above low_freq_factor ({low})")
    return Rope(theta, kind, given.positive("factor"), low, high, given.size("original_max_position_embeddings"))


def _windows(keys: ConfigReader, architecture: str, layers: int) -> tuple[int, ...]:
    if architecture == "LlamaForCausalLM":
        return (0,) * layers
    if architecture == "MistralForCausalLM":
        # If the key is missing, transformers' default applies, 4096. A value of null means no window.
        unlimited = "sliding_window" in keys.values and keys.values["sliding_window"] is None
        return (0 if unlimited else keys.size("sliding_window", 4096),) * layers
    if not keys.flag("use_sliding_window"):
        return (0,) * layers
    window = keys.size("sliding_window", 4096)
    kinds = keys.values.get("layer_types")
    if kinds is None:
        full = keys.values.get("max_window_layers", 28)
        if type(full) is not int or full < 0:
            keys.refuse("max_window_layers", "it must be a number of layers")
        return tuple(0 if index < full else window for index in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers:
        keys.refuse("layer_types", f"it must have one entry for each of the {layers} layers")
    if any(kind not in ("full_attention", "sliding_attention") for kind in kinds):
        keys.refuse("layer_types", "supported are full_attention and sliding_attention")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _eos_token_ids(keys: ConfigReader, directory: Path, vocab_size: int) -> tuple[int, ...]:
    """Return the ids in both files, since chat models have an end-of-turn token in generation_config.json only."""
    ids = keys.token_ids("eos_token_id", vocab_size)
    file = directory / "generation_config.json"
    if file.exists():
        ids += ConfigReader(read_json(file), file).token_ids("eos_token_id", vocab_size)
    return tuple(dict.fromkeys(ids))
