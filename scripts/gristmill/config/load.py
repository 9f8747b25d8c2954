"""Read a config, check it against the files it names, and say every problem in one line each.

- pydantic's messages are rewritten to `key is value; next step`, with the nearest known key for a misspelt one. A value
  that fits none of several types gets one line for all of them.
- References between sections (a run's model, a judge's runs) and files are checked here, before any job is made.
- A relative path is looked up in the working directory first, then beside the Snakefile. One with { or } is refused,
  because Snakemake takes them for wildcards; a file below the working directory is named without that folder's path.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from gristmill.config.comparisons import comparison_problems
from gristmill.config.schema import NAME_PATTERN, Config, JudgeConfig, JuryConfig
from gristmill.config.training import TRAINED
from gristmill.config.trainings import training_problems
from gristmill.errors import UserError
from gristmill.files import LONE_SURROGATE

#: pydantic's type of an error → what to do, in the words of someone who writes YAML; others keep pydantic's message.
_ADVICE = {
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "write a mapping (key: value)"),
    **dict.fromkeys(("list_type", "tuple_type"), "write a list, for example [a, b]"),
    "string_type": "write text, in quotes if need be",
    "too_long": "name two runs",
    "invalid_key": "a key is text: put it in quotes",
    "string_pattern_mismatch": "use letters, digits, '.', '_' and '-', beginning with a letter or digit",
}
_MAX_SHOWN = 80
#: Sections of which a config has at least one.
_WORK = ("runs", "logits", "trainings")
_NO_WORK = "runs is missing; add it, or logits or trainings (config/README.md explains every key)"


def load_config(values: Mapping[str, Any], roots: Iterable[Path]) -> Config:
    """Check a parsed config file and resolve its paths.

    Args:
        values: the config as YAML or JSON gave it, overrides applied.
        roots: the folders in which relative paths are looked up, in order.

    Raises:
        UserError: one line for each problem: the key, the value and the next step.
    """
    if not isinstance(values, Mapping):
        raise UserError(f"the config is {_shown(values)}; write sections (datasets, models, …), see config/README.md")
    idle = [] if any(values.get(section, {}) != {} for section in _WORK) else [_NO_WORK]
    try:
        config = Config.model_validate(dict(values))
    except ValidationError as error:
        raise UserError("\n".join([*_problems(error), *idle])) from None
    problems = [*idle, *_unwritable(config.model_dump(), ""), *_names_alike(config), *_reference_problems(config)]
    problems += comparison_problems(config)
    config, missing = _with_paths(config, list(roots))
    if problems + missing:
        raise UserError("\n".join(problems + missing))
    return config


def find_file(path: str, roots: Iterable[Path]) -> Path | None:
    """The first existing match of a path among the roots; relative to the working directory when below it."""
    for root in roots:
        candidate = root / os.path.expanduser(path)
        if os.path.exists(candidate):  # Path.exists raises where a folder may not be entered
            relative = os.path.relpath(candidate)
            return Path(relative) if not relative.startswith("..") else candidate.absolute()
    return None


def _problems(error: ValidationError) -> list[str]:
    """One line for each value: what is wrong, and what would be right (all of it, where several types would do)."""
    found: dict[str, list[str]] = {}
    items = error.errors()
    keys = [_key(item["loc"]) for item in items]
    for key, item in zip(keys, items, strict=True):
        inside = any(other.startswith(f"{key}.") for other in keys)
        if not (inside and _is_type_tag(str(item["loc"][-1]))):  # one of several types, and another fitted better
            fault, advice = _problem(key, item)
            found.setdefault(fault, []).append(advice)
    return [f"{fault}; {', or '.join(dict.fromkeys(advice))}" for fault, advice in found.items()]


def _problem(key: str, item: Any) -> tuple[str, str]:
    """What is wrong, and the next step."""
    kind, value = item["type"], item["input"]
    if kind == "extra_forbidden":
        return f"{key} is not a known key", _near_key(item["loc"])
    if kind == "missing":
        return f"{key} is missing", "add it (config/README.md explains every key)"
    if kind == "value_error":
        fault, _, advice = item["msg"].removeprefix("Value error, ").partition("; ")
        return f"{key}: {fault}", advice
    if value is None:
        return f"{key} has no value", "give it one, or remove the line"
    if item["loc"][-1] == "[key]" and kind == "string_type":
        return f"{_key(item['loc'][:-2])} has the key {_shown(value)}", _ADVICE["invalid_key"]
    advice = item["msg"][0].lower() + item["msg"][1:].replace("nput should", "t should", 1)
    if kind != "string_pattern_mismatch" or item["ctx"]["pattern"] == NAME_PATTERN:
        advice = _ADVICE.get(kind, advice)
    return f"{key} is {_shown(value)}", advice


def _key(loc: tuple[int | str, ...]) -> str:
    """`models.smollm2.dtype`; pydantic's own additions to a union's or key's place are left out."""
    parts = [str(part) for place, part in enumerate(loc) if place < 2 or not _is_type_tag(str(part), "[key]")]
    return ".".join(part if part.isprintable() and part else repr(part) for part in parts) or "config"


def _is_type_tag(part: str, *more: str) -> bool:
    return part in {"str", "int", "float", "bool", *more} or part.startswith(("literal[", "list[", "dict[", "tuple["))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 1]}…"


def _near_key(loc: tuple[int | str, ...]) -> str:
    known = _known_keys(loc[:-1])
    near = difflib.get_close_matches(str(loc[-1]), known, n=1)
    return f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}"


def _known_keys(loc: tuple[int | str, ...]) -> list[str]:
    """The keys allowed at a place, by walking the models along it."""
    section: Any = Config
    for part in loc:
        if isinstance(section, type) and issubclass(section, BaseModel) and part in section.model_fields:
            section = section.model_fields[str(part)].annotation
        else:  # a name in a dict of sections, or an index in a list of them
            section = _inner_section(section)
    section = _inner_section(section)
    return sorted(section.model_fields) if isinstance(section, type) and issubclass(section, BaseModel) else []


def _inner_section(annotation: Any) -> Any:
    """The config section inside `dict[Name, Section]`, `list[Section]` or a union; the annotation itself if none."""
    for argument in getattr(annotation, "__args__", ()):
        if isinstance(argument, type) and issubclass(argument, BaseModel):
            return argument
    return annotation


def _unwritable(value: Any, key: str) -> Iterable[str]:
    """A line for each text with a lone surrogate, which no file, command line or tokenizer can take."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _unwritable(name, f"a key of {key or 'the config'}")
            yield from _unwritable(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _unwritable(item, f"{key}.{index}")
    elif isinstance(value, str) and LONE_SURROGATE.search(value):
        yield f"{key} is {_shown(value)}, with half of a surrogate pair; write the character itself"


def _reference_problems(config: Config) -> Iterable[str]:
    for name, run in config.runs.items():
        yield from _unknown_name(f"runs.{name}.dataset", run.dataset, config.datasets, "dataset")
        yield from _unknown_name(f"runs.{name}.model", run.model, config.models, "model")
        yield from _unknown_name(f"runs.{name}.prompt", run.prompt, config.prompts, "prompt")
        if "_vs_" in name:
            yield f"runs.{name}: '_vs_' in a run's name is kept for pairs; rename the run"
        if name == "tie":
            yield "runs.tie: 'tie' is a verdict and cannot be a run's name; rename the run"
    for name, judge in config.judges.items():
        yield from _unknown_name(f"judges.{name}.model", judge.model, config.models, "model")
        yield from _unknown_name(f"judges.{name}.prompt", judge.prompt, config.prompts, "prompt")
        for run_name in judge.runs:
            yield from _unknown_name(f"judges.{name}.runs", run_name, config.runs, "run")
        for run_name in dict.fromkeys(run for pair in judge.pairs for run in pair):
            yield from _unknown_name(f"judges.{name}.pairs", run_name, config.runs, "run")
        yield from _pair_problems(config, name)
    for name, prompt in config.prompts.items():
        if prompt.few_shot_from is not None:
            examples = prompt.few_shot_from.dataset
            yield from _unknown_name(f"prompts.{name}.few_shot_from.dataset", examples, config.datasets, "dataset")
    for name, jury in config.juries.items():
        yield from _jury_problems(config, name, jury)
    yield from _endpoint_problems(config)
    yield from _logits_problems(config)
    yield from training_problems(config)


def _logits_problems(config: Config) -> Iterable[str]:
    """Names of teachers and texts, and teachers that have no logits here."""
    for name, logits in config.logits.items():
        key = f"logits.{name}"
        yield from _unknown_name(f"{key}.model", logits.model, config.models, "model")
        if logits.model in config.models and (engine := config.models[logits.model].engine) in ("echo", "endpoint"):
            yield f"{key}.model: {logits.model} has engine {engine}, which gives no logits; name one with weights"
        if logits.run is not None:
            yield from _unknown_name(f"{key}.run", logits.run, config.runs, "run")
            if logits.run in config.runs and config.runs[logits.run].readout == "likelihood":
                yield f"{key}.run: {logits.run} has readout likelihood, so it has no answers; name another run"
        if logits.dataset is not None:
            yield from _unknown_name(f"{key}.dataset", logits.dataset, config.datasets, "dataset")
        if logits.prompt is not None:
            yield from _unknown_name(f"{key}.prompt", logits.prompt, config.prompts, "prompt")
            if logits.prompt in config.prompts and config.prompts[logits.prompt].turns is not None:
                yield f"{key}.prompt: {logits.prompt} has turns, whose answers are a run's; set run instead"


def _endpoint_problems(config: Config) -> Iterable[str]:
    """Sampling settings that a server has no key for, before anything is asked."""
    runs = [(f"runs.{name}", run.model, run.sampling) for name, run in config.runs.items()]
    judges = [(f"judges.{name}", judge.model, judge.sampling) for name, judge in config.judges.items()]
    for key, name, sampling in runs + judges:
        endpoint = config.models[name].endpoint if name in config.models else None
        if endpoint is not None and (refusal := endpoint.refusal(sampling)) is not None:
            yield f"{key}.{refusal}"
    for section, units in (("runs", config.runs), ("judges", config.judges)):
        for name, unit in units.items():
            served = unit.model in config.models and config.models[unit.model].endpoint is not None
            if served and unit.readout == "likelihood":
                yield f"{section}.{name}.readout is likelihood, which a served model does not give; use text"


def _of_judge(judge: JudgeConfig, what: str) -> str:
    return ", ".join(judge.targets()) if what == "targets" else str(getattr(judge, what))


def _jury_problems(config: Config, name: str, jury: JuryConfig) -> Iterable[str]:
    for judge in jury.judges:
        yield from _unknown_name(f"juries.{name}.judges", judge, config.judges, "judge")
    members = [config.judges[judge] for judge in jury.judges if judge in config.judges]
    if len(set(jury.judges)) < len(jury.judges):
        yield f"juries.{name}.judges: a judge is there twice; name each once"
    for what in ("kind", "targets", "range"):
        said = {judge: _of_judge(config.judges[judge], what) for judge in jury.judges if judge in config.judges}
        if len(set(said.values())) > 1:
            shown = "; ".join(f"{judge}: {value}" for judge, value in said.items())
            yield f"juries.{name}.judges differ in {what} ({shown}); a jury's judges judge the same"
            break
    if jury.combine == "mean" and any(member.kind != "score" for member in members):
        yield f"juries.{name}.combine is mean, and its judges give no scores; use majority"


def _names_alike(config: Config) -> Iterable[str]:
    """Names that become one folder on a file system that does not tell upper from lower case (macOS, Windows)."""
    sections: dict[str, Mapping[str, object]] = {"models": config.models, "runs": config.runs, "judges": config.judges}
    sections |= {"logits": config.logits, "trainings": config.trainings}
    for section, names in sections.items():
        first: dict[str, str] = {}
        for name in names:
            other = first.setdefault(name.lower(), name)
            if other != name:
                yield f"{section}.{name} differs from {section}.{other} only in upper and lower case; rename one"


def _pair_problems(config: Config, name: str) -> Iterable[str]:
    for first, second in config.judges[name].pairs:
        if first not in config.runs or second not in config.runs:
            continue
        one, other = config.runs[first], config.runs[second]
        if one.dataset != other.dataset:
            yield (
                f"judges.{name}.pairs: {first} and {second} answer different datasets "
                f"({one.dataset}, {other.dataset}); pair runs of one dataset"
            )
        if one.sampling.samples != other.sampling.samples:
            yield (
                f"judges.{name}.pairs: {first} has {one.sampling.samples} answers per row and {second} has "
                f"{other.sampling.samples}; give both runs the same sampling.samples"
            )


def _unknown_name(key: str, value: str, known: Mapping[str, object], what: str) -> Iterable[str]:
    if value not in known:
        near = difflib.get_close_matches(value, list(known), n=1)
        hint = f"did you mean {near[0]}?" if near else f"the {what}s are: {', '.join(known) or 'none'}"
        yield f"{key}: {value!r} is not a {what}; {hint}"


def _with_paths(config: Config, roots: list[Path]) -> tuple[Config, list[str]]:
    """The config with every file name made findable from the working directory, and a line for each missing file."""
    missing: list[str] = []

    def locate(key: str, path: str) -> str:
        found = find_file(path, roots)
        if found is None or not found.is_file():
            folder = found is not None and found.is_dir()
            why = "does not exist" if found is None else f"is a {'folder' if folder else 'pipe or device'}, not a file"
            missing.append(f"{key} is {path!r}, which {why} (looked in {', '.join(map(str, roots))}); correct the path")
            return path
        missing.extend(_braces(key, found))
        return str(found)

    datasets = {
        name: item.model_copy(update={"path": locate(f"datasets.{name}.path", item.path)})
        for name, item in config.datasets.items()
    }
    prompts = {
        name: item.model_copy(update={"file": locate(f"prompts.{name}.file", item.file)})
        for name, item in config.prompts.items()
    }
    models = {
        name: item.model_copy(update={"chat_template": locate(f"models.{name}.chat_template", item.chat_template)})
        if item.chat_template
        else item
        for name, item in config.models.items()
    }
    models = {
        name: item.model_copy(update={"source": _located_source(name, item.source, roots, missing)})
        for name, item in models.items()
    }
    return config.model_copy(update={"datasets": datasets, "prompts": prompts, "models": models}), missing


def _braces(key: str, path: Path) -> Iterable[str]:
    if re.search("[{}]", str(path)):
        yield f"{key} is {str(path)!r}, and Snakemake takes {{…}} in a path for a wildcard; rename it"


def _located_source(name: str, source: str | None, roots: list[Path], missing: list[str]) -> str | None:
    """A local model folder made findable; hub ids, package sources and trainings pass unchanged."""
    if source is None or source.startswith(("package:", TRAINED)):
        return source
    found = find_file(source, roots)
    if found is not None and found.is_dir():
        missing.extend(_braces(f"models.{name}.source", found))
        return str(found)
    if source.startswith((".", "/", "~")):
        missing.append(f"models.{name}.source is {source!r}, which is not a folder; correct the path")
    return source
