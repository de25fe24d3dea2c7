"""HTTP itself: listeners, which clients are let in, what a request may take, whatever it asks for."""
