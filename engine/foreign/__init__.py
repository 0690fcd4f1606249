"""Runs decoders of families that Baton does not implement, with the modules of transformers.

The modules use Baton's KV pool, attention and matrix products.
"""
