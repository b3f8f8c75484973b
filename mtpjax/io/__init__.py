"""Read and write: model files, tokenizers, checkpoints."""
