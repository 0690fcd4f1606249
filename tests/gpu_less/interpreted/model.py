import pytest
import torch

from benchmarks.random_model import random_decoder
from engine.attention import AttentionBackend, TorchAttention
from engine.cuda.attention import TritonAttention
from engine.cuda.layer import TritonKernels
from engine.kernels import Kernels, TorchKernels
from engine.kv_pool import KVPool
from engine.models.decoder import Decoder
from engine.runner import TorchRunner
from shared.kv.layout import KVLayout
from shared.rpc.messages import SamplingParams
from tests.engine.build import Blocks, generate
from tests.gpu_less.contract import TensorMemory, config_of

CPU = torch.device("cpu")
PROMPTS = [list(range(3, 11)), [7, 9], list(range(40, 44))]


def generated(triton: bool, model: Decoder, budget: int) -> list[list[int]]:
    config = model.config
    layout = KVLayout(64, config.num_kv_heads, config.num_layers, 4, config.head_dim, "float32")
    pool = KVPool(layout, TensorMemory(layout, CPU))
    pool.tensor.fill_(torch.nan)
    attention: AttentionBackend = TritonAttention(pool, split_tokens=8) if triton else TorchAttention(pool)
    kernels: Kernels = TritonKernels(config, pool) if triton else TorchKernels(config, pool)
    blocks, sampling = (
        Blocks(64, 4),
        [SamplingParams(temperature=0.0), SamplingParams(seed=3), SamplingParams(temperature=0.0)],
    )
    requests = [blocks.request(prompt, one, max_tokens=3) for prompt, one in zip(PROMPTS, sampling, strict=True)]
    return generate(TorchRunner(model, pool, attention, kernels, CPU), requests, budget)


@pytest.mark.exhaustive  # graphs.py has a short form, whose model uses more of the kernels
@pytest.mark.parametrize("budget", [5, 64])
def test_a_model_gives_the_tokens_of_plain_torch(budget: int) -> None:
    """The steps include chunks of prompts, decodes of several context lengths, and mixtures of both."""
    model = random_decoder(config_of(32, 6, 2, 16), torch.float32, CPU, seed=1, deviation=0.2)
    assert generated(True, model, budget) == generated(False, model, 64)
