"""Octavo's kernels inside other people's engines. Nothing in Octavo imports this room."""
