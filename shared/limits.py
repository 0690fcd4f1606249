"""Limits of requests that both routers and nodes enforce."""

INT32_MAX = 2**31 - 1
MAX_LOGIT_BIASES = 300
MAX_LOGPROBS = 20
GREEDY_BELOW = 1e-5  # a lower temperature selects greedy sampling, as in vLLM; a division by it could overflow
