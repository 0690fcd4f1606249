"""`baton doctor`: checks this installation and a cluster, and changes nothing.

It checks that the nodes of the cluster fit together, and that the same prompts get the same tokens in both modes and
over every KV channel.
"""

import asyncio
import secrets
import tempfile
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from pathlib import Path

from cluster.installation import CheckFailedError, Finding, examine, installation
from cluster.plan import DoctorSettings
from cluster.status import size_text
from compare.arms import Arm
from compare.endpoint import Document, Endpoint, EndpointError
from compare.run.deployments import LaunchOptions, LocalStack, fit_together, num_gpus
from compare.run.equivalence import different_answers, fits, greedy_answers
from shared.config.settings import ComputingSettings, format_value
from shared.errors import ConfigError
from shared.model_files import DEMO_MODEL

PROMPT_TOKENS = (1, 16, 33, 130, 700)  # at, near and beyond the boundaries of blocks and chunks
IDS = 250  # token ids below this are in every vocabulary
CLOCK_S = 1.0  # a larger difference between clocks gets a warning
IDLE_S = 10.0
CO_LOCATED = "co-located"
# The settings that doctor chooses for the clusters that it starts.
OURS = {"kv_channel", "kv_directory", "cpus", "emulate"}


def run_doctor(settings: DoctorSettings) -> int:
    """Run all checks and print a line for each. Return the exit status, which is 1 if a check failed."""
    return asyncio.run(_run(settings))


async def _run(settings: DoctorSettings) -> int:
    has_failed = False
    async for finding in _findings(settings):
        has_failed |= finding.level == "failed"
        print(f"{finding.level:9}{finding.name:14}{finding.text}", flush=True)
    return int(has_failed)


async def _findings(settings: DoctorSettings) -> AsyncIterator[Finding]:
    is_fit = True
    for finding in installation(settings):
        is_fit &= finding.level != "failed" or finding.name == "ports"
        yield finding
    try:
        if settings.url:
            async for finding in _running(settings):
                yield finding
        elif is_fit:
            async for finding in _own(settings):
                yield finding
    except (EndpointError, ConfigError, OSError) as error:
        yield Finding("cluster", "failed", str(error))


# ---- a running cluster ---------------------------------------------------------------------------------------------


async def _running(settings: DoctorSettings) -> AsyncIterator[Finding]:
    endpoint = Endpoint(settings.url, settings.api_key)
    try:
        await endpoint.connect()
        if not endpoint.is_baton:
            raise EndpointError(f"{settings.url} is no router of Baton, or does not tell its status")
        for finding in peers(await endpoint.status()):
            yield finding
        yield await _replayed_there(endpoint)
    finally:
        await endpoint.close()


def peers(status: Document) -> Iterator[Finding]:
    """Check in a router's /v1/status that all nodes are ready and fit together."""
    nodes = status["nodes"]
    yield examine("nodes", lambda: _ready(nodes))
    yield examine("fingerprints", lambda: _alike(nodes))
    yield examine("blocks", lambda: _balanced(nodes))
    yield examine("channels", lambda: _channels(nodes))
    yield examine("clocks", lambda: _clocks(nodes))
    yield examine("membership", lambda: _membership(status["registry"]))


def _ready(nodes: Sequence[Document]) -> str:
    if not nodes:
        raise ValueError("there are none: start some, and look at their logs for why they do not join")
    away = [f"{node['id']} is {node['state']}" for node in nodes if node["state"] != "ready"]
    if away:
        raise ValueError(f"{', '.join(away)}: see their logs; a lost node is started again by who supervises it")
    roles = [node["role"] for node in nodes]
    return f"{roles.count('prefill')} prefill and {roles.count('decode')} decode, all ready"


def _alike(nodes: Sequence[Document]) -> str:
    """Check that all nodes have the same fingerprint. Nodes with different ones cannot exchange KV.

    The router uses only the nodes of the most common fingerprint.
    """
    prints = [node["fingerprint"] for node in nodes]
    most = max(sorted(set(prints)), key=prints.count, default="")
    others = [node for node in nodes if node["fingerprint"] != most]
    if others:
        like = next(node for node in nodes if node["fingerprint"] == most)
        told = "; ".join(f"{node['id']} ({_differences(like, node)})" for node in others)
        raise ValueError(f"not as the others, and not used: {told}: give all nodes one model, dtype and block size")
    return f"all {most}"


def _differences(one: Document, other: Document) -> str:
    facts = {name: (one["facts"].get(name), value) for name, value in other["facts"].items()}
    facts |= {name: (one[name], other[name]) for name in ("block_tokens", "block_bytes")}
    named = [f"{name} {there}, not {here}" for name, (here, there) in facts.items() if here != there]
    return ", ".join(named) or "another model or revision"


def _balanced(nodes: Sequence[Document]) -> str:
    wrong = [node["id"] for node in nodes if sum(node["blocks"].values()) != 2 * node["blocks"]["total"]]
    if wrong:
        sum_of = "free + cached + owned + reserved + quarantined"
        raise ValueError(f"{', '.join(wrong)}: {sum_of} is not the total: restart it, and report its log")
    return "all accounted for"


def _channels(nodes: Sequence[Document]) -> str:
    used = sorted({channel for node in nodes for channel in node["channels"].values()})
    fallen = [f"{node['id']} {node['channel_fallbacks']} times" for node in nodes if node["channel_fallbacks"]]
    if fallen:
        raise CheckFailedError(
            f"{', '.join(fallen)} fell back to a slower one (in use: {', '.join(used)}): its log says why"
        )
    return ", ".join(used) or "none was needed yet"


def _clocks(nodes: Sequence[Document]) -> str:
    off = {node["id"]: node["clock_offset_ms"] for node in nodes}
    late = [f"{name} by {-offset:+.0f} ms" for name, offset in off.items() if abs(offset) > 1000 * CLOCK_S]
    if late:
        raise CheckFailedError(
            f"{', '.join(late)} against the router's: traces allow for it, logs do not; keep clocks by NTP"
        )
    return f"at most {max(map(abs, off.values()), default=0):.0f} ms apart"


def _membership(registry: Document) -> str:
    if registry["state"] != "ok":
        raise CheckFailedError(
            f"{registry['kind']} does not answer: the last list is kept, and nobody can join: bring it back"
        )
    return str(registry["kind"])


async def _replayed_there(endpoint: Endpoint) -> Finding:
    """Check that the cluster repeats its answers. A random salt ensures that the prefix cache is empty at first."""
    prompts, salt = _prompts(endpoint.max_model_len), secrets.token_hex(8)
    answers = {"at once": await greedy_answers(endpoint, prompts, salt)}
    answers["from the prefix cache"] = await greedy_answers(endpoint, prompts, salt)
    answers["one by one"] = [(await greedy_answers(endpoint, [prompt], salt))[0] for prompt in prompts]
    return _verdict("replays", answers, f"{len(prompts)} prompts, at once, from the prefix cache and one by one")


# ---- clusters that doctor starts -----------------------------------------------------------------------------------


async def _own(settings: DoctorSettings) -> AsyncIterator[Finding]:
    """Start a co-located cluster, and one for each KV channel or for --kv-channel, and compare their answers."""
    model = settings.model or str(DEMO_MODEL)
    on_gpus = 0 if settings.device == "cpu" else num_gpus()
    every = ("cuda_ipc" if on_gpus else "shm", "tcp", "pool")
    channels = every if settings.kv_channel == "auto" else (settings.kv_channel,)
    with tempfile.TemporaryDirectory(prefix="baton-doctor-") as directory:
        arms = [_arm(settings, name, directory) for name in (CO_LOCATED, *channels)]
        launch = LaunchOptions(model, emulate=settings.emulate, gpus=on_gpus)
        stacks = [LocalStack(arm, launch, Path(directory) / f"{arm.name}.log") for arm in arms]
        answers: dict[str, list[list[int]]] = {}
        together = fit_together(arms, model)
        starting = [asyncio.ensure_future(stack.start()) for stack in stacks if together]
        try:
            for number, stack in enumerate(stacks):
                yield await _replayed_here(stack, starting[number] if together else stack.start(), answers)
        finally:
            await asyncio.gather(*starting, return_exceptions=True)
            await asyncio.gather(*(stack.end() for stack in stacks))
    if len(answers) > 1:
        yield _verdict("replays", answers, f"{len(next(iter(answers.values())))} prompts, {', '.join(answers)}")


def _arm(settings: DoctorSettings, name: str, directory: str) -> Arm:
    """Return the arm for a cluster with the user's settings.

    It is co-located, or hands off every prompt over the channel `name`.
    """
    given = {
        field: format_value(getattr(settings, field))
        for field, about in ComputingSettings.model_fields.items()
        if field not in OURS and getattr(settings, field) != about.get_default(call_default_factory=True)
    }
    given |= {"kv_directory": f"{directory}/{name}"}
    if name == CO_LOCATED:
        return Arm(name, 0, 1, given)
    return Arm(name, 1, 1, given | {"disaggregate": "always", "kv_channel": name})


async def _replayed_here(stack: LocalStack, started: Awaitable[None], answers: dict[str, list[list[int]]]) -> Finding:
    name = stack.arm.name
    try:
        await started
        prompts = _prompts(stack.endpoint.max_model_len)
        answers[name] = await greedy_answers(stack.endpoint, prompts, "doctor")
        await stack.endpoint.until_idle(IDLE_S)
        status = await stack.endpoint.status()
    except (EndpointError, ConfigError, OSError) as error:
        return Finding(name, "failed", str(error))
    finally:
        stack.terminate()
    if name == CO_LOCATED:
        return Finding(name, "ok", f"{len(prompts)} prompts computed by the decode node")
    return examine(name, lambda: _moved(status, name, len(prompts)))


def _moved(status: Document, channel: str, count: int) -> str:
    """Check that the channel was used. Equal tokens prove nothing about a channel that was not."""
    used = {name for node in status["nodes"] for name in node["channels"].values()}
    if status["handoffs"] < count or used != {channel}:
        over = ", ".join(used) or "nothing"
        raise ValueError(
            f"{status['handoffs']} of {count} prompts were handed off, over {over}: try `baton up --kv-channel "
            f"{channel}`, and look at the prefill node's log"
        )
    return f"{count} prompts handed off, {size_text(status['bytes_moved'])} moved"


def _prompts(max_model_len: int) -> list[list[int]]:
    rows = [[(length * 7 + place * place) % IDS for place in range(length)] for length in PROMPT_TOKENS]
    return [row for row in rows if not max_model_len or fits(row, max_model_len)]


def _verdict(name: str, answers: Mapping[str, Sequence[Sequence[int]]], what: str) -> Finding:
    def check() -> str:
        if different := different_answers(answers):
            raise ValueError(
                f"{different[0]} ({len(different)} differ): either KV does not arrive as it was sent, or the nodes "
                "compute differently: compare their `facts` in /v1/status"
            )
        return f"{what}: the same tokens"

    return examine(name, check)
