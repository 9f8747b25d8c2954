# gristmill: dataset × model × prompt → answers → verdicts → metrics → report, on every GPU there is.
#
#   snakemake --cores all --resources gpu=4                 run config/config.yaml on four GPUs
#   snakemake --cores all --configfile my.yaml              another config (it replaces the demo's)
#   snakemake --cores all plan                              who gets which GPUs, what fits them; runs nothing
#   snakemake --cores all -n                                show all jobs, run none
#
# The stages are in rules/, their programs and the typed library in scripts/, the settings in config/README.md.

import os
import sys

from snakemake.utils import min_version

min_version("9.0")

# The library needs no installation; `python` in the rules is this interpreter, also without an activated environment.
sys.path.insert(0, f"{workflow.basedir}/scripts")
os.environ.update(PATH=os.pathsep.join([os.path.dirname(sys.executable), os.getenv("PATH", os.defpath)]))

# A config file on the command line replaces the demo's; Snakemake would merge the two. With --directory, a folder
# without a config of its own runs the demo's.
if not workflow.config_settings.configfiles:
    default_config = "config/config.yaml"
    if not os.path.exists(default_config):
        default_config = f"{workflow.basedir}/{default_config}"

    configfile: default_config


include: "rules/common.smk"
include: "rules/helpers/jobs.smk"
include: "rules/helpers/units.smk"
include: "rules/helpers/logits.smk"
include: "rules/helpers/trainings.smk"
include: "rules/helpers/results.smk"
include: "rules/helpers/begin.smk"
include: "rules/split.smk"
include: "rules/generate.smk"
include: "rules/merge.smk"
include: "rules/judge.smk"
include: "rules/compare.smk"
include: "rules/logits.smk"
include: "rules/train.smk"
include: "rules/report.smk"


rule all:
    default_target: True
    input:
        "results/report.html",
        result_files(),
        jury_files(),
        exports(),
        logits_files(),
        trained_files(),


# `snakemake plan` starts no job: the plan stands in front of every run.
rule plan:
    localrule: True


onstart:
    begin()
