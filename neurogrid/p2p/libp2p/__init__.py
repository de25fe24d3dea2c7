"""Hosts over libp2p, and what is replaced of py-libp2p."""
