"""Test that no request is lost while nodes are replaced by nodes of the same or another build, and that no answer mixes
the tokens of two builds."""

import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.chaos.traffic import Load
from tests.cluster.harness import ROOT, Cluster, cluster, expected, prompt_of, wait_for

PACKAGES = ("cluster", "decode_node", "engine", "node", "prefill_node", "router", "scheduler", "shared")
MODEL = Path("engine", "hash_model.py")
PROMPT, COUNT = prompt_of(5, 40), 48
OLD, NEW = ("prefill-0", "decode-0"), ("prefill-1", "decode-1")


def build(directory: Path, old: str, new: str) -> list[str]:
    """Write another build of Baton, in which the hash model differs. Return the first words of its command lines."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, directory / package, ignore=shutil.ignore_patterns("__pycache__"))
    text = (directory / MODEL).read_text()
    assert old in text
    (directory / MODEL).write_text(text.replace(old, new, 1))
    return ["env", "PYTHONSAFEPATH=1", f"PYTHONPATH={directory}"]


def stop(running: Cluster, name: str) -> None:
    """Stop a node as an orchestrator does."""
    running.send_signal(name, signal.SIGTERM)
    assert running.processes.pop(name).wait(60) == 0, running.log(name)
    wait_for(lambda: name not in running.alive("router"), f"{name} has left")


def builds(running: Cluster) -> set[str]:
    return {node["facts"]["build"] for node in running.nodes().values() if node["alive"]}


def test_both_roles_are_updated_to_another_build_under_load_without_a_lost_request(tmp_path: Path) -> None:
    """Requests that run when their node ends continue on other nodes, which may be of the other build."""
    other = build(tmp_path / "build", "import numpy as np", "import numpy as np  # another build")
    with cluster(1, 1, drain_timeout_s=0.2) as running:
        before = builds(running)
        with Load([running.url], running.model, 2, least=10, share=0.5) as load:
            for name in NEW:
                running.prefixes[name] = other
                running.start(name)
            running.ready()
            for name in OLD:
                stop(running, name)
        assert load.failures() == []
        assert len(before) == len(builds(running)) == 1
        assert before != builds(running)
        running.idle()


def test_no_answer_mixes_the_tokens_of_two_builds_and_they_exchange_no_kv(tmp_path: Path) -> None:
    other = build(tmp_path / "build", "keys + np.uint64(1)", "keys + np.uint64(2)")
    with cluster(1, 1) as running:
        for name in NEW:
            running.prefixes[name] = other
            running.start(name)
        running.ready()
        prompts = [prompt_of(seed, 40) for seed in range(24)]
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda prompt: running.stream(prompt, COUNT), prompts))
            is_old = [answer == expected(prompt, COUNT) for answer, prompt in zip(found, prompts, strict=True)]
            assert 0 < sum(is_old) < len(prompts), "both builds serve"
            under_way = [pool.submit(running.stream, prompt, COUNT) for prompt in prompts]
            running.send_signal("decode-0", signal.SIGKILL)  # its requests continue on prefill-0 (same build)
            again = [each.result() for each in under_way]
        running.send_signal("prefill-0", signal.SIGTERM)
        wait_for(lambda: running.alive("router") == set(NEW), "the old nodes have left")
        for prompt, *answers in zip(prompts, found, again, strict=True):
            new = running.stream(prompt, COUNT)
            assert new != expected(prompt, COUNT)
            assert all(answer in (new, expected(prompt, COUNT)) for answer in answers), "one build per answer"
        assert sum(node["handoffs_failed"] for node in running.nodes().values() if node["id"] in NEW) == 0


@pytest.mark.parametrize("count", [4, pytest.param(20, marks=pytest.mark.exhaustive)])
def test_scaling_down_under_load_loses_no_request(count: int) -> None:
    """Each node in turn drains and ends, and is started again, as when an autoscaler removes and adds it."""
    with cluster(2, 2) as running:
        names = sorted(running.nodes())
        with Load([running.url], running.model, 3) as load:
            for number in range(count):
                name = names[number % len(names)]
                stop(running, name)
                running.start(name)
                running.ready()
        assert load.failures() == []
        running.idle()
