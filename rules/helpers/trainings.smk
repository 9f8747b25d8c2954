# The same for trainings, and what their jobs ask of a cluster.

from gristmill.config import specs
from gristmill.config.trainings import made_by
from gristmill.planning.trainings import training_gpus, training_threads
from gristmill.training import TRAINING_VERSION
from gristmill.weights import result_folder


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
