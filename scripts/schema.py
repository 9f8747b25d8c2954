"""Write config/config.schema.json from the typed config (gristmill.config.schema).

python scripts/schema.py                       # writes config/config.schema.json
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gristmill.config.schema import json_schema
from gristmill.errors import run_main
from gristmill.files import write_json


def main() -> None:
    """Classes in, schema out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "config" / "config.schema.json")
    args = parser.parse_args()
    write_json(args.out, json_schema())


if __name__ == "__main__":
    run_main(main)
