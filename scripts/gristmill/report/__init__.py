"""One HTML file that shows what the runs answered, what the judges said, and how far to trust either.

inputs.py reads the files, rows.py joins answers and verdicts for the sample browser, data.py gathers it all,
words.py turns numbers into text, charts.py draws, render.py fills report.html.jinja. Needs no GPU and no model.
"""
