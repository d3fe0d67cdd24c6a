"""A sweep: each element of a job array trains with its own line of GRID, and a second command collects the results.

This machine:  for i in 0 1 2 3; do apptrain run --run-dir runs/$i -- examples/sweep.py --element $i; done
Slurm:         sbatch --array=0-3 -N 1 --gpus-per-node=1 slurm/multinode.sbatch -- examples/sweep.py
PBS:           export APPTRAIN_ARGS='-- examples/sweep.py'
               qsub -J 0-3 -v APPTRAIN_ARGS -l select=1:ncpus=8:ngpus=1 pbs/multinode.pbs

Collect:       python3 examples/sweep.py runs/apptrain-JOB_*      (needs no torch; an element without a result is named)

Leave --run-dir out in a job array: each element has a run directory of its own. Copy stop.py with it.
"""

import itertools
import json
import os
import sys
from pathlib import Path

GRID = [{"lr": lr, "width": width} for lr, width in itertools.product((0.1, 0.01), (8, 32))]
STEPS = 200


def collect(runs):
    """Prints the results of these run directories, the best first; the status is 1 if one has none."""
    results, missing = [], []
    for run in runs:
        try:
            results.append(json.loads(Path(run, "sweep.json").read_text()))
        except (FileNotFoundError, NotADirectoryError, ValueError):  # not there, or cut
            missing.append(run)
    for result in sorted(results, key=lambda result: result["loss"]):
        print("\t".join(f"{name}={value}" for name, value in result.items()))
    if missing:
        print("no result yet:", *missing, file=sys.stderr)
    return 1 if missing else 0


def train(index):
    import stop

    request = stop.listen()  # before the slow imports: until then the signal kills the process

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    point, run_dir = GRID[index], Path(os.environ["APPTRAIN_RUN_DIR"])
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    state_file = run_dir / "checkpoints" / "state.pt"
    state_file.parent.mkdir(exist_ok=True)
    torch.manual_seed(1)
    layers = torch.nn.Linear(8, point["width"]), torch.nn.Tanh(), torch.nn.Linear(point["width"], 1)
    model = DistributedDataParallel(torch.nn.Sequential(*layers).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=point["lr"])
    step = 0
    if state_file.exists():
        state = torch.load(state_file, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    while step < STEPS:
        step += 1
        torch.manual_seed(1000 * step + dist.get_rank())
        data = torch.randn(16, 8, device=device)
        loss = (model(data) - data.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        status = stop.agreed(request)
        if status:
            if dist.get_rank() == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, state_file.with_name(".state.pt"))
                state_file.with_name(".state.pt").replace(state_file)
            stop.leave(status)
    if dist.get_rank() == 0:
        result = {"index": index, **point, "steps": step, "loss": loss.item()}
        (run_dir / ".sweep.json").write_text(json.dumps(result))
        (run_dir / ".sweep.json").replace(run_dir / "sweep.json")
    stop.leave(0)


if __name__ == "__main__":
    element = os.environ.get("SLURM_ARRAY_TASK_ID") or os.environ.get("PBS_ARRAY_INDEX") or ""
    if sys.argv[1:2] == ["--element"]:
        element = "".join(sys.argv[2:])
    elif sys.argv[1:]:
        sys.exit(collect(sys.argv[1:]))
    if element not in map(str, range(len(GRID))):
        begin = f"element {element}" if element else "no job array, and no --element"
        sys.exit(f"{begin}: GRID has the elements 0 to {len(GRID) - 1}; this file's first lines start them")
    train(int(element))
