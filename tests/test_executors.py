"""Facts about executors that are not SLURM: the rules name standard resources and nothing of SLURM's."""

import json
import re
from pathlib import Path

import pytest
from conftest import ANSWERS, ROOT, Project, echo_config

pytestmark = pytest.mark.slow
H100S = [{"name": "H100", "memory_total_mib": 81559, "count": 4}]
#: A scheduler of one line: it notes what a job asks for, starts it, and shows its process number.
SUBMIT = """#!/bin/sh
echo "$1" >> "{folder}/asked"
nohup sh "$2" > /dev/null 2>&1 &
echo $!
"""


def test_a_generic_cluster_gets_standard_resources_and_its_jobs_part_one_hosts_gpus_by_leases(project: Project) -> None:
    folder = project.folder.with_name("project")  # the submit command is split at spaces
    project.folder.rename(folder)
    project = Project(folder)
    submit = folder / "submit.sh"
    submit.write_text(SUBMIT.format(folder=folder))
    submit.chmod(0o755)
    (folder / "inventory.json").write_text(json.dumps(H100S))
    model = {"engine": "echo", "gpus_per_model": 2, "resources": {"runtime": 7}}
    project.write_config(echo_config(models={"echo": model}, gpus={"total": 8}))
    asks = "gpu={resources.gpu},nodes={resources.nodes},mem_mb={resources.mem_mb},runtime={resources.runtime}"
    command = f"{submit} {asks},threads={{threads}}"
    options = ["--executor", "cluster-generic", "--cluster-generic-submit-cmd", command, "--jobs", "8"]
    inventory = {"GRISTMILL_INVENTORY": str(folder / "inventory.json"), "GRISTMILL_ECHO_SECONDS": "0.3"}
    project.done(ANSWERS, *options, **inventory)
    asked = (folder / "asked").read_text().splitlines()
    assert asked == ["gpu=2,nodes=1,mem_mb=1000,runtime=7,threads=2"] * 4  # --cores 2
    assert [line["id"] for line in project.lines("runs/plain/generations.jsonl")] == [f"r{n}" for n in range(12)]
    logs = [path.read_text() for path in sorted((folder / "results/runs/plain/logs").glob("generate-*"))]
    pairs = [re.findall(r"lease on GPU (\d) \(H100\), GPU (\d) \(H100\)", text) for text in logs]
    assert all(len(pair) == 1 for pair in pairs)
    assert {gpu for pair in pairs for gpu in pair[0]} <= {"0", "1", "2", "3"}


def test_no_rule_names_what_only_slurm_has() -> None:
    for path in sorted((ROOT / "rules").rglob("*.smk")):
        code = [line.partition("#")[0] for line in path.read_text().splitlines()]
        named = [line for line in code if "slurm_" in line or "SLURM_" in line or "sbatch" in line]
        assert named == [], Path(path).name
