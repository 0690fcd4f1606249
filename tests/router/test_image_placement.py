"""Test that all routers choose the same node for an image, and that an image keeps its node if another node leaves."""

from collections import Counter
from random import Random
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from router.nodes.placement import RoutableNodes
from shared.rpc.messages import NodeInfo

IMAGES = [Random(seed).randbytes(16) for seed in range(600)]


def nodes(count: int, role: str = "prefill") -> list[Any]:
    infos = [NodeInfo(f"{role}-{index}", "b", role, "", "m", "f", 4, 64, 8, 8, 8) for index in range(count)]
    return [SimpleNamespace(info=info) for info in infos]


def choices(prefill: list[Any], decode: list[Any]) -> list[str]:
    group = RoutableNodes(prefill, decode)
    return [group.encoder(digest).info.id for digest in IMAGES]


@given(st.randoms(use_true_random=False), st.integers(1, 8))
def test_routers_choose_the_same_node_for_an_image(random: Random, count: int) -> None:
    for prefill, decode in ((nodes(count), nodes(3, "decode")), ([], nodes(count, "decode"))):
        shuffled = random.sample(prefill, len(prefill)), random.sample(decode, len(decode))
        found = choices(prefill, decode)
        assert found == choices(*shuffled)
        shares = Counter(found)
        assert len(shares) == count
        assert max(shares.values()) < 1.6 * len(IMAGES) / count


@given(st.integers(2, 8), st.data())
def test_only_the_images_of_a_node_that_leaves_move(count: int, data: st.DataObject) -> None:
    prefill = nodes(count)
    gone = data.draw(st.sampled_from(prefill)).info.id
    before, after = choices(prefill, []), choices([node for node in prefill if node.info.id != gone], [])
    assert all(old == new for old, new in zip(before, after, strict=True) if old != gone)
