"""Test the hash model and the emulated device: tokens depend on the KV, and emulated passes take the modeled time."""

import asyncio
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.emulation import COSTS, Emulation, LinkSpeed, load_emulation
from engine.hash_model import LANES, EmulatedRunner, HashRunner, expected_tokens
from node.emulated_link import EmulatedLink
from scheduler.cost import CostModel, StepWork, pairs_of
from scheduler.request import Slice, Step
from shared.kv.channel import KVChannel
from tests.engine.build import Blocks, generate, piece, run_step

VOCABULARY, BLOCK_TOKENS, NUM_BLOCKS = 211, 4, 80
FREE = Emulation("free", CostModel(), 131_072, 1024, LinkSpeed(0.001, 1e9))
KINDS = {"hash": HashRunner, "emulated": partial(EmulatedRunner, emulation=FREE)}
every_kind = pytest.mark.parametrize("kind", KINDS)


def pool() -> NDArray[np.uint8]:
    """Return rows of random bytes, which must not affect the tokens. Each row is longer than the KV of a block."""
    return np.random.default_rng(3).integers(0, 256, (NUM_BLOCKS, BLOCK_TOKENS * LANES * 8 + 8), np.uint8)


def runner(kind: str, rows: NDArray[np.uint8]) -> HashRunner:
    return KINDS[kind](rows, BLOCK_TOKENS, VOCABULARY)


def expected(kind: str, prompt: list[int], num_tokens: int, salt: bytes = b"") -> list[int]:
    return expected_tokens(prompt, num_tokens, VOCABULARY, salt, emulated=kind == "emulated")


@every_kind
@pytest.mark.parametrize("budget", [1, 3, 4, 7, 1000])
def test_tokens_do_not_depend_on_chunks_or_other_requests(kind: str, budget: int) -> None:
    random, blocks = Random(budget), Blocks(NUM_BLOCKS, BLOCK_TOKENS)
    prompts = [[random.randrange(VOCABULARY) for _ in range(length)] for length in (1, 4, 5, 23)]
    salts = [b"", b"a", b"b" * 100, b""]
    requests = [blocks.request(one, max_tokens=12, salt=salt) for one, salt in zip(prompts, salts, strict=True)]
    answers = generate(runner(kind, pool()), requests, budget)
    assert answers == [expected(kind, one, 12, salt) for one, salt in zip(prompts, salts, strict=True)]


@every_kind
def test_every_token_its_position_and_the_salt_change_all_later_tokens(kind: str) -> None:
    base = list(range(40))
    rows = [[*base[:changed], base[changed] + 1, *base[changed + 1 :]] for changed in range(40)]
    rows += [[base[1], base[0], *base[2:]], base]
    answers = [expected(kind, row, 12) for row in rows] + [expected(kind, base, 12, b"x")]
    assert len(set(map(tuple, answers))) == len(answers)
    assert expected(kind, [*base, *answers[-2][:4]], 8) == answers[-2][4:], "resumed"


@every_kind
@pytest.mark.parametrize("damage", ["first byte", "last byte", "block", "order"])
def test_wrong_kv_changes_the_tokens(kind: str, damage: str) -> None:
    rows, blocks = pool(), Blocks(NUM_BLOCKS, BLOCK_TOKENS)
    request = blocks.request([5] * 12, max_tokens=8)  # all tokens are equal, so the blocks differ only in position
    run_step(runner(kind, rows), [piece(request)])
    last = request.tables[0][2]
    if damage == "order":
        request.tables[0][2], request.tables[0][1] = request.tables[0][1], last
    elif damage == "block":
        rows[last] = rows[request.tables[0][1]]
    elif kind == "hash":
        rows[request.tables[0][1], 0 if damage == "first byte" else BLOCK_TOKENS * LANES * 8 - 1] ^= 1
    else:  # the emulated device reads back only the last position
        rows[last, (BLOCK_TOKENS - 1) * LANES * 8] ^= 1
    found = [token for _ in range(7) for token in run_step(runner(kind, rows), [piece(request)])[0].tokens]
    assert found != expected(kind, [5] * 12, 8)[1:]


@every_kind
def test_a_handoff_a_preemption_and_a_repeated_step_change_nothing(kind: str) -> None:
    source, target, blocks = pool(), pool()[::-1].copy(), Blocks(NUM_BLOCKS, BLOCK_TOKENS)
    device, request = runner(kind, source), blocks.request(list(range(30)), max_tokens=20)
    for _ in range(4):
        run_step(device, [piece(request)])
    step = Step(0, [piece(request)], [])
    assert device.run(step) == device.run(step)
    received = Blocks(NUM_BLOCKS, BLOCK_TOKENS, seed=9).request(list(range(30)), max_tokens=20)
    target[received.tables[0]] = source[request.tables[0]]
    received.tokens, received.num_computed = list(request.tokens), request.num_computed
    request.num_computed, request.tables[0] = 0, request.tables[0][::-1]
    for one, rows in ((received, target), (request, source)):
        assert generate(runner(kind, rows), [one], 5)[0] == expected(kind, list(range(30)), 20)


@every_kind
def test_requests_with_equal_ids_share_no_state(kind: str) -> None:
    device, blocks = runner(kind, pool()), Blocks(NUM_BLOCKS, BLOCK_TOKENS)
    first, second = blocks.request([1, 2, 3], max_tokens=4), blocks.request([4, 5, 6], max_tokens=4)
    second.id = first.id
    run_step(device, [Slice(first, 0, 2, False, 0), Slice(second, 0, 2, False, 0)])
    assert generate(device, [first, second], 64) == [expected(kind, [1, 2, 3], 4), expected(kind, [4, 5, 6], 4)]


class Device:
    """An emulated runner with a simulated clock, which advances when the runner sleeps."""

    def __init__(self, cost: CostModel) -> None:
        self.now = 100.0
        self.oversleep = 0.0
        emulation = Emulation("d", cost, 1, 1024, LinkSpeed(0, 1))
        self.runner = EmulatedRunner(pool(), BLOCK_TOKENS, VOCABULARY, emulation, lambda: self.now, self.sleep)
        self.request = Blocks(NUM_BLOCKS, BLOCK_TOKENS).request(list(range(9)), max_tokens=64)

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds + self.oversleep

    def run(self) -> None:
        run_step(self.runner, [piece(self.request)])


def test_a_pass_takes_the_modelled_time() -> None:
    cost = CostModel(0.01, 1e-3, 4.0, 1e-5, 1e-4, 1e-3)
    device = Device(cost)
    device.run()
    assert device.now == pytest.approx(100.0 + cost.seconds(StepWork(1, 9, pairs_of(0, 9))))
    start = device.now = device.now + 1.0
    device.run()
    assert device.now - start == pytest.approx(cost.seconds(StepWork(num_decodes=1, decode_context=10)))


def test_host_time_shortens_the_next_pass_and_idle_time_does_not() -> None:
    device = Device(CostModel(0.01))
    device.oversleep = 0.0005
    for _ in range(20):
        device.run()
        device.now += 0.001  # the time that the engine loop takes
    assert device.now == pytest.approx(100.0 + 20 * 0.01, abs=0.002)
    assert device.runner.overruns == 0
    device.now += 5.0
    start = device.now
    device.run()
    assert device.now - start == pytest.approx(0.0105)


class Silent(KVChannel):
    """A channel whose pushes return at once without copying. It records the order of the pushes."""

    name, fenced = "shm", True

    def __init__(self) -> None:
        self.pushed: list[int] = []

    async def push(
        self, descriptor: bytes, reservation_id: bytes, source: Sequence[int], target: Sequence[int]
    ) -> None:
        self.pushed.append(len(source))


async def test_pushes_of_one_node_share_its_link_in_order() -> None:
    inner, loop = Silent(), asyncio.get_running_loop()
    link = EmulatedLink(inner, FREE, block_tokens=16)  # 2.1 ms per block, and 1 ms per push
    ended: list[tuple[int, float]] = []
    start = loop.time()

    async def push(blocks: int) -> None:
        await link.push(b"", b"", list(range(blocks)), list(range(blocks)))
        ended.append((blocks, loop.time() - start))

    await asyncio.gather(*(push(blocks) for blocks in (4, 1, 2)))
    assert [blocks for blocks, _ in ended] == inner.pushed == [4, 1, 2]
    block_s = 16 * 131_072 / 1e9
    for (_, seconds), (blocks, pushes) in zip(ended, ((4, 1), (5, 2), (7, 3)), strict=True):
        assert seconds >= blocks * block_s + pushes * 0.001 - 0.002
    assert (link.name, link.fenced) == ("shm", True)


@pytest.mark.parametrize("path", sorted(COSTS.glob("*.json")), ids=lambda path: path.stem)
def test_a_shipped_model_has_the_stated_error_at_the_published_points(path: Path) -> None:
    data, cost = json.loads(path.read_text()), load_emulation(path.stem).cost
    errors = []
    for point in data["points"]:
        chunk, decodes = point.get("prompt", 0), point.get("decodes", 0)
        work = StepWork(bool(chunk), chunk, pairs_of(0, chunk), decodes, decodes * point.get("context", 0))
        errors.append(abs(cost.seconds(work) / point["seconds"] - 1))
    assert len(errors) >= 5
    assert data["worst_error"] - 0.001 <= max(errors) <= data["worst_error"] <= 0.03
    assert {"cost", "kv_bytes_per_token", "kv_tokens", "points"} <= set(data["sources"])
    assert all(link["source"] for link in data["links"].values())


def test_a_link_is_chosen_by_name() -> None:
    slow, fast = load_emulation("h200-llama-3.1-8b@100gbe"), load_emulation("h200-llama-3.1-8b")
    assert slow.link.bytes_per_s < fast.link.bytes_per_s
    assert slow.cost == fast.cost
    assert slow.name != fast.name, "nodes with different links are of different kinds"


BROKEN: list[tuple[str, Any, str]] = [
    ("cost", 5, "cost must be an object"),
    ("cost", {"overhead": -1.0}, "cost.overhead must be a number from 0"),
    ("cost", {"overheads": 1.0}, "cost.overheads is not one of overhead"),
    ("cost", {}, "cost has only zeros"),
    ("kv_tokens", "many", "kv_tokens must be a number"),
    ("kv_bytes_per_token", 0, "kv_bytes_per_token must be a number from 1"),
    ("link", "token ring", "link 'token ring' is not one of 100gbe"),
    ("residuals", [1.0, -1.0], "residuals must be a list of ratios of measured to predicted duration"),
    ("prefill_residuals", [1.0], "prefill_residuals must be a list of objects with up_to_s and quantiles"),
    ("prefill_residuals", [{"quantiles": [1.0]}], "prefill_residuals.up_to_s must be a number"),
    ("prefill_residuals", [{"up_to_s": 1.0}], "quantiles must be a list of ratios of measured to predicted duration"),
]


@pytest.mark.parametrize(("field", "value", "complaint"), BROKEN)
def test_an_error_in_a_file_names_the_field(field: str, value: object, complaint: str, tmp_path: Path) -> None:
    data = json.loads((COSTS / "h200-llama-3.1-8b.json").read_text()) | {field: value}
    path = tmp_path / "device.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=complaint) as caught:
        load_emulation(str(path))
    assert "\n" not in str(caught.value)
    assert "device.json" in str(caught.value)


def test_the_error_for_an_unknown_name_lists_the_known_names(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"one of h200-llama-3\.1-8b, h200-qwen3-32b, h200-qwen3-8b"):
        load_emulation("h100-gpt-5")
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        load_emulation(str(tmp_path / "x.json"))
