# Rows → requests → one shard a worker.


rule render_requests:
    input:
        dataset=lambda w: dataset_of(w).path,
        prompt=lambda w: prompt_of(w).file,
        examples=examples_of,
    output:
        f"{RUN}/requests.jsonl",
    log:
        f"{RUN}/logs/render_requests.log",
    localrule: beside("render_requests")
    conda:
        "../envs/cpu.yaml"
    params:
        spec=requests_spec,
        code=RENDER_CODE,
        content=lambda w: content_of(dataset_of(w).path, prompt_of(w).file, *examples_of(w)),
    shell:
        program("render_requests.py") + " --spec {params.spec:q} --out {output:q} > {log:q} 2>&1"


rule split:
    input:
        requests=f"{RUN}/requests.jsonl",
        weights=weights_of,
        template=template_of,
    output:
        temp(directory(f"{RUN}/shards/{{shards}}")),
    log:
        f"{RUN}/logs/split-{{shards}}.log",
    localrule: beside("split")
    conda:
        "../envs/cpu.yaml"
    params:
        spec=model_spec,
    shell:
        program("split.py", *PLACED)
        + " --spec {params.spec:q} --weights {input.weights:q} --requests {input.requests:q} "
        "--shards {wildcards.shards} --out {output:q} > {log:q} 2>&1"
