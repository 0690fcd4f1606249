"""Test how a node is built on a fake GPU: the dtype, the memory for KV, and the settings that are rejected."""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from engine.components import build
from engine.cuda.build import CONTEXT_BYTES, GIB, GRAPH_BYTES, build_on_cuda
from engine.cuda.device import CudaAccelerator
from engine.cuda.graphs import GraphRecording
from engine.cuda.kv.driver import CudaError
from engine.cuda.selection import kv_dtype_on_cuda
from engine.formats.kv_scales import read_kv_scales
from engine.models.families import read_model_config
from engine.models.spec import ModelConfig
from engine.options import BuildOptions
from scheduler.request import Request
from shared.kv.memory import HostMemory
from tests.engine.build import GREEDY, generate
from tests.engine.fake_graph import FakeGraph, FakeGraphPool

torch.set_num_threads(1)
MODEL = Path(__file__).parents[2] / "demo" / "model"
OPTIONS = BuildOptions(
    str(MODEL), device="cuda", attention_backend="torch", max_num_seqs=4, max_step_tokens=24, max_model_len=200
)


class HostGpu:
    """A fake GPU with `total` bytes of memory, of which `free` are free. A step needs at most `held` bytes."""

    name = "a host"
    device = torch.device("cpu")

    def __init__(self, total: int = 4 * GIB, free: int | None = None, held: int = GIB) -> None:
        self._memory = total if free is None else free, total
        self._held = held
        self.worked = False

    def memory(self) -> tuple[int, int]:
        return self._memory

    def most_held(self, work: Callable[[], object]) -> int:
        work()
        self.worked = True
        return self._held

    def allocate(self, num_rows: int, row_bytes: int) -> HostMemory:
        self.rows = num_rows, row_bytes
        return HostMemory(num_rows if num_rows < 4096 else 64, row_bytes)

    def graphs(self) -> FakeGraphPool:
        return FakeGraphPool()

    def has_triton(self) -> bool:
        return False


def config() -> ModelConfig:
    return read_model_config(MODEL)


def test_a_node_on_a_gpu_generates_the_tokens_of_one_on_a_cpu() -> None:
    ours = build_on_cuda(replace(OPTIONS, dtype="float32", num_blocks=40), config(), MODEL, HostGpu())
    theirs = build(replace(OPTIONS, device="cpu", num_blocks=40, block_size=64))
    assert ours.fingerprint == theirs.fingerprint
    answers = []
    for computer in (ours, theirs):
        requests = [
            Request(f"r{at}", list(range(3, 3 + size)), size, 12, sampling=GREEDY) for at, size in enumerate((50, 4))
        ]
        requests[0].tables[0], requests[1].tables[0] = [7, 3], [5]
        answers.append(generate(computer.runner, requests, 24))
    assert answers[0] == answers[1]
    assert ours.attributes["graphs"] == "steps of up to 24 tokens"
    assert (ours.attributes["device"], ours.attributes["dtype"], ours.attributes["attention"]) == (
        "cpu",
        "float32",
        "torch",
    )


def test_keys_and_values_in_float8_take_half_the_memory_and_have_the_scales_of_the_checkpoint(tmp_path: Path) -> None:
    shape = config()
    tensors = load_file(MODEL / "model.safetensors")
    options = replace(OPTIONS, num_blocks=40, enforce_eager=True, kv_cache_dtype="fp8")
    answers, fingerprints = [], set()
    for scale, message in ((0.5, ""), (2.0, ""), (0.0, "k_scale.*is not one positive number")):
        names = ("k_scale", "v_scale") if scale == 0.5 else ("k_proj.k_scale", "v_proj.v_scale")
        scales = {f"model.layers.1.self_attn.{name}": torch.tensor(scale) for name in names}
        save_file(tensors | scales, tmp_path / "model.safetensors")
        quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}  # although no matrix is quantized
        values = json.loads((MODEL / "config.json").read_text()) | {"quantization_config": quantization}
        (tmp_path / "config.json").write_text(json.dumps(values))
        if message:
            with pytest.raises(ValueError, match=message):
                build_on_cuda(options, shape, tmp_path, HostGpu())
            continue
        assert read_kv_scales(tmp_path, shape)[:3] == [(1.0, 1.0), (scale, scale), (1.0, 1.0)]
        gpu = HostGpu()
        computer = build_on_cuda(options, shape, tmp_path, gpu)
        assert computer.layout.dtype == computer.attributes["kv_cache_dtype"] == "float8_e4m3fn"
        assert gpu.rows[1] == 64 * shape.num_kv_heads * shape.num_layers * shape.head_dim * 2
        fingerprints.add(computer.fingerprint)
        request = Request("r", list(range(3, 60)), 57, 12, sampling=GREEDY)
        request.tables[0] = [7, 3]
        answers.append(generate(computer.runner, [request], 24))
    # Scales that are powers of 2 do not change the rounding of numbers within the range of float8.
    assert answers[0] == answers[1]
    other = build_on_cuda(replace(options, kv_cache_dtype="auto"), shape, MODEL, HostGpu())
    assert other.fingerprint not in fingerprints


def test_kv_gets_the_memory_that_weights_and_steps_leave() -> None:
    gpu = HostGpu(total=8 * GIB, held=GIB)
    with pytest.raises(ValueError, match="rows x bytes"):  # HostGpu allocates fewer rows
        build_on_cuda(replace(OPTIONS, gpu_memory_utilization=0.5), config(), MODEL, gpu)
    assert gpu.worked
    rows, row_bytes = gpu.rows
    room = 4 * GIB - GIB - CONTEXT_BYTES - GRAPH_BYTES
    assert room - row_bytes < rows * row_bytes <= room
    shape = config()
    assert row_bytes == 64 * shape.num_kv_heads * shape.num_layers * shape.head_dim * 2 * 2  # bfloat16, 64 tokens


@pytest.mark.parametrize(
    ("gpu", "options", "message"),
    [
        (HostGpu(total=2 * GIB), {}, "leave no room for KV"),
        (HostGpu(total=16 * GIB, free=GIB), {}, "other processes leave 1.0 GiB"),
        (HostGpu(), {"kv_cache_memory": 1000}, "at least 2 are needed"),
        (HostGpu(), {"quantization": "int8"}, "--quantization int8: runs only on CPUs"),
        (HostGpu(), {"weight_dtype": "float32"}, "--weight-dtype float32: on a GPU weights are stored in --dtype"),
        (HostGpu(), {"attention_backend": "numba"}, "runs on a CPU only"),
        (HostGpu(), {"attention_backend": "triton", "num_blocks": 9}, "triton is not installed"),
    ],
)
def test_an_impossible_setting_raises_an_error_of_one_line(
    gpu: HostGpu, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        build_on_cuda(replace(OPTIONS, **options), config(), MODEL, gpu)
    assert "\n" not in str(raised.value)


def test_the_log_names_the_variable_that_helps_triton_find_libcuda(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Driver:
        @property
        def active(self) -> NoReturn:
            raise AssertionError("libcuda.so cannot found!\nPlease make sure GPU is set up")

    triton, runtime = ModuleType("triton"), ModuleType("triton.runtime")
    triton.__spec__ = ModuleSpec("triton", None)
    runtime.driver = Driver()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setitem(sys.modules, "triton.runtime", runtime)
    assert not CudaAccelerator.has_triton()
    (logged,) = caplog.messages
    assert "libcuda.so cannot found! (AssertionError): set TRITON_LIBCUDA_PATH to the directory" in logged


aten = torch.ops.aten
# safetensors calls these operations to create tensors on the host, and replaces their errors with its own errors.
UNNOTICED = {
    aten.empty.memory_format, aten.set_.source_Storage, aten.select.int, aten._local_scalar_dense.default,
}  # fmt: skip


class FailAt(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raise `error` in torch operation number `at` of this thread, and in all later operations."""

    def __init__(self, at: int, error: Exception) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0
        self._at, self._error = at, error

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += func not in UNNOTICED
        if self.count > self._at:
            raise self._error
        return func(*args, **(kwargs or {}))


def test_the_largest_step_has_biased_logits_and_logprobs_for_each_guess() -> None:
    seen: set[tuple[object, int]] = set()

    class Notes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in {aten.log_softmax.int, aten.index_put_.default}:
                seen.add((func, len(args[0])))
            return func(*args, **(kwargs or {}))

    class Gpu(HostGpu):
        def most_held(self, work: Callable[[], object]) -> int:
            with Notes():  # type: ignore[no-untyped-call]
                return super().most_held(work)

    options = replace(OPTIONS, num_blocks=40, speculative_tokens=2, enforce_eager=True)
    build_on_cuda(options, config(), MODEL, Gpu())
    assert {(aten.log_softmax.int, 12), (aten.index_put_.default, 12)} <= seen


OUT_OF_MEMORY = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 8.00 GiB of which 5.00 MiB is "
    "free. Of the allocated memory 7.00 GiB is allocated by PyTorch"
)
DEVICE_LOST = torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCompile with ...")
FIXES = {
    "loading": "take a smaller model",
    "running": "lower --max-num-batched-tokens",
    "allocating": "lower --gpu-memory-utilization",
    "capturing": "--enforce-eager",
}


def test_an_error_in_any_operation_of_a_start_is_one_line_with_the_stage_and_the_fix() -> None:
    options = replace(OPTIONS, num_blocks=40)
    with FailAt(sys.maxsize, DEVICE_LOST) as whole:  # type: ignore[no-untyped-call]
        build_on_cuda(options, config(), MODEL, HostGpu())
    stages = set()
    for number in range(6):
        at, error = number * whole.count // 6, (OUT_OF_MEMORY, DEVICE_LOST)[number % 2]
        with pytest.raises(ValueError, match="GiB free") as raised, FailAt(at, error):  # type: ignore[no-untyped-call]
            build_on_cuda(options, config(), MODEL, HostGpu())
        text = str(raised.value)
        stage = text.split(maxsplit=1)[0]
        stages.add(stage)
        assert "\n" not in text
        assert "(a host: 4.0 GiB of 4.0 GiB free): CUDA" in text
        assert "Of the allocated" not in text
        assert (FIXES[stage] in text) == (error is OUT_OF_MEMORY or stage == "capturing")
    assert stages >= {"loading", "running", "capturing"}


@pytest.mark.parametrize(
    ("method", "error", "words"),
    [
        ("most_held", OUT_OF_MEMORY, "running a step of 24 tokens .*lower --max-num-batched-tokens"),
        ("allocate", CudaError("cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY (2)"), "allocating .* for KV .*lower --g"),
        ("graphs", DEVICE_LOST, "capturing CUDA graphs .*illegal memory access .*try --enforce-eager"),
    ],
)
def test_an_error_of_the_device_is_reported_in_one_line(method: str, error: Exception, words: str) -> None:
    def refuse(*_: object) -> NoReturn:
        raise error

    gpu = type("Refuses", (HostGpu,), {method: refuse})()
    with pytest.raises(ValueError, match=words) as raised:
        build_on_cuda(replace(OPTIONS, num_blocks=40), config(), MODEL, gpu)
    assert "\n" not in str(raised.value)


def test_a_capture_that_fails_is_not_hidden_by_the_end_of_its_graph() -> None:
    class Invalid(FakeGraph):
        def capture_end(self) -> NoReturn:
            super().capture_end()
            raise RuntimeError("operation failed due to a previous error during capture")

    class Pool(FakeGraphPool):
        def begin(self) -> FakeGraph:
            graph = Invalid()
            graph.capture_begin()
            return graph

    def work() -> NoReturn:
        raise OUT_OF_MEMORY

    with pytest.raises(torch.OutOfMemoryError):
        GraphRecording(Pool()).capture(work)
    with pytest.raises(RuntimeError, match="previous error"):
        GraphRecording(Pool()).capture(lambda: None)


def test_float8_is_refused_on_a_cpu_and_on_an_old_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="--kv-cache-dtype fp8: runs only on GPUs; use float16 or bfloat16"):
        build(replace(OPTIONS, device="cpu", attention_backend="auto", kv_cache_dtype="fp8"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A100")
    with pytest.raises(ValueError, match="--kv-cache-dtype fp8: A100 has no float8; use auto"):
        kv_dtype_on_cuda("fp8", torch.bfloat16, torch.device("cuda"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_device_cuda_is_refused_on_a_machine_without_a_gpu() -> None:
    with pytest.raises(ValueError, match=r"finds no CUDA device .*; use --device cpu"):
        build(OPTIONS)


def test_the_reason_why_torch_finds_no_gpu_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> NoReturn:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nadvice")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", fail)
    words = r"finds no CUDA device \(The NVIDIA driver on your system is too old \(found version 11040\)\.\)"
    with pytest.raises(ValueError, match=f"^--device cuda: torch .* {words}; use --device cpu$"):
        build(OPTIONS)
    options = replace(OPTIONS, device="auto", attention_backend="auto", num_blocks=8, max_model_len=64)
    for file, warns in (("/nowhere", False), ("/dev/null", True)):
        monkeypatch.setattr("engine.options.GPU_FILES", (file,))
        caplog.clear()
        build(options)
        found = [each for each in caplog.messages if each.startswith("--device auto: computing on the CPU, because")]
        assert len(found) == warns
        assert all(re.search(words, each) for each in found)


def test_a_gpu_that_cannot_be_opened_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> NoReturn:
        raise torch.AcceleratorError("CUDA error: all CUDA-capable devices are busy or unavailable\nadvice")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", fail)
    words = r"^starting the engine \(--device cuda\): CUDA error: all CUDA-capable devices are busy or unavailable \(AcceleratorError\)$"
    with pytest.raises(ValueError, match=words):
        build(OPTIONS)


@pytest.mark.parametrize("options", [{"runner": "hash"}, {"emulate": "h200-qwen3-8b"}])
def test_runners_without_a_model_refuse_a_gpu(options: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="need no GPU; use --device cpu"):
        build(replace(OPTIONS, **options))


@pytest.mark.parametrize(
    ("stored", "requested", "held"),
    [
        (torch.float32, "auto", "bfloat16"),
        (torch.float16, "auto", "float16"),
        (torch.bfloat16, "auto", "bfloat16"),
        (torch.bfloat16, "float32", "float32"),
    ],
)
def test_auto_keeps_a_stored_16_bit_dtype(tmp_path: Path, stored: torch.dtype, requested: str, held: str) -> None:
    tensors = {name: tensor.to(stored) for name, tensor in load_file(MODEL / "model.safetensors").items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(json.loads((MODEL / "config.json").read_text())))
    options = replace(OPTIONS, dtype=requested, num_blocks=8, enforce_eager=True)
    computer = build_on_cuda(options, config(), tmp_path, HostGpu())
    assert (computer.attributes["dtype"], computer.layout.dtype) == (held, held)
    assert computer.attributes["graphs"] == "none"
    request = Request("r", [3, 4, 5], 3, 2, sampling=GREEDY)
    request.tables[0] = [2]
    assert generate(computer.runner, [request], 24) != [[]]
