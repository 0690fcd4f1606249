"""Reads the files of a router's models, and connects each model to its nodes."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf

from router.dispatch.admission import AdmissionQueue
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.requests import ModelCard
from router.dispatch.rules import DispatchRules
from router.http.generation import ModelParts
from router.metrics.scaling import ScalingSignals
from router.nodes.model_registry import DividedRegistry
from router.nodes.placement import PoolCapacity
from router.nodes.pool import NodePool
from router.observer import RouterObserver
from router.text.images import ImageLimits, ImageReader
from router.text.model_files import read_model
from router.text.pooling_rule import read_pooling
from router.text.tokenizer import Tokenizer
from router.workers import WorkerShare
from shared.config.settings import RouterSettings
from shared.errors import ConfigError
from shared.images import ImageRules, read_image_rules
from shared.model_files import resolve, served_name
from shared.registry import Registry


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model that the router reads."""

    card: ModelCard
    tokenizer: Tokenizer
    images: ImageRules | None


@dataclass(frozen=True)
class ConnectedModel:
    """A model and the pool of its nodes. `signals` computes how many nodes the model's requests need."""

    pool: NodePool
    parts: ModelParts
    signals: ScalingSignals


def load_models(settings: RouterSettings) -> list[ModelFiles]:
    """Read the files of all models. The first result is for --model. Raises ConfigError, OSError or ValueError."""
    parsers = settings.tool_call_parser, settings.reasoning_parser
    name = served_name(settings.model, settings.served_model_name)
    models = [_read_files(name, settings.model, settings.max_model_len, parsers, settings.generation_config)]
    for text in settings.more_models:
        name, _, directory = text.partition("=")
        if name == models[0].card.name:
            raise ConfigError(f"--more-models {text}: --model has this name too; see --served-model-name")
        models.append(_read_files(name, directory, 0, ("auto", "auto"), settings.generation_config))
    return models


def _read_files(
    name: str, model: str, max_model_len: int, parsers: tuple[str, str], generation_config: str
) -> ModelFiles:
    directory = resolve(model)
    card = read_model(directory, name, max_model_len, int(time.time()), generation_config)
    card = replace(card, pooling=read_pooling(directory, card.vocab_size))
    return ModelFiles(card, Tokenizer.load(directory, card.vocab_size, *parsers), read_image_rules(directory))


def connect(
    settings: RouterSettings,
    models: Sequence[ModelFiles],
    identity: str,
    registry: Registry,
    share: WorkerShare,
    observer: RouterObserver,
) -> list[ConnectedModel]:
    """Return the models with their pools of nodes. The caller must start the pools."""
    names = [each.card.name for each in models]
    # The SLO for the first token also limits the wait in the queue: a request that waits longer misses the SLO.
    ttft_slo_s = settings.ttft_slo_ms / 1000
    rules = DispatchRules(settings.max_attempts, settings.disaggregate, ttft_slo_s, settings.exact_retries)
    served = []
    limits = ImageLimits(settings.limit_mm_per_prompt, settings.max_image_pixels, settings.max_images_size)
    for files, part in zip(models, DividedRegistry(registry, names).parts if names[1:] else [registry], strict=True):
        queue = AdmissionQueue(min(settings.max_queue_s, ttft_slo_s or inf), share.of(settings.max_queued_tokens))
        resize = partial(_resize, queue, share)
        pool = NodePool(identity, part, settings.mode, settings.node_timeout_s, observer, resize)
        dispatcher = Dispatcher(pool, queue, files.card.name, rules, observer)
        images = None if files.images is None else ImageReader(files.images, limits)
        parts = ModelParts(dispatcher, files.tokenizer, files.card, images)
        signals = ScalingSignals(pool, queue, dispatcher.arrivals, files.card.name, ttft_slo_s)
        served.append(ConnectedModel(pool, parts, signals))
    return served


def _resize(queue: AdmissionQueue, share: WorkerShare, capacity: PoolCapacity, now: float) -> None:
    """Set the queue's capacity to this worker's share of the nodes' capacity."""
    queue.resize(PoolCapacity(*map(share.of, capacity)), now)
