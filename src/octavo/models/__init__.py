"""Models: what a checkpoint is, the shape of its network, and its weights read into packed layers."""
