"""Benchmarks of the GPU code (experimental). No GPU has run them yet; tests run them at toy size on a CPU."""
