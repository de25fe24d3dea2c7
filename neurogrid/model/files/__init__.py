"""The files of a checkpoint: config, weights, tokenizer, and the blobs that are made of them."""
