"""Test that a registry's nodes are divided among the models of a router."""

import logging
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.nodes.model_registry import DividedRegistry
from shared.registry import Registry
from shared.rpc.messages import NodeInfo

INFO = NodeInfo("d0", "boot-1", "decode", "127.0.0.1:1", "a", "print", 4, 64, 100, 512, 8)


class ListedNodes(Registry):
    """A registry whose nodes the test sets."""

    kind = "listed"

    async def start(self, changed) -> None:
        self.changed = changed
        self.starts = getattr(self, "starts", 0) + 1

    async def close(self) -> None:
        self.closes = getattr(self, "closes", 0) + 1


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["a", "b", "c"])), max_size=20))
async def test_each_node_is_in_the_part_of_its_model_only(joins: list[tuple[int, str]]) -> None:
    whole = ListedNodes()
    parts = DividedRegistry(whole, ["a", "b"]).parts
    seen = [0, 0]
    for number, part in enumerate(parts):
        await part.start(lambda number=number: seen.__setitem__(number, seen[number] + 1))
    for node, model in joins:
        whole.nodes[f"d{node}"] = replace(INFO, id=f"d{node}", model=model)
        whole.changed()
    assert seen == [len(joins)] * 2
    for part, model in zip(parts, "ab", strict=True):
        assert part.nodes == {name: info for name, info in whole.nodes.items() if info.model == model}
    for part in parts:
        await part.close()
    assert (whole.starts, whole.closes) == (1, 1)


async def test_a_node_of_another_model_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    whole = ListedNodes()
    first, second = DividedRegistry(whole, ["a", "b"]).parts
    await first.start(lambda: None)
    await second.start(lambda: None)
    whole.nodes["x"] = replace(INFO, id="x", model="other")
    with caplog.at_level(logging.WARNING):
        whole.changed()
        whole.changed()
    assert [record.getMessage() for record in caplog.records] == [
        "node x serves the model 'other', which is not among this router's models (a, b)"
    ]
    whole.state, whole.problem = "down", "Redis does not answer"
    assert (first.kind, second.state, second.problem) == ("listed", "down", "Redis does not answer")
