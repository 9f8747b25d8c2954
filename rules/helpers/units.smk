# The rules' narrow parts of the config for runs and judges, and what else decides their results.

import functools
from pathlib import Path

from gristmill import GENERATION_VERSION, keys
from gristmill.config import specs
from gristmill.config.comparisons import compare_spec
from gristmill.config.schema import metric_name
from gristmill.grading.custom import module_file
from gristmill.weights import weights_inputs


def weights_of(wildcards):
    return MODEL.format(model=unit_of(wildcards).model)


def template_of(wildcards):
    """The model's own chat template file, which decides answers as the weights do; none for the tokenizer's."""
    template = CONFIG.models[unit_of(wildcards).model].chat_template
    return [template] if template else []


def model_spec(wildcards):
    name = wildcards.model if hasattr(wildcards, "model") else unit_of(wildcards).model
    return specs.encode(specs.ModelSpec.unplaced(name, CONFIG.models[name]))


def requests_spec(wildcards):
    run = unit_of(wildcards)
    labels = list(run.label_names()) if run.readout == "likelihood" else []
    examples = prompt_of(wildcards).few_shot_from
    asked = {"sampling": run.sampling, "labels": labels}
    shown = {"prompt": prompt_of(wildcards), "examples": CONFIG.datasets[examples.dataset] if examples else None}
    return specs.encode(specs.RequestsSpec(dataset=dataset_of(wildcards), **shown, **asked))


def examples_of(wildcards):
    """The file that a prompt takes its examples from; none for most."""
    examples = prompt_of(wildcards).few_shot_from
    return [CONFIG.datasets[examples.dataset].path] if examples else []


def judge_spec(wildcards):
    return specs.encode(specs.JudgeSpec.of(unit_of(wildcards), target_runs(wildcards), prompt_of(wildcards)))


def clustered(runs):
    """The cluster column of runs that all have the same one."""
    columns = {CONFIG.runs[run].cluster for run in runs}
    return {"cluster": columns.pop()} if len(columns) == 1 else {}


def verdict_spec(wildcards):
    """The judge with this target alone, so that another run that it is to judge changes nothing here."""
    judge, target = unit_of(wildcards), target_runs(wildcards)
    alone = {"runs": target} if len(target) == 1 else {"pairs": [tuple(target)]}
    models = {run: CONFIG.runs[run].model for run in target}
    alone_judge = judge.model_copy(update=alone)
    return specs.encode(
        specs.VerdictSpec(
            name=wildcards.judge, judge=alone_judge, target=target, run_models=models, **clustered(target)
        )
    )


def jury_of(wildcards):
    return CONFIG.juries[wildcards.jury]


def jury_spec(wildcards):
    jury = jury_of(wildcards)
    judge = CONFIG.judges[jury.judges[0]]
    targets = dict(zip(judge.targets(), judge.pairs or [[run] for run in judge.runs]))
    target = list(targets[wildcards.target])
    named = {"kind": judge.kind, "range": judge.range, "target": target, **clustered(target)}
    return specs.encode(specs.JurySpec(name=wildcards.jury, judges=jury.judges, combine=jury.combine, **named))


def asking_code(wildcards):
    """What decides a judge's last attempts beside its model: nothing, unless it is asked again."""
    if not unit_of(wildcards).retries:
        return GENERATION_VERSION
    return [GENERATION_VERSION, READING_CODE, specs.asked_again(unit_of(wildcards))]


def metrics_spec(wildcards):
    run = unit_of(wildcards)
    named = {"dataset": run.dataset, "model": run.model, "prompt": run.prompt}
    read = {"labels": run.label_names(), "readout": run.readout, "samples": run.sampling.samples}
    graded = {"metrics": run.metrics, "slices": run.slices, "cluster": run.cluster}
    return specs.encode(specs.MetricsSpec(run=wildcards.run, **named, **graded, **read))


def metric_code_of(wildcards):
    """Fingerprints of the modules in the working directory that a run's own metrics come from, to notice an edit."""
    own = [metric["python"] for metric in unit_of(wildcards).metrics if isinstance(metric, dict) and "python" in metric]
    return content_of(*map(module_file, own))


COMPARISONS = compare_spec(CONFIG)
RANKINGS = specs.RankSpec.from_config(CONFIG)


def compared_runs():
    """What is compared: run → grades, each run once."""
    runs = dict.fromkeys(run for comparison in COMPARISONS.comparisons for run in comparison.runs)
    return {run: f"results/runs/{run}/grades.jsonl" for run in runs}


def ranked_targets():
    """What is ranked: judge/target → folder."""
    named = [(pair.judge, "_vs_".join(pair.runs)) for pair in RANKINGS.pairs]
    return {f"{judge}/{target}": JUDGE.format(judge=judge, target=target) for judge, target in named}


def ranked_runs():
    """The runs whose answers' lengths the rankings need: run → folder, each run once."""
    return {run: RUN.format(run=run) for run in dict.fromkeys(run for pair in RANKINGS.pairs for run in pair.runs)}


def report_spec(wildcards):
    """A function, because Snakemake would look for wildcards in a text: a title may have {braces}."""
    return specs.encode(specs.ReportSpec.from_config(CONFIG))


@functools.cache
def content_of(*paths):
    """The files' fingerprints, for the params: a file that is replaced by one with an older date is no newer input.

    They are taken once, at the start: an edit while a job reads is noticed by the next run.
    """
    return [keys.file_fingerprint(Path(path)) for path in paths]


def weights_files(wildcards):
    """A local model folder's files, so that retrained weights are noticed; other sources are named by their revision.

    They are in the params too: a file that went away, or came with an old date, is no newer input.
    """
    source = CONFIG.models[wildcards.model].source
    return weights_inputs(Path(source)) if source and Path(source).is_dir() else []


def grades_of(wildcards):
    """The judged run's grades, to compare a pointwise judge with; none for another kind or a run without metrics."""
    pointwise = CONFIG.judges[wildcards.judge].kind == "pointwise"
    runs = target_runs(wildcards) if pointwise else []
    return [f"results/runs/{run}/grades.jsonl" for run in runs if CONFIG.runs[run].metrics]


def agreement_of(wildcards):
    """The options that compare a judge with the run's headline metric, as a list of arguments."""
    found = grades_of(wildcards)
    metrics = CONFIG.runs[target_runs(wildcards)[0]].metrics
    return ["--grades", *found, "--metric", metric_name(metrics[0])] if found else []


def parts_of(folder):
    """An input function: all parts of a run or judge target."""
    return lambda w: expand(f"{folder}/parts/{{n}}/{{k}}-of-{{n}}.jsonl", n=(n := shards_of(w)), k=range(1, n + 1), **w)
