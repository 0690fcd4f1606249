"""The checks of this machine for `baton doctor`: libraries, kernels, model, memory, files and ports."""

import asyncio
import os
import re
import resource
import secrets
import socket
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Literal, NamedTuple

from cluster.plan import ROOT, DoctorSettings, checked
from compare.run.deployments import PROCESS_BYTES, memory_available
from engine.components import on_gpu
from engine.cpu.numba_support import why_not_compiled
from engine.models.config import ModelConfig
from engine.weights import check_finite, fingerprint, weight_files
from router.http.keys import ApiKeys
from router.text.model_files import read_model
from router.text.tokenizer import Tokenizer
from shared.config.settings import flag_of
from shared.kv.layout import HOST_KV_BYTES
from shared.kv.local import private
from shared.kv.memory import HostMemory
from shared.lifecycle import wait_until
from shared.model_files import DEMO_MODEL, resolve
from shared.registry import RedisRegistry
from shared.rpc import tls

FLOOR = re.compile(r"([\w.-]+)>=([\d.]+)")  # name and minimum version in a requirement without extras
OTHER_FILES = 256  # open files of a process in addition to its clients: nodes, libraries, logs
REDIS_S = 3.0


class Finding(NamedTuple):
    """The result of a check. `text` says what was found and, if that is a problem, how to fix it."""

    name: str
    level: Literal["ok", "warning", "failed"]
    text: str


class CheckFailedError(Exception):
    """Baton will run, but not well. The message says why, and how to fix it."""


def examine(name: str, check: Callable[[], str]) -> Finding:
    """Run a check and return its finding.

    The check returns a text, raises CheckFailedError for a warning, or raises the error with which a process of Baton
    would fail to start.
    """
    try:
        return Finding(name, "ok", check())
    except CheckFailedError as doubt:
        return Finding(name, "warning", str(doubt))
    except (ValueError, OSError, ImportError) as error:
        return Finding(name, "failed", str(error) or type(error).__name__)


def installation(settings: DoctorSettings) -> Iterator[Finding]:
    """Yield the findings of all checks, each as soon as it is known."""
    checks: dict[str, Callable[[DoctorSettings], str]] = {
        "libraries": libraries,
        "computing": computing,
        "model": model,
        "memory": memory,
        "kv directory": kv_directory,
        "open files": open_files,
        "secrets": secret_files,
        "registry": registry,
    }
    if not settings.url:  # a running cluster may already use the ports
        checks["ports"] = ports
    for name, check in checks.items():
        yield examine(name, partial(check, settings))


def libraries(_: DoctorSettings) -> str:
    if sys.platform != "linux":
        raise ValueError(f"{sys.platform}: Baton needs Linux; elsewhere, use its containers")
    wanted = [match for text in _requirements() if "extra ==" not in text and (match := FLOOR.match(text))]
    old = [
        f"{name} {found}, needs {floor}"
        for name, floor in (match.groups() for match in wanted)
        if _release(found := _found(name)) < _release(floor)
    ]
    if old:
        raise ValueError(f"{'; '.join(old)}: install again, with `make serve` or `pip install -e .`")
    return f"Python {sys.version.split()[0]}, torch {_found('torch')}, {len(wanted)} libraries as new as they must be"


def _requirements() -> list[str]:
    try:
        return requires("baton-serve") or []
    except PackageNotFoundError:  # this is a checkout that is not installed
        return list(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])


def _found(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def _release(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text.partition("+")[0])[:3])


def computing(settings: DoctorSettings) -> str:
    import torch

    if on_gpu(settings.device, computes=settings.runner == "torch" and not settings.emulate):
        if not torch.cuda.is_available():
            raise ValueError(f"--device {settings.device}: torch {torch.__version__} sees no GPU here")
        return ", ".join(torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count()))
    if reason := why_not_compiled():
        raise CheckFailedError(f"kernels cannot be compiled ({reason}): torch computes instead, several times slower")
    return f"{len(os.sched_getaffinity(0))} CPUs, kernels can be compiled"


def _directory(settings: DoctorSettings) -> Path:
    return resolve(settings.model or str(DEMO_MODEL))


def model(settings: DoctorSettings) -> str:
    directory = _directory(settings)
    config = ModelConfig.from_directory(directory)
    revision = fingerprint(directory)[:8]
    check_finite(directory)
    Tokenizer.load(directory, read_model(directory, "", 0, 0).vocab_size)
    return f"{directory}: {config.num_layers} layers, {config.max_position_embeddings} positions, revision {revision}"


def memory(settings: DoctorSettings) -> str:
    """Check the memory that the nodes of `baton up` would need with these settings on a CPU."""
    HostMemory(1, 1 << 20).close()  # check that shared memory can be created, sealed and mapped
    available = memory_available()
    if settings.device.startswith("cuda"):
        return f"shared memory can be had; {available >> 20} MiB are available"
    weights = sum(file.stat().st_size for file in weight_files(_directory(settings))) * 2  # as float32
    each = weights + PROCESS_BYTES + (settings.kv_cache_memory or HOST_KV_BYTES)
    nodes = sum(settings.num_nodes())
    if nodes * each > available:
        raise CheckFailedError(
            f"{nodes} nodes want {nodes * each >> 20} MiB and {available >> 20} MiB are available: lower "
            "--kv-cache-memory or the number of nodes"
        )
    return f"shared memory can be had; {nodes} nodes want {nodes * each >> 20} of {available >> 20} MiB"


def kv_directory(settings: DoctorSettings) -> str:
    path = private(settings.kv_directory).absolute() / secrets.token_hex(16)
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.bind(str(path))
        except OSError as error:
            raise OSError(f"--kv-directory {path.parent}: no socket can be made in it: {error}") from None
        finally:
            path.unlink(missing_ok=True)
    return str(path.parent)


def open_files(settings: DoctorSettings) -> str:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = settings.max_concurrent_requests + OTHER_FILES
    if limit < wanted:
        raise CheckFailedError(
            f"{limit} are allowed, and {settings.max_concurrent_requests} clients want {wanted}: `ulimit -n`"
        )
    return f"{limit} are allowed"


def secret_files(settings: DoctorSettings) -> str:
    """Check the given secret files. From then on, this process uses the cluster's secret."""
    tls.configure(settings.cluster_secret_file, {"--registry-host": settings.registry_host})
    if settings.api_keys_file or settings.api_keys:
        ApiKeys(settings.api_keys_file, settings.api_keys)
    elif not tls.is_loopback(settings.host):
        raise CheckFailedError(
            f"--host {settings.host} is open to everybody who reaches it: give --api-keys-file, see `baton key`"
        )
    given = [name for name in ("cluster_secret_file", "api_keys_file") if getattr(settings, name)]
    return f"{' and '.join(map(flag_of, given))} can be used" if given else "none are given, and none are needed here"


def registry(settings: DoctorSettings) -> str:
    if not settings.registry:
        return "the router itself"
    return asyncio.run(_ask_redis(settings))


async def _ask_redis(settings: DoctorSettings) -> str:
    found = RedisRegistry(settings.registry, settings.cluster)
    await found.start(lambda: None)
    try:
        if not await wait_until(lambda: found.state == "ok", REDIS_S):
            raise OSError(f"--registry: no Redis answers there within {REDIS_S:g} s; see the line above")
        return f"Redis answers, and knows {len(found.nodes)} nodes of cluster {settings.cluster}"
    finally:
        await found.close()


def ports(settings: DoctorSettings) -> str:
    return f"{settings.host}:{checked(settings).port} is free"
