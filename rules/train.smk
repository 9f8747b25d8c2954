# Texts → token ids; token ids or a teacher's logits → a model that `models:` can name (source: training:<name>).


rule training_data:
    input:
        texts=training_files_read,
        weights=training_weights,
        template=training_template,
    output:
        directory(f"{TRAINING}/data"),
    log:
        f"{TRAINING}/logs/training_data.log",
    localrule: beside("training_data")
    conda:
        "../envs/cpu.yaml"
    params:
        spec=training_data_spec,
        code=TRAINING_TEXT_CODE,
        content=lambda w: content_of(*training_files_read(w), *training_template(w)),
    shell:
        program("training_data.py")
        + " --spec {params.spec:q} --weights {input.weights:q} --out {output:q} > {log:q} 2>&1"


rule train:
    input:
        data=training_data,
        weights=training_weights,
        template=training_template,
    output:
        model=directory(f"{TRAINING}/model"),
        metrics=f"{TRAINING}/metrics.json",
    log:
        f"{TRAINING}/logs/train.log",
    # Checkpoints are no declared outputs, so a second try goes on from the last one.
    retries: RETRIES
    conda:
        "../envs/gpu.yaml"
    threads: lambda w: training_threads(PLAN, training_of(w))
    resources:
        **TRAINING_RESOURCES,
        gpu=lambda w: training_gpus(PLAN, training_of(w)),
    params:
        spec=training_spec,
        code=TRAINING_VERSION,
        work=TRAINING,
    shell:
        program("train.py", *TRAINING_PLACED, *SCHEDULED, "--gpus", GPUS)
        + " --spec {params.spec:q} --weights {input.weights:q} --data {input.data:q} --work {params.work:q} "
        "--threads {threads} --model {output.model:q} --metrics {output.metrics:q} > {log:q} 2>&1"
