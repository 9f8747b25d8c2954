# Which files and folders there will be.

from pathlib import Path


def jury_folders():
    """What the report shows of juries, on every target of their judges: jury/target → folder."""
    targets = {name: CONFIG.judges[jury.judges[0]].targets() for name, jury in CONFIG.juries.items()}
    named = [(name, target) for name in targets for target in targets[name]]
    return {f"{name}/{target}": JURY.format(jury=name, target=target) for name, target in named}


def jury_files():
    """What the juries decide."""
    return expand("{folder}/{name}", folder=jury_folders().values(), name=["verdicts.jsonl", "metrics.json"])


def logits_files():
    """What the teachers leave."""
    return expand(
        "results/logits/{name}/{file}", name=CONFIG.logits, file=["requests.jsonl", "metrics.json", "manifest.json"]
    )


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
