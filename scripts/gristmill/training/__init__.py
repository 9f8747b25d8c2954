"""Training: supervised fine-tuning, distillation from stored logits, and from scratch, on one device or many.

texts.py makes token ids of texts, data.py rows and batches of them, objectives.py is the mathematics, models.py what is
trained, checkpoint.py what a restart needs, loop.py the steps, launching.py the processes, logs.py and card.py what is
said about it.
"""

#: Of what a recipe means by its keys: raising it trains everything again.
TRAINING_VERSION = 1
