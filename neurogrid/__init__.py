"""NeuroGrid: one model on several machines."""
