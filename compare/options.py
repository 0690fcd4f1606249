"""The flags of `baton compare`."""

# ruff: noqa: RUF009 - `flag` returns a field of a dataclass

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import typer

from shared.api_client import base_url
from shared.errors import ConfigError

DEFAULT_ARMS = ("colocated:2", "disaggregated:1p1d")
DEFAULT_EMULATED = "h200-llama-3.1-8b"
DEFAULT_PRESET = "mix"
MOST = 1e9  # upper limit of every number
TTFT_SLO = "--ttft-slo-ms", "--slo-ttft-ms"  # the second name is deprecated, and will be removed after one release
TBT_SLO = "--tbt-slo-ms", "--slo-tbt-ms"


def flag(metavar: str, default: Any, about: str, *names: str, **more: Any) -> Any:
    """Return a dataclass field that describes a flag. The help shows the default, unless the default is empty."""
    more["show_default"] = default not in ("", None, [])
    option = typer.Option(*names, metavar=metavar or None, help=about, **more)
    values: Any = {"default_factory": default.copy} if isinstance(default, list) else {"default": default}
    return field(**values, metadata={"flag": option})


def check_finite(options: Any) -> None:
    """Raise ConfigError, which names the flag, if the value of an option is infinite, NaN or over MOST."""
    for each in fields(options):
        value = getattr(options, each.name)
        if isinstance(value, float) and not value <= MOST:
            raise ConfigError(f"--{each.name.replace('_', '-')} {value:g}: must be a number of at most {MOST:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """The options of the command line; each field is a flag. `compare.main` replaces empty defaults."""

    more_arms: list[str] = field(
        default_factory=list, metadata={"flag": typer.Argument(metavar="[ARM]...", show_default=False, hidden=True)}
    )
    arms: list[str] = flag(
        "ARM...", [], "colocated:N and disaggregated:XpYd, each optionally followed by @policy,setting=value."
        f" Default: {' '.join(DEFAULT_ARMS)}.",
    )  # fmt: skip
    engines: str = flag(
        "URL,URL", "", "Running vLLM servers, which are the devices of all arms; see docs/engines.md. Needs --model."
    )
    url: list[str] = flag("URL", [], "A running stack, in place of an arm. Give two or more.", parser=base_url)
    api_key: str = flag("KEY", "", "Key for --url; only an admin key reads records.", envvar="BATON_API_KEY")
    trace: Path | None = flag("FILE", None, "Traffic from a file.")
    trace_format: str = flag("FORMAT", "auto", "azure, burstgpt, mooncake or own.")
    preset: str = flag("NAME", "", f"Traffic: chat, code, rag-long, agentic or mix. Default: {DEFAULT_PRESET}.")
    scale_tokens: float | None = flag("FACTOR", None, "Factor for all token counts. Default: 0.5 for presets, else 1.")
    rate: float | None = flag("RATE", None, "Requests per second. Default: 4 for presets, else the times of the trace.")
    burstiness: float = flag("SHAPE", 1.0, "For random arrival times: 1 is Poisson, less is burstier.", min=0.01)
    find_capacity: bool = flag("", False, "Search for each arm's highest rate within the SLO.", "--find-capacity")
    start: float = flag("SECONDS", 0.0, "Seconds of the trace to skip. Only with the trace's own times.", min=0.0)
    duration: float = flag("SECONDS", 20.0, "Seconds of traffic in each period.", min=1.0)
    too_long: str = flag("ACTION", "error", "For requests longer than the context: error, cut (shorten) or drop.")
    seeds: int = flag("NUMBER", 6, "Periods of each arm. Periods with the same seed are paired.", min=1, max=100)
    ttft_slo_ms: float = flag("MS", 450.0, "Limit of the time to first token.", *TTFT_SLO, min=0.001)
    tbt_slo_ms: float = flag("MS", 40.0, "Limit of a request's p99 time between tokens.", *TBT_SLO, min=0.001)
    attainment: float = flag(
        "SHARE", 0.9, "With --find-capacity: share of requests that must meet both limits.", min=0.01, max=0.999
    )
    on: str = flag(
        "PLACE", "live", "live: nodes compute; emulated: nodes sleep instead; sim: everything runs on a virtual clock."
    )
    emulate: str = flag(
        "NAME", "", "Cost model of emulated or simulated nodes; with --on live, every period is also simulated with it."
        f" Default: {DEFAULT_EMULATED}.",
    )  # fmt: skip
    model: str = flag("MODEL", "", "Model of all arms. Default: the demo's.")
    set: list[str] = flag("SETTING=VALUE", [], "A setting of all arms.")
    unequal: bool = flag("", False, "Allow arms with different numbers of devices.", "--unequal")
    control: bool = flag("", False, "Also compare the first arm with a copy; no verdict if they differ.", "--control")
    treatment: list[str] = flag("FACT", [], "A property of the nodes that may differ between arms, such as torch.")
    timeout: float = flag("SECONDS", 60.0, "Seconds after which a request counts as failed.", min=1.0)
    out: Path | None = flag("DIRECTORY", None, "Directory of the report. Default: baton-compare-TIME.")
