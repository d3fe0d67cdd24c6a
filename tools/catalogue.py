"""Makes entrypoint/explain/catalogue.json from catalogue.yaml: `make catalogue`.

A login node's Python may have no PyYAML, so the program reads the JSON. Tests hold that they agree.

Usage: tools/catalogue.py [--check]    --check: write nothing; 1 if the JSON is not made from the YAML as it
is
"""

import json
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(CHECKOUT))

from entrypoint.core import strict_yaml  # noqa: E402
from entrypoint.explain import catalogue  # noqa: E402


def made() -> str:
    """The JSON of the YAML. Raises catalogue.Wrong."""
    data = strict_yaml.load(catalogue.SOURCE)
    catalogue.check(data)
    rows = ",\n".join(json.dumps(one, sort_keys=True) for one in data)
    return f"[\n{rows}\n]\n"


def main(arguments: list[str]) -> int:
    text = made()
    if arguments == ["--check"]:
        is_same = catalogue.MADE.exists() and catalogue.MADE.read_text() == text
        if not is_same:
            print(
                f"{catalogue.MADE.name} is not made from {catalogue.SOURCE.name} as that is now: make "
                f"catalogue"
            )
        return int(not is_same)
    catalogue.MADE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
