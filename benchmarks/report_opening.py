"""How large a report is, and how long a browser takes to paint it and to make its samples usable.

    python benchmarks/report_opening.py --rows 5000 50000

The rows are those of tests/test_report.py's demo: two runs and three judge targets. Chromium, headless, opens each
report three times. Of rows that take more than 40 MB together the report embeds as many as fit.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests")]

from test_report import spec, write_demo  # noqa: E402
from test_report_browser import Browser  # noqa: E402

from gristmill.report.render import write_report  # noqa: E402

_PAINT = "JSON.stringify(performance.getEntriesByType('paint').map((entry) => entry.startTime))"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[5000, 50000])
    parser.add_argument("--openings", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        for count in args.rows:
            folder = Path(temporary) / str(count)
            folder.mkdir()
            runs, judges = write_demo(folder, count)
            size = write_report(spec(max_rows=count), runs, judges, folder / "report.html")
            browser = Browser(folder / "profile")
            for _ in range(args.openings):
                begun = time.monotonic()
                browser.open(folder / "report.html")
                usable = time.monotonic() - begun
                first = min(json.loads(browser.run(_PAINT)))
                print(f"{count} rows, {size / 1e6:.2f} MB: first paint {first / 1000:.2f} s, usable {usable:.2f} s")
            browser.close()


if __name__ == "__main__":
    main()
