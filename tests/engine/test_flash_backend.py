"""Test the flash-attn adapters with fakes of the packages: arguments, limits and results."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random

import pytest
import torch

from benchmarks.random_model import random_decoder
from engine.attention import AttentionLayer, TorchAttention, TorchPlan
from engine.batch import Batch, build
from engine.cuda.flash_attention import FlashAttention, installed
from engine.cuda.runner import CudaRunner
from engine.cuda.selection import attention_on_cuda, block_tokens_on_cuda, flash_attn_here, usable_on_cuda
from engine.kernels import TorchKernels
from engine.kv_pool import KVPool
from scheduler.geometry import UNIFORM, Group
from scheduler.request import Slice
from shared.kv.layout import KVLayout
from shared.kv.memory import HostMemory
from tests.engine.build import CONFIG, CPU, Blocks, layout_of, thinned
from tests.engine.build import pool_of as build_pool
from tests.engine.cuda_workload import CAPACITY
from tests.engine.fake_flash import FAILURES, FUNCTIONS, OLD_CUTE, write_package
from tests.engine.fake_graph import FakeGraphPool

BLOCK_TOKENS = {"flash_attn 2": 256, "flash_attn 3": 16, "flash_attn 4": 64}
every_failure = pytest.mark.parametrize("failure", thinned(FAILURES, 4))


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Return a function that installs fake packages, some of which cannot be imported, and returns their directory."""

    def write(*names: str, **failing: str) -> Path:
        for name in (*names, *failing):
            write_package(tmp_path, name, failing.get(name, ""))
        monkeypatch.syspath_prepend(tmp_path)
        return tmp_path

    yield write
    for name in FUNCTIONS:
        sys.modules.pop(name, None)


@pytest.fixture
def packages(install: Callable[..., Path]) -> None:
    install(*FUNCTIONS)


def pool_of(block_tokens: int, dtype: str = "float16", head_dim: int = 32) -> KVPool:
    """Return a pool of random values, with NaN in the dummy block."""
    layout = KVLayout(24, 2, 2, block_tokens, head_dim, dtype)
    pool = KVPool(layout, HostMemory(layout.num_blocks, layout.block_bytes))
    pool.tensor.copy_(torch.randn(layout.shape, generator=torch.Generator().manual_seed(1)))
    pool.tensor[0] = torch.nan
    return pool


def slices_of(block_tokens: int, shapes: list[tuple[int, int]]) -> list[Slice]:
    """Return a slice for each pair in `shapes`: (number of tokens before the slice, number of tokens in the slice)."""
    blocks = Blocks(24, block_tokens, seed=3)
    random, slices = Random(2), []
    for before, count in shapes:
        request = blocks.request([random.randrange(50) for _ in range(before + count)], max_tokens=1)
        slices.append(Slice(request, before, count, True, 0))
    return slices


MIXES = {
    "decodes": [(40, 1), (0, 1), (300, 1)],
    "chunks": [(0, 70), (33, 5)],
    "decodes, then chunks": [(40, 1), (7, 1), (0, 33), (100, 2), (20, 1)],
    "a chunk first": [(10, 3), (40, 1)],
}


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize(
    ("name", "mix", "window", "apart"), thinned(product(BLOCK_TOKENS, MIXES, [0, 9], [False, True]), 5)
)
def test_every_generation_gives_the_reference_result(name: str, mix: str, window: int, apart: bool) -> None:
    pool = pool_of(BLOCK_TOKENS[name])
    batch = build(slices_of(BLOCK_TOKENS[name], MIXES[mix]), BLOCK_TOKENS[name], CPU)
    q = torch.randn(len(batch.tokens), 6, 32, generator=torch.Generator().manual_seed(5)).half()
    expected = TorchAttention(pool).plan(batch).attend(AttentionLayer(1, window), q.float())
    backend = FlashAttention(pool, name, TorchAttention(pool) if apart else None)
    found = backend.plan(batch).attend(AttentionLayer(1, window), q)
    assert found.dtype == torch.float16
    assert (found.float() - expected).abs().max() < 3e-3


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize("name", BLOCK_TOKENS)
def test_layers_that_a_package_does_not_support_are_computed_by_our_backend(name: str) -> None:
    pool = pool_of(BLOCK_TOKENS[name])
    batch = build(slices_of(BLOCK_TOKENS[name], MIXES["chunks"]), BLOCK_TOKENS[name], CPU)
    q = torch.randn(len(batch.tokens), 6, 32, generator=torch.Generator().manual_seed(5)).half()

    class Ours(TorchAttention):
        planned = 0

        def plan(self, batch: Batch) -> TorchPlan:
            self.planned += 1
            return super().plan(batch)

    ours = Ours(pool)
    plan = FlashAttention(pool, name, ours).plan(batch)
    for layer in (AttentionLayer(1, softcap=2.0), AttentionLayer(0, sinks=torch.arange(6.0))):
        expected = TorchAttention(pool).plan(batch).attend(layer, q)
        assert torch.equal(plan.attend(layer, q), expected)
    assert ours.planned == 1


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize(
    ("name", "pool", "words"),
    [
        ("flash_attn 2", (64, "float16", 32), "multiple of 256 .it is 64."),
        ("flash_attn 3", (16, "float32", 32), "16-bit.*use triton"),
        ("flash_attn 3", (16, "float8_e4m3fn", 32), "16-bit.*use triton"),
        ("flash_attn 3", (16, "bfloat16", 20), "multiple of 8"),
        ("flash_attn 3", (128, "bfloat16", 64), "reads beyond the context.*use another block size .it is 128."),
        ("flash_attn 4", (128, "bfloat16", 32), "use another"),
    ],
)
def test_limits_of_a_package_are_reported_in_one_line(name: str, pool: tuple[int, str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words) as refused:
        FlashAttention(pool_of(*pool), name)
    assert "\n" not in str(refused.value)


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize(("head_dim", "windows"), [(128, True), (256, False), (256, True)])
def test_auto_does_not_take_flash_attention_3_if_it_reads_beyond_contexts(head_dim: int, windows: bool) -> None:
    plain = pool_of(64, head_dim=head_dim)
    groups = (Group("window", 1, 9),) if windows else UNIFORM
    pool = KVPool(plain.layout, plain.memory, replace(plain.places, groups=groups))
    taken = attention_on_cuda("auto", pool, triton=False).name == "flash_attn 3"
    assert taken != (windows and head_dim == 256)


@pytest.mark.usefixtures("packages")
def test_auto_takes_flash_attention_3_if_the_dtypes_allow_it() -> None:
    assert installed() == ["flash_attn 3", "flash_attn 4", "flash_attn 2"]
    chosen = [attention_on_cuda("auto", pool_of(64, dtype), triton=False).name for dtype in ("bfloat16", "float32")]
    assert chosen == ["flash_attn 3", "torch"]
    assert attention_on_cuda("auto", pool_of(64), triton=False, computed=torch.bfloat16).name == "torch"
    with pytest.raises(ValueError, match=r"KV in float16 does not match activations in torch\.bfloat16: omit"):
        attention_on_cuda("flash_attn", pool_of(256), triton=False, computed=torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "forced", "block_tokens"),
    [("flash_attn.cute", "flash_attn 4, torch for decodes", 64), ("flash_attn", "flash_attn 2", 256)],
)
def test_other_generations_are_taken_only_when_requested(
    install: Callable[..., Path], name: str, forced: str, block_tokens: int
) -> None:
    install(name)
    assert attention_on_cuda("auto", pool_of(256), triton=False).name == "torch"
    assert attention_on_cuda("flash_attn", pool_of(256), triton=False).name == forced
    found = [block_tokens_on_cuda(kind, CPU) for kind in ("auto", "triton", "flash_attn")]
    assert found == [64, 64, block_tokens], "FlashAttention 2 needs blocks of 256 tokens"


def test_a_graph_does_not_contain_decodes_that_the_reference_computes(install: Callable[..., Path]) -> None:
    """FlashAttention 4 leaves decodes to the reference if there is no Triton."""
    install("flash_attn.cute")
    decoder = random_decoder(CONFIG, torch.float16, CPU)
    pool = build_pool(decoder, replace(layout_of(decoder, 24, 4), dtype="float16"))
    attention = attention_on_cuda("flash_attn", pool, triton=False)
    runner = CudaRunner(decoder, pool, attention, TorchKernels(CONFIG, pool), CPU, CAPACITY)
    runner.capture(FakeGraphPool())
    assert runner.passes.describe() == f"steps of up to {CAPACITY.tokens} tokens"


@pytest.mark.parametrize("failure", ["ImportError", OLD_CUTE])
def test_flash_attn_2_is_taken_if_the_version_4_in_its_package_does_not_load(
    install: Callable[..., Path], failure: str
) -> None:
    """FlashAttention 2.8.3 contains an early version 4, which needs other packages and has other arguments."""
    install("flash_attn", **{"flash_attn.cute": failure})
    assert block_tokens_on_cuda("flash_attn", CPU) == 256
    assert attention_on_cuda("flash_attn", pool_of(256), triton=False).name == "flash_attn 2"


@every_failure
def test_auto_never_imports_flash_attn_2(install: Callable[..., Path], failure: str) -> None:
    root = install("flash_attn.cute", flash_attn=failure)
    assert installed() == ["flash_attn 4", "flash_attn 2"]
    assert usable_on_cuda("auto", CPU) == "auto"
    assert attention_on_cuda("auto", pool_of(64), triton=False).name == "torch"
    assert not (root / "imported").exists()


@every_failure
def test_a_flash_attn_3_that_cannot_be_loaded_is_logged_once_by_auto(
    install: Callable[..., Path], caplog: pytest.LogCaptureFixture, failure: str
) -> None:
    install(flash_attn_interface=failure)
    name = usable_on_cuda("auto", CPU)
    assert [attention_on_cuda(name, pool_of(64), triton=False).name for _ in range(2)] == ["torch", "torch"]
    assert block_tokens_on_cuda(name, CPU) == block_tokens_on_cuda("auto", CPU)
    (logged,) = caplog.messages
    assert "FlashAttention 3" in logged
    assert f"undefined symbol ({failure})" in logged


@pytest.mark.parametrize("name", ["flash_attn", "flash_attn_interface"])
@every_failure
def test_a_requested_flash_attn_that_cannot_be_loaded_is_reported_in_one_line(
    install: Callable[..., Path], failure: str, name: str
) -> None:
    install(**{name: failure})
    assert usable_on_cuda("flash_attn", CPU) == "flash_attn"
    words = rf"undefined symbol \({failure}\): reinstall it for torch .*use auto$"
    with pytest.raises(ValueError, match=words) as raised:
        attention_on_cuda("flash_attn", pool_of(256), triton=False)
    assert "\n" not in str(raised.value)


@pytest.mark.skipif(bool(installed()), reason="flash-attn is installed")
def test_without_any_package_the_error_says_how_to_get_one() -> None:
    with pytest.raises(ValueError, match=r"pip install '\.\[gpu\]', or use auto"):
        attention_on_cuda("flash_attn", pool_of(64), triton=False)
    assert attention_on_cuda("auto", pool_of(64), triton=False).name == "torch"


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize(
    ("major", "found"),
    [
        (8, ["flash_attn 2"]),
        (9, ["flash_attn 3", "flash_attn 4", "flash_attn 2"]),
        (10, ["flash_attn 4", "flash_attn 2"]),
    ],
)
def test_each_generation_runs_on_certain_gpus(monkeypatch: pytest.MonkeyPatch, major: int, found: list[str]) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (major, 0))
    assert flash_attn_here(torch.device("cuda")) == found
