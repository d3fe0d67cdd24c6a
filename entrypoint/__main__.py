"""`python -P -m entrypoint`."""

import sys

from entrypoint.cli import main

sys.exit(main(sys.argv[1:]))
