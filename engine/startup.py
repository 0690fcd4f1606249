"""The components of an engine, and the errors that may occur when they are built."""

import hashlib
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch

from engine.cuda.kv.pool import PoolClient
from engine.cuda.memory import DeviceMemory
from engine.emulation import Emulation
from engine.media import ImageSupport
from engine.runner import Runner
from scheduler.drafters import Drafter
from scheduler.geometry import UNIFORM, Group
from shared.grammar import GrammarTokenizer
from shared.kv.layout import KVLayout
from shared.kv.memory import HostMemory

log = logging.getLogger("baton.engine")

# Parts of the out-of-memory messages of torch (CPU and CUDA), cuBLAS and the driver.
OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "ALLOC_FAILED", "OUT_OF_MEMORY")
MAX_LENGTH = 400


@dataclass(slots=True)
class EngineComponents:
    """The components that do a node's computation, and their properties.

    Two nodes may exchange KV if and only if their `fingerprint`s are equal. `attributes` has further properties for
    users and the router, such as the device and the model's revision.
    """

    runner: Runner
    memory: HostMemory | DeviceMemory | PoolClient
    layout: KVLayout
    max_model_len: int
    vocab_size: int
    fingerprint: str
    attributes: dict[str, str]
    emulation: Emulation | None = None
    groups: tuple[Group, ...] = UNIFORM
    grammars: GrammarTokenizer | None = None  # None if no model computes the tokens
    drafter: Drafter | None = None  # a draft model or a draft head
    adapters: dict[str, str] = field(default_factory=dict)  # name -> digest of each LoRA adapter
    images: ImageSupport | None = None  # None: requests with images are refused
    max_num_seqs: int = 64  # maximum number of requests that run at the same time


def exchange_fingerprint(runner: str, revision: str, layout: KVLayout, sums: str, groups: tuple[Group, ...]) -> str:
    """Return a text that is equal for two nodes if they can exchange KV: a digest (24 hex digits) and a description.

    `revision` is the digest of the model's files. `sums` is the name of the checksum that the KV memory computes for
    each row. Nodes whose builds compute KV with different code do not exchange KV.
    """
    kinds = [] if groups == UNIFORM else list(map(str, groups))
    parts = (runner, revision, layout.describe(), sums, build_digest(), *kinds)
    digest = hashlib.blake2b("|".join(parts).encode(), digest_size=12).hexdigest()
    return f"{digest} ({', '.join((runner, layout.describe(), *kinds, f'build {build_digest()}'))})"


@cache
def build_digest() -> str:
    """Return a digest (8 hex digits) of the source files with which this build of Baton computes KV and tokens."""
    root, digest = Path(__file__).resolve().parents[1], hashlib.blake2b(digest_size=4)
    for path in sorted([*root.glob("engine/**/*.py"), *root.glob("shared/kv/*.py")]):
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


@contextmanager
def stage(doing: str, if_too_large: str, otherwise: str = "") -> Iterator[None]:
    """Convert errors of torch, numpy, Triton or the driver in the `with` block to ValueErrors with one-line messages.

    `doing` describes the stage, with sizes. It is logged at the start of the stage. The duration is logged at the end.
    `if_too_large` is the fix for a lack of memory, and `otherwise` is the fix for other errors. An OSError is converted
    only if it is the driver's out-of-memory error, which has no errno.
    """
    started = time.monotonic()
    log.info(doing)
    try:
        yield
        log.info("%s: done in %.1f s", doing, time.monotonic() - started)
    except ValueError:
        raise
    except Exception as error:
        too_large = is_out_of_memory(error)
        if isinstance(error, OSError) and (not too_large or error.errno is not None):
            raise
        fix = if_too_large if too_large else otherwise
        raise ValueError(f"{doing}: {cause(error)}" + (f": {fix}" if fix else "")) from error


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, (RuntimeError, OSError)) and any(text in str(error) for text in OUT_OF_MEMORY)


def cause(error: BaseException) -> str:
    """Return the type of an error and the first line of its message, without torch's advice about its allocator."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    text = (
        text[max(0, text.find("DefaultCPUAllocator")) :]
        .partition(" Of the allocated memory")[0]
        .removesuffix(".")[:MAX_LENGTH]
    )
    kind = type(error).__name__.removeprefix("_")
    return f"{text} ({kind})" if text else kind
