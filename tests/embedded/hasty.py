"""`entrypoint` with shorter bounds where there is no option for one, or where giving the option would change the rule:
nobody waits a minute in a test.

    python -P -m tests.embedded.hasty FIRST_STEP HANG_TIMEOUT launch ...
"""

import dataclasses
import sys

from entrypoint import attempt, options
from entrypoint.cli import main

attempt.FIRST_STEP = float(sys.argv[1])
options.OPTIONS = tuple(
    dataclasses.replace(option, default=float(sys.argv[2])) if option.name == "hang-timeout" else option
    for option in options.OPTIONS
)
sys.exit(main(sys.argv[3:]))
