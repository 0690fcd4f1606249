"""Test which KV rows a cluster keeps, sends and finds in the cache if the model has sliding windows or recurrent
layers."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from scheduler.geometry import Group
from tests.cluster.harness import Cluster, cluster, completion, expected, prompt_of
from tests.cluster.kinds import KINDS, model_of

BLOCK = 16


@contextmanager
def checked(kind: str, prefill: int, directory: Path, **settings: object) -> Iterator["Checked"]:
    path, groups = model_of(kind, directory)
    with cluster(prefill, 1, model=path, **settings) as running:
        yield Checked(running, groups)


class Checked:
    """A cluster whose answers are compared with the hash model's."""

    def __init__(self, running: Cluster, groups: tuple[Group, ...]) -> None:
        self.running = running
        self._groups = groups

    def ask(self, prompt: list[int], count: int, n: int = 1) -> tuple[list[int], int]:
        """Return the answer, and the number of prompt tokens that were found in the prefix cache."""
        body = self.running.post("/v1/completions", completion(self.running.model, prompt, count, n=n))
        tokens = list(body["choices"][0]["token_ids"])
        assert [choice["token_ids"] for choice in body["choices"]] == [expected(prompt, count, self._groups)] * n
        return tokens, int((body["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0))


@pytest.mark.parametrize(("kind", "num_rows"), [("states", 10 + 2), ("windows", 10 + 4)])
def test_a_handoff_sends_what_later_tokens_need_and_one_state(kind: str, num_rows: int, tmp_path: Path) -> None:
    """The prompt has 10 blocks. A query at position 150 sees the last 40 positions, which are in 4 blocks."""
    with checked(kind, 1, tmp_path) as here:
        here.ask(prompt_of(1, 150), 20)
        status = here.running.settled()
        sender = next(node for node in status["nodes"] if node["role"] == "prefill")
        assert (sender["handoffs"], sender["blocks_moved"]) == (1, num_rows)
        assert sender["bytes_moved"] == num_rows * sender["block_bytes"]


@pytest.mark.parametrize("kind", KINDS)
def test_further_samples_compute_only_the_last_block_of_the_prompt(kind: str, tmp_path: Path) -> None:
    """The samples start at position 144, whose query sees a block that a query at position 152 does not see."""
    with checked(kind, 1, tmp_path) as here:
        prompt = prompt_of(1, 152)
        here.ask(prompt, 20, n=3)
        status = here.running.settled()
        assert sum(node["prompt_tokens"] for node in status["nodes"]) == 152 + 2 * 8


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_turn_computes_at_most_a_block_and_its_new_tokens(kind: str, tmp_path: Path) -> None:
    with checked(kind, 0, tmp_path) as here:
        first = prompt_of(2, 150)
        answer, _ = here.ask(first, 50)
        second = [*first, *answer, *prompt_of(3, 30)]
        assert len(second) - here.ask(second, 10)[1] <= BLOCK + 30


@pytest.mark.parametrize("kind", KINDS)
def test_the_third_request_with_a_shared_prefix_finds_all_its_blocks(kind: str, tmp_path: Path) -> None:
    with checked(kind, 0, tmp_path) as here:
        found = [here.ask([*prompt_of(4, 100), *prompt_of(seed, 40)], 5)[1] for seed in (5, 6, 7)]
        assert found[2] == 100 // BLOCK * BLOCK


@pytest.mark.parametrize("kind", KINDS)
def test_a_prefill_node_computes_in_the_pool_of_a_decode_node(kind: str, tmp_path: Path) -> None:
    """The second turn starts from a state or from window blocks that the decode node kept."""
    with checked(kind, 1, tmp_path, kv_channel="pool", max_num_batched_tokens=48) as here:
        first = prompt_of(2, 150)
        answer, _ = here.ask(first, 50)
        second = [*first, *answer, *prompt_of(3, 30)]
        assert len(second) - here.ask(second, 10)[1] <= BLOCK + 30
        here.ask(prompt_of(5, 77), 30)
        status = here.running.settled()
        sender = next(node for node in status["nodes"] if node["role"] == "prefill")
        assert (sender["handoffs"], sender["bytes_moved"]) == (3, 0)
