"""Peers of ill will over real libp2p: the host lives, and serves the others, during and after."""
