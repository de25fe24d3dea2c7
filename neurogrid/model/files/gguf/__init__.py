"""Models in GGUF: one file, or shards of one, that has config, tokenizer and weights of a model.

`header` and `metadata` read what a file says of itself, `architectures` and `configs` know the models that are read,
`blocks` the bytes of a matrix, `tensor_files` gives the tensors as a checkpoint of transformers has them, and
`tokenizer` makes one. Nothing here is imported with the room: what a file says is judged without torch.
"""
