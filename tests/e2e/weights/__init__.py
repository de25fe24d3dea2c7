"""Weights between real processes: kept on disk, from worker to worker, resumed."""
