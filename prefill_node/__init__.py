"""A node that computes prompts and hands their KV to a decode node, chunk by chunk."""
