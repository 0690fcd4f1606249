"""Runs `baton compare`: checks all options before it starts any process, runs the session, and writes the report."""

import json
import os
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path

from tokenizers import Tokenizer

from compare.arms import Arm, copy_of, cores_of, parse_arms
from compare.endpoint import EndpointError
from compare.load.outcome import LatencySlo
from compare.load.traces import read_trace
from compare.load.traffic import PRESET_NAMES, PromptVocabulary, TrafficSource
from compare.options import DEFAULT_ARMS, DEFAULT_EMULATED, DEFAULT_PRESET, CompareOptions, check_finite
from compare.report.document import report_of
from compare.report.page import write_report
from compare.report.terminal import show
from compare.run.deployments import Deployments, LaunchOptions, LocalStack, fit_together, num_gpus
from compare.run.engines import EngineMeter
from compare.run.session import Experiment, run_session, span
from compare.run.simulated import SimulatedDeployments, predict
from engine.emulation import Emulation, load_emulation
from proxy_node.client import read_key
from shared.config.settings import parse_engines
from shared.errors import ConfigError
from shared.model_files import DEMO_MODEL, read_limits, resolve

NO_VERDICT = 1
# The estimate of a session's duration assumes at most this slowdown by other processes. A load average overstates the
# slowdown, because it also counts processes of lower priority.
MAX_SLOWDOWN = 3.0
BUSY = 0.5  # at a higher load average per core, other processes distort the figures
MIN_REQUESTS = 10  # a search tries only rates at which at least this many requests arrive in a period
TOO_LONG = ("error", "cut", "drop")
ON = ("live", "emulated", "sim")
DEVICES = {"emulated": "emulated", "sim": "simulated"}
PREFLIGHT_TOKENS = (1, 16, 40, 100, 250)  # lengths of the preflight's prompts, from a single token to several blocks
WORDS_ONLY = 4096  # vocabulary size for --url without --model; `compare.load.outcome.body_of` turns ids into words


async def run_compare(options: CompareOptions) -> int:
    """Run the comparison. Return 0 if there is a verdict, else 1. Raises ConfigError if the comparison cannot run."""
    experiment, deployments, plan = prepare(options)
    out = experiment.out
    try:
        (out / "logs").mkdir(parents=True, exist_ok=True)
        (out / "requests.jsonl").write_text("")  # discard the requests of an earlier session
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}") from None
    say = partial(print, flush=True)
    say(plan)
    say(f"report: {out}")
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > BUSY * cores and options.on != "sim":
        say(f"the machine is busy (load {load:.1f} on {cores} cores): figures may be noisy and periods invalid")
    began = time.monotonic()
    try:
        findings = await run_session(experiment, deployments, say)
    except EndpointError as error:
        if options.url:
            raise ConfigError(f"--url: {error}") from None
        print(f"baton compare: {error}", file=sys.stderr)
        return NO_VERDICT
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror or error}") from None
    say(f"measured in {span(time.monotonic() - began)}")
    if options.on != "sim" and (options.emulate or options.on == "emulated"):
        valid = [period.trial for period in findings.periods if not period.problems]
        try:
            findings.predicted = await predict(experiment, _device(options), valid)
        except ConfigError as error:
            findings.notes.append(f"the periods were not simulated: {error}")
    report = report_of(experiment, findings, "url" if options.url else options.on, command_line(sys.argv[1:]))
    show(report)
    try:
        print(f"report: {write_report(report, out)}")
    except (OSError, ValueError) as error:
        print(f"baton compare: cannot write the report: {getattr(error, 'strerror', None) or error}", file=sys.stderr)
        return NO_VERDICT
    return 0 if report["valid"] else NO_VERDICT


def command_line(arguments: Sequence[str]) -> str:
    """Return the command that repeats the session, without the API key, because reports are shared."""
    kept = re.sub(r"(^|\0)--api-key(=|\0)[^\0]*", r"\1--api-key\2...", "\0".join(arguments))
    return shlex.join(["baton", *(kept.split("\0") if kept else [])])


# ---- from the options to the experiment ----------------------------------------------------------------------------


def prepare(
    options: CompareOptions, first_rates: Mapping[str, float] | None = None
) -> tuple[Experiment, Deployments, str]:
    """Return the experiment for these options, the deployments of its arms, and the plan to print.

    `first_rates` has, for each arm, the rate at which the search for its capacity starts. The traffic is then checked
    at the lowest of these rates. Raises ConfigError, whose one-line message names the flag and the remedy.
    """
    _check_choices(options)
    model = _model_of(options)
    arms = _arms_of(options)
    control = copy_of(arms[0]) if options.control else None
    all_arms = [*arms, *([control] if control else [])]
    launches = {} if options.url or options.on == "sim" else _launches(options, all_arms, str(model))
    tokenizer = _tokenizer(model) if model else None
    vocabulary, limit = vocabulary_of(model, tokenizer) if model and tokenizer else (PromptVocabulary(WORDS_ONLY), 0)
    limit = _device(options).kv_tokens if _simulates_other_model(options) else limit
    seeds = tuple(range(1, options.seeds + 1))
    encode = None if tokenizer is None else lambda text: list(tokenizer.encode(text).ids)
    slo = LatencySlo(options.ttft_slo_ms, options.tbt_slo_ms)
    read = partial(read_trace, form=options.trace_format, encode=encode, slo=slo, vocab_size=vocab_size(options))
    trace = read(options.trace) if options.trace else []
    source = TrafficSource(options, vocabulary, trace, limit)
    traffic = lru_cache(source.draw)
    rate = min(first_rates.values()) if first_rates else None
    for seed in seeds:
        traffic(seed, rate)  # raises ConfigError for impossible traffic before anything starts
    if options.find_capacity:
        source.check_trace()  # because a search may draw any part of the trace
    experiment = Experiment(
        arms=tuple(arms),
        control=control,
        traffic=traffic,
        seeds=seeds,
        slo=slo,
        attainment=options.attainment,
        first_rate=float(traffic(1, rate).notes["rate"]) if options.find_capacity else None,
        first_rates=first_rates or {},
        lowest_rate=MIN_REQUESTS / options.duration,
        prompts=tuple(tuple(vocabulary.draw(0, f"preflight {count}", count)) for count in PREFLIGHT_TOKENS),
        treatment=(*options.treatment, *(["devices", "engine_url"] if options.unequal else [])),
        send="ids" if model else "text",
        timeout_s=options.timeout,
        out=options.out or Path(time.strftime("baton-compare-%Y%m%d-%H%M%S")),
        engines=_meter(options, arms, model),
        device=f"{DEVICES[options.on]} {options.emulate or DEFAULT_EMULATED}" if options.on in DEVICES else "",
    )
    if options.on == "sim":
        simulated = SimulatedDeployments(experiment.all_arms, _device(options), records=not experiment.finds_capacity)
        return experiment, simulated, f"{experiment.size(options.duration)}, simulated"
    logs, blank = experiment.out / "logs", LaunchOptions("")
    stacks = [
        LocalStack(arm, launches.get(arm.name, blank), logs / f"arm-{number}.log", options.api_key)
        for number, arm in enumerate(all_arms, 1)
    ]
    keeps_all = bool(options.url or options.engines) or fit_together(all_arms, str(model))
    # The number of running processes per core, including this session.
    slowdown = min(max(1.0, (1 + os.getloadavg()[0]) / len(os.sched_getaffinity(0))), MAX_SLOWDOWN)
    plan = experiment.plan(options.duration, keeps_all=keeps_all, slowdown=slowdown)
    return experiment, Deployments(stacks, keeps_all=keeps_all), plan


def _device(options: CompareOptions) -> Emulation:
    try:
        return load_emulation(options.emulate or DEFAULT_EMULATED)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _check_choices(options: CompareOptions) -> None:
    check_finite(options)
    for flag, value, known in (
        ("--preset", options.preset or DEFAULT_PRESET, PRESET_NAMES),
        ("--on", options.on, ON),
        ("--too-long", options.too_long, TOO_LONG),
    ):
        if value not in known:
            raise ConfigError(f"{flag} {value}: must be {', '.join(known[:-1])} or {known[-1]}")
    default = CompareOptions()
    keeps_times = options.trace and options.rate is None and not options.find_capacity
    for flag, needed, alone in (
        ("--trace-format", "--trace", options.trace_format != default.trace_format and not options.trace),
        ("--start", "--trace", options.start and not options.trace),
        ("--attainment", "--find-capacity", options.attainment != default.attainment and not options.find_capacity),
        ("--burstiness with --trace", "--rate or --find-capacity", options.burstiness != 1 and keeps_times),
    ):
        if alone:
            raise ConfigError(f"{flag}: has no effect without {needed}; give {needed}, or leave out {flag.split()[0]}")
    for one, other, both in (
        ("--start", "--rate", options.start and options.rate is not None),
        ("--start", "--find-capacity", options.start and options.find_capacity),
        ("--trace", "--preset", options.trace and options.preset),
        ("--rate", "--find-capacity", options.rate is not None and options.find_capacity),
        ("--url", "--arms", options.url and (options.arms or options.more_arms)),
        ("--url", "--engines", options.url and options.engines),
        ("--url", "--set", options.url and options.set),
    ):
        if both:
            raise ConfigError(f"{one} and {other}: give only one of them")
    if options.emulate and (options.url or options.engines):
        raise ConfigError("--emulate: needs --arms of Baton's own nodes")
    if options.emulate:
        _device(options)  # raises ConfigError before anything starts
    if options.engines and options.on != "live":
        raise ConfigError(f"--engines: cannot be {DEVICES[options.on]}; leave out --on")
    if options.url and options.on != "live":
        raise ConfigError(f"--url: cannot be {DEVICES[options.on]}; leave out --on, or give --arms")


def _model_of(options: CompareOptions) -> Path | None:
    """Return the model's directory, or None if --url is given without --model."""
    if not options.model:
        return None if options.url else DEMO_MODEL
    try:
        return resolve(options.model)
    except ValueError as error:
        raise ConfigError(f"--model: {error}") from None


def _simulates_other_model(options: CompareOptions) -> bool:
    """Return True if the cost file, and not `_model_of`, determines the simulated model and its limits."""
    return options.on == "sim" and not options.model


def context_limit(options: CompareOptions) -> int:
    """Return the model's maximum context, or 0 if it is unknown. Raises ConfigError."""
    model = _model_of(options)
    return vocabulary_of(model, _tokenizer(model))[1] if model else 0


def vocab_size(options: CompareOptions) -> int:
    """Return the size of the model's vocabulary, or 0 if it is unknown. Raises ConfigError."""
    model = _model_of(options)
    with suppress(ConfigError):
        return read_limits(model)[1] if model and not _simulates_other_model(options) else 0
    return 0


def _arms_of(options: CompareOptions) -> list[Arm]:
    if not options.url:
        given = [*options.arms, *options.more_arms] or list(DEFAULT_ARMS)
        arms = parse_arms(given, options.set, unequal=options.unequal, has_control=options.control)
        urls = engines_of(options)
        if urls and len(urls) != (most := max(arm.devices for arm in arms)):
            raise ConfigError(f"--engines: {len(urls)} servers, but the arms have {most} devices: give {most} servers")
        return arms
    if len(options.url) < 2 and not options.control:
        raise ConfigError("--url: a comparison needs two URLs; to compare a stack with itself, add --control")
    if len(set(options.url)) < len(options.url):
        raise ConfigError("--url: is given twice with the same value; to compare a stack with itself, use --control")
    return [Arm(url, 0, 0, {}, url) for url in options.url]


def engines_of(options: CompareOptions) -> tuple[str, ...]:
    """Return the URLs of the vLLM servers that all arms share. Raises ConfigError."""
    try:
        urls = parse_engines(options.engines)
    except ValueError as error:
        raise ConfigError(f"--engines {options.engines}: {error}") from None
    if urls and not options.model:
        raise ConfigError("--engines: give --model too, the directory or hub id of the model that the servers have")
    return urls


def _meter(options: CompareOptions, arms: Sequence[Arm], model: Path | None) -> EngineMeter | None:
    if not (urls := engines_of(options)) or model is None:
        return None
    try:
        key = read_key(next(filter(None, (arm.settings.get("engine_api_key_file", "") for arm in arms)), ""))
        return EngineMeter(urls, key, read_limits(model)[1])
    except (ValueError, OSError) as error:
        raise ConfigError(f"--engines: {error}") from None


def _launches(options: CompareOptions, arms: list[Arm], model: str) -> dict[str, LaunchOptions]:
    if options.on == "emulated":  # emulated nodes do not compute, so they need no separate cores
        return {arm.name: LaunchOptions(model, emulate=options.emulate or DEFAULT_EMULATED) for arm in arms}
    if engines := engines_of(options):
        return {arm.name: LaunchOptions(model, engines=engines) for arm in arms}
    cores = cores_of(arms, sorted(os.sched_getaffinity(0)))
    gpus = num_gpus()
    return {arm.name: LaunchOptions(model, cores[arm.name], gpus=gpus) for arm in arms}


def _tokenizer(model: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(model / "tokenizer.json"))
    except Exception as error:  # noqa: BLE001 - tokenizers raises plain Exception
        raise ConfigError(f"--model {model}: {error}") from None


def vocabulary_of(model: Path, tokenizer: Tokenizer) -> tuple[PromptVocabulary, int]:
    """Return the ids that prompts may contain, and the model's maximum context (0 if unknown). Raises ConfigError."""
    try:
        config = json.loads((model / "config.json").read_text())
        limit = int(config.get("max_position_embeddings", 0))
        size = min(tokenizer.get_vocab_size(), int(config.get("vocab_size", tokenizer.get_vocab_size())))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"--model {model}: {error}") from None
    special = [number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    return PromptVocabulary(size, special), limit
