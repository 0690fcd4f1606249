"""Readers of quantized checkpoints. Each converts a format's tensors into one of the weight forms in `forms`."""
