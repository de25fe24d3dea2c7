"""Tools in chats: what requests say of them, how templates have calls written, and calls read from a model's text."""
