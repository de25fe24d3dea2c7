"""What there is to see of a coordinator that serves: its state, its requests, its progress."""
