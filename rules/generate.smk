# Weights ready once; then every shard on its own group of GPUs.


rule prepare_model:
    input:
        weights_files,
        trained_model,
    output:
        MODEL,
    log:
        "results/models/{model}.log",
    localrule: beside("prepare_model")
    conda:
        "../envs/cpu.yaml"
    params:
        spec=model_spec,
        files=lambda w: [(path.name, *content_of(path)) for path in weights_files(w)],
    shell:
        program("prepare_model.py", *PLACEMENTS) + " --spec {params.spec:q} --out {output:q} > {log:q} 2>&1"


rule generate:
    input:
        shards=f"{RUN}/shards/{{shards}}",
        weights=weights_of,
    output:
        temp(f"{RUN}/parts/{{shards}}/{{shard}}-of-{{shards}}.jsonl"),
    log:
        f"{RUN}/logs/generate-{{shard}}-of-{{shards}}.log",
    # A GPU with an error is set aside (gristmill.gpu.health); the second try takes another.
    retries: RETRIES
    conda:
        "../envs/gpu.yaml"
    threads: threads_of
    resources:
        **GROUP_TOKENS,
        **WORKER_RESOURCES,
        gpu=gpus_of,
    params:
        spec=model_spec,
        code=GENERATION_VERSION,
        unit="runs/{run}",
        journal=f"{RUN}/journal",
        may_fail=may_fail,
    shell:
        program("generate.py", *PLACED, *SCHEDULED, "--gpus", GPUS, "--judges", JUDGES, "--left-behind", *LEFT_BEHIND)
        + " --spec {params.spec:q} --weights {input.weights:q} "
        "--shard {input.shards:q}/{wildcards.shard}-of-{wildcards.shards}.jsonl --journal {params.journal:q} "
        "--unit {params.unit:q} --gpu-samples results/{params.unit:q}/gpu --threads {threads} "
        "--max-failed-ratio {params.may_fail} --out {output:q} > {log:q} 2>&1"
