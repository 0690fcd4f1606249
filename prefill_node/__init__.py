"""The role of a prefill node: it computes prompts and sends their KV to a decode node, chunk by chunk."""
