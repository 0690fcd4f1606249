"""Every setting of every process: its default, its help text, its bounds, and where its value comes from.

A flag overrides `BATON_<FIELD>` in the environment, which overrides the default. No other module reads the environment.
"""

import difflib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from shared.config.speculation import SpeculativeConfig, check_speculation, parse_speculation
from shared.errors import ConfigError
from shared.limits import MAX_IMAGES
from shared.resolver import is_host_and_port

PREFIX = "BATON_"
# Environment variables of vLLM that Baton reads too, by setting.
VLLM_VARIABLES = {"allow_runtime_lora_updating": "VLLM_ALLOW_RUNTIME_LORA_UPDATING"}
# Settings of `baton up` and of commands that call a router. No process refuses their variables as misspelt.
OTHERS = ("url", "api_key", "devices", "engines", "steps_sockets")
MAX_CPU = 4095
SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,6})?) ?(?:([KMGT])(I?))?B?", re.IGNORECASE | re.ASCII)
MAX_SIZE = 10**18  # processes pass sizes to each other as numbers of bytes, and SIZE accepts at most 18 digits
COUNT = re.compile(r"(\d{1,12}(?:\.\d{1,3})?)([kmgKMG])", re.ASCII)
SIZE_FORMS = "bytes, or a number with KiB, MiB, GiB, TiB, kB, MB, GB or TB, as in 512MiB"
DEFAULT_IMAGES = 16
EVERY_ADDRESS = ("0.0.0.0", "::")


# ---- values --------------------------------------------------------------------------------------------------------


def parse_size(value: int | str) -> int:
    """Return the number of bytes in a size such as "512MiB", "2GB" or "4096". Raises ValueError if it is malformed."""
    match = SIZE.fullmatch(str(value).strip())
    # "2G" is rejected, since it is 2 GB in some programs and 2 GiB in others.
    if match is None or (match[2] and not match[0].upper().endswith("B")):
        raise ValueError(f"must be {SIZE_FORMS}")
    exponent = " KMGT".index(match[2].upper()) if match[2] else 0
    size = Fraction(match[1]) * (1024 if match[3] else 1000) ** exponent
    if 0 < size < 1 or size >= MAX_SIZE or (not match[2] and size.denominator > 1):
        raise ValueError(f"must be whole bytes, and less than an exabyte: {SIZE_FORMS}")
    return int(size)


def parse_count(value: int | str) -> int | str:
    """Parse a count in vLLM's notation: "16k" is 16,000, and "16K" is 16,384.

    Return a plain number unchanged. Raises ValueError if the count is malformed.
    """
    text = str(value).strip()
    if match := COUNT.fullmatch(text):
        count = Fraction(match[1]) * (1024 if match[2].isupper() else 1000) ** ("kmg".index(match[2].lower()) + 1)
        if count.denominator == 1:
            return int(count)
    elif re.fullmatch(r"[-+]?\d+", text, re.ASCII):
        return value
    raise ValueError("must be a whole number, as in 16384, 16k (16,000) or 16K (16,384)")


def parse_image_limit(value: str | int) -> int | str:
    """Return the limit on images in a value of vLLM's --limit-mm-per-prompt, such as '{"image": 4}' or image=4. Return
    a plain number unchanged. Raises ValueError if the value is malformed, or allows videos or audio."""
    text = str(value).strip()
    if re.fullmatch(r"\d+", text, re.ASCII):
        return value
    words = 'must be the number of images, as in 4, image=4 or {"image": 4}; video and audio must be 0'
    try:
        if not text.startswith("{"):
            text = json.dumps({name: int(count) for name, count in (part.split("=") for part in text.split(","))})
        limits = {
            name: limit.get("count") if isinstance(limit, dict) else limit for name, limit in json.loads(text).items()
        }
    except (ValueError, RecursionError):
        raise ValueError(words) from None
    count = limits.pop("image", DEFAULT_IMAGES)
    if type(count) is not int or limits.keys() - {"video", "audio"} or any(limits.values()):
        raise ValueError(words)
    return count


def parse_cpus(value: str | Iterable[int]) -> tuple[int, ...]:
    """Return the sorted CPU numbers of a list such as "0,2-3". Raises ValueError if it is malformed."""
    if not isinstance(value, str):
        return tuple(sorted(set(value)))
    cpus: set[int] = set()
    for part in value.split(",") if value.strip() else ():
        match = re.fullmatch(r" *([0-9]{1,4})(?:-([0-9]{1,4}))? *", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not first <= last <= MAX_CPU:
            raise ValueError(f"must be CPU numbers up to {MAX_CPU} and ranges of them, as in 0,2-3")
        cpus.update(range(first, last + 1))
    return tuple(sorted(cpus))


def format_value(value: object) -> str:
    """Format a value in the form that the command line and the environment accept."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def private_directory() -> str:
    """Return the default of --kv-directory: a directory of this user whose path is short enough for unix sockets."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and os.access(runtime, os.W_OK):
        return str(Path(runtime) / "baton")
    return str(Path(tempfile.gettempdir()) / f"baton-{os.getuid()}")


def _matches(pattern: str, words: str, value: str) -> str:
    if not re.fullmatch(pattern, value, re.ASCII):
        raise ValueError(f"must be {words}")
    return value


def _parse_list(value: str | Iterable[str]) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    return tuple(part.strip() for part in parts if part.strip())


def _check_origins(origins: tuple[str, ...]) -> tuple[str, ...]:
    form = r"\*|[a-z][a-z0-9+.-]*://([\w.-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?"
    if not all(re.fullmatch(form, origin, re.ASCII) and origin == origin.lower() for origin in origins):
        raise ValueError(
            "must be * or origins in lower case without a path, as in https://a.example,http://localhost:3000"
        )
    return origins


def _check_engine(value: str) -> str:
    try:
        parts = urlsplit(value)
        is_valid = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0 and "@" not in parts.netloc
    except ValueError:
        is_valid = False
    if value and (not is_valid or parts.query or parts.fragment):
        raise ValueError("must be the URL of a vLLM server without credentials, as in http://127.0.0.1:8000")
    return value.rstrip("/").removesuffix("/v1")


def parse_engines(value: str | Iterable[str]) -> tuple[str, ...]:
    urls = tuple(_check_engine(url) for url in _parse_list(value))
    if len(set(urls)) < len(urls):
        raise ValueError("must name each server once")
    return urls


def _check_routers(value: str) -> str:
    if value and not is_host_and_port(value):
        raise ValueError("must be host:port of the routers' API, as in routers:8000")
    return value


def _check_models(models: tuple[str, ...]) -> tuple[str, ...]:
    names = [text.partition("=")[0] for text in models]
    if not all(name and directory for name, _, directory in (text.partition("=") for text in models)):
        raise ValueError("must be NAME=DIRECTORY,NAME=DIRECTORY, as in embed=/models/qwen3-embedding")
    if len(set(names)) < len(names):
        raise ValueError("must give each name once")
    return models


def _check_registry(value: str) -> str:
    if value.startswith("file:/"):
        return value
    if "://" not in value:
        addresses = [each.strip() for each in value.split(",")]
        if not all(map(is_host_and_port, addresses)):
            raise ValueError(
                "must be host:port of the routers' registry, as in 127.0.0.1:8001, or several of these, separated by "
                "commas, or file:/PATH of a file with one on each line, or redis://host:port"
            )
        return ",".join(addresses)
    return _check_redis(value)


def _check_redis(value: str) -> str:
    try:
        parts = urlsplit(value)
        valid = parts.scheme in {"redis", "rediss", "unix"} and (parts.port or 0) >= 0 and (parts.netloc or parts.path)
    except ValueError:  # the error's message would show the URL with the password
        valid = False
    if not valid:
        raise ValueError("must be a URL such as redis://host:port/database (or rediss:// or unix://)")
    if parts.query:
        from redis.asyncio import ConnectionPool, RedisError

        try:
            pool: Any = ConnectionPool.from_url(value, retry=None)
            pool.make_connection()
        except (RedisError, TypeError, ValueError) as error:
            raise ValueError(f"has an option after the '?' that the Redis client refuses: {error}") from None
    return value


def _check_router_registry(value: str) -> str:
    if value and "://" not in value:
        raise ValueError('must be redis://host:port/database, or "" for the router itself (see --registry-port)')
    return value and _check_redis(value)


def _check_store(value: str) -> str:
    if value and value != "memory" and "://" not in value:
        raise ValueError('must be memory, redis://host:port/database, or "" to store no responses')
    return value if value in ("", "memory") else _check_redis(value)


def _check_cpus(cpus: tuple[int, ...]) -> tuple[int, ...]:
    allowed = os.sched_getaffinity(0)
    if not allowed.issuperset(cpus):
        raise ValueError(f"must be among the CPUs that this process may use: {format_value(tuple(sorted(allowed)))}")
    return cpus


def _refuse_zero(value: object) -> object:
    """Refuse 0 in a flag or a variable, whose values are text: in the code, 0 stands for the default."""
    if isinstance(value, str) and re.fullmatch(r"\s*(-\d+|[0.]+\D*)", value):
        raise ValueError("must be at least 1; for the default, leave it out")
    return value


NOT_ZERO = BeforeValidator(_refuse_zero)
Port = Annotated[int, Field(ge=0, le=65535)]
Count = Annotated[int, BeforeValidator(parse_count), Field(ge=1, le=2**20)]
CountOrNone = Annotated[int, BeforeValidator(parse_count), Field(ge=0, le=2**31 - 1)]
CountOrDefault = Annotated[CountOrNone, NOT_ZERO]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
Milliseconds = Annotated[float, Field(ge=0, le=3_600_000)]
Policy = Literal[
    "stall_free",
    "decode_maximal",
    "split_fuse",
    "prefill_chunks_first",
    "prefill_first",
    "whole_prompt_mixed",
    "decode_first",
    "static",
]
Size = Annotated[int, BeforeValidator(parse_size)]
ImageLimit = Annotated[int, BeforeValidator(parse_image_limit), Field(ge=0, le=MAX_IMAGES)]
Cpus = Annotated[tuple[int, ...], BeforeValidator(parse_cpus), AfterValidator(_check_cpus)]
Origins = Annotated[tuple[str, ...], BeforeValidator(_parse_list), AfterValidator(_check_origins)]
Names = Annotated[tuple[str, ...], BeforeValidator(_parse_list)]
ModelDirectories = Annotated[tuple[str, ...], BeforeValidator(_parse_list), AfterValidator(_check_models)]
Host = Annotated[str, AfterValidator(partial(_matches, r"[\w.:%-]+", "a host name or address, without a port"))]
HostOrNone = Annotated[str, AfterValidator(partial(_matches, r"[\w.:%-]*", "a host name or address, without a port"))]
EngineUrl = Annotated[str, AfterValidator(_check_engine)]
Engines = Annotated[tuple[str, ...], BeforeValidator(parse_engines)]
Label = Annotated[str, AfterValidator(partial(_matches, r"[\w.-]{1,64}", "1 to 64 letters, digits and . _ -"))]
LabelOrNone = Annotated[str, AfterValidator(partial(_matches, r"[\w.-]{0,64}", "up to 64 letters, digits and . _ -"))]
Device = Annotated[str, AfterValidator(partial(_matches, r"auto|cpu|cuda(:\d{1,2})?", "auto, cpu, cuda or cuda:N"))]
LogLevel = Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(lambda text: str(text).lower())]


# ---- settings ------------------------------------------------------------------------------------------------------


def setting(default: Any, description: str, meaning: str = "") -> Any:
    """Return a field. `meaning` explains a default such as 0, "auto" or an empty text."""
    return Field(default=default, description=description, json_schema_extra={"meaning": meaning})


def meaning_of(field: FieldInfo) -> str:
    return str(field.json_schema_extra.get("meaning", "")) if isinstance(field.json_schema_extra, dict) else ""


class Settings(BaseModel):
    """The base class of all settings. It is frozen and rejects unknown keys. Fields in `needed` must not be empty."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)
    needed: ClassVar[tuple[str, ...]] = ("model",)

    def environment(self) -> dict[str, str]:
        """Return the environment variables from which another process reads the same settings."""
        return {
            variable_of(name): format_value(getattr(self, name))
            for name, field in type(self).model_fields.items()
            if getattr(self, name) != field.get_default(call_default_factory=True)
        }


class CommonSettings(Settings):
    """The settings that routers and all nodes have."""

    model: str = setting("", "Model: a directory, or a hub id such as Qwen/Qwen3-0.6B.")
    served_model_name: str = setting("", "Model name in the API.", "the hub id, or the name of the model directory")
    max_model_len: CountOrDefault = setting(
        0,
        "Maximum tokens of a prompt and its completion together; 16k is 16,000, 16K is 16,384.",
        "the limit of the model",
    )
    allow_runtime_lora_updating: bool = setting(
        False, "Serve /v1/load_lora_adapter and /v1/unload_lora_adapter, for admins."
    )
    cluster: Label = setting("default", "Name of the cluster. Clusters with different names can share a Redis.")
    drain_timeout_s: Seconds = setting(30.0, "On shutdown, seconds to wait for requests in progress.")
    log_level: LogLevel = setting("info", "Lowest level that is logged.")
    log_format: Literal["text", "json"] = setting("text", "Log format: text, or one JSON object per line.")
    cluster_secret_file: str = setting(
        "",
        "PEM file from `baton secret`, or directory with ca.crt, tls.crt and tls.key; required to listen beyond "
        "loopback.",
    )
    failpoint: str = setting("", "For tests: where this process fails; see shared/failpoints.py.")
    allow_failpoints: bool = setting(False, "For tests: allow --failpoint.")


class ServingSettings(CommonSettings):
    """The settings of a process that serves the API."""

    host: Host = setting("127.0.0.1", "Address that the OpenAI API listens on.")
    port: Port = setting(8000, "Port of the API; 0: any free port.")
    registry: Annotated[str, AfterValidator(_check_router_registry)] = setting(
        "", "redis://host:port, through which routers and nodes find each other.", "the router is the registry"
    )
    registry_host: HostOrNone = setting("", "Address that nodes join at.", "the same as --host")
    registry_port: Port = setting(8001, "Port that nodes join at; 0: any free port.")
    generation_config: Literal["auto", "vllm"] = setting(
        "auto",
        "Values of sampling parameters that a request omits: auto: those in the model's generation_config.json; vllm: "
        "the defaults of the API.",
    )
    more_models: ModelDirectories = setting(
        (),
        "Further models that the router serves, as NAME=DIRECTORY,NAME=DIRECTORY. Each name is the "
        "--served-model-name of its nodes.",
    )
    tool_call_parser: str = setting(
        "auto", "Syntax of tool calls, named as in vLLM; none: no tool calls.", "found from the chat template"
    )
    reasoning_parser: str = setting(
        "auto",
        "Syntax of reasoning, named as in vLLM; none: reasoning is content.",
        "found from the chat template",
    )
    limit_mm_per_prompt: ImageLimit = setting(
        DEFAULT_IMAGES, 'Maximum images of a request, as in vLLM: 4, image=4 or {"image": 4}.'
    )
    max_image_pixels: Annotated[int, Field(ge=1, le=500_000_000)] = setting(
        50_000_000, "Maximum pixels of an image, before it is resized."
    )
    max_images_size: Size = setting(32 << 20, "Maximum size of all images of a request together, in base64.")
    responses_store: Annotated[str, AfterValidator(_check_store)] = setting(
        "", "Store of /v1/responses: memory, or redis://host:port, for several routers.", "responses are not stored"
    )
    mode: Literal["disaggregated", "colocated"] = setting(
        "disaggregated", "Where prompts are computed: on prefill nodes, or on the decode nodes themselves."
    )
    disaggregate: Literal["always", "never", "auto"] = setting(
        "auto", "When a prompt is sent to a prefill node: always, never, or (auto) if that is predicted to be faster."
    )
    rebalance: Literal["off", "on"] = setting(
        "off", "Change a node's role if, for a minute, one role needs more nodes and the other fewer."
    )
    ttft_slo_ms: Milliseconds = setting(
        0.0, "Reject requests whose first token is predicted to take longer, with status 429.", "accept all"
    )
    max_queue_s: Seconds = setting(
        30.0,
        "Maximum seconds in the admission queue. Requests that wait longer, or probably will, are rejected.",
    )
    max_queued_tokens: CountOrDefault = setting(
        0, "Maximum tokens in the admission queue.", "4 times the KV capacity of the nodes, at least 262,144"
    )
    api_keys_file: str = setting(
        "", "File of API keys, one `tenant:sha256` per line (see `baton key`).", "no key is required"
    )
    api_keys: str = Field("", repr=False, description="API keys, as in --api-keys-file, separated by commas.")
    allowed_origins: Origins = setting(
        (), "Origins whose web pages may call the API (CORS), separated by commas; *: all.", "none"
    )
    ssl_certfile: str = setting("", "Certificate chain (PEM) of the API and the admin endpoints.", "plain HTTP")
    ssl_keyfile: str = setting("", "Private key (PEM) of --ssl-certfile.", "in the same file")
    admin_host: Host = setting("127.0.0.1", "Address that the admin endpoints listen on.")
    admin_port: Port = setting(
        0, "Port of the dashboard, status, metrics and roles.", "the port of the API, with an admin key"
    )
    dashboard: bool = setting(True, "Record requests and steps for the dashboard, timelines, traces and some metrics.")
    request_timeout_s: Annotated[float, Field(ge=0, le=86_400)] = setting(
        0.0, "Maximum seconds for a request, and maximum of the header x-request-timeout.", "no limit"
    )
    node_timeout_s: Seconds = setting(
        2.5, "Treat a node as lost after this many seconds without a message, or 3 times as many if it is idle."
    )
    max_connections: Count = setting(
        10_000, "Maximum HTTP connections. If there are more, the connection that has been idle longest is closed."
    )
    workers: Annotated[int, Field(ge=1, le=64)] = setting(
        1, "Number of processes of the router, which share its ports, nodes and limits."
    )
    max_concurrent_requests: Count = setting(
        1024,
        "Maximum requests in progress. Others get status 429, unless their tenant uses less than an equal share.",
    )
    max_attempts: Annotated[int, Field(ge=1, le=100)] = setting(
        5, "Maximum attempts for a request, each on another node if possible, before it fails."
    )
    exact_retries: bool = setting(
        False, "After the loss of a vLLM server, fail a request rather than continue it with tokens that may differ."
    )

    @model_validator(mode="after")
    def _check_api(self) -> Self:
        if self.workers > 1 and self.responses_store == "memory":
            raise ValueError("--responses-store memory: each of several --workers has its own memory; use redis://…")
        if self.ssl_keyfile and not self.ssl_certfile:
            raise ValueError("--ssl-keyfile: --ssl-certfile is missing")
        if self.workers > 1 and self.rebalance == "on":
            raise ValueError("--rebalance on: not with --workers, because no process of the router knows all requests")
        for name in ("max_concurrent_requests", "max_connections"):
            if (limit := getattr(self, name)) < self.workers:
                raise ValueError(
                    f"{flag_of(name)} {limit}: must be at least {self.workers}, because each of the --workers needs one"
                )
        return self


class ComputingSettings(CommonSettings):
    """The settings of a node that computes. Settings that vLLM also has are named as in vLLM."""

    device: Device = setting("auto", "Device that the node computes on.", "a GPU if there is one, else the CPU")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", "Data type of activations.", "float32 on the CPU, that of the model on a GPU"
    )
    weight_dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto",
        "Data type of weights.",
        "--dtype on a GPU; the checkpoint's data type on a CPU, which computes in float32",
    )
    model_impl: Literal["auto", "baton", "transformers"] = setting(
        "auto",
        "Modules that run the model: Baton's, or those of transformers (CPU only).",
        "Baton's if it has the architecture",
    )
    quantization: Literal["none", "int8"] = setting(
        "none", "int8: compute matrix products with 8-bit weights and activations (CPU only)."
    )
    lora_modules: Names = setting((), "LoRA adapters: name=directory, separated by commas.", "none")
    max_lora_rank: Count = setting(64, "Maximum rank of a LoRA adapter.")
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8"] = setting(
        "auto", "Data type of the KV cache (fp8: GPU only).", "--dtype, or float16 on the CPU with --quantization int8"
    )
    attention_backend: Literal["auto", "torch", "numba", "triton", "flash_attn"] = setting(
        "auto", "Attention backend.", "the fastest that this machine supports"
    )
    enforce_eager: bool = setting(False, "Do not use CUDA graphs.")
    async_scheduling: Literal["auto", "on", "off"] = setting(
        "auto", "Plan a step while the previous one runs.", "only where it was measured to be faster"
    )
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = setting(
        0.9, "Fraction of GPU memory that the node uses, including weights."
    )
    kv_cache_memory: Annotated[Size, NOT_ZERO] = setting(
        0, "Memory for KV blocks, in bytes or as in 4GiB or 2GB.", "512MiB on the CPU, the free memory on a GPU"
    )
    num_blocks: CountOrDefault = setting(
        0,
        "Number of rows in the KV pool: one per block, except for models with sliding windows.",
        "as many as fit into --kv-cache-memory",
    )
    block_size: Annotated[int, Field(ge=0, le=1024), NOT_ZERO] = setting(
        0, "Tokens per KV block.", "16 on the CPU, 64 on a GPU"
    )
    max_num_batched_tokens: Count = setting(512, "Maximum tokens computed in one step.")
    max_num_seqs: CountOrDefault = setting(
        0, "Maximum requests that run at the same time.", "64 on the CPU, 256 on a GPU"
    )
    long_prefill_token_threshold: CountOrNone = setting(
        0, "Maximum tokens of one prompt in a step.", "--max-num-batched-tokens"
    )
    max_num_partial_prefills: Count = setting(1, "Maximum prompts that are partially computed at the same time.")
    policy: Policy = setting("stall_free", "How prompts and decodes share steps; see docs/policies.md.")
    tbt_slo_ms: Milliseconds = setting(
        0.0, "Target for the longest time between two tokens, which limits the tokens of a step.", "a fixed limit"
    )
    speculative_config: Annotated[str, AfterValidator(check_speculation)] = setting(
        "", 'Speculative decoding, as in vLLM: {"method": "ngram"}, {"model": …} or ngram.', "none"
    )
    emulate: str = setting("", "Device to emulate (name or JSON file): steps only sleep for the predicted times.")
    enable_prefix_caching: bool = setting(True, "Reuse the KV of prompts that share a prefix.")
    kv_channel: Literal["auto", "pool", "cuda_ipc", "shm", "tcp"] = setting(
        "auto", "How KV is transferred; see docs/operations.md.", "the fastest that both nodes support"
    )
    kv_directory: str = Field(
        default_factory=private_directory,
        min_length=1,
        description="Private directory for the sockets of the KV channel.",
    )
    reserve_timeout_s: Seconds = setting(30.0, "Maximum seconds that a handoff waits for free blocks on a decode node.")
    push_timeout_s: Seconds = setting(2.0, "Fail a KV transfer after this many seconds without a byte.")
    stuck_s: Seconds = setting(
        5.0,
        "Exit, to be restarted by a supervisor, after this many seconds without progress. Slow steps get more time.",
    )
    heartbeat_s: Annotated[float, Field(ge=0.05, le=60)] = setting(0.5, "Seconds between two heartbeats.")
    cpus: Cpus = setting((), "CPUs to run on, as in 0,2-3.", "all")
    threads: Annotated[int, Field(ge=0, le=4096)] = setting(0, "Number of compute threads.", "one per CPU")
    runner: Literal["torch", "hash"] = setting(
        "torch", "hash: a model for tests, which hashes its KV instead of computing."
    )

    @model_validator(mode="after")
    def _check_async_scheduling(self) -> Self:
        if self.async_scheduling == "on" and self.speculative_config:
            raise ValueError("--async-scheduling on: --speculative-config needs each step's tokens; use auto or off")
        return self

    @property
    def speculation(self) -> SpeculativeConfig | None:
        return parse_speculation(self.speculative_config)

    @property
    def speculative_tokens(self) -> int:
        """The maximum number of tokens that are guessed for a request in one step, or 0 without speculation."""
        return self.speculation.num_speculative_tokens if self.speculation is not None else 0

    @property
    def draft_method(self) -> str:
        return self.speculation.method if self.speculation is not None else ""

    @property
    def draft_model(self) -> str:
        return self.speculation.model if self.speculation is not None else ""


class RouterSettings(ServingSettings):
    """The settings of a router process."""


class JoiningSettings(CommonSettings):
    """The settings of a process that joins a cluster as a node."""

    id: LabelOrNone = setting("", "Unique name.", "ROLE-HOST in a container, ROLE-HOST-PID otherwise")
    host: Host = setting("127.0.0.1", "Address that the node listens on for RPCs.")
    port: Port = setting(0, "Port for RPCs.", "any free port")
    advertise: HostOrNone = setting(
        "", "Address at which other processes reach this node.", "--host; if it is a wildcard, this host's address"
    )
    registry: Annotated[str, AfterValidator(_check_registry)] = setting(
        "127.0.0.1:8001",
        "Where the routers are: host:port (every address of the host is a router), several of these separated by "
        "commas, file:/PATH of a file with one per line, or redis://host:port.",
    )
    health_port: Port = setting(0, "Port of GET /health, /ready and /metrics of this node.", "off")


class NodeSettings(ComputingSettings, JoiningSettings):
    """The settings of a node process."""

    kv_host: HostOrNone = setting("", "Address for KV over tcp.", "the same as --host")
    kv_port: Port = setting(0, "Port for KV over tcp.", "any free port")


class EngineSettings(Settings):
    """The settings for external vLLM and SGLang servers."""

    engine_api_key_file: str = setting("", "File with the API key of the vLLM or SGLang servers.", "no key")
    engine_kind: Literal["vllm", "sglang"] = setting("vllm", "Kind of the vLLM or SGLang servers.")
    kv_lease_s: Seconds = setting(
        30.0, "Seconds for which a vLLM server keeps the KV of a prompt for a decode node (its kv_lease_duration)."
    )


class ProxySettings(JoiningSettings, EngineSettings):
    """The settings of a proxy node, whose engine is an external server."""

    needed: ClassVar[tuple[str, ...]] = ("model", "engine")

    engine: EngineUrl = setting("", "URL of the vLLM or SGLang server.")
    role: Literal["prefill", "decode"] = setting(
        "decode", "Role of the node. A prefill node passes the KV of its prompts to decode nodes."
    )
    max_num_seqs: Count = setting(256, "Maximum requests that the engine runs at the same time (its --max-num-seqs).")
    stuck_s: Seconds = setting(
        30.0, "Treat the engine as lost after this many seconds without progress. No single step may take longer."
    )
    heartbeat_s: Annotated[float, Field(ge=0.05, le=60)] = setting(0.5, "Seconds between two heartbeats.")
    steps_socket: str = setting(
        "", "Unix socket to which the plugin in vLLM reports steps (BATON_STEPS of vLLM).", "no steps"
    )


class PickerSettings(Settings):
    """The settings of an endpoint picker."""

    needed: ClassVar[tuple[str, ...]] = ("routers",)

    routers: Annotated[str, AfterValidator(_check_routers)] = setting(
        "", "host:port of the routers' API; every address of the host is used."
    )
    host: Host = setting("127.0.0.1", "Address that the picker listens on for ext_proc. Only the gateway may reach it.")
    port: Annotated[int, Field(ge=1, le=65535)] = setting(9002, "Port for ext_proc and grpc.health, in plain text.")
    tenant_header: Label = setting("authorization", "Header that identifies the tenant; tenants share no prefixes.")
    max_concurrent_requests: Count = setting(
        1024, "Maximum requests in progress at a router from this picker. Further requests get status 429."
    )
    drain_timeout_s: Seconds = setting(30.0, "On shutdown, seconds to wait for requests in progress.")
    log_level: LogLevel = setting("info", "Lowest level that is logged.")
    log_format: Literal["text", "json"] = setting("text", "Log format: text, or one JSON object per line.")


# ---- where a value comes from --------------------------------------------------------------------------------------

S = TypeVar("S", bound=Settings)


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def variable_of(name: str) -> str:
    return PREFIX + name.upper()


def resolve(kind: type[S], flags: Mapping[str, object], environment: Mapping[str, str]) -> tuple[S, dict[str, str]]:
    """Return the settings and the source of each: "flag --port", "environment BATON_PORT" or "default".

    `flags` maps fields to values from the command line, or to None if a flag is absent. An empty environment variable
    counts as unset. Raises ConfigError if a value is invalid; the error's message is one line with the source of the
    value, the value itself and the allowed values.
    """
    _refuse_misspelt(kind, environment)
    given = {name: (f"flag {flag_of(name)}", value) for name, value in flags.items() if value is not None}
    for name in kind.model_fields:
        for variable in (variable_of(name), VLLM_VARIABLES.get(name, "")):
            if name not in given and (text := environment.get(variable)):
                given[name] = (f"environment {variable}", text)
    try:
        settings = kind(**{name: value for name, (_, value) in given.items()})
    except ValidationError as error:
        raise ConfigError(_describe(kind, error, {name: source for name, (source, _) in given.items()})) from None
    return settings, {name: given[name][0] if name in given else "default" for name in kind.model_fields}


def _refuse_misspelt(kind: type[Settings], environment: Mapping[str, str]) -> None:
    """Raise ConfigError for an unknown variable whose name is close to that of a setting.

    Other unknown variables are ignored: they may be for another process, or come from a container platform.
    """
    kinds = (kind, RouterSettings, NodeSettings, ProxySettings)
    known = {*OTHERS, *(name for each in kinds for name in each.model_fields)}
    for variable in sorted(environment):
        name = variable.removeprefix(PREFIX).lower()
        if not variable.startswith(PREFIX) or name in known:
            continue
        if close := difflib.get_close_matches(name, sorted(known), 1, cutoff=0.85):
            raise ConfigError(f"{variable} is not a setting; did you mean {variable_of(close[0])}?")


def _describe(kind: type[Settings], error: ValidationError, sources: Mapping[str, str]) -> str:
    """Return one line that describes the first error."""
    first = error.errors(include_url=False)[0]
    is_ours = first["type"] == "value_error"
    words = str(first["ctx"]["error"]) if is_ours else first["msg"].replace("Input should be", "must be")
    if not first["loc"]:
        return words
    name = str(first["loc"][0])
    if name not in kind.model_fields:
        return f"{name} is not a setting"
    source = sources.get(name, flag_of(name)).split(" ")[-1]
    value = repr(hide_password(str(first["input"])))
    return f"{source} {value if len(value) <= 80 else value[:77] + '...'}: {words}"


def hide_password(text: str) -> str:
    """Replace the password or token in a URL with ***. `text` may be malformed, because errors quote invalid values."""
    hidden = re.sub(r"(://[^:@]*:).+@", r"\1***@", text, flags=re.DOTALL)
    hidden = re.sub(r"://[^:@/]+@", "://***@", hidden)
    return re.sub(r"([?&]password=)[^&#]+", r"\1***", hidden)
