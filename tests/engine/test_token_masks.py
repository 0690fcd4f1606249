"""Test the masks of grammars: they depend only on the tokens, and an answer ends only where its text is complete."""

import json
from dataclasses import replace
from random import Random
from time import process_time, sleep
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from engine.models.decoder import Decoder
from engine.runner import leads
from engine.sampling import NO_TOKEN, SamplingRow, sample
from engine.token_masks import MaskFiller, TokenMasks, TokenMatcher
from scheduler.request import Request, Slice, Step
from shared.grammar import choice_grammar, json_grammar, lark_grammar, regex_grammar
from shared.rpc.messages import SamplingParams, ThinkingBudget, pack_ids
from tests.engine.build import GREEDY, VOCABULARY, generate, model_fixture, torch_runner  # noqa: F401
from tests.engine.drive import answers, driven
from tests.engine.grammars import END_ID, ENDLESS, GRAMMARS, SCHEMA, matcher_of, tokenizer_of

TOKENIZER = tokenizer_of()


def row_of(matcher: TokenMatcher, generated: list[int], **more: object) -> SamplingRow:
    tokens = [3, 1, *generated]
    return SamplingRow(GREEDY, tokens, 2, len(tokens), frozenset([END_ID]), matcher=matcher, **more)


def allowed(rows: list[SamplingRow]) -> list[set[int]]:
    """Return the tokens that each row's mask allows. Check that they are in the vocabulary, and that one thread
    computes the same masks as two."""
    masks, others = (MaskFiller(num_threads).start(rows)() for num_threads in (1, 2))
    assert masks is not None
    assert others is not None
    assert np.array_equal(masks.words, others.words)
    return allowed_by(masks)


def allowed_by(masks: TokenMasks) -> list[set[int]]:
    bits = np.unpackbits(masks.words.view(np.uint8), axis=1, bitorder="little")
    assert not bits[:, VOCABULARY:].any()
    return [set(np.flatnonzero(row).tolist()) for row in bits]


def text_of(tokens: list[int]) -> str:
    return str(TOKENIZER.decode(tokens, skip_special_tokens=False))


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER.encode(text).ids)


@settings(max_examples=20)
@given(seed=st.integers(0, 10**6), grammar=st.sampled_from(GRAMMARS))
def test_a_mask_depends_only_on_the_tokens(seed: int, grammar: str) -> None:
    """The matcher moves forward. It also moves back, as after a failed step or a rejected draft."""
    random, matcher, path = Random(seed), matcher_of(grammar), list[int]()
    for _ in range(20):
        [tokens] = allowed([row_of(matcher, path)])
        assert allowed([row_of(matcher_of(grammar), path)]) == [tokens]
        if tokens == {END_ID} or random.random() < 0.2:
            path = path[: random.randrange(len(path) + 1)]
        else:
            path = [*path, random.choice(sorted(tokens - {END_ID}))]


def test_drafts_get_the_masks_of_their_positions_and_none_after_a_forbidden_one() -> None:
    matcher, path = matcher_of(choice_grammar(["abc", "abd", "x"])), ids_of("abd")
    rows = [row_of(matcher, path[:count]) for count in range(4)]
    letters = [{text_of([token]) for token in tokens} for tokens in allowed(rows)]
    assert letters == [{"a", "x"}, {"b"}, {"c", "d"}, {"<|end|>"}]
    forbidden = [row_of(matcher, ids_of("axb")[:count]) for count in range(3)]
    assert [len(tokens) for tokens in allowed(forbidden)] == [2, 1, 0]
    assert allowed([row_of(matcher, ids_of("ab"))]) == [set(ids_of("c") + ids_of("d"))]


def test_a_step_does_not_wait_for_the_first_states_of_a_large_grammar() -> None:
    began_s = process_time()
    row = row_of(matcher_of(regex_grammar("(a{500}){500}")), [])
    made_s = process_time()
    assert len(allowed([row])[0]) == 1
    assert process_time() - made_s < made_s - began_s
    made_s -= began_s
    began_s = process_time()
    assert allowed([row_of(matcher_of(regex_grammar("(a{500}){500}")), [])]) == allowed([row])
    assert process_time() - began_s < made_s, "the samples of a request compile their grammar once"


def test_few_compiled_grammars_are_kept_because_each_may_take_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, texts = list[str](), [choice_grammar([f"kept {number}"]) for number in range(3)]

    def compile_(tokenizer: LLTokenizer, text: str, **options: Any) -> LLMatcher:
        compiled.append(text)
        return LLMatcher(tokenizer, text, **options)

    monkeypatch.setattr("shared.grammar.LLMatcher", compile_)
    for text in (texts[0], *texts, texts[0]):
        matcher_of(text)
    assert compiled == [*texts, texts[0]]


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_grammar_whose_masks_take_too_long_fails(num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.token_masks.MAX_EXCESS_S", 0.1)
    filler, other = MaskFiller(num_threads), row_of(matcher_of(choice_grammar(["b"])), [])
    ambiguous = lark_grammar("start: s\ns: " + " | ".join(" ".join(["s"] * count) for count in range(2, 7)) + ' | "a"')
    matcher, began_s = matcher_of(ambiguous), process_time()
    for length in range(1, 70):
        masks = filler.start([row_of(matcher, ids_of("a") * length), other])()
        assert masks is not None
        assert masks.words[1].any()
        if allowed_by(masks)[0] <= {END_ID}:
            break
    assert length < 69
    assert process_time() - began_s < 2
    monkeypatch.setattr("engine.token_masks.FORGIVEN_S", 1000.0)
    sleep(0.01)  # this forgives the excess, although no other request had a grammar in the meantime
    masks = filler.start([row_of(matcher_of(ambiguous), [])])()
    assert masks is not None
    assert allowed_by(masks)[0] == set(ids_of("a"))


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_request_does_not_fail_when_others_have_filled_its_lexer(
    num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The requests with one grammar share a lexer, which has a limited number of states."""
    monkeypatch.setattr("shared.grammar.LIMITS", LLParserLimits(max_lexer_states=500, verbose_errors=False))
    filler, pick, grammar = MaskFiller(num_threads), Random(1), lark_grammar("start: /[ab]*a[ab]{14}c/")
    early = row_of(matcher_of(grammar), [])
    for _ in range(40):
        late = row_of(matcher_of(grammar), [])
        for row in [late] * 20 + [early]:
            masks = filler.start([row])()
            assert masks is not None
            assert allowed_by(masks)[0] >= {*ids_of("a"), *ids_of("b")}
            row.tokens = [*row.tokens, ids_of(pick.choice("ab"))[0]]
            row.position += 1


@pytest.mark.parametrize(("fuel", "names"), [(10_000, {"retried", "other"}), (5_000, {"other"})])
def test_reading_many_tokens_at_once_fails_neither_the_request_nor_others(
    fuel: int, names: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request does so after a retry on another node. The requests with a grammar share llguidance's limit on the new
    states between two masks."""
    monkeypatch.setattr("shared.grammar.LIMITS", LLParserLimits(step_lexer_fuel=fuel, verbose_errors=False))
    text = "start: /([ab]*a[ab]{30}c)|(.*b.{50}d)|((a|b|ab|ba)*c.{100})/"
    pick, grammar = Random(1), lark_grammar(f"// {fuel}\n{text}")  # the comment makes the cached grammars differ
    other = row_of(matcher_of(grammar), [])
    for _ in range(10):
        path = [ids_of(pick.choice("ab"))[0] for _ in range(200)]
        retried = row_of(matcher_of(grammar), path)
        masks = MaskFiller(1).start([retried, other])()
        assert masks is not None
        found = dict(zip(("retried", "other"), allowed_by(masks), strict=True))
        assert all(found[name] >= {*ids_of("a"), *ids_of("b")} for name in names)
        other.tokens = [*other.tokens, path[0]]
        other.position += 1


def test_a_stop_token_is_allowed_exactly_where_the_text_is_complete() -> None:
    grammar, stops = lark_grammar('start: "ab" "c"*'), frozenset([END_ID, *ids_of("d")])
    for text, ends in (("", False), ("a", False), ("ab", True), ("abcc", True)):
        row = row_of(matcher_of(grammar), ids_of(text))
        row.stop_tokens = stops
        [tokens] = allowed([row])
        assert stops <= tokens if ends else not stops & tokens
    row = row_of(matcher_of(grammar), ids_of("ab"), min_tokens=3)
    assert allowed([row]) == [set(ids_of("c"))]


def test_a_complete_text_may_end_before_the_minimum_of_tokens() -> None:
    row = row_of(matcher_of(choice_grammar(["a"])), ids_of("a"), min_tokens=5)
    assert allowed([row]) == [{END_ID}]
    request = Request("r", [1, *ids_of("a"), END_ID], 1, 9, 5, frozenset([END_ID]), matcher=row.matcher)
    assert request.finish_reason() == "stop"


def test_a_grammar_forces_the_end_of_the_reasoning_as_soon_as_it_allows_it() -> None:
    [end] = ids_of("!")
    sampling = replace(GREEDY, thinking=ThinkingBudget(2, ids_of("?")[0], pack_ids([end]), 2))
    matcher = matcher_of(lark_grammar('start: /([a-y][a-y][a-y])*/ "!" "yes"'))
    for text, is_forced in (("a", False), ("ab", False), ("abc", True), ("abc!", False)):
        one = replace(row_of(matcher, ids_of(text)), sampling=sampling)
        [tokens] = allowed([one])
        assert (tokens == {end}) == is_forced
        assert tokens
        one.tokens = [*one.tokens, 0]
        [drawn] = sample(torch.zeros(1, VOCABULARY), [one], MaskFiller().start([one])())
        assert drawn.token in tokens


def test_rows_without_a_grammar_have_no_mask() -> None:
    plain = SamplingRow(GREEDY, [1], 1, 1)
    assert MaskFiller().start([plain])() is None
    masks = MaskFiller().start([plain, row_of(matcher_of(ENDLESS), [])])()
    assert masks is not None
    assert masks.rows == [1]
    logits = torch.zeros(2, VOCABULARY + 40)  # a model may have more embeddings than its tokenizer has tokens
    masks.apply_(logits)
    assert logits[0].eq(0).all()
    assert {text_of([token]) for token in logits[1].eq(0).nonzero()[:, 0].tolist()} <= set("abcdefghijklmnopqrstuvwxy")


def test_a_row_whose_mask_allows_nothing_fails_alone() -> None:
    logits = torch.zeros(2, VOCABULARY)
    draws = sample(logits, [SamplingRow(GREEDY, [1], 1, 1)] * 2, TokenMasks([1], np.zeros((1, 4), np.int32)))
    assert [draw.error for draw in draws] == ["", NO_TOKEN]


@pytest.mark.parametrize("grammar", GRAMMARS[1:])
@pytest.mark.parametrize("seed", range(3))
def test_answers_of_a_random_model_match_the_grammar(model: Decoder, grammar: str, seed: int) -> None:
    runner, _, blocks = torch_runner(model)
    matcher, stop = matcher_of(grammar), frozenset([END_ID])
    plain = blocks.request([5, 6], SamplingParams(seed=seed), 9)
    bound = blocks.request([7, 8, 9], SamplingParams(seed=seed, logprobs=1), 60, matcher=matcher, stop_tokens=stop)
    _, tokens = generate(runner, [plain, bound], 64)
    assert bound.finish == "stop"
    text = text_of(tokens[:-1])
    if grammar == json_grammar(SCHEMA):
        value = json.loads(text)
        assert isinstance(value["a"], int)
        assert value.get("b") in (None, "x", "yy")
    else:
        assert not text.replace("bc", "").strip("a") or text in {"yes", "no", ""}


def test_the_next_step_waits_for_the_token_of_a_row_with_a_grammar(model: Decoder) -> None:
    row = Request("r", [1, 2, 3], 3, 12, sampling=GREEDY, matcher=matcher_of(ENDLESS))
    assert not leads(Step(0, [Slice(row, 0, 3, True, 0)], []))
    drive = driven(model, [row], 1, 200, ahead=True, aborts=False)
    assert drive.runner.num_overlapped == 0
    assert text_of(answers([row])[0][0]).isalpha()


@pytest.mark.parametrize("text", ["start: foo", 'start: "a', "start: /(/", '%json {"type": "foo"}', "start: <|none|>"])
def test_a_grammar_that_does_not_compile_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="the grammar does not compile: "):
        matcher_of(lark_grammar(text))
