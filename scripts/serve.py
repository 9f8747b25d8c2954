"""Serve the GPUs and the runs of this machine: a page, an API, metrics (docs/service.md).

    python scripts/serve.py                                    # http://127.0.0.1:8765, runs in this folder
    python scripts/serve.py --directory ~/study --port 9000    # runs in another folder, with its config/ if it has one

It needs the extra `service`: pip install fastapi uvicorn prometheus-client. The first start makes a token and says in
which file it stands.
Ctrl-C ends the service; runs go on, and the next start finds them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gristmill.errors import UserError, run_main
from gristmill.progress import log
from gristmill.service.settings import ROOT, Settings


def main() -> None:
    """Read the arguments, and serve."""
    settings, token_named = read_arguments()
    try:
        from gristmill.service.server import serve
    except ImportError as error:
        raise UserError(
            f"the service needs {error.name}, which is not installed; pip install fastapi uvicorn prometheus-client "
            "(the extra service)"
        ) from error
    serve(settings, token_named, log)


def read_arguments(words: list[str] | None = None) -> tuple[Settings, bool]:
    """The settings, and whether a token file was named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="where runs work; results/ is below it")
    parser.add_argument("--configs", type=Path, help="the configs that may be started (DIRECTORY/config)")
    parser.add_argument("--state", type=Path, help="the service's own files (DIRECTORY/.gristmill-service)")
    parser.add_argument("--token-file", type=Path, help="the file with the token (STATE/token)")
    parser.add_argument("--host", default="127.0.0.1", help="another address than loopback needs --token-file")
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--allowed-host", action="append", default=[], help="one more name it may be called by")
    parser.add_argument("--workflow-profile", type=Path, default=ROOT / "profiles" / "default")
    args = parser.parse_args(words)
    if not args.workflow_profile.is_dir():
        raise UserError(f"--workflow-profile {args.workflow_profile} is no folder; name one with a config.yaml")
    directory = args.directory.resolve()
    own = directory / "config"
    state = (args.state or directory / ".gristmill-service").resolve()
    settings = Settings(
        directory=directory,
        configs=(args.configs or (own if own.is_dir() else ROOT / "config")).resolve(),
        state=state,
        token_file=args.token_file or state / "token",
        host=args.host,
        port=args.port,
        allowed_hosts=tuple(args.allowed_host),
        profile=args.workflow_profile.resolve(),
    )
    return settings, args.token_file is not None


if __name__ == "__main__":
    run_main(main)
