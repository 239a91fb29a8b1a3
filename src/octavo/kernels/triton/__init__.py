"""Triton kernels: `@triton.jit` bodies and launch parameters, nothing else. None yet: they come with the GPU."""
