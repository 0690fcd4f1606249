"""`baton compare`: its flags, checked before anything starts, and the whole course from them to the report."""

import asyncio
import inspect
import sys
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from shared.errors import ConfigError

BAD_INPUT = 2
DEFAULT_EMULATED = "h200-llama-3.1-8b"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What the command line asked for: a field is a flag. What None stands for is decided in `compare.planning`."""

    more_arms: Annotated[list[str], typer.Argument(metavar="[ARM]...", show_default=False, hidden=True)] = field(
        default_factory=list
    )
    arms: Annotated[
        list[str],
        typer.Option(
            metavar="ARM...",
            help="colocated:N and disaggregated:XpYd, each with @policy,setting=value after it where wanted.",
            show_default="colocated:2 disaggregated:1p1d",
        ),
    ] = field(default_factory=list)
    url: Annotated[list[str], typer.Option(help="Instead of arms: a stack that runs already. Given twice or more.")] = (
        field(default_factory=list)
    )
    api_key: Annotated[
        str, typer.Option(envvar="BATON_API_KEY", help="Shown to those: an admin's, to see their records too.")
    ] = ""
    trace: Annotated[Path | None, typer.Option(help="Traffic from a file.", show_default=False)] = None
    trace_format: Annotated[str, typer.Option(help="azure, burstgpt, lengths, mooncake or own.")] = "auto"
    preset: Annotated[str, typer.Option(help="Traffic: chat, code, rag-long, agentic or mix.", show_default="chat")] = (
        ""
    )
    scale_tokens: Annotated[
        float | None, typer.Option(help="Times the lengths of prompts and answers.", show_default="1; presets 0.5")
    ] = None
    rate: Annotated[
        float | None, typer.Option(help="Requests per second.", show_default="the trace's own times; presets 4")
    ] = None
    burstiness: Annotated[float, typer.Option(help="With a rate: 1 is Poisson, less comes in bursts.")] = 1.0
    find_capacity: Annotated[
        bool, typer.Option("--find-capacity", help="Look for the highest rate that each arm carries within the SLO.")
    ] = False
    start: Annotated[float, typer.Option(min=0.0, help="Second of the trace's own times to begin at.")] = 0.0
    duration: Annotated[float, typer.Option(min=1.0, help="Seconds of traffic in each period.")] = 20.0
    too_long: Annotated[str, typer.Option(help="Requests over the context: error, cut or drop.")] = "error"
    seeds: Annotated[int, typer.Option(min=1, max=100, help="Paired runs: periods of each arm.")] = 6
    slo_ttft_ms: Annotated[float, typer.Option(min=0.001, help="Longest time to the first token.")] = 450.0
    slo_tbt_ms: Annotated[
        float, typer.Option(min=0.001, help="Longest time between tokens, of 99 % of a request's.")
    ] = 40.0
    attainment: Annotated[
        float, typer.Option(min=0.01, max=0.999, help="Share of requests that must keep both, for a capacity.")
    ] = 0.9
    on: Annotated[str, typer.Option(help="live: nodes compute; emulated: they sleep as long as --emulate's do.")] = (
        "live"
    )
    emulate: Annotated[str, typer.Option(help="Step-time model of emulated nodes.", show_default=DEFAULT_EMULATED)] = ""
    model: Annotated[str, typer.Option(help="Model of all arms.", show_default="the demo's")] = ""
    set: Annotated[list[str], typer.Option(metavar="SETTING=VALUE", help="A setting of all arms alike.")] = field(
        default_factory=list
    )
    unequal: Annotated[bool, typer.Option("--unequal", help="Allow arms of unequally many devices.")] = False
    control: Annotated[
        bool, typer.Option("--control", help="Also hold the first arm against a copy of itself: nothing may differ.")
    ] = False
    treatment: Annotated[
        list[str], typer.Option(metavar="FACT", help="May differ between the arms: it is what is compared.")
    ] = field(default_factory=list)
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds after which a request is a miss.")] = 60.0
    out: Annotated[Path | None, typer.Option(help="Directory of the report.", show_default="baton-compare-<time>")] = (
        None
    )


def compare(**given: Any) -> int:
    """The command. Returns 0 with a verdict, 1 without; raises SystemExit(2) after one line for what cannot be run."""
    try:
        from compare.course import compared
    except ModuleNotFoundError as error:
        print(f"baton compare: needs {error.name}: pip install -e .", file=sys.stderr)
        raise SystemExit(BAD_INPUT) from None
    try:
        return asyncio.run(compared(Choices(**given)))
    except ConfigError as error:
        print(f"baton compare: {error}", file=sys.stderr)
        raise SystemExit(BAD_INPUT) from None


def _parameters() -> list[inspect.Parameter]:
    return [
        inspect.Parameter(
            one.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=one.default_factory() if one.default_factory is not MISSING else one.default,
            annotation=one.type,
        )
        for one in fields(Choices)
    ]


# Typer reads a function's signature: the flags are declared once, above.
compare.__signature__ = inspect.Signature(_parameters())  # type: ignore[attr-defined]
compare.__annotations__ = {parameter.name: parameter.annotation for parameter in _parameters()}
