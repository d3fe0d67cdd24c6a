"""`python -P -m entrypoint`: the long spelling of `apptrain`, for an image that has no such command."""

import gc
import sys

gc.disable()  # until `launch`: what modules make is no garbage, and the search takes a tenth of their import

from entrypoint.cli.main import main  # noqa: E402

status = main(sys.argv[1:])
gc.freeze()  # or the end of `prepare`, for which a job's nodes wait, would take 6 ms longer
sys.exit(status)
