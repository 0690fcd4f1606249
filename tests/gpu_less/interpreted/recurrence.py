from random import Random

import pytest
import torch

from engine.cuda.layer import TritonKernels
from engine.kernels import TorchKernels
from tests.engine.recurrent_scene import SPECS, Scene

STEPS = [{0: 5, 1: 1, 2: 9}, {0: 17}, {0: 1}]  # the last step is a decode
SAVED = {0: 6, 2: 1}


@pytest.mark.parametrize("name", SPECS)
def test_results_and_states_equal_the_reference(name: str) -> None:
    expected, found = (Scene(SPECS[name], kind) for kind in (TorchKernels, TritonKernels))
    wanted, last = expected.run(Random(0), STEPS, SAVED)
    given, _ = found.run(Random(0), STEPS, SAVED, padding=2)
    for request in range(3):
        torch.testing.assert_close(given[request], wanted[request], atol=2e-5, rtol=2e-5)
        for which in {last[request], 2} if request in SAVED else {last[request]}:
            one, other = (scene.state(request, which) for scene in (found, expected))
            assert bool(one.isfinite().all())
            torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-5)


def test_small_steps_keep_their_digits() -> None:
    scenes = [Scene(SPECS["state space"], kind, lengths=(1,)) for kind in (TorchKernels, TritonKernels)]
    for scene in scenes:
        scene.inputs[0][2][:] = torch.tensor([-16.0, -12.0, -6.0, -4.0, -1.0, 30.0])
    states = [scene.state(0, scene.run(Random(1), [{0: 1}], {})[1][0]) for scene in scenes]
    torch.testing.assert_close(states[1], states[0], atol=0, rtol=1e-5)


def test_16_bit_activations() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        found, wanted = (
            Scene(SPECS["state space, no bias"], kind, dtype=dtype, lengths=(4,)).run(Random(0), [{0: 3}, {0: 1}], {})[
                0
            ]
            for kind in (TritonKernels, TorchKernels)
        )
        assert found[0].dtype == dtype
        torch.testing.assert_close(found[0], wanted[0], atol=2e-2, rtol=2e-2)
