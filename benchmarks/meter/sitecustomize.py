"""Python imports this at start when its folder is on PYTHONPATH: each process leaves its time and peak memory.

Peak memory is VmHWM of /proc/self/status. getrusage's maxrss would also count the process that this one was forked
from, which may be a large snakemake.
"""

import atexit
import json
import os
import resource
import sys
import time

START = time.time()


def leave() -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    with open("/proc/self/status") as status:
        peak_kib = next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))
    record = {
        "argv": sys.argv,
        "start_unix_s": START,
        "wall_s": time.time() - START,
        "cpu_s": used.ru_utime + used.ru_stime,
        "peak_mib": peak_kib / 1024,
    }
    name = os.path.join(os.environ["GRISTMILL_METER"], f"{os.getpid()}-{time.monotonic_ns()}.json")
    with open(name, "w") as handle:
        json.dump(record, handle)


if "GRISTMILL_METER" in os.environ:
    atexit.register(leave)
