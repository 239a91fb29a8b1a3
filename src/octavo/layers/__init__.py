"""Layers: the parts of a decoder, plain callables over packed tokens that hold no batch state."""
