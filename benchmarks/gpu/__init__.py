"""Benchmarks of the GPU code (experimental). Tests run them at toy size on a CPU."""
