"""The `baton` command. Each command imports what it needs when it runs, so that `baton --help` is fast."""

import os
import sys
import tomllib
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from cluster.plan import DoctorSettings, LocalSettings, RaySettings
from compare.cli import compare, plan, profile
from shared.api_client import base_url
from shared.config.command_line import command_of, run_app
from shared.config.settings import NodeSettings, PickerSettings, ProxySettings, RouterSettings, Settings
from shared.lifecycle import ROOT, exit_on_signals
from shared.version import package_version

Url = Annotated[
    str, typer.Option("--url", envvar="BATON_URL", metavar="URL", parser=base_url, help="URL of the router.")
]
RoleName = StrEnum("RoleName", {"prefill": "prefill", "decode": "decode"})
ApiKey = Annotated[
    str,
    typer.Option("--api-key", envvar="BATON_API_KEY", show_default=False, help="API key, if the router requires one."),
]
PROCESSES: dict[str, tuple[type[Settings], str]] = {
    "up": (LocalSettings, "Start a cluster on this machine and supervise it."),
    "serve": (LocalSettings, "The same as `baton up`: serve a model on this machine."),
    "router": (RouterSettings, "Run one router."),
    "prefill": (NodeSettings, "Run one prefill node."),
    "decode": (NodeSettings, "Run one decode node."),
    "proxy": (ProxySettings, "Run one node whose engine is a running vLLM or SGLang server."),
    "picker": (PickerSettings, "Run an endpoint picker, which chooses routers for an Envoy gateway."),
    "doctor": (DoctorSettings, "Check that all modes and KV channels give equal tokens, or check a running cluster."),
}
LOCAL_URL = "http://127.0.0.1:8000"


def main(argv: Sequence[str] | None = None) -> int:
    """Run `baton` with `argv` (default: `sys.argv[1:]`). Return the exit status, or raise SystemExit with a status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        status = run_app(_app(), arguments or ["--help"], "baton")
    finally:
        _flush()
    return status if isinstance(status, int) else 0


def _flush() -> None:
    """Flush standard output. If the reader of the pipe has exited, as in `baton models | head`, discard the output."""
    with suppress(OSError):  # the interpreter flushes again at exit, and reports any other error
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _app() -> typer.Typer:
    app = typer.Typer(rich_markup_mode="rich", pretty_exceptions_enable=False)
    app.callback(help="Serves large language models with prefill and decode on separate pools.")(_options)
    for name, (kind, text) in PROCESSES.items():
        positional = "model" if kind is LocalSettings else ""
        app.command(name, help=text)(command_of(kind, f"baton {name}", partial(_run, name), positional))
    app.command("status", help="Show the nodes of a running cluster.")(_status)
    app.command("top", help="Watch the nodes of a running cluster.")(_top)
    app.command("compare", help="Compare deployments under the same traffic: which one keeps the SLO best, and why.")(
        compare
    )
    app.command("plan", help="Find, by simulation, the cluster of N GPUs that carries the most traffic within an SLO.")(
        plan
    )
    app.command("profile", help="Measure the step times of a model on a device, and write a cost file for baton plan.")(
        profile
    )
    app.command("role", help="Change the role of a node in a running cluster.")(_role)
    app.command("secret", help="Write a new secret for the processes of a cluster (--cluster-secret-file).")(_secret)
    app.command("key", help="Create an API key for a tenant: `baton key NAME >> FILE` for --api-keys-file.")(_key)
    app.command("models", help="List the models that Baton serves, or show the memory that one model takes.")(_models)
    app.command("gguf", help="Make a model directory from a GGUF file.")(_gguf)
    on_ray = typer.Typer(help="Run a cluster on the hosts of a Ray cluster.", no_args_is_help=True)
    start = command_of(RaySettings, "baton ray up", _ray_up, "model")
    on_ray.command("up", help="Start the processes of the cluster that are not running yet.")(start)
    on_ray.command("status", help="Show the processes and their hosts.")(_ray_status)
    on_ray.command("down", help="Drain and end all processes.")(_ray_down)
    app.add_typer(on_ray, name="ray")
    app.command("chat", help="Chat with the model of a running cluster.")(_chat)
    return app


def _run(name: str, settings: Settings) -> int:
    """Run the command `name` of PROCESSES with the settings from its flags."""
    if not isinstance(settings, LocalSettings):
        exit_on_signals()
    match settings:
        case DoctorSettings():
            from cluster.doctor import run_doctor

            return run_doctor(settings)
        case LocalSettings():
            from cluster.local import up

            return up(settings)
        case RouterSettings():
            from router.__main__ import main as run_router

            return run_router(settings)
        case ProxySettings():
            from proxy_node.__main__ import main as run_proxy_node

            return run_proxy_node(settings)
        case PickerSettings():
            from router.picker.__main__ import main as run_picker

            return run_picker(settings)
        case NodeSettings() if name == "prefill":
            from prefill_node.__main__ import main as run_prefill_node

            return run_prefill_node(settings)
        case NodeSettings():
            from decode_node.__main__ import main as run_decode_node

            return run_decode_node(settings)
    raise AssertionError(f"no command has these settings: {settings!r}")


def _options(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=lambda on: on and _print_version())
    ] = False,
) -> None:
    """Define the options of `baton` itself, which precede the name of a command."""


def _print_version() -> None:
    found = package_version()
    if not found:  # the package is not installed, so this is a checkout
        found = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    print(f"baton {found}")
    raise typer.Exit


def _status(
    url: Url = LOCAL_URL,
    api_key: ApiKey = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON document of the router.")] = False,
) -> int:
    from cluster.clients import fails_with_1, show_status

    return fails_with_1("status", partial(show_status, url, api_key, as_json=as_json))


def _top(url: Url = LOCAL_URL, api_key: ApiKey = "") -> int:
    from cluster.clients import fails_with_1, run_top

    return fails_with_1("top", partial(run_top, url, api_key))


def _role(
    node: Annotated[str, typer.Argument(help="Name of the node, as shown by `baton status`.")],
    role: Annotated[RoleName, typer.Argument(help="New role.")],
    url: Url = LOCAL_URL,
    api_key: ApiKey = "",
) -> int:
    from cluster.clients import change_role, fails_with_1

    return fails_with_1("role", partial(change_role, url, node, role, api_key))


def _secret(
    file: Annotated[Path, typer.Argument(help="File to write, readable only by you.")],
    if_absent: Annotated[bool, typer.Option("--if-absent", help="Do nothing if the file exists.")] = False,
) -> int:
    from cluster.secret import run_secret

    return run_secret(file, if_absent=if_absent)


def _key(
    tenant: Annotated[str, typer.Argument(help="Name of the tenant, which may have several keys.")],
    admin: Annotated[
        bool, typer.Option("--admin", help="Allow access to status, metrics and roles of the cluster.")
    ] = False,
) -> int:
    from cluster.secret import make_key

    return make_key(tenant, is_admin=admin)


def _models(
    model: Annotated[str, typer.Argument(help="Directory or hub id of a model.", show_default=False)] = "",
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the list as docs/models.md.")] = False,
) -> int:
    from cluster.models import show_models

    return show_models(model, as_markdown=as_markdown)


def _gguf(
    file: Annotated[Path, typer.Argument(help="GGUF file that holds the whole model.", show_default=False)],
    directory: Annotated[
        Path | None,
        typer.Argument(help="New directory; by default, the file's path without .gguf.", show_default=False),
    ] = None,
) -> int:
    from cluster.gguf import make

    return make(file, directory or file.with_suffix(""))


ClusterName = Annotated[str, typer.Option("--cluster", envvar="BATON_CLUSTER", help="Name of the cluster.")]


def _ray_up(settings: RaySettings) -> int:
    return _on_ray(lambda commands: commands.up(settings))


def _ray_status(cluster: ClusterName = "default") -> int:
    return _on_ray(lambda commands: commands.status(cluster))


def _ray_down(
    cluster: ClusterName = "default",
    timeout_s: Annotated[
        float, typer.Option("--drain-timeout-s", min=0, max=86_400, help="Seconds to wait for requests in progress.")
    ] = 30.0,
) -> int:
    return _on_ray(lambda commands: commands.down(cluster, timeout_s))


def _on_ray(run: Callable[[Any], int]) -> int:
    """Connect to Ray, call `run` with the module `cluster.ray`, and return the exit status of `run`.

    Return 1 if Ray is not installed or there is no Ray cluster.
    """
    try:
        import cluster.ray
    except ModuleNotFoundError as error:
        print(f"baton ray: {error}; in the repository, run pip install '.[ray]'", file=sys.stderr)
        return 1
    return cluster.ray.connected(lambda: run(cluster.ray))


def _chat(
    url: Url = LOCAL_URL,
    api_key: ApiKey = "",
    model: Annotated[
        str | None, typer.Option(help="Model or LoRA adapter.", show_default="the router's first model")
    ] = None,
    system: Annotated[str, typer.Option(help="System prompt.")] = "",
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Maximum tokens of an answer.", show_default="the router's")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, max=2.0, help="Temperature; 0: greedy.", show_default="the router's")
    ] = None,
) -> int:
    from cluster.clients import run_chat

    return run_chat(url, api_key, system, model=model, max_tokens=max_tokens, temperature=temperature)
