"""The flags of `baton compare`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from shared.api_client import base_url

DEFAULT_EMULATED = "h200-llama-3.1-8b"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """The options of the command line; each field is a flag. `compare.main` replaces the defaults that are None."""

    more_arms: Annotated[list[str], typer.Argument(metavar="[ARM]...", show_default=False, hidden=True)] = field(
        default_factory=list
    )
    arms: Annotated[
        list[str],
        typer.Option(
            metavar="ARM...",
            help="colocated:N and disaggregated:XpYd, each optionally followed by @policy,setting=value.",
            show_default="colocated:2 disaggregated:1p1d",
        ),
    ] = field(default_factory=list)
    url: Annotated[
        list[str],
        typer.Option(metavar="URL", parser=base_url, help="A running stack, in place of an arm. Give two or more."),
    ] = field(default_factory=list)
    api_key: Annotated[
        str, typer.Option(envvar="BATON_API_KEY", help="Key for these stacks. An admin key also reads their records.")
    ] = ""
    trace: Annotated[Path | None, typer.Option(help="Traffic from a file.", show_default=False)] = None
    trace_format: Annotated[str, typer.Option(help="azure, burstgpt, mooncake or own.")] = "auto"
    preset: Annotated[str, typer.Option(help="Traffic: chat, code, rag-long, agentic or mix.", show_default="chat")] = (
        ""
    )
    scale_tokens: Annotated[
        float | None,
        typer.Option(help="Factor for the lengths of prompts and answers.", show_default="1; presets 0.5"),
    ] = None
    rate: Annotated[
        float | None, typer.Option(help="Requests per second.", show_default="the trace's own times; presets 4")
    ] = None
    burstiness: Annotated[float, typer.Option(help="With a rate: 1 is Poisson, less is burstier.")] = 1.0
    find_capacity: Annotated[
        bool, typer.Option("--find-capacity", help="Search for the highest rate at which each arm meets the SLO.")
    ] = False
    start: Annotated[float, typer.Option(min=0.0, help="Seconds of the trace to skip, without --rate.")] = 0.0
    duration: Annotated[float, typer.Option(min=1.0, help="Seconds of traffic in each period.")] = 20.0
    too_long: Annotated[str, typer.Option(help="For requests over the context: error, cut or drop.")] = "error"
    seeds: Annotated[int, typer.Option(min=1, max=100, help="Number of periods of each arm, as paired runs.")] = 6
    slo_ttft_ms: Annotated[float, typer.Option(min=0.001, help="Limit of the time to first token.")] = 450.0
    slo_tbt_ms: Annotated[float, typer.Option(min=0.001, help="Limit of a request's p99 time between tokens.")] = 40.0
    attainment: Annotated[
        float, typer.Option(min=0.01, max=0.999, help="With --find-capacity: share of requests to meet the limits.")
    ] = 0.9
    on: Annotated[str, typer.Option(help="live: nodes compute; emulated: they sleep instead (see --emulate).")] = "live"
    emulate: Annotated[str, typer.Option(help="Step-time model of emulated nodes.", show_default=DEFAULT_EMULATED)] = ""
    model: Annotated[str, typer.Option(help="Model of all arms.", show_default="the demo's")] = ""
    set: Annotated[list[str], typer.Option(metavar="SETTING=VALUE", help="A setting of all arms.")] = field(
        default_factory=list
    )
    unequal: Annotated[bool, typer.Option("--unequal", help="Allow arms with different numbers of devices.")] = False
    control: Annotated[
        bool, typer.Option("--control", help="Also compare the first arm with a copy, which must not differ.")
    ] = False
    treatment: Annotated[list[str], typer.Option(metavar="FACT", help="A fact that may differ between the arms.")] = (
        field(default_factory=list)
    )
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds after which a request is a miss.")] = 60.0
    out: Annotated[Path | None, typer.Option(help="Directory of the report.", show_default="baton-compare-<time>")] = (
        None
    )
