"""Kernels for CPUs, compiled with numba. Optional: plain torch computes where numba is missing."""
