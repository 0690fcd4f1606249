"""From what the command line asked for to an experiment: every choice is checked here, before anything starts."""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

from tokenizers import Tokenizer

from compare.arms import Arm, copy_of, cores_of, parse_arms
from compare.command import DEFAULT_EMULATED, Choices
from compare.experiment import Experiment
from compare.outcome import Slo
from compare.presets import NAMES
from compare.schedule import Plan
from compare.stack import Launch, fit_together, num_gpus
from compare.traces import Encode, Row, read_trace
from compare.traffic import Traffic, TrafficPlan, Vocabulary, draw_traffic
from shared.errors import ConfigError
from shared.model_files import resolve

DEMO_MODEL = Path(__file__).resolve().parent.parent / "demo" / "model"
DEFAULT_ARMS = ("colocated:2", "disaggregated:1p1d")
PRESET_RATE = 4.0  # requests per second: two cores are busy with the demo model, and not swamped
PRESET_SCALE = 0.5  # of a preset's lengths: they are of GPUs' models
TOO_LONG = ("error", "cut", "drop")
PLACES = ("live", "emulated")
PREFLIGHT_TOKENS = (1, 16, 40, 100, 250)  # shorter than a block, a whole one, several, and a chunk or more
WORDS_ONLY = 4096  # ids of a model that is not here: they become words, see `compare.stream`


@dataclass(frozen=True, slots=True)
class Prepared:
    """All that a run needs."""

    experiment: Experiment
    launches: dict[str, Launch]  # by arm; empty for stacks that run already
    keeps_all: bool
    plan: Plan
    on: str
    api_key: str


def prepared(choices: Choices) -> Prepared:
    """Raises ConfigError: one line that names the flag and the remedy."""
    _check_words(choices)
    model = _model_of(choices)
    arms = _arms_of(choices)
    control = copy_of(arms[0]) if choices.control else None
    everyone = [*arms, *([control] if control else [])]
    launches = {} if choices.url else _launches(choices, everyone, str(model))
    keeps_all = bool(choices.url) or fit_together(everyone, str(model))
    tokenizer = _tokenizer(model) if model else None
    vocabulary, limit = vocabulary_of(model, tokenizer) if model and tokenizer else (Vocabulary(WORDS_ONLY), 0)
    seeds = tuple(range(1, choices.seeds + 1))
    plan = traffic_plan(choices, limit)
    trace = read_trace(choices.trace, choices.trace_format, _encode(tokenizer)) if choices.trace else None
    traffic = lru_cache(partial(traffic_of, choices.duration, plan, vocabulary, trace))
    for seed in seeds:
        traffic(seed)  # what cannot be drawn had better be told now
    experiment = Experiment(
        tuple(arms),
        control,
        traffic,
        seeds,
        Slo(choices.slo_ttft_ms, choices.slo_tbt_ms),
        choices.attainment,
        float(traffic(1).notes["rate"]) if choices.find_capacity else None,
        tuple(tuple(vocabulary.draw(0, f"preflight {count}", count)) for count in PREFLIGHT_TOKENS),
        (*choices.treatment, *(["devices"] if choices.unequal else [])),
        "ids" if model else "text",
        choices.timeout,
        choices.out or Path(time.strftime("baton-compare-%Y%m%d-%H%M%S")),
    )
    num_devices = max(arm.devices for arm in everyone)
    course = Plan(len(everyone), experiment.max_turns, choices.duration, num_devices, keeps_all)
    return Prepared(experiment, launches, keeps_all, course, "url" if choices.url else choices.on, choices.api_key)


def _check_words(choices: Choices) -> None:
    for flag, value, known in (
        ("--preset", choices.preset or NAMES[0], NAMES),
        ("--on", choices.on, PLACES),
        ("--too-long", choices.too_long, TOO_LONG),
    ):
        if value not in known:
            raise ConfigError(f"{flag} {value}: must be {', '.join(known[:-1])} or {known[-1]}")
    for one, other, both in (
        ("--trace", "--preset", choices.trace and choices.preset),
        ("--rate", "--find-capacity", choices.rate is not None and choices.find_capacity),
        ("--url", "--arms", choices.url and (choices.arms or choices.more_arms)),
    ):
        if both:
            raise ConfigError(f"{one} and {other}: give one of them")
    if choices.emulate and choices.on != "emulated":
        raise ConfigError("--emulate: is for --on emulated")


def _model_of(choices: Choices) -> Path | None:
    """The model's directory; None for stacks that run already and whose model is not here."""
    if not choices.model:
        return None if choices.url else DEMO_MODEL
    try:
        return resolve(choices.model)
    except ValueError as error:
        raise ConfigError(f"--model: {error}") from None


def _arms_of(choices: Choices) -> list[Arm]:
    if not choices.url:
        given = [*choices.arms, *choices.more_arms] or list(DEFAULT_ARMS)
        return parse_arms(given, choices.set, unequal=choices.unequal)
    if len(choices.url) < 2 and not choices.control:
        raise ConfigError("--url: a comparison needs two; to hold a stack against itself, add --control")
    if len(set(choices.url)) < len(choices.url):
        raise ConfigError("--url: is given twice with the same value; to hold a stack against itself, use --control")
    return [Arm(url, 0, 0, {}, url) for url in choices.url]


def _launches(choices: Choices, arms: list[Arm], model: str) -> dict[str, Launch]:
    if choices.on == "emulated":  # nodes that sleep need no core of their own
        return {arm.name: Launch(model, emulate=choices.emulate or DEFAULT_EMULATED) for arm in arms}
    cores = cores_of(arms, sorted(os.sched_getaffinity(0)))
    gpus = num_gpus()
    return {arm.name: Launch(model, cores[arm.name], gpus=gpus) for arm in arms}


def traffic_plan(choices: Choices, max_model_len: int) -> TrafficPlan:
    """Without a rate a trace has its own times, and a preset the usual one."""
    is_preset = choices.trace is None
    return TrafficPlan(
        (choices.preset or NAMES[0]) if is_preset else str(choices.trace),
        choices.trace_format,
        choices.rate if choices.rate is not None or not is_preset else PRESET_RATE,
        choices.burstiness,
        start_s=choices.start,
        duration_s=choices.duration,
        scale_tokens=choices.scale_tokens or (PRESET_SCALE if is_preset else 1.0),
        too_long=choices.too_long,
        max_model_len=max_model_len,
    )


def traffic_of(
    duration_s: float,
    plan: TrafficPlan,
    vocabulary: Vocabulary,
    trace: Sequence[Row] | None,
    seed: int,
    rate: float | None = None,
) -> Traffic:
    """A seed's; of a trace with its own times, the seed's own part of it: the periods follow each other."""
    if rate is not None:
        plan = replace(plan, rate=rate)
    elif plan.rate is None:
        plan = replace(plan, start_s=plan.start_s + (seed - 1) * duration_s)
    return draw_traffic(plan, seed, vocabulary, trace=trace)


def _tokenizer(model: Path) -> Tokenizer:
    """Raises ConfigError."""
    try:
        return Tokenizer.from_file(str(model / "tokenizer.json"))
    except Exception as error:  # noqa: BLE001 - tokenizers raises Exception itself
        raise ConfigError(f"--model {model}: {error}") from None


def _encode(tokenizer: Tokenizer | None) -> Encode | None:
    return None if tokenizer is None else lambda text: list(tokenizer.encode(text).ids)


def vocabulary_of(model: Path, tokenizer: Tokenizer) -> tuple[Vocabulary, int]:
    """The ids that prompts may hold, and the longest context (0: not told). Raises ConfigError."""
    try:
        config = json.loads((model / "config.json").read_text())
        limit = int(config.get("max_position_embeddings", 0))
        size = min(tokenizer.get_vocab_size(), int(config.get("vocab_size", tokenizer.get_vocab_size())))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"--model {model}: {error}") from None
    special = [number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    return Vocabulary(size, special), limit
