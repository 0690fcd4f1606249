"""The data plane: the memory of KV pools, and the channels that copy KV between pools. Independent of requests and
models."""
