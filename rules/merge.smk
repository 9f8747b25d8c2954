# Parts → one file, proven complete. The params repeat the model's spec: the parts are temporary, so a changed model must
# be seen here to run anything.


rule merge:
    input:
        requests=f"{RUN}/requests.jsonl",
        weights=weights_of,
        template=template_of,
        parts=parts_of(RUN),
    output:
        generations=f"{RUN}/generations.jsonl",
        manifest=f"{RUN}/manifest.json",
    log:
        f"{RUN}/logs/merge.log",
    localrule: beside("merge")
    conda:
        "../envs/cpu.yaml"
    params:
        spec=model_spec,
        code=GENERATION_VERSION,
        unit="runs/{run}",
        journal=f"{RUN}/journal",
        may_fail=may_fail,
        template=lambda w: content_of(*template_of(w)),
    shell:
        program("merge.py", *PLACEMENTS)
        + " --spec {params.spec:q} --weights {input.weights:q} --unit {params.unit:q} "
        "--requests {input.requests:q} --first-part {input.parts[0]:q} --journal {params.journal:q} "
        "--max-failed-ratio {params.may_fail} --generations {output.generations:q} "
        "--manifest {output.manifest:q} > {log:q} 2>&1"


rule export:
    input:
        f"{RUN}/generations.jsonl",
    output:
        f"{RUN}/generations.{{format}}",
    log:
        f"{RUN}/logs/export-{{format}}.log",
    localrule: beside("export")
    conda:
        "../envs/cpu.yaml"
    params:
        code=EXPORT_CODE,
    shell:
        program("export.py") + " --generations {input:q} --out {output:q} > {log:q} 2>&1"
