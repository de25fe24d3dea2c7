"""The OpenAI API: requests read, answered and written."""
