"""What the service is told at its start, and where its own files lie."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings; the defaults are those of scripts/serve.py."""

    #: Runs work here (snakemake --directory); their results go to results/ below it.
    directory: Path
    #: Only configs below this folder can be started.
    configs: Path
    #: The service's own files: token, lock, one folder a run.
    state: Path
    token_file: Path
    host: str = "127.0.0.1"
    port: int = 8765
    #: Names by which it may be called beside those of loopback and `host` (the Host header).
    allowed_hosts: tuple[str, ...] = ()
    profile: Path = ROOT / "profiles" / "default"
    #: All clients together; a burst may take twice as many.
    requests_per_second: float = 500.0
    #: How long a stopped run has after SIGINT before SIGTERM.
    grace_s: float = 30.0
    #: How often GPUs and runs are looked at.
    every_s: float = 1.0
    max_body_bytes: int = 16 * 1024
    max_active_runs: int = 16
    max_streams: int = 256

    @property
    def runs(self) -> Path:
        """One folder a run."""
        return self.state / "runs"
