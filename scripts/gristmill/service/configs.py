"""The configs that can be started: those that are listed, so that no name from outside becomes a path."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

_KINDS = {"runs": "generation", "judges": "judging", "logits": "logits", "trainings": "training"}
MAX_CONFIGS, MAX_BYTES = 1000, 1 << 20


@dataclass(frozen=True, slots=True)
class NamedConfig:
    """A config file below the folder of configs."""

    name: str
    path: Path
    #: generation, judging, logits, training: the sections that it has.
    kinds: tuple[str, ...]


def list_configs(root: Path) -> dict[str, NamedConfig]:
    """Name (the path below `root`) → config; a link that leads out of `root`, and what is no config, is left out."""
    found: dict[str, NamedConfig] = {}
    try:
        base = root.resolve(strict=True)
    except OSError:
        return {}
    for path in sorted(base.rglob("*.y*ml"))[:MAX_CONFIGS]:
        try:
            real = path.resolve(strict=True)
            inside = real.is_relative_to(base) and real.is_file() and real.stat().st_size <= MAX_BYTES
            value = yaml.safe_load(real.read_text("utf-8")) if inside else None
        except (OSError, ValueError, yaml.YAMLError, RecursionError, RuntimeError):
            continue
        if isinstance(value, dict) and (kinds := tuple(kind for key, kind in _KINDS.items() if value.get(key))):
            name = path.relative_to(base).as_posix()
            found[name] = NamedConfig(name, real, kinds)
    return found
