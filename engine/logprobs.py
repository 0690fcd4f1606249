"""Log-probabilities of tokens as a client sees them: of the raw logits, before any penalty or temperature (vLLM)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shared.rpc.messages import Logprobs


def describe(logits: Tensor, tokens: Sequence[int], num_top: Sequence[int]) -> list[Logprobs]:
    """One entry a row of `logits` [R, vocab]: of tokens[r], with the num_top[r] most likely beside it.

    The rank counts the tokens that are as likely or likelier, so the most likely one has rank 1.
    """
    if not tokens:
        return []
    logprobs = logits.log_softmax(dim=-1)
    chosen = torch.tensor(tokens, device=logits.device)[:, None]
    values = logprobs.gather(1, chosen)
    ranks = (logprobs >= values).sum(dim=1).tolist()
    top = logprobs.topk(min(max(num_top), logits.shape[1]), dim=1)
    top_tokens, top_values = top.indices.tolist(), top.values.tolist()
    return [
        Logprobs(token, value, rank, ids[:count], best[:count])
        for token, value, rank, count, ids, best in zip(
            tokens, values[:, 0].tolist(), ranks, num_top, top_tokens, top_values, strict=True
        )
    ]
