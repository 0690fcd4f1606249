"""A node that takes over KV and generates; without prefill nodes it computes prompts as well."""
