"""Optional kernels for CPUs, compiled with numba. Without them the engine uses plain torch."""
