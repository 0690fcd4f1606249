"""Placement: load and prefix overlap decide, and the cost of a decision does not grow with the cluster."""

from hypothesis import given
from hypothesis import strategies as st

from scheduler.disaggregate import NodeView
from scheduler.placement import PrefixIndex, place
from scheduler.prefix import block_hashes


def node(name: str, role: str = "decode", **fields: int) -> NodeView:
    return NodeView(name, role, **({"max_num_seqs": 8, "kv_capacity_tokens": 1000} | fields))  # type: ignore[arg-type]


def placed(prefill: list[NodeView], decode: list[NodeView], tokens: int = 100, **cached: int) -> tuple[str | None, str]:
    found = place("r", tokens, prefill, decode, cached)
    assert found is not None
    return found.prefill, found.decode


def test_a_prompt_goes_where_it_is_done_first_and_its_answer_where_there_is_room() -> None:
    prefill = [node("p0", "prefill", outstanding_tokens=500), node("p1", "prefill", outstanding_tokens=90)]
    decode = [node("d0", kv_tokens=100), node("d1", kv_tokens=800), node("d2", running=7)]
    assert placed(prefill, decode) == ("p1", "d0")


def test_a_known_prefix_outweighs_a_queue_that_is_shorter_than_it() -> None:
    prefill = [node("p0", "prefill", outstanding_tokens=60), node("p1", "prefill")]
    assert placed(prefill, [node("d")], p0=80) == ("p0", "d")
    assert placed(prefill, [node("d")], p0=50) == ("p1", "d")


def test_without_prefill_nodes_decode_nodes_compute_and_the_other_way_round() -> None:
    assert placed([], [node("d0"), node("d1")]) == (None, "d0")
    assert placed([node("p0", "prefill")], []) == (None, "p0")
    assert place("r", 1, [], [], {}) is None


def test_equals_take_turns() -> None:
    nodes = [node("d0"), node("d1"), node("d2")]
    for _ in range(9):
        _, chosen = placed([], nodes)
        next(view for view in nodes if view.id == chosen).placed += 1
    assert [view.placed for view in nodes] == [3, 3, 3]


@given(st.integers(17, 400), st.integers(0, 10_000))
def test_a_large_cluster_is_sampled_and_the_best_match_is_still_found(size: int, request: int) -> None:
    nodes = [node(f"d{index}", kv_tokens=500) for index in range(size)]
    found = place(f"r{request}", 300, [], nodes, {"d9": 300})
    assert found is not None
    assert found.decode == "d9"


def test_the_index_knows_who_was_sent_how_much_of_a_prefix() -> None:
    index = PrefixIndex(max_blocks=6)
    rows = block_hashes(list(range(64)), 16, b"")
    index.record(rows, "a")
    index.record(rows[:2], "b")
    assert index.overlap(rows) == {"a": 4, "b": 2}
    assert index.overlap(block_hashes(list(range(64)), 16, b"tenant")) == {}
    index.forget("a")
    assert index.overlap(rows) == {"b": 2}
    index.record(block_hashes(list(range(100, 196)), 16, b""), "c")
    assert index.overlap(rows) == {}, "the least recently used are forgotten"
