# Loads and checks the config, decides the plan, and gives the rules their narrow parts of both.

import functools
import shlex
import uuid
from pathlib import Path

from snakemake.resources import Resource

from gristmill import GENERATION_VERSION, fence, invocation, keys, slurm
from gristmill.gpu import gpus, lease
from gristmill.grading.custom import module_file
from gristmill.config import specs
from gristmill.config.check import check_data, rows_up_to
from gristmill.config.comparisons import compare_spec
from gristmill.config.load import load_config
from gristmill.config.repeated import refuse_repeated_keys
from gristmill.config.resources import value_at
from gristmill.config.schema import metric_name
from gristmill.config.trainings import made_by
from gristmill.errors import UserError
from gristmill.files import write_bytes
from gristmill.keys import code_digest
from gristmill.logits import LOGITS_VERSION
from gristmill.planning.memory import refuse_unfit
from gristmill.planning.text import plan_text
from gristmill.planning.plan import make_plan
from gristmill.planning.trainings import refuse_unfit_trainings, training_gpus, training_threads
from gristmill.shards import requests_to_count, shard_count
from gristmill.training import TRAINING_VERSION
from gristmill.weights import read_description, result_folder, weights_inputs
from gristmill.planning.resources import memory_mb
from gristmill.planning.workers import encode_workers, worker_of

MODEL = "results/models/{model}.json"
RUN = "results/runs/{run}"
JUDGE = "results/judges/{judge}/{target}"
JURY = "results/juries/{jury}/{target}"
LOGITS = "results/logits/{logits}"
TRAINING = "results/trainings/{training}"
# As many folders as a command line has room for beside a spec.
MAX_LEFT_BEHIND = 100
TOKENS = "GRISTMILL_CLUSTER_TOKENS"


wildcard_constraints:
    model="[^/]+",
    run="[^/]+",
    judge="[^/]+",
    jury="[^/]+",
    logits="[^/]+",
    training="[^/]+",
    target="[^/]+",
    shard=r"\d+",
    shards=r"\d+",
    format="csv|parquet",


def program(name, *options):
    """The start of a shell command: a script of this checkout with fixed options, quoted for the shell and for Snakemake.

    It stands outside the params because where the checkout lies and how long to wait for a GPU change no result.
    """
    words = ["python", f"{workflow.basedir}/scripts/{name}", *options]
    return shlex.join(words).replace("{", "{{").replace("}", "}}")


def resource_limit(name):
    """N of a global limit such as --resources gpu=N or --cores N; None when there is none."""
    found = workflow.global_resources.get(name)
    return None if found is None else found.value


def decide(loaded):
    """The plan; inside a cluster's job the one of the Snakemake that submitted it, whatever GPUs that node has."""
    cluster = workflow.remote_exec or resource_limit("_nodes") is not None
    limit = int(os.environ[TOKENS]) if workflow.remote_exec and TOKENS in os.environ else resource_limit("gpu")
    usable = [] if cluster else gpus.usable(gpus.inventory(), os.environ, loaded.gpus.wanted())
    busy = lease.foreign_use(usable, loaded.gpus.busy_memory_mib)
    made = make_plan(loaded, usable, limit, resource_limit("_cores"), cluster, busy)
    refuse_unfit(loaded, made)
    refuse_unfit_trainings(loaded, made)
    return made


def check_descriptions(loaded):
    """Refuse a torn results/models/<model>.json before any job; that it means the config's model, each job checks."""
    for path in map(Path, expand(MODEL, model=loaded.models)):
        if path.exists():
            read_description(path)


def load():
    """The checked config and the plan; a mistake ends Snakemake with one line for each problem and no traceback."""
    try:
        if set("{}") & set(str(workflow.basedir)):  # Snakemake looks for wildcards in the paths of its conda files
            raise UserError(f"Snakemake cannot run from a path with {{ or }}: {workflow.basedir}; move the checkout")
        refuse_repeated_keys(workflow.configfiles)
        fence.check_place()
        loaded = load_config(config, [Path.cwd(), Path(workflow.basedir)])
        check_data(loaded)
        check_descriptions(loaded)
        return loaded, decide(loaded)
    except UserError as error:
        for line in str(error).splitlines():
            print(f"config error: {line}", file=sys.stderr)
        sys.exit(2)


CONFIG, PLAN = load()
GPUS = CONFIG.gpus.model_dump_json()
# How judges are read, asked again and given up: what of it decides answers is in judge_merge's params (asking_code).
JUDGES = specs.encode_judges(CONFIG.judges)
PLACEMENTS = ["--placements", specs.encode_placements(CONFIG.models)]
PLACED = [*PLACEMENTS, "--workers", encode_workers(PLAN.all_workers())]
SCHEDULED = ["--scheduled"] if PLAN.cluster else []
# Inside a cluster's job the Snakemake that submitted it decides whether there is another try, with more time and memory.
RETRIES = 0 if workflow.remote_exec else 1

# Steps that need no model run again when their code changes; the model's step has a version of its own.
RENDER_CODE = code_digest("prompts", "rendering", "rows", "grading.text")
QUESTION_CODE = code_digest("prompts", "thinking", "judging.items", "judging.reading", "judging.requests")
METRICS_CODE = code_digest(
    *("grading", "thinking", "classification", "samples", "clusters", "intervals", "stats.intervals", "metrics"),
    "gpu.usage",
)
VERDICT_CODE = code_digest(
    "clusters",
    *[f"judging.{name}" for name in ("agreement", "items", "pairs", "reading", "readout", "reliability", "scales")],
    *[f"judging.{name}" for name in ("scores", "tallies", "verdicts")],
    "thinking",
    "intervals",
    "stats.intervals",
    "stats.agreement",
    "gpu.usage",
)
COMPARE_CODE = code_digest("comparing", "stats.intervals", "stats.paired")
RANK_CODE = code_digest("judging.items", "ranking", "intervals", "stats")
READING_CODE = code_digest("judging.reading", "judging.readout", "judging.scores", "thinking")
JURY_CODE = code_digest(
    *[f"judging.{name}" for name in ("items", "juries", "pairs", "tallies")], "clusters", "intervals", "stats"
)
EXPORT_CODE = code_digest("export")
TRAINING_PLACED = ["--placements", specs.encode_training_placements(CONFIG.trainings)]
TRAINING_TEXT_CODE = code_digest("prompts", "rendering", "rows", "grading.text", "logits.texts", "training.texts")
LOGITS_TEXT_CODE = code_digest("prompts", "rendering", "rows", "grading.text", "logits.texts")
REPORT_CODE = code_digest("report")
RUN_FILES = ["requests.jsonl", "generations.jsonl", "grades.jsonl", "metrics.json", "manifest.json"]
JUDGE_FILES = ["requests.jsonl", "generations.jsonl", "verdicts.jsonl", "metrics.json", "manifest.json"]

# Jobs belong to the Snakemake that started them; what a killed one left behind must not write (gristmill.fence).
if workflow.is_main_process:
    os.environ[fence.RUN] = uuid.uuid4().hex

# Without a limit Snakemake ignores the tokens and starts everything at once.
if PLAN.cluster:
    os.environ[TOKENS] = str(PLAN.tokens)
    workflow.register_envvars(TOKENS, *([fence.RUN] if workflow.is_main_process else []))
else:
    workflow.register_resource("gpu", Resource("gpu", PLAN.tokens))


def unit_of(wildcards):
    """The run, judge or logits that a job works for: what has a model."""
    if hasattr(wildcards, "logits"):
        return CONFIG.logits[wildcards.logits]
    return CONFIG.runs[wildcards.run] if hasattr(wildcards, "run") else CONFIG.judges[wildcards.judge]


def dataset_of(wildcards):
    return CONFIG.datasets[CONFIG.runs[wildcards.run].dataset]


def prompt_of(wildcards):
    return CONFIG.prompts[unit_of(wildcards).prompt]


def target_runs(wildcards):
    """The run, or the two runs of a pair, that a judge target stands for."""
    judge = CONFIG.judges[wildcards.judge]
    targets = dict(zip(judge.targets(), judge.pairs or [[run] for run in judge.runs]))
    return list(targets[wildcards.target])


@functools.cache
def rows_counted(dataset, limit):
    """min(limit, rows), read once: Snakemake asks for every job, and a .json file can only be read whole."""
    return rows_up_to(CONFIG, dataset, limit)


def shards_of(wildcards):
    """shards_per_worker for every worker, but never more than the dataset has requests."""
    model = unit_of(wildcards).model
    speeds = [worker.speed for worker in PLAN.workers_of(model)]
    each = CONFIG.models[model].shards_per_worker
    return shard_count(speeds, requests_up_to(wildcards, requests_to_count(speeds, each)), each)


def requests_up_to(wildcards, limit):
    """How many requests a unit has, no more rows counted than `limit`; of a split text each window is one more."""
    if hasattr(wildcards, "logits"):
        unit = unit_of(wildcards)
        run = CONFIG.runs[unit.run] if unit.run else None
        texts = rows_counted(run.dataset if run else unit.dataset, limit) * (run.sampling.samples if run else 1)
        return limit if unit.on_overflow == "split" else min(texts, unit.max_samples or texts)
    run = unit_of(wildcards) if hasattr(wildcards, "run") else CONFIG.runs[target_runs(wildcards)[0]]
    return rows_counted(run.dataset, limit) * run.sampling.samples


def worker_of_shard(wildcards):
    return worker_of(PLAN.workers_of(unit_of(wildcards).model), int(wildcards.shard))


def gpus_of(wildcards):
    """The tokens of a shard's job; none of a cluster's GPUs where all models run on CPUs."""
    return 0 if PLAN.cluster and PLAN.cpu_only else worker_of_shard(wildcards).gpus


def worker_memory(wildcards, attempt):
    """Host memory of a shard's job in MB: what models.<name>.resources says, else an estimate; more at each attempt."""
    name = unit_of(wildcards).model
    model = CONFIG.models[name]
    if "mem_mb" in model.resources:
        return value_at("mem_mb", model.resources["mem_mb"], attempt)
    return memory_mb(MODEL.format(model=name), model, gpus_of(wildcards)) * attempt


def model_resources(wildcards):
    """models.<name>.resources of a shard's job."""
    return CONFIG.models[unit_of(wildcards).model].resources


def asked_of_cluster(name, resources_of):
    """An input function for one resource that a section's `resources` may name; where it does not, what the profile says."""
    default = workflow.resource_settings._parsed_default_resources.get(name)

    def value(wildcards, input, attempt, threads, rulename):
        given = resources_of(wildcards)
        if name in given:
            return value_at(name, given[name], attempt)
        if default is None:
            return None
        return default.evaluate(wildcards, input=input, attempt=attempt, threads=threads, rulename=rulename).value

    return value


def asked_by(sections, resources_of):
    """Resource → input function, of all that any of the sections names."""
    return {name: asked_of_cluster(name, resources_of) for section in sections for name in section.resources}


ASKED = asked_by(CONFIG.models.values(), model_resources)
# The GPUs of a worker are on one node; SLURM's --gpus alone may take them from several.
WORKER_RESOURCES = ASKED | {"mem_mb": worker_memory, "nodes": 1} if PLAN.cluster else {}


def beside(rule):
    """Whether a step without a model runs where Snakemake does, also with a cluster: unless a profile groups it.

    Ten thousand such jobs would wait in the queue for longer than they take.
    """
    return rule not in workflow.group_settings.overwrite_groups


def gpus_in(group):
    """An input function for the tokens of one group: a shard's GPUs if its worker is of that group, else none."""
    return lambda w: gpus_of(w) if worker_of_shard(w).group == group else 0


def asks(name):
    """An input function for the token of one served model: 1 for its jobs."""
    return lambda w: 1 if unit_of(w).model == name else 0


# A job that waits for a lease holds its tokens. With tokens of its own for each of gpus.groups, no job starts while its
# group is taken, and none keeps another group's GPUs idle.
GROUP_TOKENS = {f"gpu_group_{group.number}": gpus_in(group.number) for group in PLAN.groups}
for group in PLAN.groups:
    workflow.register_resource(f"gpu_group_{group.number}", Resource(f"gpu_group_{group.number}", len(group.gpus)))

# A served model's limits (max_concurrent, requests_per_minute) hold for one job, so it has one at a time.
SERVED = [name for name, model in CONFIG.models.items() if model.endpoint is not None]
GROUP_TOKENS |= {f"endpoint_{number}": asks(name) for number, name in enumerate(SERVED)}
for number in range(len(SERVED)):
    workflow.register_resource(f"endpoint_{number}", Resource(f"endpoint_{number}", 1))


def may_fail(wildcards):
    """Share of the rows that may fail; another share asks the failed rows again."""
    return unit_of(wildcards).max_failed_ratio


def threads_of(wildcards):
    return PLAN.threads(unit_of(wildcards).model)


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


def jury_folders():
    """What the report shows of juries, on every target of their judges: jury/target → folder."""
    targets = {name: CONFIG.judges[jury.judges[0]].targets() for name, jury in CONFIG.juries.items()}
    named = [(name, target) for name in targets for target in targets[name]]
    return {f"{name}/{target}": JURY.format(jury=name, target=target) for name, target in named}


def jury_files():
    """What the juries decide."""
    return expand("{folder}/{name}", folder=jury_folders().values(), name=["verdicts.jsonl", "metrics.json"])


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


def logits_files():
    """What the teachers leave."""
    return expand(
        "results/logits/{name}/{file}", name=CONFIG.logits, file=["requests.jsonl", "metrics.json", "manifest.json"]
    )


def trained_model(wildcards):
    """The folder of the training that makes a model; none for other sources."""
    made = made_by(CONFIG.models[wildcards.model].source)
    return [str(result_folder(made))] if made else []


def training_of(wildcards):
    return CONFIG.trainings[wildcards.training]


TRAINING_ASKED = asked_by(CONFIG.trainings.values(), lambda w: training_of(w).resources)


def on_several_nodes(value):
    """An input function: what a training on several nodes asks for beside them; on one node nothing."""
    return lambda w: value(training_of(w).nodes) if training_of(w).nodes > 1 else None


# On several nodes the launcher starts a task on each itself: Snakemake calls that an MPI job.
TRAINING_NODES = {
    "nodes": lambda w: training_of(w).nodes,
    "mpi": on_several_nodes(lambda nodes: "srun"),
    "tasks": on_several_nodes(lambda nodes: nodes),
    "tasks_per_gpu": on_several_nodes(lambda nodes: 0),
}
TRAINING_RESOURCES = TRAINING_ASKED | TRAINING_NODES if PLAN.cluster else {}


def training_files_read(wildcards):
    """The files of a training's texts that are there before: datasets, prompt, the file of its examples."""
    training = training_of(wildcards)
    apart = training.evaluation.dataset if training.evaluation else None
    prompt = CONFIG.prompts[training.prompt] if training.prompt else None
    examples = [CONFIG.datasets[prompt.few_shot_from.dataset].path] if prompt and prompt.few_shot_from else []
    datasets = [CONFIG.datasets[name].path for name in (training.dataset, apart) if name]
    return [*datasets, *([prompt.file] if prompt else []), *examples]


def training_weights(wildcards):
    return MODEL.format(model=training_of(wildcards).tokenizer_of())


def training_template(wildcards):
    template = CONFIG.models[training_of(wildcards).tokenizer_of()].chat_template
    return [template] if template else []


def training_data_spec(wildcards):
    return specs.encode(specs.TrainingDataSpec.of(CONFIG, wildcards.training))


def training_spec(wildcards):
    return specs.encode(specs.TrainingSpec.of(CONFIG, wildcards.training))


def training_data(wildcards):
    """What a training reads: its own token ids, or a teacher's logits."""
    logits = training_of(wildcards).logits
    return f"results/logits/{logits}/data" if logits else f"results/trainings/{wildcards.training}/data"


def trained_files():
    """What the trainings leave."""
    return expand("results/trainings/{name}/{file}", name=CONFIG.trainings, file=["model", "metrics.json"])


def exports():
    return [f"results/runs/{name}/generations.{kind}" for name, run in CONFIG.runs.items() for kind in run.formats]


def run_folders():
    """What the report shows of runs: name → folder."""
    return {name: RUN.format(run=name) for name in CONFIG.runs}


def judge_folders():
    """What the report shows of judges: judge/target → folder."""
    return {
        f"{name}/{target}": JUDGE.format(judge=name, target=target)
        for name, judge in CONFIG.judges.items()
        for target in judge.targets()
    }


def beside_arguments():
    """The report's options for what is beside runs and judges; a file of an earlier config is not named."""
    named = [f"--jury={name}={folder}" for name, folder in jury_folders().items()]
    named += [f"--training={name}=results/trainings/{name}" for name in CONFIG.trainings]
    named += [f"--logits={name}=results/logits/{name}" for name in CONFIG.logits]
    compared = ["--comparisons=results/comparisons.json"] if COMPARISONS.comparisons else []
    return named + compared + (["--rankings=results/rankings.json"] if RANKINGS.pairs else [])


def result_files():
    """Every file of the results that is kept, so that a missing one is made again even when the report is there."""
    runs = expand("{folder}/{name}", folder=run_folders().values(), name=RUN_FILES)
    judges = expand("{folder}/{name}", folder=judge_folders().values(), name=JUDGE_FILES)
    compared = ["results/comparisons.json"] if COMPARISONS.comparisons else []
    return runs + judges + compared + (["results/rankings.json"] if RANKINGS.pairs else [])


def left_behind():
    """Journals of runs and judges that the config no longer names: one that was renamed finds its answers there."""
    there = {str(path) for kind in ("runs/*", "judges/*/*") for path in Path("results").glob(f"{kind}/journal")}
    named = {f"{folder}/journal" for folder in [*run_folders().values(), *judge_folders().values()]}
    return sorted(there - named, key=os.path.getmtime, reverse=True)[:MAX_LEFT_BEHIND]


LEFT_BEHIND = left_behind()

# Without its records Snakemake goes by dates alone, and an edit of the config would pass unseen.
if os.path.isdir("results/runs") and not any(Path(".snakemake").glob("metadata*/*")) and not workflow.remote_exec:
    print(
        "results/ is here without .snakemake/metadata, so edits since are not noticed; copy that folder too, or run "
        "once with --forcerun prepare_model render_requests (answers are kept)",
        file=sys.stderr,
    )


def jobs_on_cluster():
    """What the jobs that this run is about to submit ask for, as far as it is known; groups as the one job they are."""
    for job in workflow.dag.needrun_jobs():
        group = workflow.dag.get_job_group(job)
        if group is not None:
            yield slurm.Wanted(f"group {group.groupid}", group.threads, dict(group.resources.items()))
        elif not job.is_local:
            last = job.rule.expand_resources(job.wildcards_dict, job.input, job.restart_times + 1)
            yield slurm.Wanted(f"rule {job.rule.name}", job.threads, dict(job.resources.items()), last.get("runtime"))


def asked_of_all_jobs():
    """The executor's settings that go with every job, as its options on the command line."""
    settings = {name: getattr(workflow.executor_settings, name, None) for name in ("qos", "reservation")}
    return [f"--{name}={value}" for name, value in settings.items() if value]


def begin():
    """Take results/ for this run, or end with one line that names who has it; then say the plan, which alone takes none."""
    if not workflow.is_main_process:
        return
    named = list(map(str, workflow.config_settings.configfiles))
    text = plan_text(CONFIG, PLAN, gpus.use(PLAN.gpus), gpus.links(PLAN.gpus), configfiles=named)
    try:
        if {job.rule.name for job in workflow.dag.jobs} == {"plan"}:
            del os.environ[fence.RUN]  # it is of no run, and stands beside any
        else:
            if PLAN.cluster and workflow.executor_plugin.name == "slurm":
                slurm.keep_unanswered(workflow.executor_plugin.executor)
                slurm.require_states(workflow.executor_settings.status_command)
                slurm.require_accepted(
                    jobs_on_cluster(), functools.partial(print, file=sys.stderr), asked_of_all_jobs()
                )
            fence.claim(os.environ[fence.RUN])
            invocation.write(sys.argv, config)
        write_bytes("results/plan.txt", text.encode())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(text, end="", file=sys.stderr)
