"""Attention over the paged KV pool: one interface, a backend per kind of device."""
