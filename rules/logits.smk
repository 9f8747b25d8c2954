# A teacher's log-probabilities: texts → token ids → every share on its own group of GPUs → data files.


rule logits_requests:
    input:
        texts=logits_texts,
        weights=weights_of,
        template=template_of,
    output:
        f"{LOGITS}/requests.jsonl",
    log:
        f"{LOGITS}/logs/logits_requests.log",
    localrule: beside("logits_requests")
    conda:
        "../envs/cpu.yaml"
    params:
        spec=logits_spec,
        code=LOGITS_TEXT_CODE,
        content=lambda w: content_of(*logits_files_read(w)),
        generations=logits_generations,
    shell:
        program("logits_requests.py")
        + " --spec {params.spec:q} --weights {input.weights:q} {params.generations:q} --out {output:q} > {log:q} 2>&1"


rule logits:
    input:
        requests=f"{LOGITS}/requests.jsonl",
        weights=weights_of,
    output:
        temp(f"{LOGITS}/parts/{{shards}}/{{shard}}-of-{{shards}}.jsonl"),
    log:
        f"{LOGITS}/logs/logits-{{shard}}-of-{{shards}}.log",
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
        code=LOGITS_VERSION,
        top_k=kept_of,
        journal=f"{LOGITS}/journal",
        may_fail=may_fail,
    shell:
        program("logits.py", *PLACED, *SCHEDULED, "--gpus", GPUS)
        + " --spec {params.spec:q} --weights {input.weights:q} --top-k {params.top_k} "
        "--name {wildcards.shard}-of-{wildcards.shards} --requests {input.requests:q} --journal {params.journal:q} "
        "--unit logits/{wildcards.logits:q} --gpu-samples results/logits/{wildcards.logits:q}/gpu --threads {threads} "
        "--max-failed-ratio {params.may_fail} --out {output:q} > {log:q} 2>&1"


rule logits_merge:
    input:
        requests=f"{LOGITS}/requests.jsonl",
        weights=weights_of,
        parts=parts_of(LOGITS),
    output:
        data=directory(f"{LOGITS}/data"),
        metrics=f"{LOGITS}/metrics.json",
        manifest=f"{LOGITS}/manifest.json",
    log:
        f"{LOGITS}/logs/logits_merge.log",
    localrule: beside("logits_merge")
    conda:
        "../envs/cpu.yaml"
    params:
        spec=model_spec,
        code=LOGITS_VERSION,
        top_k=kept_of,
        journal=f"{LOGITS}/journal",
        may_fail=may_fail,
    shell:
        program("logits_merge.py") + " --spec {params.spec:q} --weights {input.weights:q} --top-k {params.top_k} "
        "--unit logits/{wildcards.logits:q} --requests {input.requests:q} --first-part {input.parts[0]:q} "
        "--journal {params.journal:q} --max-failed-ratio {params.may_fail} --data {output.data:q} "
        "--metrics {output.metrics:q} --manifest {output.manifest:q} > {log:q} 2>&1"
