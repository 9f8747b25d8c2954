"""From a run's answers to a judge's questions, and from the judge's words to verdicts and how far to trust them.

generations ─ items.py ─▶ requests.py ─▶ (the engine answers) ─▶ readout.py ─▶ verdicts.py ─▶ tallies.py, reliability.py
"""
