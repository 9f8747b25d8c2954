# Grades and metrics of the runs, and the report over everything.


rule metrics:
    input:
        f"{RUN}/generations.jsonl",
    output:
        grades=f"{RUN}/grades.jsonl",
        metrics=f"{RUN}/metrics.json",
    log:
        f"{RUN}/logs/metrics.log",
    localrule: beside("metrics")
    conda:
        "../envs/cpu.yaml"
    params:
        spec=metrics_spec,
        code=METRICS_CODE,
        own=metric_code_of,
    shell:
        program("metrics.py") + " --spec {params.spec:q} --generations {input:q} "
        "--gpu-samples results/runs/{wildcards.run}/gpu "
        "--grades {output.grades:q} --metrics {output.metrics:q} > {log:q} 2>&1"


rule report:
    input:
        result_files(),
        jury_files(),
        expand("results/logits/{name}/metrics.json", name=CONFIG.logits),
        expand("results/trainings/{name}/metrics.json", name=CONFIG.trainings),
    output:
        report("results/report.html", caption="captions/report.rst", category="Report"),
    log:
        "results/logs/report.log",
    localrule: beside("report")
    conda:
        "../envs/cpu.yaml"
    params:
        spec=report_spec,
        code=REPORT_CODE,
        runs=[f"--run={name}={folder}" for name, folder in run_folders().items()],
        judges=[f"--judge={name}={folder}" for name, folder in judge_folders().items()],
        beside=beside_arguments(),
    shell:
        program("report.py") + " --spec {params.spec:q} {params.runs:q} {params.judges:q} {params.beside:q} "
        "--invocation results/invocation.json --out {output:q} > {log:q} 2>&1"
