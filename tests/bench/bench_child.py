"""A bench run of table doubles in a process of its own: bench_child.py OUT VERIFY_SECONDS; also started by torchrun."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from bench_doubles import PLAN, SAMPLES, TableTarget, table_pair

from deltatree.bench import Ranks, run_bench

ranks = Ranks.of(os.environ)
pair = table_pair(TableTarget({"verify": float(sys.argv[2])}))
run = run_bench(pair, SAMPLES, PLAN, Path(sys.argv[1]), ranks=ranks)
print(f"{ranks.rank}:{len(run.records)}")
