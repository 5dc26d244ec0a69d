"""Measure how long ``import layerzero`` takes beyond the imports of torch that every sharded program needs.

    python benchmarks/import_time.py --rounds 20

Each round starts one process that imports torch alone, and one that imports layerzero after torch. The program prints
the median of the differences between the two, in seconds, and the modules that layerzero adds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
TORCH = "import torch, torch.distributed.fsdp"
PROGRAM = """
import sys, time
began = time.process_time()
{imports}
print(time.process_time() - began, sum(name.partition(".")[0] == "layerzero" for name in sys.modules), len(sys.modules))
"""


def measure(imports: str) -> tuple[float, int, int]:
    """Return processor time in seconds, and the number of modules of layerzero and of all packages."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", PROGRAM.format(imports=imports)]
    done = subprocess.run(
        command, env=environment | {"PYTHONPATH": path}, check=True, stdout=subprocess.PIPE, text=True
    )
    seconds, own, total = done.stdout.split()
    return float(seconds), int(own), int(total)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    measure(f"{TORCH}, layerzero")  # compiles the bytecode
    pairs = [(measure(TORCH), measure(f"{TORCH}, layerzero")) for _ in range(rounds)]
    added = sorted(ours[0] - alone[0] for alone, ours in pairs)
    (_, _, before), (_, own, after) = pairs[-1]
    print(f"import layerzero: {statistics.median(added):.3f} s beyond torch ({added[0]:.3f} to {added[-1]:.3f})")
    print(f"modules: {own} of layerzero, {after - before - own} others")


if __name__ == "__main__":
    main()
