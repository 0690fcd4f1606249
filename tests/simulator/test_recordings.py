"""Test, with recordings of live nodes, that a simulated node decides every step as the live node did."""

import pytest

from benchmarks.recording import RUNS, names_of
from tests.simulator.replay import Recording, Replay


@pytest.mark.parametrize("name", ["stall_free", "scarce_blocks"])
def test_every_step_has_the_composition_of_the_live_step(name: str) -> None:
    recording = Recording(name)
    replay = Replay(recording).run()
    for number, (live, (members, blocks)) in enumerate(zip(recording.steps, replay.steps, strict=True)):
        assert sorted(members) == sorted(live.members), f"step {number}"
        assert blocks == live.blocks, f"step {number}"
    assert len(replay.steps) > 300


def test_the_recordings_have_prefix_hits_mixed_steps_and_preemptions() -> None:
    """Without these cases, the replays would prove little."""
    ample, scarce = Recording("stall_free"), Recording("scarce_blocks")
    firsts = {}
    for step in ample.steps:
        for number, start, _ in step.members:
            firsts.setdefault(number, start)
    assert sum(start > 0 for start in firsts.values()) > 20, "prefix hits"
    assert sum(step.work.num_prefills > 0 < step.work.num_decodes for step in ample.steps) > 100
    num_chunks = sum(count > 1 for step in scarce.steps for *_, count in step.members)
    assert num_chunks > len(list(scarce.requests())), "preempted requests are computed twice"
    assert min(step.blocks[0] + step.blocks[1] for step in scarce.steps) < 5


def test_all_runs_are_recorded_by_default() -> None:
    assert names_of([]) == list(RUNS)
    assert names_of(["scarce_blocks"]) == ["scarce_blocks"]
