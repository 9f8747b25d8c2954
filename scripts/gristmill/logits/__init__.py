"""A teacher's logits: the log-probabilities of given tokens and of the most likely ones, position by position.

texts.py makes token ids of texts, scoring.py and vllm.py ask the model, worker.py is one job, journal.py what is scored
already, merging.py joins it, and storage.py is the file format and its reader.
"""

#: Of what the scoring means by its numbers: raising it scores everything again.
LOGITS_VERSION = 1
