"""Attention over the paged KV pool: an interface and its backends."""
