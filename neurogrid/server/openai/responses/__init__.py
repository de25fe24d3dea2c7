"""OpenAI's Responses API: the same answers as those of chats, as items, and in events of their own."""
