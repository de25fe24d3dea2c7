"""Making a data directory: text or images in, slices and a manifest out. The same input gives the same blob ids.

documents     text of files of every kind, piece by piece
tokenizing    a tokenizer from a directory, or trained
token_file    the ids of all documents on disk
token_ids     ids in the binary files of other programs
images        a folder of images for each class
holding_out   which documents nobody trains on
opening       what is at a place, as samples that can be read by their numbers
mixing        several sources, by weights
shuffling     the order of samples, by a seed
writing       slices, manifest, and a directory that is there whole or not at all
"""

from neurogrid.training.data.preparing.opening import find
from neurogrid.training.data.preparing.prepare import prepare

__all__ = ["find", "prepare"]
