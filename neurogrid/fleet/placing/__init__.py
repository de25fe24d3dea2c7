"""Layers onto members: plans carried out, assignments, and what follows a loss."""
