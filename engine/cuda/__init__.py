"""The engine for CUDA GPUs: Triton kernels, flash-attn, captured graphs, and KV memory that peers may map.

Experimental: the kernels and small models were run on one H200 (`docs/results/performance.md`), but have not been used
in production. Without a GPU, the tests use Triton's interpreter and fakes of the CUDA interfaces.
"""
