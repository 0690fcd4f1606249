"""Test the rows that a geometry counts and orders, against a brute-force model."""

from hypothesis import given
from hypothesis import strategies as st

from scheduler.geometry import Geometry, Group

KV_GROUPS = st.lists(
    st.one_of(
        st.builds(Group, st.just("full"), st.integers(1, 3)),
        st.builds(Group, st.just("window"), st.integers(1, 3), st.integers(1, 20)),
    ),
    min_size=1,
    max_size=3,
)
STATES = st.lists(st.builds(Group, st.just("state"), st.integers(1, 4)), max_size=1)
GEOMETRIES = st.builds(lambda size, kv, state: Geometry(size, (*kv, *state)), st.integers(1, 8), KV_GROUPS, STATES)


def sees(group: Group, query: int, key: int) -> bool:
    if key > query:
        return False
    return group.kind == "full" or key > query - group.size


@given(GEOMETRIES, st.integers(1, 80), st.data())
def test_a_block_before_the_first_is_seen_by_no_later_query(geometry: Geometry, end: int, data: st.DataObject) -> None:
    for group in geometry.attention:
        first = geometry.first_block(group, end)
        hidden = range(first * geometry.block_tokens)
        assert not any(sees(group, query, key) for query in range(end, end + 40) for key in hidden)
        block = range(first * geometry.block_tokens, (first + 1) * geometry.block_tokens)
        assert (
            any(sees(group, query, key) for query in range(end, end + 40) for key in block) or first * len(block) >= end
        )


@given(GEOMETRIES, st.integers(1, 60), st.integers(1, 20))
def test_a_running_request_never_has_more_rows_than_counted(geometry: Geometry, tokens: int, chunk: int) -> None:
    for start in range(0, tokens):
        end = min(tokens, start + chunk)
        blocks, rows = -(-end // geometry.block_tokens), 2 * geometry.state_rows
        rows += sum(group.rows * (blocks - geometry.first_block(group, start)) for group in geometry.attention)
        assert rows <= geometry.rows_for(tokens, chunk)


@given(GEOMETRIES, st.integers(1, 40), st.integers(1, 20), st.integers(1, 200))
def test_a_request_is_within_the_capacity_if_and_only_if_its_rows_fit(
    geometry: Geometry, num_rows: int, chunk: int, tokens: int
) -> None:
    blocks = geometry.capacity(num_rows, chunk, tokens)
    fits = geometry.rows_for(tokens, chunk) <= num_rows - 1
    assert (tokens <= blocks * geometry.block_tokens) == fits


@given(GEOMETRIES, st.integers(1, 60), st.data())
def test_the_landing_order_has_what_later_queries_see_and_grows_with_the_prompt(
    geometry: Geometry, num_prompt: int, data: st.DataObject
) -> None:
    size = geometry.block_tokens
    held = data.draw(st.integers(0, num_prompt // size))
    order = geometry.landing_order(num_prompt, held)
    assert len(set(order)) == len(order)
    states = len(geometry.attention)
    for index, group in enumerate(geometry.attention):
        wanted = {
            key // size for key in range(held * size if group.kind == "full" else 0, num_prompt) for query in range((num_prompt - 1) // size * size, num_prompt + 25)
            if sees(group, query, key)
        }  # fmt: skip
        sent = {place.block for place in order if place.group == index}
        assert wanted <= sent
        if group.kind != "full":
            assert len(sent) <= -(-group.size // size) + 1
    counts = [geometry.num_final(num_prompt, held, computed) for computed in range(num_prompt + 1)]
    assert counts == sorted(counts)
    assert counts[-1] == len(order)
    for computed, count in enumerate(counts[:-1]):
        assert all(place.group != states and (place.block + 1) * size <= computed for place in order[:count])
