"""A model cut into stages: built without weights, loaded layer by layer, run, measured."""
