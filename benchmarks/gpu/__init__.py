"""Benchmarks of the GPU code (experimental). They have not run on a GPU yet; tests run them at toy size on a CPU."""
