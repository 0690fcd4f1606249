"""The data plane: the memory of KV pools and the channels that move its rows. Independent of requests and models."""
