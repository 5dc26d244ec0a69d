"""Print the share of padding in the flat storage of well-known models, by unit and number of ranks.

    python benchmarks/padding.py [--align 8] [--ranks 8 64 1024]

Each cell is padding in percent of a unit's flat storage. A `+` means that the unit needs a second handle,
because no shard length fits all of its rows. A `.` means that a shard holds fewer than 100 of its longest
rows. Padding is then bounded by one row per rank instead of 1 %.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.model_shapes import UNITS
from layerzero.layout.flat_layout import FlatLayout, plan_layouts

RANKS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def cell(layouts: tuple[FlatLayout, ...]) -> str:
    """Return the text of a cell; `0.27+`: 0.27 % padding, two handles, at least 100 rows per shard in both."""
    padding = sum(layout.padding for layout in layouts) / sum(layout.numel for layout in layouts)
    rows = min(layout.shard_numel / max(slot.row_numel for slot in layout.slots) for layout in layouts)
    return f"{100 * padding:.2f}{'+' * (len(layouts) - 1)}{'.' if rows < 100 else ''}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--align", type=int, default=8, help="elements in 16 bytes: 8 for bf16, 4 for fp32")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    args = parser.parse_args()

    name_width = max(len(f"{shapes.model}, {shapes.unit}") for shapes in UNITS)
    print("padding in % by data-parallel ranks; +: two handles; .: a shard holds < 100 of its longest rows")
    print(f"{'unit':{name_width}} {'copies':>6} {'M elem':>7} " + " ".join(f"{n:>7}" for n in args.ranks))
    slowest, plans, began = 0.0, 0, time.perf_counter()
    for shapes in UNITS:
        cells = []
        for num_shards in args.ranks:
            start = time.perf_counter()
            layouts = plan_layouts(shapes.params, num_shards=num_shards, align=args.align)
            slowest, plans = max(slowest, time.perf_counter() - start), plans + 1
            cells.append(f"{cell(layouts):>7}")
        label = f"{shapes.model}, {shapes.unit}"
        print(f"{label:{name_width}} {shapes.copies:>6} {shapes.numel / 1e6:>7.2f} " + " ".join(cells))
    mean = (time.perf_counter() - began) / plans
    print(f"{plans} plans, {1e3 * mean:.2f} ms each, {1e3 * slowest:.1f} ms at most")


if __name__ == "__main__":
    main()
