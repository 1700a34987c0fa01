"""Write mpmath's derivatives of elementwise functions in their tails into a file.

python tests/corrections/write_tails.py
"""

import json
import sys
from pathlib import Path


def main() -> None:
    from corrections.tails import TAILS, TRUTHS, exact, points
    from tqdm import tqdm

    table = {name: {repr(point): exact(name, point) for point in points(name)} for name in tqdm(TAILS)}
    # Each function has one line.
    lines = [f"{json.dumps(name)}: {json.dumps(rows)}" for name, rows in table.items()]
    TRUTHS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    main()
