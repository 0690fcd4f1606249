"""The prefill role: a prefill node computes prompts and sends their KV to decode nodes, chunk by chunk."""
