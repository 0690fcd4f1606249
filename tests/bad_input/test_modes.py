"""Test that both modes of a cluster give equal answers to generated requests. `make schemathesis` tests more cases."""

from tests.bad_input.modes import compare_modes, joined


def test_both_modes_give_the_same_answers() -> None:
    for name, statuses in compare_modes(cases=1).items():
        assert statuses[200], name
        assert statuses[400], name


def test_streams_are_equal_if_only_their_cuts_differ() -> None:
    whole = [{"choices": [{"text": "abc", "index": 0}]}, {"usage": {"total_tokens": 3}}]
    cut = [{"choices": [{"text": text, "index": 0}]} for text in ("a", "bc")] + whole[1:]
    assert joined(whole) == joined(cut)
    assert joined(whole) != joined([*cut, *cut[:1]])
    assert joined(whole) != joined(cut[:2])
