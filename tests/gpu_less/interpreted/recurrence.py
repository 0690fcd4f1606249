from random import Random

import pytest
import torch

from engine.cuda.layer import TritonKernels
from engine.kernels import TorchKernels
from tests.engine.build import CPU, thinned
from tests.engine.recurrent_scene import SPECS, Scene
from tests.gpu_less.layers import check_recurrence


@pytest.mark.parametrize("name", thinned(reversed(SPECS), 2))
def test_results_and_states_equal_the_reference(name: str) -> None:
    steps = [{0: 5, 1: 1, 2: 4}, {0: 17}, {0: 1}]  # the last step is a decode
    check_recurrence(SPECS[name], CPU, (23, 1, 4), steps, {0: 6, 2: 1})


def test_small_steps_keep_their_digits() -> None:
    scenes = [Scene(SPECS["state space"], kind, lengths=(1,)) for kind in (TorchKernels, TritonKernels)]
    for scene in scenes:
        scene.inputs[0][2][:] = torch.tensor([-16.0, -12.0, -6.0, -4.0, -1.0, 30.0])
    states = [scene.state(0, scene.run(Random(1), [{0: 1}], {})[1][0]) for scene in scenes]
    torch.testing.assert_close(states[1], states[0], atol=0, rtol=1e-5)


@pytest.mark.parametrize("dtype", thinned([torch.bfloat16, torch.float16], 2))
def test_16_bit_activations(dtype: torch.dtype) -> None:
    check_recurrence(SPECS["state space, no bias"], CPU, (4,), [{0: 3}, {0: 1}], {}, dtype)
