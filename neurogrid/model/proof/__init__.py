"""Proof that a config's model can be built and split: a miniature of it, tried in a confined process."""
