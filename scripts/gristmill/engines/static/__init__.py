"""The static engine: rows come and go in batches of a model of transformers, on any device_map."""
