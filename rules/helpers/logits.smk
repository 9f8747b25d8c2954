# The rules' narrow parts of the config for teachers, and the files that they read.

from gristmill.config import specs
from gristmill.logits import LOGITS_VERSION


def logits_spec(wildcards):
    return specs.encode(specs.LogitsSpec.of(CONFIG, wildcards.logits))


def logits_files_read(wildcards):
    """The files of a teacher's texts that are there before: dataset, prompt, the file of its examples; none for a run's."""
    unit = unit_of(wildcards)
    if unit.run:
        return []
    prompt = CONFIG.prompts[unit.prompt] if unit.prompt else None
    examples = [CONFIG.datasets[prompt.few_shot_from.dataset].path] if prompt and prompt.few_shot_from else []
    return [CONFIG.datasets[unit.dataset].path, *([prompt.file] if prompt else []), *examples]


def logits_texts(wildcards):
    run = unit_of(wildcards).run
    return [f"results/runs/{run}/generations.jsonl"] if run else logits_files_read(wildcards)


def logits_generations(wildcards):
    """The option that names a run's answers; none for texts of a dataset."""
    run = unit_of(wildcards).run
    return ["--generations", f"results/runs/{run}/generations.jsonl"] if run else []


def kept_of(wildcards):
    """Log-probabilities kept a position; 0: all."""
    unit = unit_of(wildcards)
    return 0 if unit.full else unit.top_k
