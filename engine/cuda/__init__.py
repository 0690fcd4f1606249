"""The engine for CUDA GPUs: Triton kernels, flash-attn, captured graphs, and KV memory that peers may map.

EXPERIMENTAL: this code has not been run on a GPU in production. Its tests run on CPUs, under Triton's interpreter and
with fakes of the CUDA interfaces.
"""
