"""The continuous engine: transformers' continuous batching, on one GPU or cut over several."""
