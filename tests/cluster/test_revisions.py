"""Test that nodes with the old weights and nodes with the new weights of a model serve at the same time, and that no
answer mixes tokens of old and new weights."""

import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.cluster.harness import DEMO, Cluster, cluster, wait_for

PROMPT, COUNT, REQUESTS = list(range(5, 45)), 48, 16
OLD, NEW = ("prefill-0", "decode-0"), ("prefill-1", "decode-1")


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the demo model with other weights."""
    directory = Path(shutil.copytree(DEMO, tmp_path_factory.mktemp("models") / "other"))
    (file,) = directory.glob("*.safetensors")
    save_file({name: one.flip(0) if "norm" in name else one for name, one in load_file(file).items()}, file)
    return directory


def answers(running: Cluster, count: int) -> list[list[int]]:
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda _: running.stream(PROMPT, COUNT), range(count)))


def test_a_change_of_weights_under_load_mixes_no_answer(other_weights: Path) -> None:
    own: dict[str, dict[str, object]] = {name: {"model": other_weights} for name in NEW}
    with cluster(1, 1, runner="torch", own=own) as running:
        (old,) = set(map(tuple, answers(running, 2)))
        for name in NEW:
            running.start(name)
        running.ready()
        found = {tuple(one) for one in answers(running, REQUESTS)}
        assert len(found) == 2, "both serve"
        assert old in found
        (new,) = found - {old}
        with ThreadPoolExecutor(1) as pool:
            under_way = pool.submit(answers, running, REQUESTS)
            for name in OLD:
                running.send_signal(name, signal.SIGTERM)
            assert {tuple(one) for one in under_way.result()} <= {old, new}
        wait_for(lambda: running.alive("router") == set(NEW), "the old nodes have left")
        assert {tuple(one) for one in answers(running, 4)} == {new}
