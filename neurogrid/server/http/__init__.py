"""HTTP itself: listeners, who is let in, what a request may take, whatever it asks for."""
