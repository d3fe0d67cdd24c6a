"""`python -P -m entrypoint`: the long spelling of `apptrain`, for an image that has no such command."""

import sys

from entrypoint.cli.main import main

sys.exit(main(sys.argv[1:]))
