from random import Random

import numpy as np
import pytest

from engine.hash_model import KV_BYTES, HashRunner, expected_tokens
from scheduler.request import Slice, Step
from tests.engine.build import Blocks, generate, piece, run_step

LAYERS, VOCABULARY, BLOCK_TOKENS, NUM_BLOCKS = 3, 211, 4, 80


def pool() -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """Return rows of random bytes that are longer than the KV. The initial content must not affect the tokens."""
    return np.random.default_rng(3).integers(0, 256, (NUM_BLOCKS, BLOCK_TOKENS * LAYERS * KV_BYTES + 5), np.uint8)


def runner(rows: np.ndarray[tuple[int, int], np.dtype[np.uint8]]) -> HashRunner:
    return HashRunner(rows, BLOCK_TOKENS, LAYERS, VOCABULARY)


def expected(prompt: list[int], num_tokens: int, salt: bytes = b"") -> list[int]:
    return expected_tokens(prompt, num_tokens, salt, LAYERS, VOCABULARY)


@pytest.mark.parametrize("budget", [1, 3, 4, 7, 1000])
def test_any_chunking_and_company_gives_the_reference(budget: int) -> None:
    random, blocks = Random(budget), Blocks(NUM_BLOCKS, BLOCK_TOKENS)
    prompts = [[random.randrange(VOCABULARY) for _ in range(length)] for length in (1, 4, 5, 23)]
    salts = [b"", b"a", b"b" * 100, b""]
    requests = [blocks.request(one, max_tokens=12, salt=salt) for one, salt in zip(prompts, salts, strict=True)]
    answers = generate(runner(pool()), requests, budget)
    assert answers == [expected(one, 12, salt) for one, salt in zip(prompts, salts, strict=True)]


def test_tokens_salt_layers_and_vocabulary_all_matter() -> None:
    rows = [
        expected_tokens([1, 2, 3], 8),
        expected_tokens([1, 3, 3], 8),
        expected_tokens([1, 2, 3], 8, b"x"),
        expected_tokens([1, 2, 3], 8, layers=3),
        expected_tokens([1, 2, 3], 8, vocab_size=511),
    ]
    assert len({tuple(row) for row in rows}) == 5
    assert expected_tokens([1, 2, 3], 8)[3:] == expected_tokens([1, 2, 3, *rows[0][:3]], 5)  # resumed


@pytest.mark.parametrize("byte", [0, LAYERS * KV_BYTES * BLOCK_TOKENS - 1])
def test_one_wrong_byte_of_one_block_changes_the_answer(byte: int) -> None:
    rows, blocks = pool(), Blocks(NUM_BLOCKS, BLOCK_TOKENS)
    prompt = list(range(9))
    request = blocks.request(prompt, max_tokens=8)
    run_step(runner(rows), [piece(request)])
    rows[request.blocks[1], byte] ^= 1
    assert [run_step(runner(rows), [piece(request)])[0].token for _ in range(7)] != expected(prompt, 8)[1:]


def test_blocks_in_the_wrong_order_change_the_answer() -> None:
    rows, blocks = pool(), Blocks(NUM_BLOCKS, BLOCK_TOKENS)
    request = blocks.request([5] * 12, max_tokens=8)  # the blocks differ only in their positions
    run_step(runner(rows), [piece(request)])
    request.blocks[0], request.blocks[1] = request.blocks[1], request.blocks[0]
    assert [run_step(runner(rows), [piece(request)])[0].token for _ in range(7)] != expected([5] * 12, 8)[1:]


def test_rows_carried_to_another_pool_go_on_there() -> None:
    """As in a handoff, the rows are copied to a pool whose runner has never seen the request."""
    source, target, blocks = pool(), pool()[::-1].copy(), Blocks(NUM_BLOCKS, BLOCK_TOKENS)
    request = blocks.request(list(range(30)), max_tokens=20)
    run_step(runner(source), [piece(request)])
    landed = Blocks(NUM_BLOCKS, BLOCK_TOKENS, seed=9).request(list(range(30)), max_tokens=20)
    target[landed.blocks] = source[request.blocks]
    landed.tokens, landed.num_computed = list(request.tokens), 30
    assert generate(runner(target), [landed], 64)[0] == expected(list(range(30)), 20)


def test_a_preempted_request_and_a_repeated_step_change_nothing() -> None:
    device, blocks = runner(pool()), Blocks(NUM_BLOCKS, BLOCK_TOKENS)
    request = blocks.request(list(range(10)), max_tokens=10)
    for _ in range(4):
        run_step(device, [piece(request)])
    step = Step(0, [piece(request)], [])
    assert device.run(step) == device.run(step)
    request.num_computed, request.blocks = 0, request.blocks[::-1]
    assert generate(device, [request], 5)[0] == expected(list(range(10)), 10)


def test_a_reused_request_id_is_another_request() -> None:
    device, blocks = runner(pool()), Blocks(NUM_BLOCKS, BLOCK_TOKENS)
    first, second = blocks.request([1, 2, 3], max_tokens=4), blocks.request([4, 5, 6], max_tokens=4)
    second.id = first.id
    run_step(device, [Slice(first, 0, 2, False, 0)])
    run_step(device, [Slice(second, 0, 2, False, 0)])
    assert generate(device, [first, second], 64) == [expected([1, 2, 3], 4), expected([4, 5, 6], 4)]


def test_rows_too_short_for_a_block_are_refused() -> None:
    with pytest.raises(ValueError, match="take 96"):
        HashRunner(np.zeros((4, 95), np.uint8), BLOCK_TOKENS, LAYERS, VOCABULARY)
