"""Data of a training run: slices and their manifest, and which member trains on which samples."""
