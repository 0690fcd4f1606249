"""Runs steps on a device: models, attention over paged KV, sampling. It decides nothing about what runs when."""
