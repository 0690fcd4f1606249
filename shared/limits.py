"""Limits of requests that both the router, for its clients, and the nodes, for their routers, enforce."""

INT32_MAX = 2**31 - 1
MAX_LOGIT_BIASES = 300
MAX_LOGPROBS = 20
