"""Readers of quantized checkpoints. They convert the stored tensors into the weight forms of `forms`."""
