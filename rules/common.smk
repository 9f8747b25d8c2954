# Loads and checks the config and decides the plan; rules/helpers/ gives the rules their narrow parts of both.

import shlex
import uuid
from pathlib import Path

from snakemake.resources import Resource

from gristmill import fence
from gristmill.config import specs
from gristmill.config.check import check_data
from gristmill.config.load import load_config
from gristmill.config.repeated import refuse_repeated_keys
from gristmill.errors import UserError
from gristmill.gpu import gpus, lease
from gristmill.keys import code_digest
from gristmill.planning.memory import refuse_unfit
from gristmill.planning.plan import make_plan
from gristmill.planning.trainings import refuse_unfit_trainings
from gristmill.planning.workers import encode_workers
from gristmill.weights import read_description

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
