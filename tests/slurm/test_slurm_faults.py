"""Facts about what goes wrong on a cluster: what is lost (rows in flight at most), what is asked again, what is said.

The echo engine has one row in flight in each worker. A row that was answered stands in the journal; one that stands
there once was not asked again after its answer.
"""

import functools
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from cluster import Cluster, running, why_not
from conftest import ANSWERS, ROOT
from slurm_project import ClusterProject, cluster_config, new_project, on_cluster, slurm, until

from gristmill.types import JsonDict

pytestmark = pytest.mark.slow
two_nodes = on_cluster(nodes=2)
project = pytest.fixture(new_project)
one_small_queue = functools.partial(running, nodes=1, max_jobs=3)
ROWS = [f"r{n}" for n in range(24)]


def require_each_row_once(project: ClusterProject) -> None:
    assert [line["id"] for line in project.answers()] == ROWS
    assert sorted(project.answered()) == sorted(ROWS)


def started(project: ClusterProject, seconds_a_row: float = 1.0) -> "subprocess.Popen[str]":
    """A run of which both workers have answered something."""
    process = project.start(ANSWERS, GRISTMILL_ECHO_SECONDS=str(seconds_a_row))
    until(lambda: len(project.answered()) >= 3 and project.logs().count("engine echo") == 2, project)
    return process


def test_a_cancelled_job_is_tried_again_and_keeps_its_rows(two_nodes: Cluster, project: ClusterProject) -> None:
    process = started(project)
    job = min(two_nodes.jobs("RUNNING"))
    subprocess.run(["scancel", job], check=True)
    said = project.finished(process)
    assert f"SLURM-job '{job}' failed, SLURM status is: 'CANCELLED'" in said
    assert "Trying to restart job" in said
    require_each_row_once(project)


def test_a_node_that_dies_costs_the_rows_in_flight(two_nodes: Cluster, project: ClusterProject) -> None:
    project.write_config(cluster_config(gpus_per_model=4, total=8))
    process = started(project)
    two_nodes.kill_node(2)
    try:
        project.finished(process)
        require_each_row_once(project)
    finally:
        two_nodes.start_node(2)
        two_nodes.until_idle()


def test_a_job_over_its_time_limit_stops_in_time_and_the_next_goes_on(
    two_nodes: Cluster, project: ClusterProject
) -> None:
    project.write_config(cluster_config(total=2, runtime=1, slurm_extra="--signal=TERM@20"))
    process = project.start(ANSWERS, GRISTMILL_ECHO_SECONDS="4")
    said = project.finished(process, seconds=420)
    assert "Trying to restart job" in said
    assert "runtime=1" in said
    assert "runtime=2" in said
    assert re.search(r"stopped by SIGTERM; finished rows are in", said)
    require_each_row_once(project)


def test_a_job_that_runs_out_of_memory_gets_more_at_the_next_attempt(
    two_nodes: Cluster, project: ClusterProject
) -> None:
    project.write_config(cluster_config(total=2, mem_mb=[40, 3000]))
    said = project.finished(project.start(ANSWERS, GRISTMILL_ECHO_SECONDS="1"))
    assert re.search(r"SLURM status is: '(OUT_OF_MEMORY|FAILED|CANCELLED)'", said)
    assert "mem_mb=3000" in said
    require_each_row_once(project)


def test_a_preempted_job_goes_back_into_the_queue_and_goes_on(two_nodes: Cluster, project: ClusterProject) -> None:
    process = started(project)
    urgent = ["sbatch", "--partition=urgent", "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=4", "--wrap=sleep 5"]
    subprocess.run([*urgent, "--output=/dev/null"], check=True, capture_output=True)
    until(lambda: "PENDING" in two_nodes.jobs().values(), project)
    project.finished(process)
    require_each_row_once(project)


def test_nodes_that_are_drained_are_waited_for(two_nodes: Cluster, project: ClusterProject) -> None:
    slurm("scontrol update nodename=node[1-2] state=drain reason=maintenance")
    process = project.start(ANSWERS)
    until(lambda: list(two_nodes.jobs().values()).count("PENDING") == 2, project)
    slurm("scontrol update nodename=node[1-2] state=resume")
    said = project.finished(process)
    assert re.search(r"^rule generate \(.*\) cannot start as long as node1 is drain\w*, node2 is drain", said, re.M)


def test_a_full_queue_is_waited_for(two_nodes: Cluster, project: ClusterProject) -> None:
    other = slurm(
        "sbatch --parsable --nodes=2 --ntasks-per-node=1 --gpus-per-node=4 --output=/dev/null --wrap='sleep 60'"
    )
    process = project.start(ANSWERS)
    until(lambda: list(two_nodes.jobs().values()).count("PENDING") == 2, project)
    assert "rule_generate" in slurm("squeue -h -t PENDING -o '%k %r'")
    subprocess.run(["scancel", other.strip()], check=True)
    project.finished(process)
    require_each_row_once(project)


def test_a_controller_that_is_away_is_waited_for(two_nodes: Cluster, project: ClusterProject) -> None:
    process = started(project)
    two_nodes.kill_controller()
    time.sleep(25)
    two_nodes.start_controller()
    project.finished(process)
    two_nodes.until_idle()
    require_each_row_once(project)


def test_without_a_controller_a_run_ends_with_one_line(two_nodes: Cluster, project: ClusterProject) -> None:
    two_nodes.kill_controller()
    try:
        result = project.run()
    finally:
        two_nodes.start_controller()
        two_nodes.until_idle()
    assert result.returncode != 0
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("error:")]
    assert line.startswith("error: SLURM does not answer:")
    assert "Traceback" not in result.stdout


def watched(project: ClusterProject) -> JsonDict:
    """What scripts/watch.py says of the run."""
    command = [sys.executable, str(ROOT / "scripts" / "watch.py"), "--results", str(project.folder / "results")]
    found: JsonDict = json.loads(subprocess.run([*command, "--json"], capture_output=True, check=True).stdout)
    (unit,) = found["units"]
    return dict(unit)


def test_ctrl_c_cancels_the_jobs_and_the_next_run_goes_on_and_watch_says_so(
    two_nodes: Cluster, project: ClusterProject
) -> None:
    process = started(project)
    until(lambda: [worker["state"] for worker in watched(project)["workers"]] == ["running", "running"], project)
    until(lambda: watched(project)["done"] >= 3, project)  # each worker tells it every few seconds
    assert watched(project)["total"] == len(ROWS)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) != 0
    until(lambda: not two_nodes.jobs(), project)
    there = project.answered()
    assert 3 <= len(there) < len(ROWS)
    assert watched(project)["done"] == len(there)
    project.finished(project.start(ANSWERS))
    require_each_row_once(project)
    assert (watched(project)["state"], watched(project)["done"]) == ("done", len(ROWS))


def test_after_a_kill_9_of_snakemake_its_jobs_leave_and_the_next_run_goes_on(
    two_nodes: Cluster, project: ClusterProject
) -> None:
    process = started(project)
    process.kill()
    process.wait()
    assert len(two_nodes.jobs("RUNNING")) == 2
    project.finished(project.start(ANSWERS))
    assert "another one owns the results; leaving" in project.logs() or "GPU" in project.logs()
    require_each_row_once(project)


def test_a_queue_that_takes_no_more_jobs_is_waited_for(project: ClusterProject) -> None:
    """MaxJobCount, which counts other jobs and ended ones too; the controller is started again with a larger one."""
    if reason := why_not():
        pytest.skip(f"no SLURM: {reason}")
    with one_small_queue() as small:
        others = [slurm("sbatch --parsable --gpus=4 --output=/dev/null --wrap='sleep 600'").strip() for _ in range(2)]
        process = project.start(ANSWERS)
        until(lambda: "rule generate:" in project.said(), project)
        time.sleep(5)
        assert len(small.jobs()) < 4  # both of ours cannot be in
        small.kill_controller()
        small.set_max_jobs(1000)
        small.start_controller()
        subprocess.run(["scancel", *others], check=True)
        project.finished(process)
    require_each_row_once(project)
