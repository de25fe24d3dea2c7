"""One stream to a peer: its bytes, its messages, its credit, and the room that what arrives takes."""
