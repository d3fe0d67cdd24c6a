"""Makes what `apptrain explain` reads, and docs/troubleshooting.md: `make catalogue`.

Of entrypoint/explain/catalogue.yaml and messages.yaml, and of the refusals in the sources. A login node's
Python may have no PyYAML, so the program reads JSON. `make lint` looks whether all
is made of them as they are now.

Usage: tools/catalogue.py [--check]    --check: write nothing; 1 if a file is not made as it would be now
"""

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(CHECKOUT))

from entrypoint.core import strict_yaml  # noqa: E402
from entrypoint.explain import catalogue, messages  # noqa: E402
from tools import refusals, structure, troubleshooting  # noqa: E402

PAGE = CHECKOUT / "docs/troubleshooting.md"


def made() -> Mapping[Path, str]:
    """The text of each file. Raises catalogue.Wrong."""
    data, of_ours = strict_yaml.load(catalogue.SOURCE), strict_yaml.load(messages.SOURCE)
    causes = catalogue.check(data)
    own = troubleshooting.own(of_ours, refusals.find(structure.read(CHECKOUT)))
    return {
        catalogue.MADE: _rows(data),
        messages.MADE: _rows(own),
        PAGE: troubleshooting.page(of_ours, causes),
    }


def _rows(data: Iterable[Any]) -> str:
    rows = ",\n".join(json.dumps(one, sort_keys=True) for one in data)
    return f"[\n{rows}\n]\n"


def main(arguments: list[str]) -> int:
    is_check, status = arguments == ["--check"], 0
    for file, text in made().items():
        if not is_check:
            file.write_text(text)
        elif not file.exists() or file.read_text() != text:
            print(f"{file.relative_to(CHECKOUT)} is not as it would be made now: make catalogue")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
