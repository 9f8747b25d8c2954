"""GPUs: which are there, who may hold them, what they did, and whether they are sound."""
