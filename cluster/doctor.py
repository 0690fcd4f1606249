"""The `baton doctor` command, which checks this installation or a running cluster, and changes nothing.

Without --url, it checks this machine. It then starts small clusters, and checks that they give the same answers in both
modes (co-located and disaggregated) and over every KV channel. With --url, it checks a running cluster: the
registry, the nodes, and whether answers are repeatable. With --engine, it checks vLLM servers.
"""

import asyncio
import inspect
import os
import secrets
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Literal, NamedTuple

from cluster.clients import size_text
from cluster.doctor_engine import engine_checks
from cluster.plan import DoctorSettings
from compare.arms import Arm
from compare.endpoint import Document, Endpoint, EndpointError
from compare.run.deployments import LaunchOptions, LocalStack, fit_together, num_gpus
from compare.run.equivalence import different_answers, fits, greedy_answers
from engine.cpu import why_not_compiled
from engine.options import BuildOptions, check_gpu, check_options
from engine.weights import check_finite, fingerprint
from proxy_node.wire import EngineFailure
from router.http.auth import ApiKeys
from router.text.model_files import read_model
from router.text.tokenizer import Tokenizer
from shared.config.settings import ComputingSettings, flag_of, format_value, hide_password
from shared.lifecycle import in_container, wait_until
from shared.model_files import DEMO_MODEL
from shared.registry import RedisRegistry
from shared.rpc import tls

REDIS_S = 3.0
PROMPT_TOKENS = (1, 16, 33, 130, 700)  # lengths at, near and beyond the boundaries of blocks and chunks
IDS = 250  # token ids in prompts are below this number, so that every model's vocabulary has them
CLOCK_MS = 1000.0  # a larger difference between clocks causes a warning
REPORT_S = 10.0  # maximum wait for the nodes' reports, which arrive every 0.5 to 2.5 s, or later on a busy machine
REPORT_POLL_S = 0.2
CO_LOCATED = "co-located"
CHOSEN = {"kv_channel", "kv_directory", "cpus", "emulate"}  # settings that doctor chooses itself


class Finding(NamedTuple):
    """The result of a check. `text` describes the result and, if there is a problem, says how to fix it."""

    name: str
    level: Literal["ok", "warning", "failed"]
    text: str


class CheckWarning(Exception):
    """A check found that Baton will run, but not well. The message says why, and how to fix it."""


def run_doctor(settings: DoctorSettings) -> int:
    """Run all checks and print a line for each. Return 1 if a check failed, else 0."""
    return asyncio.run(_run(settings))


async def _run(settings: DoctorSettings) -> int:
    failed = set[str]()
    stages = (_engines,) if settings.engine else (_installation, _running if settings.url else replays_here)
    for stage in stages:
        if failed and not settings.url:
            break  # the clusters of the next stage could not start
        async for finding in stage(settings):
            print(f"{finding.level:9}{finding.name:14}{finding.text}", flush=True)
            failed |= {finding.name} if finding.level == "failed" else set()
    return int(bool(failed))


async def examine(name: str, check: Callable[[], str | Awaitable[str]]) -> Finding:
    """Run a check, which may be a coroutine function, and return its finding.

    The check returns a text, raises CheckWarning for a warning, or raises any other exception for a failure.
    """
    try:
        found = check()
        return Finding(name, "ok", await found if inspect.isawaitable(found) else found)
    except CheckWarning as warning:
        return Finding(name, "warning", str(warning))
    except Exception as error:  # noqa: BLE001 - an error in one check must not prevent the others
        is_known = isinstance(error, ValueError | OSError | ImportError | EndpointError | EngineFailure) and str(error)
        return Finding(name, "failed", str(error) if is_known else f"{type(error).__name__}: {error}")


# ---- this machine --------------------------------------------------------------------------------------------------


async def _installation(settings: DoctorSettings) -> AsyncIterator[Finding]:
    """Yield the findings about this machine. With --url, the cluster may run on other machines, so check neither the
    devices nor the model."""
    checks: tuple[Callable[[DoctorSettings], str | Awaitable[str]], ...] = (libraries, secret_files, registry)
    if not settings.url:
        checks = (libraries, computing, model, secret_files, registry)
    for check in checks:
        yield await examine(check.__name__.replace("_", " "), partial(check, settings))


def libraries(_: DoctorSettings) -> str:
    if sys.platform != "linux":
        raise ValueError(f"{sys.platform}: Baton needs Linux; on other systems, run it in a container")
    return f"Python {sys.version.split()[0]}, torch {version('torch')}"


def computing(settings: DoctorSettings) -> str:
    if BuildOptions.from_settings(settings).on_gpu:
        import torch

        check_gpu("cuda" if settings.device == "auto" else settings.device)
        return ", ".join(torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count()))
    if reason := BuildOptions.from_settings(settings).unused_gpu:
        raise CheckWarning(f"nodes compute on the CPU, because {reason}")
    if reason := why_not_compiled():
        raise CheckWarning(f"kernels cannot be compiled ({reason}): torch computes instead, several times slower")
    return f"{len(os.sched_getaffinity(0))} CPUs, kernels can be compiled"


def model(settings: DoctorSettings) -> str:
    options = BuildOptions.from_settings(settings, model=settings.model or str(DEMO_MODEL))
    directory, config = check_options(options)
    revision = fingerprint(directory)[:8]
    check_finite(directory)
    Tokenizer.load(directory, read_model(directory, "", 0, 0).vocab_size)
    return f"{directory}: {config.num_layers} layers, {config.max_position_embeddings} positions, revision {revision}"


def secret_files(settings: DoctorSettings) -> str:
    """Check the files of secrets and API keys, and let this process use the cluster's secret."""
    tls.configure(settings.cluster_secret_file, {} if settings.url else {"--registry-host": settings.registry_host})
    if settings.api_keys_file or settings.api_keys:
        ApiKeys(settings.api_keys_file, settings.api_keys)
    # In a container, --host is an address inside the container, so it does not show who can connect.
    elif not (settings.url or in_container() or tls.is_loopback(settings.host)):
        raise CheckWarning(f"--host {settings.host} serves any client without a key: give --api-keys-file")
    given = [flag_of(name) for name in ("cluster_secret_file", "api_keys_file") if getattr(settings, name)]
    return f"{' and '.join(given)} can be used" if given else "none are given, and none are needed here"


async def registry(settings: DoctorSettings) -> str:
    if not settings.registry:
        return "the router itself"
    redis = RedisRegistry(settings.registry, settings.cluster)
    await redis.start(lambda: None)
    try:
        if not await wait_until(lambda: redis.state == "ok", REDIS_S):
            reason = redis.error or "no answer"
            raise OSError(f"--registry {hide_password(settings.registry)}: no Redis within {REDIS_S:g} s: {reason}")
        if redis.skipped:
            raise ValueError(
                f"{redis.skipped} nodes in Redis are not signed with this process's secret: --cluster-secret-file "
                "must be the file that the nodes have"
            )
        return f"Redis answers, and knows {len(redis.nodes)} nodes of cluster {settings.cluster}"
    finally:
        await redis.close()


# ---- vLLM servers ---------------------------------------------------------------------------------------------------


async def _engines(settings: DoctorSettings) -> AsyncIterator[Finding]:
    try:
        async with engine_checks(settings) as checks:
            for name, check in checks:
                yield (finding := await examine(name, check))
                if name == "server" and finding.level == "failed":
                    return
    except (ValueError, OSError) as error:
        yield Finding("model", "failed", str(error))


# ---- a running cluster ---------------------------------------------------------------------------------------------


async def _running(settings: DoctorSettings) -> AsyncIterator[Finding]:
    endpoint, status = Endpoint(settings.url, settings.api_key), Document()

    async def connect() -> str:
        await endpoint.connect()
        if not endpoint.is_baton:
            raise EndpointError(f"{settings.url} is not a router, has an --admin-port, or needs an admin's --api-key")
        status.update(await endpoint.status())
        return f"{endpoint.model} at {settings.url}"

    async def replays() -> str:
        """Check that a prompt always gets the same answer. With a new salt, the first answers use no cached prefix."""
        prompts, salt = _prompts(endpoint.max_model_len), secrets.token_hex(8)
        answers = {"at once": await greedy_answers(endpoint, prompts, salt)}
        answers["from the prefix cache"] = await greedy_answers(endpoint, prompts, salt)
        answers["one by one"] = [(await greedy_answers(endpoint, [prompt], salt))[0] for prompt in prompts]
        return same_tokens(answers)

    try:
        yield (finding := await examine("cluster", connect))
        if finding.level == "ok":
            for name, check in STATUS_CHECKS.items():
                yield await examine(name, partial(check, status))
            yield await examine("replays", replays)
    finally:
        await endpoint.close()


def _members(status: Document) -> list[Document]:
    """Return the entries of the nodes that are in the cluster now: those that are not lost and have not left."""
    return [node for node in status["nodes"] if node["state"] not in {"lost", "left"}]


def _nodes(status: Document) -> str:
    nodes = [node for node in status["nodes"] if node["state"] != "left"]
    if not nodes:
        raise ValueError("no nodes have joined: start some; their logs show any errors")
    if not_ready := [f"{node['id']} is {node['state']}" for node in nodes if node["state"] != "ready"]:
        raise ValueError(f"{', '.join(not_ready)}: see their logs; a supervisor should restart a lost node")
    roles = [node["role"] for node in nodes]
    return f"{roles.count('prefill')} prefill and {roles.count('decode')} decode, all ready"


def _fingerprints(status: Document) -> str:
    """Check that all nodes of a model have the same fingerprint. Nodes with different fingerprints serve requests, but
    do not exchange KV."""
    found = []
    for model in status.get("models", [None]):
        nodes = [node for node in _members(status) if model is None or node["model"] == model]
        prints = [node["fingerprint"] for node in nodes]
        found.append(max(sorted(set(prints)), key=prints.count, default=""))
        if others := [f"{node['id']}: {node['fingerprint']}" for node in nodes if node["fingerprint"] != found[-1]]:
            raise CheckWarning(
                f"{'; '.join(others)}; the other nodes have {found[-1]} and do not exchange KV with these nodes; "
                "unless you are changing the model or Baton, give them the same model, --model-impl, dtype, block size"
            )
    return f"all {', '.join(found)}"


def _blocks(status: Document) -> str:
    blocks = {node["id"]: node["blocks"] for node in _members(status)}
    # The counts contain the total too, so their sum must be twice the total.
    if wrong := [name for name, counts in blocks.items() if sum(counts.values()) != 2 * counts["total"]]:
        raise ValueError(f"{', '.join(wrong)}: the blocks do not add up to the total: restart the node, report its log")
    return "all accounted for"


def _channels(status: Document) -> str:
    used = ", ".join(sorted({channel for node in _members(status) for channel in node["channels"].values()}))
    slower = [
        f"{node['id']} {node['channel_fallbacks']} times" for node in _members(status) if node["channel_fallbacks"]
    ]
    if slower:
        raise CheckWarning(f"nodes used a slower channel: {', '.join(slower)} (in use: {used}); their logs say why")
    return used or "no KV has been sent yet"


def _clocks(status: Document) -> str:
    """Check that the nodes' clocks agree with the router's. Without the dashboard, a router knows no offsets."""
    offsets = {node["id"]: node["clock_offset_ms"] for node in _members(status) if "clock_offset_ms" in node}
    if skewed := [f"{name} by {-offset:+.0f} ms" for name, offset in offsets.items() if abs(offset) > CLOCK_MS]:
        raise CheckWarning(f"clocks differ from the router's: {', '.join(skewed)}: synchronize them with NTP")
    return f"at most {max(map(abs, offsets.values()), default=0):.0f} ms apart" if offsets else "unknown"


def _membership(status: Document) -> str:
    kind, state = status["registry"]["kind"], status["registry"]["state"]
    if state != "ok":
        raise CheckWarning(
            f"{kind} does not answer: until it does, the router keeps its last list of nodes, and no node can join"
        )
    return str(kind)


STATUS_CHECKS: dict[str, Callable[[Document], str]] = {
    "nodes": _nodes,
    "fingerprints": _fingerprints,
    "blocks": _blocks,
    "channels": _channels,
    "clocks": _clocks,
    "membership": _membership,
}


# ---- clusters that doctor starts -----------------------------------------------------------------------------------


async def replays_here(settings: DoctorSettings) -> AsyncIterator[Finding]:
    """Compare the answers of a co-located cluster with those of one disaggregated cluster per KV channel. If
    --kv-channel names a channel, compare only with that channel's cluster."""
    model_name = settings.model or str(DEMO_MODEL)
    on_gpus = num_gpus() if BuildOptions.from_settings(settings).on_gpu else 0
    every = ("cuda_ipc" if on_gpus else "shm", "tcp", "pool")
    channels = every if settings.kv_channel == "auto" else (settings.kv_channel,)
    with tempfile.TemporaryDirectory(prefix="baton-doctor-") as directory:
        arms = [_arm(settings, name, directory) for name in (CO_LOCATED, *channels)]
        launch = LaunchOptions(model_name, emulate=settings.emulate, gpus=on_gpus)
        stacks = [LocalStack(arm, launch, Path(directory) / f"{arm.name}.log") for arm in arms]
        answers: dict[str, list[list[int]]] = {}
        together = fit_together(arms, model_name)
        starting = [asyncio.ensure_future(stack.start()) for stack in stacks if together]
        try:
            for number, stack in enumerate(stacks):
                started = starting[number] if together else stack.start()
                yield await examine(stack.arm.name, partial(_answered, stack, started, answers))
        finally:
            for start in starting:
                start.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
            await asyncio.gather(*(stack.end() for stack in stacks))
    if len(answers) > 1:
        yield await examine("replays", partial(same_tokens, answers))


def _arm(settings: DoctorSettings, name: str, directory: str) -> Arm:
    """Return a cluster with the user's settings. If it is not co-located, its prefill node hands off every prompt."""
    given = {
        field: format_value(getattr(settings, field))
        for field, about in ComputingSettings.model_fields.items()
        if field not in CHOSEN and getattr(settings, field) != about.get_default(call_default_factory=True)
    } | {"kv_directory": f"{directory}/{name}"}
    if name == CO_LOCATED:
        return Arm(name, 0, 1, given)
    return Arm(name, 1, 1, given | {"disaggregate": "always", "kv_channel": name})


async def _answered(stack: LocalStack, started: Awaitable[None], answers: dict[str, list[list[int]]]) -> str:
    try:
        await started
        prompts = _prompts(stack.endpoint.max_model_len)
        answers[stack.arm.name] = await greedy_answers(stack.endpoint, prompts, "doctor")
        if stack.arm.name == CO_LOCATED:
            return f"{len(prompts)} prompts computed by the decode node"
        return handed_off(await _reported(stack.endpoint, len(prompts)), stack.arm.name, len(prompts))
    finally:
        stack.terminate()


async def _reported(endpoint: Endpoint, num_handoffs: int) -> Document:
    """Wait until the nodes have reported `num_handoffs` handoffs, for at most REPORT_S seconds. Return the status."""
    deadline = time.monotonic() + REPORT_S
    while True:
        status = await endpoint.status()
        if status["handoffs"] >= num_handoffs or time.monotonic() >= deadline:
            return status
        await asyncio.sleep(REPORT_POLL_S)


def handed_off(status: Document, channel: str, count: int) -> str:
    """Check that the prompts were handed off over `channel`. Equal tokens do not prove that the channel was used."""
    used = {name for node in status["nodes"] for name in node["channels"].values()}
    if status["handoffs"] < count or used != {channel}:
        raise ValueError(
            f"{status['handoffs']} of {count} prompts were handed off; channels used: {', '.join(used) or 'none'}. Try "
            f"`baton up --kv-channel {channel}`, and look at the prefill node's log"
        )
    return f"{count} prompts handed off, {size_text(status['bytes_moved'])} moved"


def _prompts(max_model_len: int) -> list[list[int]]:
    rows = [[(length * 7 + place * place) % IDS for place in range(length)] for length in PROMPT_TOKENS]
    return [row for row in rows if not max_model_len or fits(row, max_model_len)]


def same_tokens(answers: Mapping[str, Sequence[Sequence[int]]]) -> str:
    """Check that all answers are equal. `answers` is keyed by the cluster or the method that gave the answers."""
    if different := different_answers(answers):
        raise ValueError(
            f"{different[0]} ({len(different)} differ): either KV does not arrive as it was sent, or the nodes "
            "compute differently: compare their `facts` in /v1/status"
        )
    return f"{len(next(iter(answers.values())))} prompts, {', '.join(answers)}: the same tokens"
