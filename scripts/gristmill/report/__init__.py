"""One HTML file that shows what the runs answered, what the judges said, and how far to trust either.

inputs.py, comparisons.py, rankings.py and juries.py read the files, rows.py and lines.py join answers and verdicts for
the sample browser, data.py gathers it all, words.py, labelled.py and judged.py turn numbers into text, charts draws,
render.py fills the templates of page/. Needs no GPU and no model.
"""
