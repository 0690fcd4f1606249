"""Test that every weight format multiplies by exactly the weights that it stores, each row independently."""

import math
from random import Random

import pytest
import torch
from torch import Tensor

from benchmarks.random_model import random_decoder
from engine.cpu import why_not_compiled
from engine.cpu.int8 import LEVELS, LEVELS_OF_7_BITS, Int8, has_fbgemm
from engine.cpu.selection import AsStored, linear_on_cpu
from engine.linear import LinearFormat, Plain, SeparateExperts
from engine.models.spec import AttentionSpec, LayerSpec, MlpSpec, ModelConfig
from tests.engine.build import CPU, generate, thinned, torch_runner

compiled = pytest.mark.skipif(bool(why_not_compiled()), reason=f"no compiled kernels: {why_not_compiled()}")
EIGHT_BITS: list[LinearFormat] = [Int8()] if has_fbgemm() else []
PANELS: list[LinearFormat] = []
if not why_not_compiled():
    from engine.cpu.matmul_kernels import HAS_INT8, PANEL, TILE_ROWS
    from engine.cpu.panels import Panels

    PANELS += [Panels(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    if HAS_INT8:
        from engine.cpu.panels import Int8Panels

        EIGHT_BITS.append(Int8Panels())

torch.set_num_threads(1)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FLOATS = [Plain(torch.float32), *PANELS]
SHAPES = [(768, 256), (1, 1), (33, 1), (1, 65), (100, 37)] + [
    (Random(seed).randrange(1, 300), Random(seed + 50).randrange(1, 300)) for seed in range(6)
]


def matrix(out: int, width: int, seed: int = 0, size: float = 0.05) -> Tensor:
    return torch.randn(out, width, generator=torch.Generator().manual_seed(seed)) * size


def held(linear: LinearFormat, weight: Tensor) -> Tensor:
    """Round the weights to the dtype in which the format stores them, and return them in float64."""
    return weight.to(DTYPES[linear.name.split()[0]]).double()


def error(found: Tensor, wanted: Tensor) -> float:
    """Return the largest error of a row, relative to the norm of the row."""
    return float(((found - wanted).norm(dim=1) / wanted.norm(dim=1).clamp(min=1e-30)).max())


@pytest.mark.parametrize("linear", FLOATS, ids=lambda linear: linear.name)
@pytest.mark.parametrize(("out", "width"), thinned(SHAPES, 4))
def test_a_product_uses_the_stored_weights(linear: LinearFormat, out: int, width: int) -> None:
    weight, bias, rows = matrix(out, width), matrix(1, out, 1)[0], matrix(600, width, 2, 1.0)
    for offset in (None, bias):
        made = linear.make(weight.clone(), offset)
        wanted = rows.double() @ held(linear, weight).T + (0 if offset is None else offset.to(torch.float32).double())
        for count in (1, 2, 7, 33, 600):
            found = made(rows[:count])
            assert found.dtype == torch.float32
            torch.testing.assert_close(found.double(), wanted[:count], rtol=1e-5, atol=2e-5)


@compiled
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("linear", [*PANELS, *EIGHT_BITS[1:]], ids=lambda linear: linear.name)
def test_in_panels_no_bit_of_a_row_depends_on_other_rows(linear: LinearFormat, threads: int) -> None:
    """The number of threads does not change the bits either, because each sum adds its terms in a fixed order."""
    made, rows = linear.make(matrix(3 * PANEL + 5, 1100), matrix(1, 3 * PANEL + 5, 3)[0]), matrix(400, 1100, 2, 1.0)
    torch.set_num_threads(1)
    alone = torch.cat([made(row[None]) for row in rows])
    torch.set_num_threads(threads)
    for count in (*range(2, 3 * TILE_ROWS), 64 * TILE_ROWS, 64 * TILE_ROWS + 1, 400):
        assert torch.equal(made(rows[-count:]), alone[-count:])
    torch.set_num_threads(1)


@compiled
@pytest.mark.parametrize("stored", ["bfloat16", "float16", "float32"])
def test_weights_of_a_16_bit_checkpoint_stay_as_they_are(stored: str) -> None:
    weight, rows = matrix(64, 48).to(DTYPES[stored]), matrix(5, 48, 1, 1.0)
    linear = linear_on_cpu("auto", "none")
    found = linear.make(weight.clone(), None)(rows)
    assert linear.name.startswith(stored)
    assert error(found, rows.double() @ weight.double().T) < 1e-6


@compiled
@pytest.mark.parametrize("size", [1e-30, 1e-9, 1e-4, 1.0, 1e9, 1e30])
def test_bfloat16_keeps_its_range(size: float) -> None:
    weight, rows = matrix(40, 64, size=size), matrix(3, 64, 1, 1.0)
    found = Panels(torch.bfloat16).make(weight.clone(), None)(rows)
    assert error(found, rows.double() @ weight.bfloat16().double().T) < 1e-6


@pytest.mark.parametrize("given", DTYPES.values(), ids=str)
@pytest.mark.parametrize("linear", [*FLOATS, *EIGHT_BITS], ids=lambda linear: linear.name)
def test_a_format_has_a_lookup_only_for_unrounded_weights(linear: LinearFormat, given: torch.dtype) -> None:
    weight = matrix(150, 37).to(given)
    lookup = linear.make(weight.clone(), None).lookup()
    keeps = linear.name.split()[0] in {"float32", str(given).removeprefix("torch.")}
    assert (lookup is not None) == keeps
    if lookup is not None:
        indices = torch.tensor([149, 0, 63, 64, 64, 127, 128])
        assert torch.equal(lookup(indices).double(), weight[indices].double())


def test_a_matrix_of_zeros_gives_zeros() -> None:
    for linear in (*PANELS, *EIGHT_BITS):
        assert torch.equal(linear.make(torch.zeros(8, 16), None)(matrix(3, 16)), torch.zeros(3, 8))


@compiled
@pytest.mark.parametrize("bad", [7e4, math.inf, math.nan])
def test_weights_that_float16_cannot_hold_are_refused(bad: float) -> None:
    weight = matrix(8, 8)
    weight[3, 5] = bad
    with pytest.raises(ValueError, match=r"too large for float16.*use --weight-dtype float32"):
        Panels(torch.float16).make(weight, None)


@pytest.mark.parametrize("levels", [LEVELS, LEVELS_OF_7_BITS])
@pytest.mark.parametrize("linear", EIGHT_BITS, ids=lambda linear: type(linear).__name__)
@pytest.mark.parametrize(("out", "width"), thinned(SHAPES, 4))
def test_int8_errors_are_bounded_by_the_rounding_of_both_factors(
    out: int, width: int, linear: LinearFormat, levels: int
) -> None:
    """The bound follows, by the triangle inequality, from an error of half a level in each weight and activation."""
    if isinstance(linear, Int8):
        if levels > Int8().levels:
            pytest.skip("this CPU multiplies bytes in 16 bits")
        linear = Int8()
        linear.levels = levels
    weight, bias, rows = matrix(out, width), matrix(1, out, 1)[0], matrix(200, width, 2, 1.0)
    made = linear.make(weight.clone(), bias)
    wanted = rows.double() @ weight.double().T + bias.double()
    row_step, weight_step = rows.abs().amax(1) / LEVELS, weight.abs().amax(1) / levels
    bound = 0.51 * (row_step[:, None] * weight.abs().sum(1) + rows.abs().sum(1)[:, None] * weight_step)
    bound += 0.26 * width * row_step[:, None] * weight_step + 1e-4
    for count in (1, 5, 200):
        assert ((made(rows[:count]) - wanted[:count]).abs() <= bound[:count]).all()


@pytest.mark.parametrize("linear", EIGHT_BITS, ids=lambda linear: type(linear).__name__)
def test_int8_keeps_the_precision_of_a_row_next_to_a_huge_one(linear: LinearFormat) -> None:
    rows = matrix(300, 96, 2, 1.0)
    made = linear.make(matrix(64, 96), None)
    for count in (2, 70, 300):
        others = rows[:count].clone()
        others[-1] *= 1e4
        torch.testing.assert_close(made(others)[:-1], made(rows[:count])[:-1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("linear", EIGHT_BITS, ids=lambda linear: type(linear).__name__)
def test_int8_does_not_saturate_on_the_largest_values(linear: LinearFormat) -> None:
    """With 8 bits for both weights and activations, the instructions of CPUs without VNNI would saturate."""
    found = linear.make(torch.full((32, 256), 0.5), None)(torch.full((150, 256), 3.0))
    torch.testing.assert_close(found, torch.full((150, 32), 384.0))


def test_a_broken_row_spoils_only_itself() -> None:
    rows = matrix(6, 32, 2, 1.0)
    rows[1, 3], rows[4, 0] = math.nan, math.inf
    for linear in (*PANELS, *EIGHT_BITS):
        finite = linear.make(matrix(16, 32), None)(rows).isfinite()
        assert finite[[0, 2, 3, 5]].all()
        assert not finite[[1, 4]].any()


@pytest.mark.parametrize("linear", [*FLOATS, *EIGHT_BITS], ids=lambda linear: type(linear).__name__ + linear.name)
def test_experts_multiply_their_own_rows(linear: LinearFormat) -> None:
    """Some experts have no rows, and some have more than one block of rows. A row's bits do not depend on other
    rows."""
    each = [linear.make(matrix(70, 40, seed), matrix(1, 70, seed + 9)[0]) for seed in range(7)]
    counts = torch.tensor([0, 3, 1, 0, 140, 17, 0])
    rows = matrix(int(counts.sum()), 40, 2, 1.0)
    for threads in (1, 3):
        torch.set_num_threads(threads)
        found = linear.of_experts(each)(rows, counts)
        torch.testing.assert_close(found, SeparateExperts(each)(rows, counts))
        some = torch.tensor([0, 0, 0, 0, 60, 1, 0])
        if linear in PANELS:
            assert torch.equal(linear.of_experts(each)(rows[84:145], some), found[84:145])
    torch.set_num_threads(1)


@pytest.mark.parametrize("linear", [*FLOATS, *EIGHT_BITS], ids=lambda linear: type(linear).__name__ + linear.name)
def test_empty_and_strided_rows_are_multiplied(linear: LinearFormat) -> None:
    made = linear.make(matrix(20, 12), None)
    rows = matrix(9, 30, 1)
    assert made(rows[:0, :12]).shape == (0, 20)
    for strided in (rows[:, 3:15], matrix(12, 9, 1).T, rows[::2, :12]):
        torch.testing.assert_close(made(strided), made(strided.contiguous()))


@compiled
@pytest.mark.parametrize(
    ("settings", "name"),
    [
        (("auto", "none"), "float32 packed"),
        (("float32", "none"), "float32 packed"),
        (("bfloat16", "none"), "bfloat16 packed (float32 arithmetic)"),
        (("float16", "none"), "float16 packed (float32 arithmetic)"),
    ],
)
def test_the_requested_format_is_chosen(settings: tuple[str, str], name: str) -> None:
    linear = linear_on_cpu(*settings)
    assert isinstance(linear, AsStored if settings[0] == "auto" else Panels)
    assert linear.name == name
    assert linear_on_cpu("auto", "int8").name == "int8"


@compiled
@pytest.mark.parametrize("settings", [("auto", "none"), ("bfloat16", "none"), ("float16", "none"), ("auto", "int8")])
def test_a_model_generates_the_same_alone_and_in_a_batch(settings: tuple[str, str]) -> None:
    layer = LayerSpec(AttentionSpec(4, 2, 16), MlpSpec(100))
    config = ModelConfig("LlamaForCausalLM", 64, 97, (layer, layer), 1e-5, True, 4096)
    model = random_decoder(config, torch.float32, CPU, linear_on_cpu(*settings), deviation=0.1)
    prompts = [[Random(seed).randrange(97) for _ in range(count)] for seed, count in enumerate((1, 17, 160))]
    runner, _, blocks = torch_runner(model, num_blocks=400)
    together = generate(runner, [blocks.request(prompt, max_tokens=12) for prompt in prompts], budget=500)
    for prompt, answer in zip(prompts, together, strict=True):
        runner, _, blocks = torch_runner(model, num_blocks=400)
        assert generate(runner, [blocks.request(prompt, max_tokens=12)], budget=500) == [answer]
    assert all(len(answer) == 12 for answer in together)
