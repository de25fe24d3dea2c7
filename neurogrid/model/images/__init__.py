"""Images among the tokens of a session: where they are, what that means to the layers, and how bytes become pixels."""
