"""A teacher's logits: the log-probabilities of given tokens and of the most likely ones, position by position.

storage.py is the file format and its reader.
"""
