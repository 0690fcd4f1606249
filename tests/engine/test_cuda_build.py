"""What a node on a GPU is built of: its dtype, the room for KV, what it refuses; with a host in the GPU's place."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.components import build
from engine.cuda.build import CONTEXT_BYTES, GIB, GRAPH_BYTES, build_on_cuda
from engine.models.config import ModelConfig
from engine.options import BuildOptions
from scheduler.request import Request
from shared.kv.memory import HostMemory
from tests.engine.build import GREEDY, generate
from tests.engine.fake_graph import FakeGraphPool

torch.set_num_threads(1)
MODEL = Path(__file__).parents[2] / "demo" / "model"
OPTIONS = BuildOptions(
    str(MODEL), device="cuda", attention_backend="torch", max_num_seqs=4, max_step_tokens=24, max_model_len=200
)


class HostGpu:
    """A GPU of `total` bytes, of which `free` are; torch holds `held` of them."""

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
    return ModelConfig.from_directory(MODEL)


def test_it_answers_as_the_cpu_does() -> None:
    ours = build_on_cuda(replace(OPTIONS, dtype="float32", num_blocks=40), config(), MODEL, HostGpu())
    theirs = build(replace(OPTIONS, device="cpu", num_blocks=40, block_size=64))
    assert ours.fingerprint == theirs.fingerprint
    answers = []
    for computer in (ours, theirs):
        requests = [
            Request(f"r{at}", list(range(3, 3 + size)), size, 12, sampling=GREEDY) for at, size in enumerate((50, 4))
        ]
        requests[0].blocks, requests[1].blocks = [7, 3], [5]
        answers.append(generate(computer.runner, requests, 24))
    assert answers[0] == answers[1]
    assert ours.attributes["graphs"] == "steps of up to 24 tokens"
    assert (ours.attributes["device"], ours.attributes["dtype"], ours.attributes["attention"]) == (
        "cpu",
        "float32",
        "torch",
    )


def test_kv_gets_what_the_share_leaves() -> None:
    gpu = HostGpu(total=8 * GIB, held=GIB)
    with pytest.raises(ValueError, match="rows x bytes"):  # more than this test has room for
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
        (HostGpu(), {"num_blocks": 1}, "at least 2"),
        (HostGpu(), {"kv_cache_memory": 1000}, "at least 2 are needed"),
        (HostGpu(), {"quantization": "int8"}, "--quantization int8: runs only on CPUs"),
        (HostGpu(), {"weight_dtype": "float32"}, "--weight-dtype float32: on a GPU weights are stored in --dtype"),
        (HostGpu(), {"attention_backend": "numba"}, "runs on a CPU only"),
        (HostGpu(), {"attention_backend": "triton", "num_blocks": 9}, "triton is not installed"),
    ],
)
def test_what_cannot_be_is_one_clear_line(gpu: HostGpu, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        build_on_cuda(replace(OPTIONS, **options), config(), MODEL, gpu)
    assert "\n" not in str(raised.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.skipif(find_spec("triton") is None, reason="triton has wheels for Linux only")
def test_where_triton_cannot_launch_torchs_kernels_are_taken() -> None:
    asked = "from engine.cuda.device import CudaAccelerator; print(CudaAccelerator.has_triton(None))"
    told = subprocess.run(
        [sys.executable, "-c", asked], cwd=MODEL.parents[1], capture_output=True, text=True, check=True
    )
    assert told.stdout.strip() == "False"
    assert "Triton does not work" in told.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_asking_for_one_is_refused() -> None:
    with pytest.raises(ValueError, match="finds no CUDA device; use --device cpu"):
        build(OPTIONS)


@pytest.mark.parametrize("options", [{"runner": "hash"}, {"emulate": "h200-qwen3-8b"}])
def test_what_does_not_compute_takes_no_gpu(options: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="needs no GPU; use --device cpu"):
        build(replace(OPTIONS, **options))


@pytest.mark.parametrize(
    ("stored", "asked", "held"),
    [
        (torch.float32, "auto", "bfloat16"),
        (torch.float16, "auto", "float16"),
        (torch.bfloat16, "auto", "bfloat16"),
        (torch.bfloat16, "float32", "float32"),
    ],
)
def test_16_bits_stay_as_they_are_stored(tmp_path: Path, stored: torch.dtype, asked: str, held: str) -> None:
    tensors = {name: tensor.to(stored) for name, tensor in load_file(MODEL / "model.safetensors").items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(json.loads((MODEL / "config.json").read_text())))
    options = replace(OPTIONS, dtype=asked, num_blocks=8, enforce_eager=True)
    computer = build_on_cuda(options, config(), tmp_path, HostGpu())
    assert (computer.attributes["dtype"], computer.layout.dtype) == (held, held)
    assert computer.attributes["graphs"] == "none"
    request = Request("r", [3, 4, 5], 3, 2, sampling=GREEDY)
    request.blocks = [2]
    assert generate(computer.runner, [request], 24) != [[]]
