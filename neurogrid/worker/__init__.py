"""A machine's side: claim, layers, transfers, blobs, links."""
