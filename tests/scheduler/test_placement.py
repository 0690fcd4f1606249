"""Test that placement decides by load and prefix overlap, at a cost that does not grow with the cluster."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from scheduler.disaggregate import NodeView
from scheduler.placement import SCAN_LIMIT, PrefixIndex, candidates, place
from scheduler.prefix import block_hashes


def node(name: str, role: str = "decode", **fields: int) -> NodeView:
    return NodeView(name, role, **({"max_num_seqs": 8, "kv_capacity_tokens": 1000} | fields))


def placed(prefill: list[NodeView], decode: list[NodeView], tokens: int = 100, **cached: int) -> tuple[str | None, str]:
    found = place(tokens, prefill, decode, cached)
    assert found is not None
    return found.prefill, found.decode


def test_the_least_busy_prefill_node_and_the_emptiest_decode_node_are_chosen() -> None:
    prefill = [node("p0", "prefill", outstanding_tokens=500), node("p1", "prefill", outstanding_tokens=90)]
    decode = [node("d0", kv_tokens=100), node("d1", kv_tokens=800), node("d2", running=7)]
    assert placed(prefill, decode) == ("p1", "d0")


def test_a_cached_prefix_outweighs_a_shorter_queue() -> None:
    prefill = [node("p0", "prefill", outstanding_tokens=60), node("p1", "prefill")]
    assert placed(prefill, [node("d")], p0=80) == ("p0", "d")
    assert placed(prefill, [node("d")], p0=50) == ("p1", "d")


def test_an_image_that_a_node_has_encoded_outweighs_a_shorter_queue() -> None:
    prefill = [node("p0", "prefill", outstanding_tokens=60), node("p1", "prefill")]
    for saved, chosen in ((80, "p0"), (50, "p1")):
        found = place(100, prefill, [node("d")], {}, encoded_tokens={"p0": saved})
        assert found is not None
        assert found.prefill == chosen


def test_a_cluster_with_one_kind_of_node_uses_that_kind() -> None:
    assert placed([], [node("d0"), node("d1")]) == (None, "d0")
    assert placed([node("p0", "prefill")], []) == (None, "p0")
    assert place(1, [], [], {}) is None


def test_equal_nodes_are_used_alternately() -> None:
    nodes = [node("d0"), node("d1"), node("d2")]
    for _ in range(9):
        _, chosen = placed([], nodes)
        next(view for view in nodes if view.id == chosen).placed += 1
    assert [view.placed for view in nodes] == [3, 3, 3]


@given(st.integers(17, 400), st.integers(0, 10_000))
def test_a_large_cluster_is_sampled_and_the_best_match_is_still_found(size: int, request: int) -> None:
    nodes = [node(f"d{index}", kv_tokens=500) for index in range(size)]
    seen = candidates(f"r{request}", nodes, nodes[9])
    assert len(seen) == 3
    found = place(300, [], seen, {"d9": 300})
    assert found is not None
    assert found.decode == "d9"


def test_the_index_records_how_much_of_a_prefix_each_node_was_sent() -> None:
    index = PrefixIndex(max_blocks=6)
    rows = block_hashes(list(range(64)), 16, b"")
    index.record(rows, "a")
    index.record(rows[:2], "b")
    assert index.overlap(rows) == {"a": 4, "b": 2}
    assert index.overlap(block_hashes(list(range(64)), 16, b"tenant")) == {}
    index.record(rows[:3], "c", "b")
    assert index.overlap(rows) == {"a": 4, "b": 3, "c": 3}
    index.forget("a")
    assert index.overlap(rows) == {"b": 3, "c": 3}
    for start in (100, 200):
        index.record(rows[:1], "b")
        index.record(block_hashes(list(range(start, start + 64)), 16, b""), "c")
    assert index.overlap(rows) == {"b": 1, "c": 1}, "blocks that were not sent recently are dropped"


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 6)), max_size=30))
def test_the_index_agrees_with_a_record_of_all_sent_blocks(sent: list[tuple[int, int]]) -> None:
    index, depths = PrefixIndex(), dict[str, int]()
    rows = block_hashes(array("i", range(24)), 4, b"")
    assert rows == block_hashes(list(range(24)), 4, b"")
    for node, depth in sent:
        index.record(rows[:depth], str(node))
        depths[str(node)] = max(depth, depths.get(str(node), 0))
    assert index.overlap(rows) == depths


def test_the_latest_nodes_that_were_sent_a_prefix_are_kept() -> None:
    index = PrefixIndex()
    for number in range(1000):
        index.record([b"shared"], str(number))
    assert sorted(index.overlap([b"shared"])) == [str(number) for number in range(1000 - SCAN_LIMIT, 1000)]
