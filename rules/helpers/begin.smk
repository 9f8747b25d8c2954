# What happens when a run begins, before its first job.

import functools

from gristmill import fence, invocation, slurm
from gristmill.errors import UserError
from gristmill.files import write_bytes
from gristmill.gpu import gpus
from gristmill.planning.text import plan_text


def jobs_on_cluster():
    """What the jobs that this run is about to submit ask for, as far as it is known; groups as the one job they are."""
    for job in workflow.dag.needrun_jobs():
        group = workflow.dag.get_job_group(job)
        if group is not None:
            yield slurm.Wanted(f"group {group.groupid}", group.threads, dict(group.resources.items()))
        elif not job.is_local:
            last = job.rule.expand_resources(job.wildcards_dict, job.input, job.restart_times + 1)
            yield slurm.Wanted(f"rule {job.rule.name}", job.threads, dict(job.resources.items()), last.get("runtime"))


def asked_of_all_jobs():
    """The executor's settings that go with every job, as its options on the command line."""
    settings = {name: getattr(workflow.executor_settings, name, None) for name in ("qos", "reservation")}
    return [f"--{name}={value}" for name, value in settings.items() if value]


def begin():
    """Take results/ for this run, or end with one line that names who has it; then say the plan, which alone takes none."""
    if not workflow.is_main_process:
        return
    named = list(map(str, workflow.config_settings.configfiles))
    text = plan_text(CONFIG, PLAN, gpus.use(PLAN.gpus), gpus.links(PLAN.gpus), configfiles=named)
    try:
        if {job.rule.name for job in workflow.dag.jobs} == {"plan"}:
            del os.environ[fence.RUN]  # it is of no run, and stands beside any
        else:
            if PLAN.cluster and workflow.executor_plugin.name == "slurm":
                slurm.keep_unanswered(workflow.executor_plugin.executor)
                slurm.require_states(workflow.executor_settings.status_command)
                slurm.require_accepted(
                    jobs_on_cluster(), functools.partial(print, file=sys.stderr), asked_of_all_jobs()
                )
            fence.claim(os.environ[fence.RUN])
            invocation.write(sys.argv, config)
        write_bytes("results/plan.txt", text.encode())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(text, end="", file=sys.stderr)
