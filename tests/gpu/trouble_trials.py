"""A job that hangs and one whose memory is short: whom the launcher names, and what it leaves."""

from pathlib import Path

from benchmarks.bounded import CommandResult
from benchmarks.device import NODE
from entrypoint.core.errors import STUCK

from .trial import SCRIPTS, Bench, expect

PATIENCE = "5"
"""Of the hang detector, in seconds."""


def hang(bench: Bench) -> str:
    """A hang on the GPUs is ended, the rank named, every stack and NCCL's flight recorder kept."""
    alone = bench.ranks == 1
    script = "endless.py" if alone else "skip.py"
    rank = bench.ranks - 1
    ranks = ("--device", bench.device, "--nproc-per-node", str(bench.ranks), "--hang-timeout", PATIENCE)
    ended = bench.launch("hang", str(SCRIPTS / script), bench.device, options=ranks)
    expect(ended.status == STUCK, f"the launcher ended with {ended.status}, not {STUCK}", ended)
    begin = f"apptrain: rank {rank} on {NODE}, status {STUCK}: stuck, no step for {PATIENCE} s after step 3: "
    said = _said(ended, begin)
    expect(f"{script}:" in said, f"where it is is not said: {said}", ended)
    folder = bench.folder / "hang" / "stacks" / "0"
    for number in range(bench.ranks):
        stack = _text(folder / f"{NODE}.rank{number}.txt")
        expect(script in stack, f"no stack of rank {number} in {folder}: {_listed(folder)}", ended)
    if bench.device == "cuda":
        for number in range(bench.ranks):
            dump = folder / f"nccl.rank{number}"
            expect(dump.exists() and dump.stat().st_size, f"no {dump.name}: {_listed(folder)}", ended)
    form = (
        "one rank alone, kernels that do not end"
        if alone
        else f"one of {bench.ranks} ranks skips an all_reduce"
    )
    return f"{form}: {said.removeprefix('apptrain: ')}"


def memory(bench: Bench) -> str:
    """A GPU's memory that runs out is one line, with the rank and CUDA's own words."""
    ended = bench.launch("memory", str(SCRIPTS / "oom.py"))
    expect(ended.status == 1, f"the launcher ended with {ended.status}, not 1", ended)
    said = _said(ended, f"apptrain: rank {bench.ranks - 1} on {NODE} failed first, status 1: ")
    expect("CUDA out of memory" in said, f"no word of memory: {said}", ended)
    return said.removeprefix("apptrain: ")[:160]


def _said(ended: CommandResult, begin: str) -> str:
    """The one line that begins so."""
    lines = [line for line in ended.err.splitlines() if line.startswith(begin)]
    expect(len(lines) == 1, f"{len(lines)} lines begin with {begin!r}", ended)
    return lines[0]


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _listed(folder: Path) -> str:
    return ", ".join(sorted(path.name for path in folder.glob("*"))) or "nothing is there"
