"""Runs decoders without a native family: transformers' own modules, over Baton's KV pool, attention and products."""
