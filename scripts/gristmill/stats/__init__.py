"""Statistics on plain arrays, each with its interval, its source and the cases in which it is withheld.

- A number that is not defined is None with a `reason` of one sentence; it is never 0, and never a very large number.
- Randomness takes a seed, and resamples are drawn over clusters in the order of their names, so that the order in which
  rows come changes nothing.
- What a caller got wrong (lengths that differ, a value that is no number) is a ValueError.

intervals: one mean. paired: two runs on the same rows. agreement: raters. bradley_terry: many runs, from pairs.
length_control: a win rate without what length does to it. docs/statistics.md tells a reader which number uses which.
"""
