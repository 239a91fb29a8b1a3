"""Weights: checkpoint files as named tensors, and the one way from there into a model's parameters."""
