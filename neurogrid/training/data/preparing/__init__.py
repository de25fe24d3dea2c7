"""Making a data directory: text or images in, slices and a manifest out. The same input gives the same blob ids.

documents     text of files of every kind, piece by piece
tokenizing    a tokenizer from a directory, or trained
token_file    the ids of all documents on disk, and what is held out of them
images        a folder of images for each class
writing       slices, manifest, and a directory that is there whole or not at all
"""

from neurogrid.training.data.preparing.prepare import prepare

__all__ = ["prepare"]
