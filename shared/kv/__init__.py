"""The data plane: the memory of KV pools and the channels that move rows of it. Knows no request and no model."""
