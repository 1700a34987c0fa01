"""Write mpmath's results for Functions at extreme numbers into a file for the tests.

python tests/functions/write_truths.py
"""

import json
import sys
from pathlib import Path

# More digits than float64 holds; later changes in mpmath's rounding stay below them.
STORED_DIGITS = 20


def main() -> None:
    from functions.extremes import TRUTHS, each_extremes, points, truth
    from mpmath import mp
    from tqdm import tqdm

    def row(extremes, point):
        return [mp.nstr(value, STORED_DIGITS) for value in truth(extremes, point)]

    table = {
        name: {repr(point): row(extremes, point) for point in points(name, extremes)}
        for name, _, extremes in tqdm(list(each_extremes()), unit=" functions")
    }
    # Write one line per function.
    lines = [f"{json.dumps(name)}: {json.dumps(rows)}" for name, rows in table.items()]
    TRUTHS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    main()
