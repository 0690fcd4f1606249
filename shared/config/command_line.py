"""The command line of every process, with an option for each setting.

After wrong usage or an invalid value, the process prints one line on stderr and exits with status 2.
"""

import difflib
import inspect
import os
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_origin

import typer
import typer.main
from pydantic.fields import FieldInfo

from shared.config.settings import (
    NOT_ZERO,
    Settings,
    flag_of,
    format_value,
    hide_password,
    meaning_of,
    resolve,
    variable_of,
)
from shared.errors import ConfigError

S = TypeVar("S", bound=Settings)

PANELS = {  # the groups of --help and their settings; --help omits a setting that is in no group
    "Model": "model served_model_name generation_config more_models max_model_len dtype weight_dtype quantization "
    "model_impl lora_modules max_lora_rank limit_mm_per_prompt max_image_pixels max_images_size",
    "Computation": "device devices gpu_memory_utilization attention_backend threads cpus emulate",
    "KV cache": "kv_cache_memory kv_cache_dtype num_blocks block_size kv_channel kv_directory "
    "kv_host kv_port reserve_timeout_s push_timeout_s",
    "Scheduling": "disaggregate rebalance policy max_num_batched_tokens max_num_seqs long_prefill_token_threshold "
    "max_num_partial_prefills async_scheduling speculative_config ttft_slo_ms tbt_slo_ms",
    "API": "host port ssl_certfile ssl_keyfile api_keys_file api_keys allowed_origins admin_host admin_port "
    "tool_call_parser reasoning_parser responses_store workers",
    "Picker": "tenant_header",
    "Limits": "max_concurrent_requests max_connections max_queue_s max_queued_tokens request_timeout_s max_attempts "
    "drain_timeout_s",
    "Engine": "engines engine peer engine_api_key_file engine_kind role kv_lease_s",
    "Cluster": "prefill decode mode routers url api_key registry registry_host registry_port cluster "
    "cluster_secret_file id advertise health_port heartbeat_s node_timeout_s stuck_s",
    "Logs": "log_level log_format",
    "Ray": "placement",
    "Switches": "enable_prefix_caching enforce_eager dashboard exact_retries allow_runtime_lora_updating",
}
NOT_SUPPORTED = "tensor-parallel-size tp pipeline-parallel-size pp swap-space cpu-offload-gb trust-remote-code"
VLLM_FLAGS = {  # vLLM's flags that have another name here, or no equivalent
    **dict.fromkeys(NOT_SUPPORTED.split(), "is not supported"),
    **dict.fromkeys(("data-parallel-size", "dp"), "is replaced by --prefill and --decode, the numbers of nodes"),
    **dict.fromkeys(("enable-lora", "max-loras"), "is not needed: --lora-modules names the adapters"),
    "api-key": "is named --api-keys-file here; `baton key` makes a key",
    "kv-cache-memory-bytes": "is named --kv-cache-memory here",
    "num-gpu-blocks-override": "is named --num-blocks here",
    "kv-transfer-config": "is not needed: prefill nodes pass KV to decode nodes (--kv-channel)",
    "enable-auto-tool-choice": "is not needed: it is always on (--tool-call-parser)",
    "enable-chunked-prefill": "is not needed: prompts are always computed in chunks (--max-num-batched-tokens)",
    **dict.fromkeys(("disable-log-requests", "uvicorn-log-level"), "is named --log-level here"),
}
MIN_FILES = 512  # minimum limit of open files; a router keeps 256 of them for everything except clients

# The base class of usage errors. Typer does not export this class of click, and some versions of Typer contain their
# own copy of click.
Misuse = cast(type[Exception], next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"))


def settings_from_command_line(kind: type[S], argv: Sequence[str], prog: str) -> S:
    """Return the settings for `__main__`. Exit after --help and --print-config; exit with status 2 for a bad value."""
    app = typer.Typer(add_completion=False, rich_markup_mode="rich")
    app.command(help=f"Run one process: {prog}.")(command_of(kind, prog, lambda settings: settings))
    result = run_app(app, argv, prog)
    if isinstance(result, kind):
        return result
    raise SystemExit(result)


def run_app(app: typer.Typer, argv: Sequence[str], prog: str) -> Any:
    """Run the command and return its result, or 0 after --help. On wrong usage, print a line and exit with status 2."""
    try:
        return typer.main.get_command(app).main(args=list(argv), prog_name=prog, standalone_mode=False)
    except Misuse as error:
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else prog
        print(f"{path}: {_explain(error, argv)}", file=sys.stderr)
        raise SystemExit(2) from None


def _explain(error: Exception, argv: Sequence[str]) -> str:
    """Return the message of a usage error. If an option is unknown, suggest the option that was probably meant."""
    unknown, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
    if unknown is None or context is None or type(error).__name__ != "NoSuchOption":
        message: str = cast(typer.BadParameter, error).format_message()
        return " ".join(message.split()).replace("Value error, ", "")
    for flag in [argument.partition("=")[0] for argument in argv if argument.startswith("-")]:
        if (note := VLLM_FLAGS.get(flag.lstrip("-").replace("_", "-"))) and flag.startswith(unknown):
            return f"{flag} of vLLM {note}"
    known = [option[2:] for each in context.command.params for option in each.opts if option.startswith("--")]
    close = difflib.get_close_matches(unknown.lstrip("-").replace("_", "-"), known, 1, cutoff=0.7)
    return f"No such option: {unknown}" + (
        f"; did you mean --{close[0]}?" if close else f"; see {context.command_path} --help"
    )


def command_of(kind: type[S], prog: str, run: Callable[[S], Any], positional: str = "") -> Callable[..., Any]:
    """Return a Typer command that has an option for each field and calls `run` with the settings.

    The field `positional`, if any, can also be given as an argument without its flag. If the settings are invalid or
    `run` raises ConfigError, the command prints one line on stderr and exits with status 2.
    """

    def command(print_config: bool, argument: str | None = None, **flags: object) -> Any:
        try:
            if argument is not None:
                if flags[positional] is not None:
                    raise ConfigError(f"{flag_of(positional)} {flags[positional]}: {argument!r} is given too; give one")
                flags[positional] = argument
            settings, sources = resolve(kind, flags, os.environ)
            if print_config:
                print_settings(settings, sources)
                return 0
            for name in kind.needed:
                if not getattr(settings, name):
                    raise ConfigError(f"{flag_of(name)} (or {variable_of(name)}) is required")
            allow_files()
            return run(settings)
        except ConfigError as error:
            print(f"{prog}: {error}", file=sys.stderr)
            raise SystemExit(2) from None

    shown = {name: panel for panel, names in PANELS.items() for name in names.split() if name in kind.model_fields}
    names = [*shown, *(name for name in kind.model_fields if name not in shown)]
    parameters = [_parameter(name, kind.model_fields[name], shown.get(name)) for name in names]
    about = typer.Option("--print-config", help="Print every setting with its source, and exit.")
    parameters.append(_keyword("print_config", Annotated[bool, about], default=False))
    if positional:
        given = typer.Argument(metavar=positional.upper(), help=f"Same as {flag_of(positional)}.", show_default=False)
        parameters.append(_keyword("argument", Annotated[str | None, given], default=None))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def allow_files() -> None:
    """Raise the limit of open files to MIN_FILES if it is lower. Raises ConfigError if that is not allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= MIN_FILES:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (MIN_FILES, hard))
    except ValueError:
        raise ConfigError(f"at most {hard} open files are allowed: allow {MIN_FILES} or more (ulimit -n)") from None


def _parameter(name: str, field: FieldInfo, panel: str | None) -> inspect.Parameter:
    """Return the option for a field. The option's value is text, because pydantic parses the values of all sources."""
    is_bool = field.annotation is bool
    value = "" if NOT_ZERO in field.metadata else format_value(field.get_default(call_default_factory=True))
    default = ", ".join(filter(None, (value, meaning_of(field))))
    details = [_type_of(field), f"env var: {variable_of(name)}", default and f"default: {default}"]
    option = typer.Option(
        f"{flag_of(name)}/--no-{flag_of(name)[2:]}" if is_bool else flag_of(name),
        help=str(field.description) + "".join(f" [dim]\\[{detail}][/dim]" for detail in details if detail),
        metavar=" ",  # a column of types would leave too little room for the text
        show_default=False,
        rich_help_panel=panel,
        hidden=panel is None,
    )
    return _keyword(name, Annotated[bool | None if is_bool else str | None, option], default=None)


def _keyword(name: str, annotation: object, default: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _type_of(field: FieldInfo) -> str:
    """Return the choices or the type of a field's value, or "" if the value is text or a boolean."""
    if get_origin(field.annotation) is Literal:
        return ", ".join(get_args(field.annotation))
    return {int: "integer", float: "number"}.get(cast(type, field.annotation), "")


def print_settings(settings: Settings, sources: Mapping[str, str]) -> None:
    """Print a line `name = value # source` for each setting. Explain a default such as 0 or "auto"."""
    for name, field in type(settings).model_fields.items():
        value, source = format_value(getattr(settings, name)), sources[name]
        if source == "default":
            value = "" if NOT_ZERO in field.metadata else value
            source = ": ".join(filter(None, (source, meaning_of(field))))
        print(f"{name} = {hide_password(value) if field.repr or not value else '***'}  # {source}")
