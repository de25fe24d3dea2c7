"""Sessions on a worker: their caches, their steps, and the batches that steps are computed in."""
