"""`python -m train.hello`: do the ranks meet, and does a collective give the right sum?

Each rank prints `[tcp://HOST:PORT] hello from [NODE:BACKEND] process R/W`.
"""

import os
import sys

from train.environment import read_rank_info, said_rank
from train.status import BAD_INPUT, DONE, FAILED, TrainingRefused
from train.stop import die_of_interrupt, listen


def main() -> int:
    """Greet and check; returns the exit status."""
    listen()
    die_of_interrupt()
    try:
        info = read_rank_info(os.environ)
        from train.distributed import World, choose_device

        world = World(info, choose_device("auto", info))
    except TrainingRefused as error:
        if error.rank == said_rank(os.environ):
            print(f"train.hello: {error}", file=sys.stderr)
        return BAD_INPUT
    (found,) = world.sum([world.rank + 1])
    expected = world.size * (world.size + 1) // 2
    where = f"[{info.node}:{world.backend}] process {world.rank}/{world.size}"
    # One write: the ranks share a pipe.
    os.write(1, f"[tcp://{info.master or '127.0.0.1:0'}] hello from {where}\n".encode())
    if found != expected:
        print(f"train.hello: {where}: all_reduce gave {found} instead of {expected}", file=sys.stderr)
        return FAILED
    world.close()
    return DONE


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)
