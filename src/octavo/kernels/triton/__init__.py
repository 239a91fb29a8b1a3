"""Triton kernels: `@triton.jit` bodies and launch parameters, nothing else. They come with the GPU."""
