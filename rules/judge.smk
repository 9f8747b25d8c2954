# A judge is a model that answers requests: the same rules split, generate and merge, with other paths. Only building its
# requests and reading its verdicts are its own, and neither needs a GPU.


rule judge_requests:
    input:
        generations=lambda w: expand("results/runs/{run}/generations.jsonl", run=target_runs(w)),
        prompt=lambda w: prompt_of(w).file,
    output:
        f"{JUDGE}/requests.jsonl",
    log:
        f"{JUDGE}/logs/judge_requests.log",
    localrule: beside("judge_requests")
    conda:
        "../envs/cpu.yaml"
    params:
        spec=judge_spec,
        code=QUESTION_CODE,
        content=lambda w: content_of(prompt_of(w).file),
    shell:
        program("judge_requests.py") + " --spec {params.spec:q} --generations {input.generations:q} "
        "--out {output:q} > {log:q} 2>&1"


use rule split as judge_split with:
    input:
        requests=f"{JUDGE}/requests.jsonl",
        weights=weights_of,
        template=template_of,
    output:
        temp(directory(f"{JUDGE}/shards/{{shards}}")),
    log:
        f"{JUDGE}/logs/split-{{shards}}.log",


use rule generate as judge_generate with:
    input:
        shards=f"{JUDGE}/shards/{{shards}}",
        weights=weights_of,
    output:
        temp(f"{JUDGE}/parts/{{shards}}/{{shard}}-of-{{shards}}.jsonl"),
    log:
        f"{JUDGE}/logs/generate-{{shard}}-of-{{shards}}.log",
    params:
        spec=model_spec,
        code=GENERATION_VERSION,
        unit="judges/{judge}/{target}",
        journal=f"{JUDGE}/journal",
        may_fail=may_fail,


use rule merge as judge_merge with:
    input:
        requests=f"{JUDGE}/requests.jsonl",
        weights=weights_of,
        template=template_of,
        parts=parts_of(JUDGE),
    output:
        generations=f"{JUDGE}/generations.jsonl",
        manifest=f"{JUDGE}/manifest.json",
    log:
        f"{JUDGE}/logs/merge.log",
    params:
        spec=model_spec,
        code=asking_code,
        unit="judges/{judge}/{target}",
        journal=f"{JUDGE}/journal",
        may_fail=may_fail,
        template=lambda w: content_of(*template_of(w)),


rule verdicts:
    input:
        generations=lambda w: expand("results/runs/{run}/generations.jsonl", run=target_runs(w)),
        judge_generations=f"{JUDGE}/generations.jsonl",
        grades=grades_of,
    output:
        verdicts=f"{JUDGE}/verdicts.jsonl",
        metrics=f"{JUDGE}/metrics.json",
    log:
        f"{JUDGE}/logs/verdicts.log",
    localrule: beside("verdicts")
    conda:
        "../envs/cpu.yaml"
    params:
        spec=verdict_spec,
        code=VERDICT_CODE,
        agreement=agreement_of,
    shell:
        program("verdicts.py") + " --spec {params.spec:q} --generations {input.generations:q} "
        "--judge-generations {input.judge_generations:q} {params.agreement:q} "
        "--gpu-samples results/judges/{wildcards.judge}/{wildcards.target}/gpu "
        "--verdicts {output.verdicts:q} --metrics {output.metrics:q} > {log:q} 2>&1"


rule jury:
    input:
        lambda w: expand("results/judges/{member}/{target}/verdicts.jsonl", member=jury_of(w).judges, target=w.target),
    output:
        verdicts=f"{JURY}/verdicts.jsonl",
        metrics=f"{JURY}/metrics.json",
    log:
        f"{JURY}/logs/jury.log",
    localrule: beside("jury")
    conda:
        "../envs/cpu.yaml"
    params:
        spec=jury_spec,
        code=JURY_CODE,
    shell:
        program("jury.py") + " --spec {params.spec:q} --judge-verdicts {input:q} "
        "--verdicts {output.verdicts:q} --metrics {output.metrics:q} > {log:q} 2>&1"
