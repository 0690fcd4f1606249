from dataclasses import replace

import pytest
import torch

from engine.cuda.draw import draw
from engine.sampling import restrict
from tests.engine.build import thinned
from tests.gpu_less.draws import FILTERS, expected, logits_of, parameters_of, rows_of

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("vocab", "scale", "every"), thinned([(7, 1.0, 1), (97, 0.1, 1), (1100, 5.0, 2), (4200, 1.0, 5)], 3)
)
def test_draws_the_tokens_of_the_cpu(vocab: int, scale: float, every: int) -> None:
    rows = rows_of(FILTERS[::every])
    logits = logits_of(len(rows), vocab, scale, CPU)
    assert draw(logits, parameters_of(rows, CPU)).tolist() == expected(logits, rows)


@pytest.mark.parametrize("given", thinned([{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.3}], 3))
def test_every_draw_is_one_that_the_filters_keep(given: dict[str, float]) -> None:
    """20 draws from equal rows choose all tokens that the filters keep, and no others. If several tokens have
    equal logits at the limit of a filter, the filter keeps all of them."""
    logits = torch.tensor([2.0, 1.0, 2.0, -0.0, 0.0, 1.0, -3.0, 1.0]).expand(20, -1)
    sampling = replace(FILTERS[1], **given)
    rows = rows_of([sampling] * 20, range(20))
    tokens = draw(logits, parameters_of(rows, CPU)).tolist()
    assert tokens == expected(logits, rows)
    assert set(tokens) == set(restrict(logits[:1].clone(), [sampling]).isfinite()[0].nonzero()[:, 0].tolist())


def test_zeros_of_either_sign_are_equal() -> None:
    logits = torch.tensor([0.0, -0.0, 0.0, -0.0]).expand(8, -1)
    rows = rows_of([replace(FILTERS[1], top_k=1)] * 8, range(8))
    assert set(draw(logits, parameters_of(rows, CPU)).tolist()) == {0, 1, 2, 3}


def test_broken_rows_and_bans_do_not_affect_other_rows() -> None:
    logits = logits_of(5, 4200, 1.0, CPU)
    logits[0, 4101], logits[1, 3], logits[2, 0] = torch.nan, -torch.inf, torch.inf
    adjusted = logits.clone()
    adjusted[3] = -torch.inf
    adjusted[4, :4199] = -torch.inf
    rows = rows_of([FILTERS[5]] * 5)
    assert draw(logits, parameters_of(rows, CPU), adjusted).tolist() == [-1, -1, -1, -2, 4199]
    greedy = rows_of([FILTERS[0]] * 5)
    assert draw(logits, parameters_of(greedy, CPU), adjusted).tolist() == [-1, -1, -1, -2, 4199]


def test_greedy_takes_the_first_of_equal_scores() -> None:
    logits = torch.zeros(1, 4200)
    logits[0, [17, 4100, 4199]] = 1.0
    assert draw(logits, parameters_of(rows_of(FILTERS[:1]), CPU)).tolist() == [17]
