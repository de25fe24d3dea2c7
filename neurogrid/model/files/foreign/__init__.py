"""Quantised checkpoints as others publish them: `formats` reads or refuses one, `codes` decodes its matrices.

`integers` and `floats` know how each format has them, `layout` has what is common to them.
"""
