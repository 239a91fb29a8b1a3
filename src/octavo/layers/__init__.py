"""Layers: the parts of a decoder, each a plain callable over packed tokens; no batch state is parked in them."""
