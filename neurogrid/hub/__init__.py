"""Models by name: what a hub has of one, what lies in the cache of this machine, and the way from there to here.

Knows huggingface_hub, and no torch. That library reads HF_HUB_OFFLINE when it is imported, which `neurogrid.model`
sets for good, and its calls cannot be cancelled: what goes to the network runs in a process of its own
(`fetching`), for a name that somebody typed, and `download` starts and ends it. What is here looks into the cache only
(`cache`), and so does all that runs once a model is there.
"""
