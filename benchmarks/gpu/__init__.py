"""Benchmarks of the GPU code (experimental): no GPU has run them yet; tests run them at toy size on a CPU."""
