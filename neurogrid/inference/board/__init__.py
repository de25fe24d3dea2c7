"""The view of a coordinator that serves: its state, its requests, its progress."""
