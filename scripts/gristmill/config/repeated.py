"""Refuse a config file in which a key is there twice: YAML and JSON readers keep the last one and say nothing.

Snakemake has read the file already, so only its keys and their lines matter here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import yaml

from gristmill.errors import UserError

_MERGE = "tag:yaml.org,2002:merge"


def refuse_repeated_keys(files: Iterable[Path | str]) -> None:
    """Stop on a key that is twice in one mapping.

    Raises:
        UserError: one line for each such key, with both of its lines.
    """
    problems = [f"{path}: {problem}" for path in files for problem in _repeated(Path(path))]
    if problems:
        raise UserError("\n".join(problems))


def _repeated(path: Path) -> list[str]:
    text = path.read_text("utf-8")
    if path.suffix == ".json":
        text = text.replace("\t", " ")  # JSON may be indented by tabs, YAML may not, and no JSON string holds one
    try:
        root = yaml.compose(text, yaml.SafeLoader)
    except yaml.YAMLError:  # a JSON file that is no YAML (a key of over 1,024 characters), or what its reader refuses
        return []
    return [] if root is None else list(_in_node(root, "", set()))


def _in_node(node: yaml.Node, key: str, seen: set[int]) -> Iterator[str]:
    if id(node) in seen:  # an alias (*name) is the node of its anchor
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _in_node(item, f"{key}.{index}", seen)
    if isinstance(node, yaml.MappingNode):
        lines: dict[tuple[str, str], int] = {}
        for name, value in node.value:
            inner = f"{key}.{name.value}" if key else str(name.value)
            line = name.start_mark.line + 1
            if (known := (name.tag, str(name.value))) in lines and name.tag != _MERGE:
                yield f"{inner} is there twice, on line {lines[known]} and line {line}; remove one"
            lines.setdefault(known, line)
            yield from _in_node(value, inner, seen)
