"""Compile every kernel configuration for an H200 (sm_90) on a machine without a GPU, by launching kernels on meta
tensors. Print each kernel's resource usage as a line of JSON. Run this as a process: it replaces Triton's driver."""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from engine.attention import AttentionLayer
from engine.batch import Batch, StateBatch
from engine.cuda.attention import Tile, TritonAttention, TritonPlan
from engine.cuda.attention_kernels import attend
from engine.cuda.draw import draw
from engine.cuda.layer import TritonKernels
from engine.cuda.products import TritonExperts, TritonGroupedLinear
from engine.formats.forms import INTEGERS, GroupedWeight
from engine.kv_pool import KVPool
from engine.models.kv_places import kv_places
from engine.models.spec import DeltaSpec, LayerSpec, MlpSpec, ModelConfig, MoeSpec, RecurrentSpec, SsmSpec
from engine.recurrence import RecurrentLayer
from shared.kv.layout import KVLayout
from tests.gpu_less.contract import FLOAT8, NAMES, TensorMemory, batch_of, config_of

META, CPU = torch.device("meta"), torch.device("cpu")
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
SPILLS = "attention fp32 in a tile too large"
WIDE = "attention bf16 of 16 heads a group, several queries"
FEW = {
    SPILLS,
    WIDE,
    "attention fp32 64",
    "attention bf16 128",
    "elementwise bf16, 32 heads of 128",
    "sampling",
    "grouped bf16",
    "experts bf16",
    "delta bf16",
}
NUM_BLOCKS = 60_000  # so many blocks that the offset of a block needs 64 bits


class H200:
    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def usage(cubin: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(CUOBJDUMP), "--dump-resource-usage", file.name]
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    return {name.lower(): int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", found)}


def report(label: str, kernel_name: str, launched: dict[str, object], compiled: object) -> None:
    ptx = compiled.asm["ptx"]
    line = {
        "label": label,
        "kernel": kernel_name,
        "rows": launched.get("BLOCK_M", 0),
        "shared": compiled.metadata.shared,
        "wgmma": ptx.count("wgmma.mma_async"),
        "mma": ptx.count("mma.sync"),
        "tf32": ptx.count("tf32"),
        "copies": len(re.findall(r"cp\.async\.cg\.shared\.global [^;]*0x10,", ptx)),
        "ahead": max(map(int, re.findall(r"async_wait[^{]*\{num = (\d+)", compiled.asm["ttgir"])), default=0),
        **usage(compiled.asm["cubin"]),
    }
    print(json.dumps(line), flush=True)


class Compiler:
    """A replacement for Triton's kernel launcher, which compiles and reports a kernel but does not run it."""

    label = ""

    def install(self) -> None:
        compile_and_launch = JITFunction.run

        def run(kernel: JITFunction, *args: object, grid: object, warmup: bool, **launched: object) -> None:
            compiled = compile_and_launch(kernel, *args, grid=grid, warmup=True, **launched)
            report(self.label, kernel.__name__, launched, compiled)

        driver.set_active(H200())
        JITFunction.run = run


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def without_memory(batch: Batch) -> Batch:
    for name in ("cu_q", "kv_len", "block_table", "positions", "slots"):
        setattr(batch, name, getattr(batch, name).to(META))
    return batch


def pool_of(kv_heads: int, head_dim: int, page: int, dtype: torch.dtype) -> KVPool:
    layout = KVLayout(NUM_BLOCKS, kv_heads, 2, page, head_dim, NAMES[dtype])
    return KVPool(layout, TensorMemory(layout, META))


def attention(
    dtype: torch.dtype,
    head_dim: int,
    page: int = 64,
    group: int = 4,
    window: int = 0,
    spans: tuple[tuple[int, int], ...] = ((1000, 1001), (0, 4096)),
    held: torch.dtype | None = None,
    softcap: float = 0.0,
    wide: int = 0,
) -> None:
    """Compile attention. With a soft cap, the attention also has sinks."""
    pool = pool_of(8, head_dim, page, held or dtype)
    plan = TritonAttention(pool).plan(without_memory(batch_of(spans, page, NUM_BLOCKS, CPU)))
    sinks = empty(8 * group, dtype=torch.float32) if softcap else None
    q = empty(sum(end - start for start, end in spans), 8 * group, head_dim * (2 if wide else 1), dtype=dtype)
    plan.attend(AttentionLayer(1, window, softcap, sinks, wide=wide), q)


def elementwise(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> None:
    hidden = heads * head_dim
    kernels = TritonKernels(config_of(hidden, heads, kv_heads, head_dim), pool_of(kv_heads, head_dim, 64, dtype))
    step = kernels.begin(batch := without_memory(batch_of([(0, 50)], 64, NUM_BLOCKS, CPU)))
    rows, weight, head = empty(50, hidden, dtype=dtype), empty(hidden, dtype=dtype), empty(head_dim, dtype=dtype)
    step.norm(rows, weight)
    step.add_norm(rows, rows, weight)
    for activation in ("silu", "gelu_tanh", "clamped_swiglu"):
        step.gated(empty(50, 7 * hidden, dtype=dtype), activation)
    step.sigmoid_gated(rows, rows)
    for norm in (head, None):
        held8 = TritonKernels(kernels.config, pool_of(kv_heads, head_dim, 64, FLOAT8)).begin(batch)
        held8.rotate_and_store(1, empty(50, (heads + 2 * kv_heads) * head_dim, dtype=dtype), norm, norm)
        step.rotate_and_store(1, empty(50, (heads + 2 * kv_heads) * head_dim, dtype=dtype), norm, norm)


def sampling() -> None:
    logits, parameters = empty(64, 128_256, dtype=torch.float32), empty(64, 5, dtype=torch.int64)
    draw(logits, parameters)
    draw(logits, parameters, empty(64, 128_256, dtype=torch.float32))


def grouped(dtype: torch.dtype, zeros: bool, group: int = 128) -> None:
    out, width = 11_008, 4096
    scales = empty(out, width // group, dtype=torch.float32)
    weight = GroupedWeight(empty(out, width // 2, dtype=torch.uint8), INTEGERS, scales, scales if zeros else None)
    linear = TritonGroupedLinear(weight, empty(16, dtype=torch.float32), empty(out, dtype=dtype) if zeros else None)
    for rows in (1, 300):
        linear(empty(rows, width, dtype=dtype))


def experts(dtype: torch.dtype, quantized: bool) -> None:
    """Compile an expert layer of gpt-oss-20b, and also the routing of DeepSeek V3."""
    count, out, width = 32, 5760, 2880
    weight: Tensor | GroupedWeight = empty(count, out, width, dtype=dtype)
    if quantized:
        scales, order = empty(count, out, width // 32, dtype=torch.float32), empty(count, width, dtype=torch.int64)
        weight = GroupedWeight(empty(count, out, width // 2, dtype=torch.uint8), INTEGERS, scales, scales, order)
    linear = TritonExperts(weight, empty(16, dtype=torch.float32), empty(count, out, dtype=dtype))
    step = TritonKernels(config_of(64, 2, 1, 32), pool_of(1, 32, 64, dtype)).begin(batch_of([(0, 1)], 64, 9, CPU))
    grouped = MoeSpec(256, 8, MlpSpec(64), "sigmoid", groups=8, top_groups=4, corrects=True)
    for spec in (MoeSpec(count, 4, MlpSpec(64), scores_chosen=True), grouped):
        correction = empty(spec.num_experts, dtype=torch.float32) if spec.corrects else None
        factors = empty(spec.num_experts, dtype=torch.float32)
        weights, chosen = step.route(spec, empty(9, spec.num_experts, dtype=torch.float32), correction, factors)
        _, places, _ = step.by_expert(chosen, spec.num_experts)
        step.combine(empty(9 * spec.top_k, width, dtype=dtype), places, weights)
    for rows in (4, 3000):
        linear(empty(rows, width, dtype=dtype), empty(count, dtype=torch.int64))


def recurrent(spec: RecurrentSpec, dtype: torch.dtype) -> None:
    layers = LayerSpec(spec, MlpSpec(64)), *config_of(64, 2, 1, 128).layers[:1]
    config = ModelConfig("Test", 64, 100, layers, 1e-6, False, 4096)
    layout = KVLayout(NUM_BLOCKS, 1, 1, 1024, 128, NAMES[dtype])
    pool = KVPool(layout, TensorMemory(layout, META), kv_places(config, layout.block_bytes))
    heads, delta = spec.value_heads, isinstance(spec, DeltaSpec)

    def numbers(*shape: int) -> Tensor:
        return empty(*shape, dtype=torch.float32)

    layer = RecurrentLayer(
        spec, 0, numbers(spec.conv, spec.channels), None if delta else numbers(spec.channels), numbers(heads),
        numbers(heads), numbers(heads), numbers(spec.inner), spec.value_dim if delta else spec.inner // spec.key_heads,
    )  # fmt: skip
    for spans in ([(99, 100), (7, 8)], [(0, 50), (7, 8)]):
        batch, count = without_memory(batch_of(spans, 64, NUM_BLOCKS, CPU)), sum(end - start for start, end in spans)
        rows = empty(3, 2, pool.places.state_rows, dtype=torch.int64)
        batch.states = StateBatch(rows, empty(2, dtype=torch.int64))
        both = empty(count, spec.channels + spec.inner, dtype=dtype)
        steps = empty(count, heads * (2 if delta else 1), dtype=dtype)
        step = TritonKernels(config, pool).begin(batch)
        step.recur(layer, both[:, : spec.channels], both[:, spec.channels :], steps)


def too_large() -> None:
    """Compile a kernel that must spill registers, to check that the report shows spills."""
    pool, batch = pool_of(8, 128, 64, torch.float32), without_memory(batch_of([(0, 64)], 64, NUM_BLOCKS, CPU))
    plan = TritonPlan(TritonAttention(pool), batch)
    q, work = empty(64, 32, 128, dtype=torch.float32), empty(8, 2, dtype=torch.int32)
    layer, out = AttentionLayer(1), empty(64, 32, 128, dtype=torch.float32)
    plan._launch(layer, q, out, None, work, 8, Tile(32, 32, 4, 2), 1, plan._heads(layer, q, 8))


def latents(dtype: torch.dtype) -> None:
    """Compile latent attention with the shapes of DeepSeek V3."""
    pool = pool_of(1, 288, 64, dtype)
    for spans in (((1000, 1001), (0, 4096)), ((1000, 1005), (1000, 1001))):
        plan = TritonAttention(pool).plan(without_memory(batch_of(spans, 64, NUM_BLOCKS, CPU)))
        plan.attend(
            AttentionLayer(1, latent=512), empty(sum(end - start for start, end in spans), 128, 576, dtype=dtype)
        )


def configurations() -> dict[str, Callable[[], None]]:
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    few = ((1000, 1001), (0, 60))
    several = ((1000, 1005), (1000, 1001))  # one slice has several tokens, but the split kernel still computes it
    found: dict[str, Callable[[], None]] = {
        SPILLS: too_large,
        "attention fp16 pool under fp32": lambda: attention(fp32, 128, held=fp16),
        "attention fp16 pool under bf16": lambda: attention(bf16, 128, held=fp16),
        "attention fp8 pool under bf16": lambda: attention(bf16, 128, held=FLOAT8),
        "attention fp8 pool under fp32": lambda: attention(fp32, 128, held=FLOAT8),
        "attention bf16 of 7 heads a group": lambda: attention(bf16, 128, group=7),
        "attention bf16 of 80 a head": lambda: attention(bf16, 80),
        "attention bf16 of many heads a group, several queries": lambda: attention(bf16, 128, group=8, spans=several),
        WIDE: lambda: attention(bf16, 128, group=16, spans=several),
        "attention bf16 256 of 16 a group, several queries": lambda: attention(bf16, 256, group=16, spans=several),
        "attention bf16 of 48 heads a group, several queries": lambda: attention(bf16, 128, group=48, spans=several),
        "attention bf16 of latents": lambda: latents(bf16),
        "attention fp32 of latents": lambda: latents(fp32),
        "sampling": sampling,
        "grouped bf16": lambda: grouped(bf16, zeros=True),
        "grouped fp16, 16 a group": lambda: grouped(fp16, zeros=False, group=16),
        "grouped fp32": lambda: grouped(fp32, zeros=True),
        "experts bf16": lambda: experts(bf16, quantized=False),
        "experts of codes bf16": lambda: experts(bf16, quantized=True),
        "experts fp32": lambda: experts(fp32, quantized=False),
        "delta bf16": lambda: recurrent(DeltaSpec(16, 32, 128, 128, 4), bf16),  # Qwen3.5 9B
        "state space bf16": lambda: recurrent(SsmSpec(1, 48, 128, 64, 4), bf16),  # Granite 4 H-Tiny
        "delta fp32": lambda: recurrent(DeltaSpec(16, 32, 128, 128, 4), fp32),
        "attention bf16 128, soft cap": lambda: attention(bf16, 128, softcap=50.0, window=1000),
        "attention fp32 128, soft cap": lambda: attention(fp32, 128, softcap=50.0),
        "attention bf16 of heads of 512": lambda: attention(bf16, 256, wide=4, spans=(*few, (1000, 1005))),
        "attention fp32 of heads of 512": lambda: attention(fp32, 256, wide=4, spans=few),
    }
    for head_dim in (64, 128, 256):
        found[f"attention fp32 {head_dim}"] = lambda h=head_dim: attention(fp32, h)
        found[f"attention bf16 {head_dim}"] = lambda h=head_dim: attention(bf16, h)
        found[f"attention bf16 {head_dim}, few"] = lambda h=head_dim: attention(bf16, h, spans=few)
        found[f"attention bf16 {head_dim}, window"] = lambda h=head_dim: attention(bf16, h, window=1000)
    for page in (16, 128):
        found[f"attention fp16 128, block {page}"] = lambda p=page: attention(fp16, 128, page=p)
    for heads, kv_heads, head_dim in ((32, 8, 128), (14, 2, 64), (64, 8, 128), (16, 16, 256)):
        label = f"elementwise bf16, {heads} heads of {head_dim}"
        found[label] = lambda h=heads, k=kv_heads, w=head_dim: elementwise(bf16, h, k, w)
    found["elementwise fp32"] = lambda: elementwise(fp32, 32, 8, 128)
    return found


if __name__ == "__main__":
    part, parts, extent = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    assert isinstance(attend, JITFunction), "TRITON_INTERPRET is set: nothing would be compiled"
    compiler = Compiler()
    compiler.install()
    chosen = {label: work for label, work in configurations().items() if extent == "all" or label in FEW}
    for index, (label, compile_all) in enumerate(chosen.items()):
        if index % parts == part:
            compiler.label = label
            compile_all()
