"""The API of Ollama, in front of the same coordinator."""
