"""Programs of clients that have an environment of their own, `.venv/clients`: each asks a server and prints JSON.

What to ask is a line of JSON on stdin: `url`, `model`, `prompts`, `max_tokens` and `bias`, a `logit_bias` by which
answers in JSON come to an end.
"""
