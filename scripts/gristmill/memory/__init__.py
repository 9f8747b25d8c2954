"""How much GPU memory a model takes, and whether its worker's GPUs have it: known before anything is loaded."""
