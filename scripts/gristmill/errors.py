"""The two kinds of failure a user sees: a mistake they can fix, and a row the model could not answer."""

from __future__ import annotations

import sys
from collections.abc import Callable


class UserError(Exception):
    """A mistake in the input or the set-up. The message is one line: the value, the limit and the next step."""


def run_main(main: Callable[[], object]) -> None:
    """Run a script's `main`; a UserError becomes one line on stderr and exit status 2, with no traceback.

    So does a file that is not there or cannot be used: that is the machine's state, not a bug. Ctrl-C, which reaches
    every job, is no bug either: one line, exit status 130.
    """
    try:
        main()
    except UserError as error:
        message = str(error)
    except OSError as error:
        if error.filename is None:
            raise
        message = f"{error.filename}: {error.strerror}; put it right and run again (what is finished is kept)"
    except KeyboardInterrupt:
        print("stopped by SIGINT; run again to go on", file=sys.stderr)
        raise SystemExit(130) from None
    else:
        return
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2) from None


def some(names: list[str], limit: int = 5) -> str:
    """The first few names for an error message: `a, b, c and 7 more`."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
