# Runs beside each other: compared on the rows they share, and ranked by what pairwise judges said of them.


rule compare:
    input:
        list(compared_runs().values()),
    output:
        "results/comparisons.json",
    log:
        "results/logs/compare.log",
    localrule: beside("compare")
    conda:
        "../envs/cpu.yaml"
    params:
        spec=lambda w: specs.encode(COMPARISONS),
        code=COMPARE_CODE,
        grades=[f"--grades={run}={path}" for run, path in compared_runs().items()],
    shell:
        program("compare.py") + " --spec {params.spec:q} {params.grades:q} --out {output:q} > {log:q} 2>&1"


rule rank:
    input:
        expand("{folder}/{name}", folder=ranked_targets().values(), name=["verdicts.jsonl", "metrics.json"]),
        expand("{folder}/generations.jsonl", folder=ranked_runs().values()),
    output:
        "results/rankings.json",
    log:
        "results/logs/rank.log",
    localrule: beside("rank")
    conda:
        "../envs/cpu.yaml"
    params:
        spec=lambda w: specs.encode(RANKINGS),
        code=RANK_CODE,
        judges=[f"--judge={name}={folder}" for name, folder in ranked_targets().items()],
        runs=[f"--run={name}={folder}" for name, folder in ranked_runs().items()],
    shell:
        program("rank.py") + " --spec {params.spec:q} {params.judges:q} {params.runs:q} "
        "--out {output:q} > {log:q} 2>&1"
