"""Check a config against the data it names: the first rows of every dataset, and the columns that prompts use.

It reads a few rows of each dataset, so it is cheap enough to run each time the workflow starts, before any job. A
column that only some of them have counts: rows may lack a reference, or what a prompt asks for under a condition.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from gristmill.config.schema import Config, JudgeConfig, LogitsConfig, PromptConfig, TrainingConfig
from gristmill.config.specs import MAX_SPEC_BYTES
from gristmill.errors import UserError, some
from gristmill.prompts import JUDGE_NAMES, JUDGED_TURN_NAMES, MAX_NAMES_SHOWN, TURN_NAMES, check_placeholders
from gristmill.rendering import dataset_rows
from gristmill.rows import count_up_to

#: Rows in which a column must appear to be known.
FIRST_ROWS = 100
#: What a prompt may take of a spec; the other settings of a step need far less than the rest.
MAX_PROMPT_BYTES = MAX_SPEC_BYTES - 20_000


def check_data(config: Config) -> None:
    """Stop on a dataset that cannot be read, a placeholder or slice that is no column, or metrics without references.

    Raises:
        UserError: one line for each problem.
    """
    columns: dict[str, set[str]] = {}
    problems: list[str] = []
    for name in dict.fromkeys([*_run_datasets(config), *_example_datasets(config)]):
        try:
            columns[name] = _columns(config, name)
        except UserError as error:
            problems.append(f"datasets.{name}: {error}")
    problems += [*_long_prompts(config), *_run_problems(config, columns), *_judge_problems(config, columns)]
    problems += [*_logits_problems(config, columns), *_training_problems(config, columns)]
    if problems:
        raise UserError("\n".join(dict.fromkeys(problems)))


def rows_up_to(config: Config, dataset: str, limit: int) -> int:
    """min(limit, rows of the dataset), reading no more of the file than needed."""
    data = config.datasets[dataset]
    return count_up_to(Path(data.path), min(limit, data.max_rows or limit), data.delimiter)


def _long_prompts(config: Config) -> Iterable[str]:
    """Prompts whose own texts, which travel on a command line, leave too little room for the rest of a spec."""
    for name, prompt in config.prompts.items():
        size = len(prompt.model_dump_json().encode("utf-8", "surrogatepass"))
        if size > MAX_PROMPT_BYTES:
            yield (
                f"prompts.{name}: system and few_shot take {size} bytes, over the {MAX_PROMPT_BYTES} that fit on a "
                "command line; move long texts into the prompt file"
            )


def _columns(config: Config, name: str) -> set[str]:
    dataset = config.datasets[name]
    most = min(FIRST_ROWS, dataset.max_rows or FIRST_ROWS)
    rows = dataset_rows(dataset, most)
    return {column for row in rows for column in row.fields}


def _run_problems(config: Config, columns: dict[str, set[str]]) -> Iterable[str]:
    for name, run in config.runs.items():
        if run.dataset not in columns:
            continue
        there = columns[run.dataset]
        prompt = config.prompts[run.prompt]
        yield from check_placeholders(run.prompt, prompt, there, TURN_NAMES if prompt.turns is not None else set())
        yield from _example_problems(run.prompt, prompt, columns)
        listed = some(sorted(there), MAX_NAMES_SHOWN)
        if prompt.turns is not None and prompt.turns not in there:
            yield f"prompts.{run.prompt}.turns: {prompt.turns!r} is not a column of {run.dataset}; columns: {listed}"
        for column in run.slices:
            if column not in there:
                yield f"runs.{name}.slices: {column!r} is not a column of {run.dataset}; columns: {listed}"
        if run.cluster is not None and run.cluster not in there:
            yield f"runs.{name}.cluster: {run.cluster!r} is not a column of {run.dataset}; columns: {listed}"
        own = [metric for metric in run.metrics if isinstance(metric, dict) and "python" in metric]
        if len(own) < len(run.metrics) and "reference" not in there:
            yield (
                f"runs.{name}.metrics need a column 'reference' in {run.dataset}; "
                f"name one with datasets.{run.dataset}.fields, for example {{reference: answer}}; columns: {listed}"
            )


def _run_datasets(config: Config) -> list[str]:
    """The datasets of runs, of teachers' texts and of trainings."""
    texts = [logits.dataset for logits in config.logits.values() if logits.dataset is not None]
    texts += [dataset for training in config.trainings.values() for dataset in _training_datasets(training)]
    return [*(run.dataset for run in config.runs.values()), *texts]


def _logits_problems(config: Config, columns: dict[str, set[str]]) -> Iterable[str]:
    for name, logits in config.logits.items():
        if logits.dataset is not None:
            yield from _text_problems(config, columns, f"logits.{name}", logits, logits.dataset)


def _text_problems(
    config: Config, columns: dict[str, set[str]], key: str, texts: LogitsConfig | TrainingConfig, dataset: str
) -> Iterable[str]:
    """Of texts that a teacher or a training reads from a dataset: a column, or a prompt and the answers after it."""
    there = columns.get(dataset)
    if there is None:
        return
    listed = some(sorted(there), MAX_NAMES_SHOWN)
    if texts.text_field is not None and texts.text_field not in there:
        yield f"{key}.text_field: {texts.text_field!r} is not a column of {dataset}; columns: {listed}"
    if texts.prompt is not None:
        yield from check_placeholders(texts.prompt, config.prompts[texts.prompt], there, set())
        yield from _example_problems(texts.prompt, config.prompts[texts.prompt], columns)
        if "reference" not in there:
            yield (
                f"{key}.prompt needs a column 'reference' in {dataset}, the answers; name one with "
                f"datasets.{dataset}.fields; columns: {listed}"
            )


def _training_datasets(training: TrainingConfig) -> list[str]:
    """The dataset that is trained on, and that of the evaluation."""
    apart = training.evaluation.dataset if training.evaluation is not None else None
    return [dataset for dataset in (training.dataset, apart) if dataset is not None]


def _training_problems(config: Config, columns: dict[str, set[str]]) -> Iterable[str]:
    for name, training in config.trainings.items():
        for dataset in _training_datasets(training):
            yield from _text_problems(config, columns, f"trainings.{name}", training, dataset)


def _example_datasets(config: Config) -> list[str]:
    """The datasets that runs, teachers' texts and trainings take examples from."""
    prompts = [config.prompts[run.prompt] for run in config.runs.values()]
    prompts += [config.prompts[logits.prompt] for logits in config.logits.values() if logits.prompt is not None]
    prompts += [config.prompts[one.prompt] for one in config.trainings.values() if one.prompt is not None]
    return [prompt.few_shot_from.dataset for prompt in prompts if prompt.few_shot_from is not None]


def _example_problems(name: str, prompt: PromptConfig, columns: dict[str, set[str]]) -> Iterable[str]:
    examples = prompt.few_shot_from
    if examples is None or examples.dataset not in columns:
        return
    there = columns[examples.dataset]
    yield from check_placeholders(name, prompt, there, set())
    if "reference" not in there:
        yield (
            f"prompts.{name}.few_shot_from needs a column 'reference' in {examples.dataset}, the answers to show; "
            f"name one with datasets.{examples.dataset}.fields"
        )


def _judge_problems(config: Config, columns: dict[str, set[str]]) -> Iterable[str]:
    for name, judge in config.judges.items():
        if config.prompts[judge.prompt].turns is not None:
            yield f"prompts.{judge.prompt}.turns: a judge's prompt has no turns; give the judge a prompt of its own"
        if config.prompts[judge.prompt].few_shot_from is not None:
            yield f"prompts.{judge.prompt}.few_shot_from: a judge's examples have no answers to judge; use few_shot"
        for run in map(config.runs.__getitem__, _judged_runs(judge)):
            if run.dataset not in columns:
                continue
            in_turns = config.prompts[run.prompt].turns is not None
            extra = JUDGE_NAMES[judge.kind] | (JUDGED_TURN_NAMES[judge.kind] if in_turns else set())
            there = columns[run.dataset]
            yield from check_placeholders(judge.prompt, config.prompts[judge.prompt], there, extra)
            if judge.human is not None and judge.human not in there:
                listed = some(sorted(there), MAX_NAMES_SHOWN)
                yield f"judges.{name}.human: {judge.human!r} is not a column of {run.dataset}; columns: {listed}"


def _judged_runs(judge: JudgeConfig) -> list[str]:
    return [*judge.runs, *(run for pair in judge.pairs for run in pair)]
