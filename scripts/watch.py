"""Watch a run: rows, tokens a second, time left, batch sizes, GPUs and the last errors, of all its workers.

    python scripts/watch.py                          in the folder with results/; q or Ctrl-C leaves, the run goes on
    python scripts/watch.py --results my/results     another folder
    python scripts/watch.py --once                   one snapshot, in lines
    python scripts/watch.py --json                   one snapshot, as JSON
    python scripts/watch.py | tee progress.log       a line for each change, until nothing is at work

It reads files alone, so it works beside any run, over ssh and on another node that sees the folder, and may start and
end at any time. Without a results folder it waits for one; --once and --json end with an error. On a terminal it stays
until it is left, in a pipe it ends when nothing is at work. What it shows is in docs/live.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from pathlib import Path

from gristmill.errors import UserError, run_main
from gristmill.live import Progress, Reader
from gristmill.live.words import Changes, snapshot, summary

TERMINAL_S, PIPE_S = 1.0, 10.0


def main() -> None:
    """The results folder in, what is going on there out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument(
        "--every", type=float, metavar="SECONDS", help="between two looks: 1 on a terminal, 10 in a pipe"
    )
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--once", action="store_true", help="one snapshot, in lines")
    shape.add_argument("--json", action="store_true", help="one snapshot, as JSON")
    args = parser.parse_args()
    if args.every is not None and not 0.1 <= args.every <= 3600:
        raise UserError(f"--every is {args.every:g}; between 0.1 and 3600 seconds")
    if args.results.exists() and not args.results.is_dir():
        raise UserError(f"{args.results} is no folder; name the folder with the results")
    # A terminal without UTF-8 gets a ? of the same width; elsewhere nothing is lost.
    on_terminal = sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
    sys.stdout.reconfigure(errors="replace" if on_terminal else "backslashreplace")  # type: ignore[union-attr]
    reader = Reader(args.results)
    try:
        if args.once or args.json:
            _once(reader.read(), args.results, args.json)
        elif on_terminal:
            _on_terminal(reader, args.every or TERMINAL_S)
        else:
            _in_pipe(reader, args.every or PIPE_S)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return
    except BrokenPipeError:  # whoever read it, `head` for example, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _once(progress: Progress, results: Path, as_json: bool) -> None:
    if not progress.exists:
        raise UserError(f"there is no folder {results}; call it in the folder with the results, or name it: --results")
    if as_json:
        print(json.dumps(dataclasses.asdict(progress)))
        return
    for line in snapshot(progress):
        print(line)


def _on_terminal(reader: Reader, every_s: float) -> None:
    from rich.console import Console

    from gristmill.live.screen import View
    from gristmill.live.terminal import show

    for name in ("COLUMNS", "LINES"):  # rich would take them for the window's size for ever
        os.environ.pop(name, None)
    show(lambda: View(reader.read()), every_s, Console(highlight=False, markup=False, emoji=False))
    print(summary(reader.read()))


def _in_pipe(reader: Reader, every_s: float) -> None:
    changes = Changes()
    while True:
        progress = reader.read()
        for line in changes.lines(progress):
            print(line, flush=True)
        if progress.exists and not progress.is_live:
            return
        time.sleep(every_s)


if __name__ == "__main__":
    run_main(main)
