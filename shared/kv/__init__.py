"""The data plane: the memory of KV pools, and the channels that copy KV between pools. It does not depend on
requests or models."""
