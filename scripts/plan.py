"""Print the plan: GPUs and what runs on them, workers and their GPUs, memory, the commands to run. It starts nothing.

    python scripts/plan.py                                            # config/config.yaml on this machine
    python scripts/plan.py --config my.yaml --gpu 4                   # with --resources gpu=4
    python scripts/plan.py --inventory a100.json                      # on a machine one does not have

An inventory is a list of GPUs: [{"name": "A100", "memory_total_mib": 81920, "count": 8}]. `snakemake plan` prints the
same text. A hub model that was never fetched is asked for its config.json, nothing more.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import yaml

from gristmill.config.load import load_config
from gristmill.config.repeated import refuse_repeated_keys
from gristmill.config.schema import ModelConfig
from gristmill.errors import UserError, run_main
from gristmill.gpu import gpus, lease
from gristmill.planning.memory import local_folder, refuse_unfit
from gristmill.planning.plan import make_plan
from gristmill.planning.text import plan_text
from gristmill.progress import log
from gristmill.weights import expanded


def main() -> None:
    """Config and machine in, text out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("config/config.yaml"))
    parser.add_argument("--inventory", type=Path, help="plan for the GPUs of this file instead of those here")
    parser.add_argument("--gpu", type=int, help="N of snakemake's --resources gpu=N")
    parser.add_argument("--cores", type=int, default=os.cpu_count())
    args = parser.parse_args()
    if args.inventory:
        os.environ["GRISTMILL_INVENTORY"] = str(args.inventory)
    config = load_config(_read(args.config), [Path.cwd(), Path(__file__).parents[1]])
    usable = gpus.usable(gpus.inventory(), os.environ, config.gpus.wanted())
    busy = lease.foreign_use(usable, config.gpus.busy_memory_mib)
    plan = make_plan(config, usable, args.gpu, args.cores, cluster=False, busy=busy)
    named = [] if args.config == parser.get_default("config") else [str(args.config)]
    print(plan_text(config, plan, gpus.use(usable), gpus.links(usable), _folder, named), end="")
    refuse_unfit(config, plan, _folder, from_config=True)


def _read(path: Path) -> dict[str, object]:
    try:
        refuse_repeated_keys([path])
        values = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(
            f"{path} cannot be read: {' '.join(str(error).split())}; name the config with --config"
        ) from error
    return values if isinstance(values, dict) else {}


def _folder(name: str, model: ModelConfig) -> Path | None:
    """A model's folder; of a hub model that is not here, one with only its config, which a meta model needs."""
    found = local_folder(name, model)
    if found is not None or not model.source or model.source.startswith("package:"):
        return found
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        cache = expanded(model.cache_dir, f"models.{name}.cache_dir") if model.cache_dir is not None else None
        return Path(hf_hub_download(model.source, "config.json", revision=model.revision, cache_dir=cache)).parent
    except (HfHubHTTPError, OSError, ValueError) as error:  # no network, no such model: the plan says it does not know
        log(f"{model.source}: config.json cannot be fetched: {str(error).strip().splitlines()[0]}")
        return None


if __name__ == "__main__":
    run_main(main)
