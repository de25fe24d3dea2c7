"""Verification: a share of sessions is computed again by another worker or by the coordinator; who differs is named."""
