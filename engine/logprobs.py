"""Log-probabilities of tokens, computed from the raw logits before any penalty or temperature, as in vLLM."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shared.rpc.messages import Logprobs


def describe(logits: Tensor, tokens: Sequence[int], num_top: Sequence[int]) -> list[Logprobs]:
    """Return one entry per row of `logits` [R, vocab]: the logprob of tokens[r] and of the num_top[r] likeliest tokens.

    The rank counts the tokens that are at least as likely, so the most likely token has rank 1.
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
