"""The traps of job scripts: what each will cause, and what to write instead. `find` names those of a
script. Pure functions of its text; nothing of it is run.

A trap is worth mending; a remark is not wrong, and may be meant so.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache

from entrypoint.core.frozen import dataclass
from entrypoint.explain import launches, request, shell
from entrypoint.explain.launches import Launch
from entrypoint.explain.request import AskedOption, ScriptRequest
from entrypoint.explain.shell import Command, Word


@dataclass(frozen=True)
class Trap:
    id: str
    title: str
    why: str
    """What it will cause."""
    remedy: str
    is_remark: bool = False


@dataclass(frozen=True)
class Found:
    trap: Trap
    line: int
    text: str
    """The place in the script, as a person would quote it."""


@dataclass(frozen=True)
class Script:
    """A job script, read."""

    text: str
    lines: tuple[str, ...]
    request: ScriptRequest
    commands: tuple[Command, ...]
    launches: tuple[Launch, ...]

    @cached_property
    def nodes(self) -> int | None:
        """None where it is not known."""
        if self.request.scheduler:
            return self.request.nodes
        options = [one.agent_options for one in self.launches]
        numbers = [number(one.get("nnodes") or one.get("num-machines")) for one in options]
        return next((one for one in numbers if one), None)

    @cached_property
    def trainings(self) -> list[Launch]:
        found = [one for one in self.launches if one.trains]
        started = [one for one in found if (one.agent or one.is_in_task) and not self._is_beside(one)]
        return started or ([] if self.wrappers else found)

    @cached_property
    def wrappers(self) -> list[Launch]:
        """Scripts that srun and the like start: the training may stand in one of them."""
        return [one for one in self.launches if one.is_in_task and not one.agent and one.script]

    @cached_property
    def helpers(self) -> list[Launch]:
        """Programs in Python that run where the script runs, or in one task, beside a training that srun or a
        launcher of ranks starts: they prepare it, or look at what came of it."""
        own = [one for one in self.launches if one.trains and not one.agent and not one.is_in_task]
        has_started = any(one.agent or one.is_in_task for one in self.trainings)
        alone = [one for one in self.launches if one.trains and self._is_beside(one)]
        return sorted([*(own if has_started else []), *alone], key=_line_of)

    def _is_beside(self, one: Launch) -> bool:
        """Whether it runs in one task, and something else in several."""
        return self._has_several and _has_one_task(self.request, one)

    @cached_property
    def _has_several(self) -> bool:
        """Whether anything that may train is started in more than one task, as far as one can tell."""
        found = [one for one in self.launches if one.trains and (one.agent or one.is_in_task)]
        return any(not _has_one_task(self.request, one) for one in (*found, *self.wrappers))

    @property
    def training(self) -> Launch | None:
        """The first of a launcher of ranks, else of srun and the like: without a launcher it may prepare
        something."""
        return min(self.trainings, key=lambda one: (not one.agent, not one.is_in_task), default=None)

    @cached_property
    def assigned(self) -> list[tuple[Word, str, str]]:
        """Variables that the script sets outside of its tasks, with name and value."""
        words = [word for one in self.commands for word in one.assigned]
        return [(word, *split(word)) for word in words]

    @cached_property
    def rocm_line(self) -> int:
        """Where it names ROCm, as a module, an image or an option: its GPUs are AMD's. 0: nowhere."""
        words = [word for one in self.commands for word in (*one.words, *one.assigned)]
        return next((word.line for word in words if "rocm" in word.text.lower()), 0)

    @cached_property
    def named_files(self) -> set[str]:
        """Variables that the script only ever makes a file's name, and no options."""
        values = [(name, value.strip("'\"")) for _, name, value in self.assigned]
        return {name for name, _ in values} - {name for name, value in values if not _FILE.match(value)}

    @cached_property
    def torchruns_options(self) -> set[str]:
        """Those that a variable of torchrun is, such as PET_NNODES."""
        return {name.lower().replace("_", "-") for name in _OF_TORCHRUN.findall(self.text)}

    @cached_property
    def heads_of_loops(self) -> list[Command]:
        """A `for`, or the `read` of a loop over the lines of its input; in the order of their lines."""
        return [
            one
            for one in self.commands
            if one.texts[:1] == ["for"] or (one.texts[:1] == ["read"] and self._heads_loop(one))
        ]

    def _heads_loop(self, read: Command) -> bool:
        """Whether it reads the lines of the loop's own input."""
        before = self.lines[read.line - 1][:_HEAD_OF_LOOP].partition("read")[0]
        return _OF_LINES.search(before) is not None and not any(map(_OTHER_FILE.match, read.texts))

    @cached_property
    def lines_of_heads(self) -> list[int]:
        return [one.line for one in self.heads_of_loops]

    @cached_property
    def chooses_by_nodes(self) -> bool:
        """Whether it has several lines with torchrun, and chooses by the number of nodes."""
        several = sum(one.agent == "torchrun" for one in self.trainings) > 1
        return several and _BY_NODES.search(self.text) is not None


def split(word: Word) -> tuple[str, str]:
    """The name and the value of an assignment."""
    name, _, value = word.raw.partition("=")
    return name.rstrip("+"), value


def number(word: Word | None) -> int | None:
    """The number that an option is; None for none, or one that only the shell knows."""
    text = word.text if word else ""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 9 else None


def read(text: str) -> Script:
    """Of a script's text, of which line ends of Windows are taken away."""
    text = text[: shell.MOST].replace("\r\n", "\n").replace("\r", "\n")
    lines = tuple(text.split("\n"))
    commands = tuple(shell.commands(text))
    return Script(text, lines, request.read(lines), commands, tuple(launches.read(commands)))


_MOST_COMPONENTS = 16
"""Of a heterogeneous job, for which traps are looked for."""


def find(original: str) -> list[Found]:
    """All traps of a script, in the order of its lines; each once a line. Of a heterogeneous job, those that
    it has whichever component a step runs in."""
    script = read(original)
    found = [one for rule in _RULES for one in rule(script)]
    for component in script.request.others[:_MOST_COMPONENTS]:
        of_it = [one for rule in _RULES for one in rule(replace(script, request=component))]
        found = [
            one for one in found if (one.trap, one.line) in {(other.trap, other.line) for other in of_it}
        ]
    if "\r\n" in original:
        found.append(Found(CRLF, 1, "every line ends in a carriage return"))
    unique = {(one.trap.id, one.line): one for one in found}
    return sorted(unique.values(), key=_line)


def _line(found: Found) -> tuple[bool, int]:
    return (found.trap.is_remark, found.line)


HEAD_BY_HOSTNAME = Trap(
    "head-by-hostname",
    "the head node's address comes from hostname or ping",
    "hostname names the node on which it runs, so every node that runs this takes itself for the "
    "first, and they never "
    "meet; ping and hostname -i may give 127.0.1.1 or a network that the nodes do not share.",
    'Take the first name of the job\'s list: scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n '
    "1, or head -n 1 "
    '"$PBS_NODEFILE".',
)
HEAD_IN_BATCH = Trap(
    "head-by-hostname",
    "the head node's address comes from hostname or ping",
    "A batch script runs once, on the first node, so this is the right node. In a task it would be each "
    "node's own, and the name may lead to another network than the one that the job's list of nodes names.",
    HEAD_BY_HOSTNAME.remedy,
    is_remark=True,
)
MASTER_IN_TASK = Trap(
    "master-in-each-task",
    "MASTER_ADDR is computed inside each task, or inside the container",
    "Each task computes it for itself: hostname then names every node's own address, and scontrol "
    "does not exist in the "
    "container, so the value is empty.",
    "Compute it once in the batch script, export it, and pass it in.",
)
MASTER_LOCALHOST = Trap(
    "master-is-localhost",
    "MASTER_ADDR is this machine itself, on several nodes",
    "Every node looks for the first node on itself, waits, and runs out of time.",
    "Take the first name of the job's list of nodes.",
)
MASTER_IS_LIST = Trap(
    "master-is-list",
    "MASTER_ADDR is the whole list of nodes",
    "Such a name as gpu-[01-04] does not resolve.",
    'Expand it: scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1.',
)
SINGLE_QUOTES = Trap(
    "single-quotes",
    "a variable stands in single quotes, and is passed as it is written",
    "The shell does not fill it in: the program gets the literal text with the dollar sign. As a "
    "rendezvous id it is the same "
    "for all jobs, so two of them can meet each other.",
    'Use double quotes: "$NAME".',
)
FIXED_PORT = Trap(
    "fixed-port",
    "the port is fixed, on nodes that other jobs may share",
    "A second job on the first node, also your own, finds the port in use (EADDRINUSE), or the two "
    "jobs meet each other.",
    "Take it from the job's number, such as $((20000 + SLURM_JOB_ID % 20000)), or under PBS "
    "$((20000 + ${PBS_JOBID%%[!0-9]*} % 20000)).",
)
RDZV_RANDOM = Trap(
    "rdzv-id-random",
    "--rdzv_id=$RANDOM is drawn by each node for itself",
    "Each node has another rendezvous id, so they never meet, and all run out of time.",
    "Take the job's number: --rdzv_id=$SLURM_JOB_ID.",
)
PBS_NODEID = Trap(
    "pbs-nodeid",
    "PBS_NODEID is not a variable of PBS",
    "PBS does not set it, so the node rank is empty: torchrun refuses it, or every node takes itself "
    "for node 0.",
    "Number the hosts of $PBS_NODEFILE, or use a c10d rendezvous, which needs no node rank.",
)
RANK_ONCE = Trap(
    "rank-once",
    "a rank is filled in by the batch script, before the tasks start",
    "The batch script is itself task 0, so all tasks get 0 (or nothing, if MPI sets it): every node takes "
    "itself for the first one.",
    "Let a shell in each task fill it in: srun bash -c 'torchrun --node_rank=$SLURM_NODEID ...'; under PBS "
    "pbsdsh or mpiexec with bash -c '...' likewise.",
)
FIRST_NODE_ONLY = Trap(
    "first-node-only",
    "the training starts on the first node only",
    "A batch script runs on the first node only. The other nodes start nothing, so this one waits "
    "for them until it runs out of time.",
    "Start one on every node: srun --ntasks-per-node=1 (Slurm), pbsdsh or mpiexec --ppn 1 (PBS) in "
    "front of it.",
)
NO_HOSTFILE = Trap(
    FIRST_NODE_ONLY.id,
    FIRST_NODE_ONLY.title,
    "deepspeed takes the nodes from a hostfile. Without one it knows this node alone, and ends at once if "
    "it is to start on more (no extra nodes available via hostfile).",
    "Write a hostfile, a line NAME slots=GPUS for each node, and start it once with --hostfile; or start it "
    "on each node with --no_ssh and that node's --node_rank.",
)
OPENS_ON_EACH = Trap(
    "deepspeed-on-each-node",
    "deepspeed opens the nodes of its hostfile itself, and is started on each of them",
    "Each of them starts the whole training on all nodes: the second one finds the port in use, or they "
    "share the GPUs.",
    "Start it once, without srun, pbsdsh or mpiexec; or start it on each node with --no_ssh and that node's "
    "--node_rank.",
)
TORCHRUN_PER_TASK = Trap(
    "torchrun-per-task",
    "every task starts a torchrun of its own, and a node has several tasks",
    "Several launchers on a node each start their own ranks: they fight for the port and the GPUs.",
    "One task a node with torchrun (--ntasks-per-node=1), or no torchrun with one task for each rank.",
)
NODES_DIFFER = Trap(
    "nodes-against-nnodes",
    "the job has another number of nodes than --nnodes says",
    "With fewer, torchrun waits for nodes that never come; with more, the rest is turned away or "
    "forms a second world, and with --nnodes=1 each node trains alone.",
    '--nnodes="$SLURM_NNODES" follows the request.',
)
_MEET = (
    '--nnodes="$SLURM_NNODES" --rdzv_backend=c10d --rdzv_id="$SLURM_JOB_ID" --rdzv_endpoint="$head:$port" '
    "(under PBS the number of nodes, and $PBS_JOBID): head is the first name of the job's list of nodes, and "
    "port comes from the job's number."
)
NO_NNODES = Trap(
    "no-nnodes",
    "torchrun starts on several nodes, and has no --nnodes",
    "It takes its node for the only one: each node trains by itself, on all the data, and ends with 0. Where "
    "they have an endpoint in common, one node trains, and the others wait or fail.",
    _MEET,
)
STANDALONE = Trap(
    "standalone-on-several-nodes",
    "torchrun starts on several nodes, and has --standalone",
    "Each node meets itself alone, whatever --rdzv_* say: it trains by itself, on all the data, and ends "
    "with 0; or, where --nnodes wants more, it waits for them until it runs out of time.",
    f"Leave --standalone out, and write {_MEET}",
)
NO_ENDPOINT = Trap(
    "no-endpoint",
    "torchrun starts on several nodes, and is not told where they meet",
    "The variable MASTER_ADDR tells torchrun nothing. Without --rdzv_endpoint or --master_addr (which c10d "
    "does not read) each node waits at its own loopback address, and runs out of time.",
    _MEET,
)
NO_NODE_RANK = Trap(
    "no-node-rank",
    "torchrun starts on several nodes, and all of them are node 0",
    "Without --rdzv_backend the rendezvous is static, which numbers nobody. Without --node_rank (the "
    "variable NODE_RANK tells torchrun nothing) each node takes itself for the first, and all run out of "
    "time.",
    "Add --rdzv_backend=c10d to --rdzv_endpoint, which needs no node rank; or let a shell in each task fill "
    "it in: srun bash -c 'torchrun --node_rank=$SLURM_NODEID ...'.",
)
HEAD_BY_ADDRESS = Trap(
    "head-by-address",
    "the head node's address is what hostname says of it on that node",
    "hostname --ip-address may give 127.0.1.1, several addresses, or one of a network that the nodes "
    "do not share.",
    'Give its name: scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1.',
    is_remark=True,
)
TASKS_DIFFER = Trap(
    "tasks-against-gpus",
    "a node gets more tasks than GPUs",
    "Each task is a rank that takes the GPU of its local rank: invalid device ordinal, or two ranks on "
    "one GPU.",
    "Make --ntasks-per-node equal to the GPUs per node.",
)
NPROC_DIFFERS = Trap(
    "tasks-against-nproc",
    "--nproc_per_node does not go with the GPUs or tasks that a node gets",
    "More ranks than GPUs end with invalid device ordinal, or share a GPU; fewer leave GPUs unused.",
    "Make --nproc_per_node equal to the GPUs per node (ntasks-per-node is 1 with torchrun).",
)
GPUS_PER_TASK = Trap(
    "gpus-per-task",
    "--gpus-per-task shows each task its own GPU only",
    "In each task the one GPU is number 0: set_device(LOCAL_RANK) ends with invalid device ordinal, "
    "and NCCL may not reach its "
    "peers directly.",
    "--gpus-per-node=N, so that each task sees all GPUs of its node.",
)
NO_CPUS = Trap(
    "no-cpus-per-task",
    "srun does not take --cpus-per-task over from the job",
    "From Slurm 22.05 on the tasks get one core each: the DataLoader is slow.",
    'srun --cpus-per-task="$SLURM_CPUS_PER_TASK", or export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK.',
)
NO_KILL = Trap(
    "no-kill-on-bad-exit",
    "srun goes on after one task fails",
    "The other tasks hang and wait for it until the time limit: hours of the allocation are lost.",
    "srun --kill-on-bad-exit=1.",
    is_remark=True,
)
EXPORT_DROPS = Trap(
    "export-drops",
    "--export drops variables that the job needs",
    "Without ALL only the named variables reach the tasks: MASTER_ADDR, PATH and HOME of the batch "
    "script are missing.",
    "--export=ALL, or --export=ALL,NAME=VALUE.",
)
_SOURCE = ("source", ".")
NO_NV = Trap(
    "no-nv",
    "the container is started without --nv",
    "The GPU and its driver are not visible inside: torch finds no CUDA device.",
    "apptainer exec --nv ...",
)
CONDA = Trap(
    "conda-and-container",
    "a conda environment is activated, and the program runs in a container",
    "It has no effect inside the container, which has a Python of its own, or conda does not exist "
    "there. Variables that it sets may "
    "mix both.",
    "Leave the activation out, and install what is missing into the image, or into a venv made with "
    "the image's Python.",
)
MODULE_INSIDE = Trap(
    "module-in-container",
    "module load stands inside the container",
    "The command module does not exist there, and the site's software is not shown.",
    "Load modules before srun, outside of the container; the image must have what the program needs.",
)
NO_SIGNAL = Trap(
    "no-signal",
    "no signal comes before the time limit",
    "At the limit the job is killed, and what was trained since the last checkpoint is lost.",
    "#SBATCH --signal=B:USR2@120 and a handler that saves; under PBS a clock of your own. Frequent "
    "checkpoints do too.",
    is_remark=True,
)
TIME_IN_MINUTES = Trap(
    "time-in-minutes",
    "the time limit is a number of minutes",
    "Slurm takes a number alone for minutes, and Slurm and PBS take 24:00 for minutes and seconds: if hours "
    "were meant, the job is killed long before.",
    "If hours are meant, write 24:00:00.",
    is_remark=True,
)
WALLTIME_IN_SECONDS = Trap(
    "walltime-in-seconds",
    "the walltime is a number of seconds",
    "PBS takes a number alone for seconds: the job is killed before it has begun to train.",
    "Write hours as walltime=24:00:00.",
)
VENV = Trap(
    "venv-and-container",
    "a virtual environment is activated, and the program runs in a container",
    "Inside it is another Python; a venv that the image's own Python has made counts only if the image shows "
    "its folder.",
    "Leave the activation out, unless the venv was made with the image's Python.",
    is_remark=True,
)
EXCLUSIVE = Trap(
    "exclusive-options",
    "two options of the request are mutually exclusive",
    "Slurm refuses the job, or the step (from 26.05 on also --gres=gpu with --gpus-per-node).",
    "Keep one of the two.",
)
LATE = Trap(
    "sbatch-after-command",
    "a directive (#SBATCH or #PBS) stands after the first command",
    "It is ignored: the job runs with the default of that option.",
    "Move it above the first command.",
)
CRLF = Trap(
    "crlf",
    "the file has the line ends of Windows (CRLF)",
    "sbatch refuses it, or bash takes the carriage return (\\r) for a part of each last word.",
    "dos2unix SCRIPT.",
)
NODEFILE_INSIDE = Trap(
    "nodefile-in-container",
    "$PBS_NODEFILE is read inside the container or on another host",
    "The file lies in PBS's spool on the first host, which is not visible in the container: the "
    "address is empty.",
    "Read it in the job script, and pass the answer in.",
)
IFNAME = Trap(
    "ifname",
    "NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME names one interface",
    "A node that has no interface of this name ends with no socket interface found.",
    "Leave it out, or exclude instead: NCCL_SOCKET_IFNAME=^lo,docker.",
)
LOOPBACK = Trap(
    "ifname-loopback",
    "NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME is the loopback interface, on several nodes",
    "lo leads from each node to itself: the ranks of the nodes do not find each other.",
    "Leave it out, or exclude instead: NCCL_SOCKET_IFNAME=^lo,docker.",
)
PORT_RANDOM = Trap(
    "port-random",
    "the port is drawn at random by each node for itself",
    "Each node waits at a port of its own, and they never meet.",
    "Draw it once, before the tasks start, or calculate it from the job's number: "
    "$((20000 + SLURM_JOB_ID % 20000)).",
)
NUM_PROCESSES = Trap(
    "num-processes",
    "accelerate's --num_processes is not the number of all GPUs of the job",
    "It counts the processes of all machines together: GPUs stay idle, or ranks find none.",
    "--num_processes: nodes times GPUs of a node.",
)
NO_WAIT = Trap(
    "no-wait",
    "the training starts in the background, and the job script does not wait for it",
    "The job ends with its script, and the scheduler ends what still runs.",
    "wait at the end of the script.",
)
SSH_ENVIRONMENT = Trap(
    "ssh-environment",
    "the environment is activated in the job script alone, and ssh starts the training",
    "A shell of ssh begins anew: it finds another Python there, or no torchrun.",
    "Activate it in the command that ssh runs, or give the program's whole path.",
)
LOOP_WAITS = Trap(
    "loop-waits",
    "a loop starts one node after another, and waits for each",
    "The first node waits for the others, which start only after it has ended.",
    "Put & behind the command, and wait behind the loop.",
)
LOOP_IS_READ = Trap(
    "loop-is-read",
    "what a loop starts reads the rest of the list that the loop reads",
    "ssh and srun pass their standard input on, which is the loop's list of hosts: they take all that is "
    "left of it, and no host follows the first one.",
    "Write ssh -n, srun --input=none, or < /dev/null behind the command.",
)
RANK_FIXED = Trap(
    "rank-fixed",
    "the rank of a node is fixed in a script for several nodes",
    "If every node starts it unchanged, all have the same rank, and wait for the others.",
    "Take it from the first argument: --node_rank $1.",
    is_remark=True,
)
DEVICES_DIFFER = Trap(
    "devices-against-tasks",
    "Lightning's devices is not --ntasks-per-node",
    "Under Slurm, Lightning starts no ranks of its own: it ends, or waits for ranks that nobody starts.",
    "Make --ntasks-per-node equal to devices.",
)
FEWER_TASKS = Trap(
    "fewer-tasks-than-nodes",
    "the training gets fewer tasks than the job has nodes",
    "srun starts --ntasks tasks: some nodes start nothing, and the others wait for them.",
    "--ntasks-per-node=1 with torchrun, and no --ntasks.",
)
MPIRUN_IN_SRUN = Trap(
    "mpirun-in-srun",
    "each task of srun starts an mpirun of its own",
    "Each of them starts all processes: several times as many as there are GPUs.",
    "One of the two: mpirun without srun, or srun with a task for each process (--mpi=pmix).",
)
DEBUG_SLOW = Trap(
    "debugging-slow",
    "a switch for debugging is on, which slows down each step",
    "CUDA_LAUNCH_BLOCKING has each kernel waited for, TORCH_DISTRIBUTED_DEBUG=DETAIL has the ranks compare "
    "each collective.",
    "Leave it out once the fault is found.",
    is_remark=True,
)
VISIBLE_DEVICES = Trap(
    "visible-devices",
    "CUDA_VISIBLE_DEVICES shows fewer GPUs than a node has ranks",
    "Ranks without a GPU of their own end with invalid device ordinal, or share one.",
    "Leave it out: the scheduler shows each job its GPUs.",
)
WORLD_SIZE_NODES = Trap(
    "world-size-is-nodes",
    "WORLD_SIZE is the number of nodes, and a node has several ranks",
    "The first ranks form a world of their own, the others are turned away or wait.",
    "WORLD_SIZE=$SLURM_NTASKS.",
)
OUTPUT_FOLDER = Trap(
    "output-folder",
    "the output goes to a directory that has the job's number, so nobody has made it",
    "Where Slurm does not make it, the job fails at once, and there is no log.",
    "#SBATCH --output=logs/%x-%j.out, with logs made before the job is submitted.",
    is_remark=True,
)
BLANK_IN_DIRECTIVE = Trap(
    "blank-in-directive",
    "a blank stands behind the # of a directive",
    "The scheduler takes the line for a comment, and the option does not count.",
    "#SBATCH or #PBS, without the blank, if it is meant.",
    is_remark=True,
)
NOT_EXPORTED = Trap(
    "not-exported",
    "a variable of the job script is not exported, and the tasks' own shell is to fill it in",
    "It stands in single quotes, so the task's shell looks for it, where it is empty.",
    "Write export in front of it.",
)
NODEFILE_LINES = Trap(
    "nodefile-lines",
    "the lines of $PBS_NODEFILE are counted as nodes, and each host has several",
    "It has a line for each of a host's mpiprocs, so the training waits for nodes that do not exist.",
    'sort -u "$PBS_NODEFILE" | wc -l.',
)
SLOW = frozenset(
    {
        ("NCCL_IB_DISABLE", "1"),
        ("NCCL_P2P_DISABLE", "1"),
        ("NCCL_SHM_DISABLE", "1"),
        ("NCCL_P2P_LEVEL", "LOC"),
        ("NCCL_NET", "Socket"),
    }
)
SLOW_TRANSPORT = Trap(
    "slow-transport",
    "NCCL is told not to use a fast way between GPUs or nodes",
    "It then copies through host memory, or sends over TCP, which is many times slower where the fast way "
    "works.",
    "Leave it out; if a run fails without it, the log with NCCL_DEBUG=INFO says why.",
    is_remark=True,
)
NTASKS = Trap(
    "ntasks-against-nodes",
    "--ntasks is not --nodes times --ntasks-per-node",
    "--ntasks decides, and fewer tasks start than the program has ranks: it waits for the others, or "
    "uses one GPU.",
    "Leave --ntasks out.",
)
PURGE_LATE = Trap(
    "module-purge-late",
    "module purge stands behind module load",
    "It unloads again what was loaded before it.",
    "module purge first, then module load.",
)
SIGNAL_UNHEARD = Trap(
    "signal-unheard",
    "--signal=B: warns the job script alone, which does nothing with it",
    "The tasks of srun do not get the signal, and it ends a shell that has no trap for it.",
    "Leave B: out if the program handles the signal; else a trap that passes it on, with srun ... & wait.",
)
SIGNAL_LATE = Trap(
    "signal-behind-srun",
    "the trap for --signal=B: runs only after the training has ended",
    "bash runs a trap only when the program in the foreground has ended: nothing is done with the warning, "
    "and the time limit kills the job.",
    "Start the training in the background, and wait: srun ... & wait $!. The trap then runs at once; wait in "
    "it again for the training to end.",
)
SIGNAL_ELSEWHERE = Trap(
    "signal-without-b",
    "the script has a trap for a signal that --signal sends to the tasks only",
    "Without B: Slurm sends it to the steps of srun, and not to the shell of the batch script: the trap "
    "never runs.",
    "Write --signal=B:USR1@300, and start the training in the background: srun ... & wait $!.",
)
VARIABLE_IN_DIRECTIVE = Trap(
    "variable-in-directive",
    "a variable stands in an #SBATCH line",
    "Slurm fills none in there: the text is taken as it stands.",
    "%j is the job's number, %x its name, %A and %a those of an array; or give the option to sbatch itself.",
)
OUTPUT_NULL = Trap(
    "output-null",
    "the output goes to /dev/null",
    "If it fails there is no log to read.",
    "#SBATCH --output=%x-%j.out.",
)
PBS_MIXED = Trap(
    "pbs-mixed-select",
    "select and the old style of request are mixed",
    "qsub refuses nodes=, ncpus=, ngpus= or mem= beside select.",
    "Write all of it into select: select=2:ncpus=8:ngpus=4:mem=64gb.",
)
NO_SHEBANG = Trap(
    "no-shebang",
    "the first line does not say which shell reads the script",
    "sbatch refuses such a script: it does not look like a batch script.",
    "Begin it with #!/bin/bash.",
)
TRAPS = tuple(one for one in list(globals().values()) if isinstance(one, Trap))

_HEAD_NAMES = re.compile(
    r"(?i)(?:.*_)?(?:master(?:_addr|_node|_host|_ip)?|head(?:_node|_ip|_addr|node)?|rdzv_(?:host|endpoint)|main_?(?:node|process_ip|addr)|host_?node|ip|addr|endpoint|leader|first_?node)$"
)
_BY_NAME = re.compile(
    r"(?:\$\(|`)\s*(?:ping\b|/?(?:usr/)?(?:bin/)?hostname\b)|\|\s*hostname\b|\$\(\s*(?:uname -n|ip "
    r"(?:-4 )?(?:addr|route))"
)
_BY_ADDRESS = re.compile(r"\bhostname\s+(?:-i|-I|--ip-address|--all-ip-addresses)\b")
_PING = re.compile(r"\bping\b")
_SCONTROL = re.compile(r"\bscontrol\b|\$SLURM_(?:JOB_)?NODELIST")
_LITERAL_HOST = re.compile(r"(?:localhost|127\.\d+\.\d+\.\d+|::1)$")
_PORT = re.compile(r"(?i)(?:.*_)?(?:master_|rdzv_|main_process_)?port$")
_RANKS = re.compile(
    r"\$\{?(SLURM_PROCID|SLURM_NODEID|SLURM_LOCALID|PBS_TASKNUM|PBS_NODENUM|OMPI_COMM_WORLD_RANK|PMIX?_RANK)\b"
)
_WAITS = ("wait", "tail", "sleep", "kill", "fg")
"""Commands behind a program in the background that may wait for it."""
_PREPARES = re.compile(
    r"activate|\bmodule\b|\bml\b|PATH=|\bsource\b|\bconda\b|[;&|'\"]\s*\. |-l|/bin/"
    r"|\bapptainer\b|\bsingularity\b"
)
"""What makes an environment, or needs none."""
MPI = ("mpirun", "mpiexec", "mpiexec.hydra", "prun")
_PER_NODE = re.compile(
    r"(?:^| )(?:--?ppn|--?npernode|--?n-per-node|--?ranks-per-node|-N)[ =]([$\w{}]{1,80})|ppr:(\d{1,4}):node"
)
_DEVICES = re.compile(r"(?:^| )(?:--trainer\.|\+*trainer\.|--)devices[ =](\d{1,4})\b")
_RANKS_FILLED = re.compile(r"(?<!\\)" + _RANKS.pattern)
"""Those that no backslash keeps for the task's shell."""
_RANDOM_KEPT = re.compile(r"\\\$(?:\{?|\(\([^$()]*)RANDOM\b")
"""Drawn by the task's shell, as a backslash says."""
_NODEFILE_KEPT = re.compile(r"\\\$\{?PBS_NODEFILE\b")
_OF_WORLD = {"MASTER_ADDR", "RANK", "NODE_RANK", "WORLD_SIZE"}
"""Variables of a program on several nodes that no agent starts."""
_DRAWN = re.compile(r"\bRANDOM\b|\bshuf\b|\brand(?:om|int)\b|\.bind\(")
_SAME_DRAW = re.compile(r"--random-source|\bRANDOM=|\bseed\(")
"""What makes a draw the same everywhere."""
_VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)")
_FILLED_IN = re.compile(r"\$\{?[\w@*#]")
_DEBUGGING = frozenset({("CUDA_LAUNCH_BLOCKING", "1"), ("TORCH_DISTRIBUTED_DEBUG", "DETAIL")})
_SMALL_NUMBER = re.compile(r"[0-9]{1,8}")
_LIST_OF_GPUS = re.compile(r"\d{1,3}(?:,\d{1,3})*")
_FUNCTION = re.compile(r"(?m)^[ \t]*(?:function[ \t]+)?([\w.-]+)[ \t]*(?:\(\)|\{)")
_EXPORTED_FUNCTION = re.compile(r"^[ \t]*export -f\b", re.M)
_ALL_EXPORTED = re.compile(r"\bset -\w*a\b|\ballexport\b")
_INHERITED = re.compile(r"(?:\w*PATH|HOME|USER|TMPDIR|SCRATCH|WORK|CUDA_\w+|SLURM_\w+|PBS_\w+)$")
"""Names that the environment has had before: what the script makes of them passes on."""
_NUMBERED = re.compile(r"%\d*[jJAaNnst]")
_ONE_HOST = re.compile(r"\$(?:\{\w+\[[^\]]*\]\}|\{?(?!\w*LIST)\w*[^\Ws]\}?)|[\w.-]+")
"""A name, or a variable that is an item of a list or not called by a plural."""
_WORD = re.compile(r"\w+")
_OF_TORCHRUN = re.compile(r"\bPET_([A-Z_]+)=")
"""Variables that torchrun takes for its options."""
_ONLY_VARIABLE = re.compile(r'"?\$\{?(\w+)\}?"?')
_FILE = re.compile(r"[\w./~]|\$\{?\w+\}?/")
"""How a program begins, and no option."""
_PROCESSES = re.compile(r"(?:^| )--?(?:n|np)[ =](\d{1,5})\b")
_COUNTED = re.compile(r"(?:^| )--?(?:n|np|c|perhost|npersocket)[ =]|\bppr:")
"""mpirun is told a number of processes, in whatever way."""
_NTASKS = re.compile(r"\$\{?SLURM_(?:NTASKS|NPROCS)\}?")
_AS_MANY_AS_ASKED = re.compile(r"(?:^| )--?(?:n|np)[ =]" + _NTASKS.pattern)
_INTO_FILES = re.compile(r"[\d&]?>>?&?[ \t]*\S+|\btee[ \t]+(?:-a[ \t]+)?\S+")
_CHOICE = re.compile(r"\b(?:if|case)\b|\[ |(?<!\$)\(\(")
_BY_NODES = re.compile(r"(?im)^[ \t]*(?:if|elif|case|\[|\(\()[^\n]*(?:nodes|machines)")
"""A line that chooses by the number of nodes."""
_EXPORTS = re.compile(r"\b(?:export|declare|typeset)\b([^\n;]*)")
_SET_IN_SHELL = re.compile(r"\b(?:for|read(?: -\w+)*) (\w+)")
_COMMENTED = re.compile(r"#\s+(?:SBATCH|PBS)\s+-")
_SINGLE_HOSTS = re.compile(r"\b(?:sort|uniq|awk)\b")
_OF_NODES = re.compile(r"(?i)node|host")
_ALL_LINES = re.compile(r'\s*(?:\$\(\s*(?:cat |<)|`\s*cat )\s*"?\$\{?PBS_NODEFILE\}?"?\s*[)`]?\s*')
"""What gives each line of it, also those that are the same."""
_OF_LINES = re.compile(r"\b(?:while|until)\b")
_OTHER_FILE = re.compile(r"-\w*u")
"""An option of `read`."""
_LONGEST_QUOTE = 2000
_HEAD_OF_LOOP = 500
"""Characters of its line."""
_LONGEST_LOOP = 200
"""Lines."""
_END_OF_LOOP = re.compile(r"[^#]*\bdone\b(.*)")
_OWN_INPUT = {"ssh": re.compile(r"-[A-Za-z]*[nf][A-Za-z]*$"), "srun": re.compile(r"--input\b|-i")}
"""Options that give a starter another standard input, or none."""
_FROM_NODEFILE = re.compile(r'<\s*"?\$\{?PBS_NODEFILE\}?"?')
_LENGTH = re.compile(r'"?\$\{#(\w+)\[[@*]\]\}"?')
_ITEMS = re.compile(r'"?\$\{?(\w+)(?:\[[@*]\])?\}?"?')
_NUMBER_OF_TIME = re.compile(r"([0-9]{2,3})(:00)?")
_MEANT_AS_HOURS = {12, 24, 36, 48, 72, 96, 168}
_MPIPROCS = re.compile(r"\bmpiprocs=(\d{1,4})\b")


def _head_values(script: Script) -> Iterator[tuple[int, str, Launch | None]]:
    """(line, value, the launch inside which it stands) of each address of the head node."""
    for one in script.launches:
        for word in one.assigned if one.in_shell or one.is_in_task else ():
            name, value = split(word)
            if _HEAD_NAMES.match(name):
                yield word.line, value, one
        for option in ("rdzv-endpoint", "master-addr", "main-process-ip"):
            if given := one.agent_options.get(option):
                yield given.line, given.raw, one
    for word, name, value in script.assigned:
        if _HEAD_NAMES.match(name):
            yield word.line, value, None


def _of_head(script: Script) -> Iterator[Found]:
    several = script.nodes != 1
    for line, value, launch in _head_values(script):
        if "srun" in value and not _PING.search(value):
            if several and _BY_ADDRESS.search(value):
                yield Found(HEAD_BY_ADDRESS, line, value)
            continue  # it is asked on the first node
        is_inside = launch is not None and (launch.in_shell or (launch.is_in_task and launch.container != ""))
        literal = value.strip("'\"")
        if _BY_NAME.search(value) or _PING.search(value):
            is_name = script.request.scheduler and not (_PING.search(value) or _BY_ADDRESS.search(value))
            if several:
                outside = HEAD_IN_BATCH if is_name else HEAD_BY_HOSTNAME
                yield Found(MASTER_IN_TASK if is_inside else outside, line, value)
        elif (
            is_inside
            and launch is not None
            and launch.in_shell
            and launch.container
            and _SCONTROL.search(value)
        ):
            yield Found(MASTER_IN_TASK, line, value)
        elif (
            several
            and _LITERAL_HOST.match(literal.rpartition(":")[0] or literal)
            and ((script.nodes or 0) > 1 or _names_hosts(script))
        ):
            yield Found(MASTER_LOCALHOST, line, value)
        elif re.fullmatch(r"\$\{?SLURM_(?:JOB_|STEP_)?NODELIST\}?(?::.*)?", literal) and several:
            yield Found(MASTER_IS_LIST, line, value)


def _names_hosts(script: Script) -> bool:
    """Whether a launch is given a list of nodes, of which there will be several."""
    for one in script.trainings:
        hostfile, include = one.agent_options.get("hostfile"), one.agent_options.get("include")
        if include and _LITERAL_HOST.match(include.text.partition(":")[0]):
            continue  # GPUs of this machine
        if include or (hostfile and hostfile.text != "/dev/null"):
            return True
    return False


def _of_quotes(script: Script) -> Iterator[Found]:
    for one in script.trainings:
        if one.is_filled:
            continue
        for word in (*one.agent_options.values(), *one.words, *one.starter_words):
            if _VARIABLE.search(word.single_quoted):
                yield Found(SINGLE_QUOTES, word.line, word.raw)


def _of_port(script: Script) -> Iterator[Found]:
    if script.request.is_exclusive or not _needs_port(script):
        return
    fixed = {}
    values = {name: value for _, name, value in script.assigned}
    for word, name, value in script.assigned:
        if re.fullmatch(r"['\"]?\d{2,5}['\"]?", value) and _PORT.match(name):
            fixed[name] = word.line
    inner = [
        (word, *split(word))
        for one in script.launches
        if one.in_shell or one.is_in_task
        for word in one.assigned
    ]
    for word, name, value in inner:
        if re.fullmatch(r"['\"]?\d{2,5}['\"]?", value) and _PORT.match(name):
            yield Found(FIXED_PORT, word.line, word.raw)
    for name, line in fixed.items():
        yield Found(FIXED_PORT, line, name)
    for one in script.trainings:
        for option in ("rdzv-endpoint", "master-port", "main-process-port"):
            option_word = one.agent_options.get(option)
            if option_word is None:
                continue
            variable = re.fullmatch(r"\$\{?(\w+)\}?", option_word.text)
            text = values.get(variable[1], "").strip("'\"") if variable else option_word.text
            if re.search(r"(?:^|:)\d{2,5}$", text) and (not variable or ":" in text):
                yield Found(FIXED_PORT, option_word.line, option_word.raw)


def _needs_port(script: Script) -> bool:
    return any("standalone" not in one.agent_options for one in script.trainings)


def _of_random(script: Script) -> Iterator[Found]:
    for one in script.trainings:
        for option in ("rdzv-id", "rdzv-endpoint", "master-port", "main-process-port"):
            word = one.agent_options.get(option)
            if word and "RANDOM" in word.raw and _draws_on_each_node(script, one, word):
                yield Found(RDZV_RANDOM if option == "rdzv-id" else PORT_RANDOM, word.line, word.raw)
    is_by_hand = any(
        not one.is_in_task and not script.request.scheduler and _is_of_several(script, one)
        for one in script.trainings
    )
    for word, name, value in script.assigned:
        if "RANDOM" in value and "rdzv" in name.lower() and not script.request.scheduler:
            yield Found(RDZV_RANDOM, word.line, word.raw)
        if "RANDOM" in value and _PORT.match(name) and is_by_hand and f"${{{name}" not in value:
            yield Found(PORT_RANDOM, word.line, word.raw)


def _of_random_in_tasks(script: Script) -> Iterator[Found]:
    """Ports that a shell draws which each task of one world runs."""
    outside = {word for word, _, _ in script.assigned}
    shells: dict[Word, list[Launch]] = {}
    for one in script.launches:
        if one.is_in_task and one.shell_word:
            shells.setdefault(one.shell_word, []).append(one)
    for shell_word, inside in shells.items():
        words = {word: None for one in inside for word in one.assigned if word not in outside}
        drawn = [word for word in words if _is_drawn_port(word, inside[-1].is_filled)]
        if not drawn or _SAME_DRAW.search(shell_word.raw) or _chooses_by_node(shell_word.raw):
            continue
        if inside[-1].is_filled and not _RANDOM_KEPT.search(shell_word.raw):
            continue
        used = {name for one in inside for name in _port_names(script, one)}
        has_ranks = any(split(word)[0] in ("RANK", "WORLD_SIZE") for word in words)
        for one in inside:
            if has_ranks and one.trains and not one.agent and _nodes_of(script, one) != 1:
                used.add("MASTER_PORT")
        yield from (Found(PORT_RANDOM, word.line, word.raw) for word in drawn if split(word)[0] in used)


def _is_drawn_port(word: Word, is_filled: bool) -> bool:
    name, value = split(word)
    is_drawn = "RANDOM" in value if is_filled else _DRAWN.search(value) is not None
    return is_drawn and _PORT.match(name) is not None and f"${{{name}" not in value


def _port_names(script: Script, one: Launch) -> set[str]:
    """Variables that make the port at which this part of a training on several nodes meets the others."""
    if not one.agent or not _is_of_several(script, one) or _nodes_of(script, one) == 1:
        return set()
    options = map(one.agent_options.get, ("rdzv-endpoint", "master-port", "main-process-port"))
    own = (word for word in options if word and word.variable is None)
    return {name for word in own for name in _VARIABLE.findall(word.raw)}


def _draws_on_each_node(script: Script, one: Launch, option: Word) -> bool:
    """Whether each node draws this option at random for itself: the script draws one for each, starts on
    each, or has the task's own shell draw it."""
    if not _is_of_several(script, one) or one.agent == "deepspeed":
        return False  # deepspeed passes on what it was given
    if option.variable and one.is_in_task:
        return False  # it was drawn when the variable was set
    if _starts_one_node(one):
        return True
    if not one.is_in_task:
        return not script.request.scheduler
    is_kept = one.shell_word is not None and _RANDOM_KEPT.search(one.shell_word.raw) is not None
    return one.in_shell and (is_kept or not one.is_filled)


def _is_of_several(script: Script, one: Launch) -> bool:
    """Whether this is a part of a training on several nodes, as far as one can tell."""
    nnodes = one.agent_options.get("nnodes") or one.agent_options.get("num-machines")
    if nnodes:
        return nnodes.text not in ("1", "1:1")
    if one.agent == "torchrun":
        return False
    if one.agent and script.request.scheduler:
        return script.nodes != 1
    names = {split(word)[0] for word in one.assigned}
    return bool(names & _OF_WORLD) or not one.agent_options.keys().isdisjoint(("node-rank", "machine-rank"))


def _of_pbs_nodeid(script: Script) -> Iterator[Found]:
    for at, line in enumerate(script.lines, 1):
        if re.search(r"\$\{?PBS_NODEID\b", line.partition(" #")[0]) and not line.lstrip().startswith("#"):
            yield Found(PBS_NODEID, at, line.strip())


def _of_ranks(script: Script) -> Iterator[Found]:
    is_slurm = script.request.scheduler == "slurm"
    if not script.request.scheduler or (script.nodes == 1 and script.request.tasks_per_node in (None, 1)):
        return
    for word, name, value in script.assigned if is_slurm else ():
        if name in ("RANK", "NODE_RANK", "LOCAL_RANK", "MACHINE_RANK", "GROUP_RANK") and _RANKS.search(value):
            yield Found(RANK_ONCE, word.line, word.raw)
    for variable in dict.fromkeys(word.variable for word in _words_of_tasks(script) if word.variable):
        for found in _RANKS_FILLED.finditer("" if variable.single_quoted else variable.raw):
            line = variable.line + variable.raw.count("\n", 0, found.start())
            yield Found(RANK_ONCE, line, found[0])
    shells = (one.shell_word for one in script.trainings if one.is_in_task)
    for word in dict.fromkeys(word for word in shells if word and not word.single_quoted):
        for found in _RANKS_FILLED.finditer(word.raw):
            line = word.line + word.raw.count("\n", 0, found.start())
            yield Found(RANK_ONCE, line, found[0])
    for one in script.trainings:
        for option in ("node-rank", "machine-rank"):
            option_word = one.agent_options.get(option)
            is_fixed = option_word is not None and number(option_word) is not None and (script.nodes or 1) > 1
            is_fixed = is_fixed and is_slurm and not _starts_one_node(one)
            is_once = option_word is not None and _RANKS_FILLED.search(option_word.raw) is not None
            is_once = is_once and option_word is not None and not _RANKS.search(option_word.single_quoted)
            is_direct = option_word is not None and not one.in_shell and option_word.variable is None
            if option_word and one.is_in_task and is_direct and (is_once or is_fixed):
                yield Found(RANK_ONCE, option_word.line, option_word.raw)


def _words_of_tasks(script: Script) -> Iterator[Word]:
    """With which the trainings are started there."""
    for one in script.trainings:
        if one.is_in_task:
            yield from one.agent_options.values()
            yield from one.words


def _of_fixed_rank(script: Script) -> Iterator[Found]:
    given = [
        word
        for one in script.trainings
        if (one.in_loop and _is_of_several(script, one))
        or (not one.is_in_task and not script.request.scheduler and (script.nodes or 1) > 1)
        for option in ("node-rank", "machine-rank")
        if (word := one.agent_options.get(option)) and number(word) is not None
    ]
    if len({number(word) for word in given}) == 1:
        yield from (Found(RANK_FIXED, word.line, word.raw) for word in given)


def _of_wait(script: Script) -> Iterator[Found]:
    left = [one for one in script.trainings if one.in_background]
    if not script.request.scheduler or not left or len(left) < len(script.trainings):
        return
    last = max(at for at, one in enumerate(script.launches) if one is left[-1])
    if not any(_waits_for(left[-1], one) for one in script.launches[last + 1 :]):
        yield Found(NO_WAIT, left[0].line, _quote(script, left[0].line))


def _waits_for(training: Launch, one: Launch) -> bool:
    """Whether this command behind a training in the background may wait for it: in the same shell, or in the
    job script's own."""
    is_its_shell = one.shell_word == training.shell_word if one.in_shell else not one.is_in_task
    return is_its_shell and not one.in_background and any(word.text in _WAITS for word in one.words[:1])


def _of_ssh(script: Script) -> Iterator[Found]:
    if not any(_activates(one) and not one.is_in_task for one in script.launches):
        return
    for one in script.trainings:
        if one.starter == "ssh" and one.shell_word and not _PREPARES.search(one.shell_word.raw):
            yield Found(SSH_ENVIRONMENT, one.starter_line, _quote(script, one.starter_line))


def _of_devices(script: Script) -> Iterator[Found]:
    for one in script.trainings:
        text = " ".join(word.text for word in one.words)
        found = _DEVICES.search(text) if "num_nodes" in text or "trainer.devices" in text else None
        tasks = _tasks(script, one)
        if found and one.starter == "srun" and not one.agent and tasks and int(found[1]) != tasks:
            yield Found(DEVICES_DIFFER, one.line, found[0].strip())


def _of_start(script: Script) -> Iterator[Found]:
    nodes = script.nodes
    if not script.request.scheduler or not nodes or nodes < 2:
        return
    if _EXPORTED_FUNCTION.search(script.text):
        return  # tasks may run it
    for one in script.trainings:
        if _opens_nodes(one):
            if (_nodes_of(script, one) or 0) > 1 and not _has_branches(one):
                yield Found(OPENS_ON_EACH, one.line, _quote(script, one.line))
        elif not one.is_in_task and not one.in_shell:
            trap = NO_HOSTFILE if one.agent == "deepspeed" else FIRST_NODE_ONLY
            yield Found(trap, one.line, _quote(script, one.line))


def _opens_nodes(one: Launch) -> bool:
    """Whether this launcher itself starts the training on all nodes of its hostfile, when it runs once."""
    hostfile = one.agent_options.get("hostfile")
    names_nodes = "launcher" in one.agent_options or (hostfile is not None and hostfile.text != "/dev/null")
    is_one_node = not one.agent_options.keys().isdisjoint(("no-ssh", "node-rank"))
    return one.agent == "deepspeed" and names_nodes and not is_one_node


def _of_tasks(script: Script) -> Iterator[Found]:
    in_background = any(one.in_loop and one.in_background for one in script.trainings)
    """A loop may start all nodes but the last one there."""
    for one in script.trainings:
        tasks, nodes = _tasks(script, one), script.nodes
        nnodes = number(one.agent_options.get("nnodes"))
        nproc = one.agent_options.get("nproc-per-node")
        gpus = script.request.gpus_per_node
        is_waited_for = one.in_loop and _starts_one_node(one) and not in_background
        if is_waited_for and _is_of_several(script, one):
            yield Found(LOOP_WAITS, one.starter_line, _quote(script, one.starter_line))
        if one.starter in MPI:
            tasks = _tasks_of_mpi(script, one)
        if one.agent == "torchrun" and one.starter in ("srun", *MPI) and tasks and tasks > 1:
            yield Found(TORCHRUN_PER_TASK, one.line, _quote(script, one.line))
        if nodes and script.request.scheduler and _differs(script, one, nodes):
            yield Found(NODES_DIFFER, one.agent_options["nnodes"].line, f"{nodes} nodes, --nnodes {nnodes}")
        processes, shown = number(nproc), _set_in_front(one, "CUDA_VISIBLE_DEVICES")
        if nproc and processes and gpus and (tasks in (None, 1)):
            if shown is None and processes != gpus:
                yield Found(NPROC_DIFFERS, nproc.line, f"{gpus} GPUs per node, --nproc_per_node {processes}")
            elif shown and processes < _gpus_in(shown):  # VISIBLE_DEVICES is about more of them
                yield Found(NPROC_DIFFERS, nproc.line, f"{shown.raw}, --nproc_per_node {processes}")
        total = number(one.agent_options.get("num-processes"))
        if one.agent == "accelerate" and total and gpus and nodes and total != nodes * gpus:
            line = one.agent_options["num-processes"].line
            yield Found(NUM_PROCESSES, line, f"{nodes} nodes with {gpus} GPUs, --num_processes {total}")
        if one.starter == "srun" and not one.agent and tasks and gpus and tasks > gpus:
            yield Found(TASKS_DIFFER, one.line, f"{gpus} GPUs per node, {tasks} tasks")


def _differs(script: Script, one: Launch, nodes: int) -> bool:
    """Whether --nnodes is another number than this job or step has nodes."""
    nnodes, own = number(one.agent_options.get("nnodes")), _nodes_of(script, one)
    is_told = "standalone" in one.agent_options and (own or 0) > 1  # by STANDALONE
    if not nnodes or nnodes in (nodes, own) or is_told:
        return False
    return nnodes > 1 or own is None or not _is_for_itself(script, one)


def _of_rendezvous(script: Script) -> Iterator[Found]:
    """What torchrun has to be told where its line starts on several nodes; as torch 2.15 does it."""
    for one in script.trainings:
        if one.agent != "torchrun":
            continue
        nodes = _nodes_of(script, one) or 0
        standalone = one.agent_options.get("standalone")
        if standalone:
            if nodes > 1 and not _is_for_itself(script, one):
                yield Found(STANDALONE, standalone.line, f"{nodes} nodes, --standalone")
        elif not _shows_options(script, one):
            continue
        elif "nnodes" not in _given(script, one) or _says_one_node(one):
            is_told = number(one.agent_options.get("nnodes")) == 1  # NODES_DIFFER is about it
            if nodes > 1 and not is_told and not _is_for_itself(script, one):
                yield Found(NO_NNODES, one.line, _quote(script, one.line))
        elif _starts_all(script, one) and not _has_branches(one):
            trap = _missing(script, one)
            if trap:
                yield Found(trap, one.line, _quote(script, one.line))


def _missing(script: Script, one: Launch) -> Trap | None:
    """What nodes that start the same line need to meet, and are not given."""
    given = _given(script, one)
    backend = one.agent_options.get("rdzv-backend")
    name = backend.text if backend else "static"
    if name not in ("static", "c10d") or (backend is None and "rdzv-backend" in given):
        return None
    if number(one.agent_options.get("node-rank")) is not None:
        return None  # RANK_ONCE and RANK_FIXED are about it
    if given.isdisjoint(("rdzv-endpoint", *(["master-addr"] if name == "static" else []))):
        return NO_ENDPOINT
    return NO_NODE_RANK if name == "static" and "node-rank" not in given else None


def _given(script: Script, one: Launch) -> set[str]:
    """torchrun's options, also those that a variable of it is."""
    return script.torchruns_options | one.agent_options.keys()


def _shows_options(script: Script, one: Launch) -> bool:
    """Whether all of torchrun's options stand in its line, and none may be in a variable behind them."""
    first = one.words[0].raw if one.words else ""
    variable = _ONLY_VARIABLE.fullmatch(first)
    if variable is None:
        return not first.strip('"').startswith(("$", "`")) or one.words[0].text.endswith(".py")
    return variable[1] in script.named_files


def _says_one_node(one: Launch) -> bool:
    nnodes = one.agent_options.get("nnodes")
    return nnodes is not None and nnodes.text in ("1", "1:1")


def _starts_all(script: Script, one: Launch) -> bool:
    """Whether this line starts all nodes of a training: at once, or in a loop that gives each the same."""
    if not one.is_in_task or (one.starter not in ("srun", "pbsdsh", *MPI) and not _starts_one_node(one)):
        return False
    nodes, nnodes = _nodes_of(script, one), number(one.agent_options.get("nnodes"))
    if _starts_one_node(one):
        return one.in_loop and ((nnodes or 0) > 1 or (script.nodes or 0) > 1)
    return nodes > 1 if nodes else (nnodes or 0) > 1


def _has_branches(one: Launch) -> bool:
    """Whether a shell in the task may choose another line for each node."""
    return one.shell_word is not None and _chooses_by_node(one.shell_word.raw)


@lru_cache(maxsize=8)
def _chooses_by_node(text: str) -> bool:
    return _CHOICE.search(text) is not None and ("hostname" in text or _RANKS.search(text) is not None)


def _is_for_itself(script: Script, one: Launch) -> bool:
    """Whether each node is to train something of its own, or another line is for several nodes."""
    if script.chooses_by_nodes or _uses_a_rank(" ".join(word.raw for word in one.words)):
        return True
    return (
        one.shell_word is not None
        and "node-rank" not in one.agent_options
        and _uses_a_rank(one.shell_word.raw)
    )


@lru_cache(maxsize=8)  # many lines may stand in one shell's text
def _uses_a_rank(text: str) -> bool:
    """For something else than the name of a log."""
    return _RANKS.search(_INTO_FILES.sub("", text)) is not None


def _nodes_of(script: Script, one: Launch) -> int | None:
    """On how many nodes this line starts its program; None where it is not known."""
    nodes = script.nodes if script.request.scheduler else None
    if _starts_one_node(one):
        return 1
    if one.starter == "srun":
        return _nodes_of_srun(script, one, nodes)
    if one.starter in MPI:
        found = _PROCESSES.search(" ".join(word.text for word in one.starter_words))
        asked = -(-int(found[1]) // (_tasks_of_mpi(script, one) or 1)) if found else nodes
        return min(nodes, asked) if nodes and asked else nodes
    return nodes if one.starter == "pbsdsh" else None


def _nodes_of_srun(script: Script, one: Launch, nodes: int | None) -> int | None:
    is_slurm = script.request.scheduler == "slurm"
    own = ScriptRequest("slurm", (*(script.request.options if is_slurm else ()), *one.starter_options), ())
    option = own.find("nodes")
    count = own.nodes if is_slurm or option else None
    if option and option in one.starter_options and request.NODES_OF_SLURM.fullmatch(option.value):
        count = nodes
    tasks = own.number("ntasks")
    return min(count, tasks) if count and tasks else count


def _of_fewer_tasks(script: Script) -> Iterator[Found]:
    settings = _settings(script, "SLURM_NTASKS")
    for one in script.launches:
        if one.starter != "srun" or script.request.scheduler != "slurm":
            continue
        own = ScriptRequest("slurm", (*script.request.options, *one.starter_options), ())
        nodes = own.nodes or 1
        count = own.number("ntasks") or nodes * (own.tasks_per_node or 1)
        if count > 1 and one.words and one.words[0].text.rpartition("/")[2] in MPI:
            yield Found(MPIRUN_IN_SRUN, one.line, _quote(script, one.starter_line))
        tasks, per_node = own.find("ntasks"), own.find("ntasks-per-node")
        counts = not one.agent_options.keys().isdisjoint(("nnodes", "num-machines"))
        is_part = one.in_loop or one.in_background or own.find("relative", "r", "nodelist")
        if not counts or is_part or not _is_of_several(script, one):
            continue
        variable = _set_for(one, "SLURM_NTASKS", settings)
        set_to = split(variable)[1].strip("'\"") if variable else ""
        if variable and tasks not in one.starter_options:  # srun takes it for its --ntasks
            if _SMALL_NUMBER.fullmatch(set_to) and 0 < int(set_to) < nodes:
                yield Found(FEWER_TASKS, variable.line, f"{variable.raw}, {nodes} nodes")
            continue
        if tasks is None or (per_node and tasks not in one.starter_options):
            continue  # NTASKS is about both
        if count < nodes:
            yield Found(FEWER_TASKS, tasks.line, f"--ntasks={tasks.value}, {nodes} nodes")


def _of_visible_devices(script: Script) -> Iterator[Found]:
    settings = _settings(script, "CUDA_VISIBLE_DEVICES")
    for one in script.trainings:
        ranks = ranks_of_node(script, one) or 1
        word = _set_for(one, "CUDA_VISIBLE_DEVICES", settings)
        if word and 0 < _gpus_in(word) < ranks:
            yield Found(VISIBLE_DEVICES, word.line, f"{word.raw}, {ranks} ranks a node")


def _of_world_size(script: Script) -> Iterator[Found]:
    settings = _settings(script, "WORLD_SIZE")
    for one in script.trainings:
        ranks = (ranks_of_node(script, one) if one.starter == "srun" and not one.agent else None) or 1
        word = _set_for(one, "WORLD_SIZE", settings)
        if word and ranks > 1 and request.NODES_OF_SLURM.fullmatch(split(word)[1].strip("'\"")):
            yield Found(WORLD_SIZE_NODES, word.line, f"{word.raw}, {ranks} ranks a node")


def ranks_of_node(script: Script, one: Launch) -> int | None:
    """How many ranks this launch starts on a node; None where that is not known."""
    if one.agent:
        given = one.agent_options.get("nproc-per-node")
        is_one = one.agent == "torchrun" and "nproc-per-node" not in script.torchruns_options
        return number(given) if given else (1 if is_one else None)
    if one.starter in (*MPI, "ibrun"):
        return _ranks_of_mpi(script, one)
    if one.starter == "srun":
        alone = ScriptRequest("slurm", one.starter_options, ()).number("ntasks") == 1
        return 1 if alone else _tasks(script, one)
    return None if one.is_in_task or one.in_loop else 1


def _ranks_of_mpi(script: Script, one: Launch) -> int | None:
    """Those of a node, or else of all nodes, on which they are taken to be as many each."""
    words = " ".join(word.text for word in one.starter_words)
    asked, total = script.request, _PROCESSES.search(words)
    if _PER_NODE.search(words):
        return _tasks_of_mpi(script, one)
    if total:
        count, nodes = int(total[1]), script.nodes
        return count // nodes if nodes and count % nodes == 0 else None
    if _COUNTED.search(_AS_MANY_AS_ASKED.sub("", words)):
        return None
    if asked.scheduler == "slurm":
        return asked.tasks_per_node if asked.find("ntasks", "ntasks-per-node") else None
    select = asked.find("select")
    found = set(_MPIPROCS.findall(select.value)) if select else set()
    return int(found.pop()) if len(found) == 1 else None


def _settings(script: Script, name: str) -> tuple[list[int], list[Word | None]]:
    """(the lines where the script sets this variable for what follows, what it sets there). None: it is
    unset, or set in a condition or a function, so that nobody knows."""
    found: dict[int, Word | None] = {0: None}
    for command in script.commands:
        if command.texts[:1] == ["unset"] and name in command.texts:
            found[command.line] = None
        for word in command.assigned if not command.words else ():
            if split(word)[0] == name:
                is_at_top = script.lines[word.line - 1].startswith((name, "export"))
                found[word.line] = word if is_at_top else None
    lines = sorted(found)
    return lines, [found[line] for line in lines]


def _set_in_front(one: Launch, name: str) -> Word | None:
    """What sets this variable for this launch alone."""
    return next((word for word in reversed(one.assigned) if split(word)[0] == name), None)


def _set_for(one: Launch, name: str, settings: tuple[list[int], list[Word | None]]) -> Word | None:
    """What of them counts for a launch, if it has none of its own."""
    lines, words = settings
    return _set_in_front(one, name) or words[bisect.bisect(lines, one.line) - 1]


def _gpus_in(word: Word) -> int:
    """How many GPUs a CUDA_VISIBLE_DEVICES shows; 0 where it is not known."""
    value = split(word)[1].strip("'\"")
    return value.count(",") + 1 if _LIST_OF_GPUS.fullmatch(value) else 0


@lru_cache(maxsize=8)  # many lines may stand in one shell's text
def _names_in(shell_word: Word) -> tuple[set[str], set[str]]:
    """The variables that a task's shell fills in, and those that it sets in loops and by reading."""
    filled = {found[1] for found in _VARIABLE.finditer(shell_word.single_quoted)}
    return filled, {found[1] for found in _SET_IN_SHELL.finditer(shell_word.raw)}


def _of_exports(script: Script) -> Iterator[Found]:
    lines = {
        name: word
        for word, name, value in script.assigned
        if not _INHERITED.match(name) and f"${{{name}" not in value
    }
    asked: dict[Word, set[str]] = {}
    for one in script.launches if not _ALL_EXPORTED.search(script.text) else ():
        if one.shell_word and one.starter in ("srun", *MPI) and not one.is_filled:
            names, set_there = _names_in(one.shell_word)
            passed = " ".join(word.raw for word in (*one.starter_words, *one.container_words))
            kept = {split(word)[0] for word in one.assigned} | set(_WORD.findall(passed))
            asked.setdefault(one.shell_word, names & lines.keys()).difference_update(kept, set_there)
    exported = set(_WORD.findall(" ".join(_EXPORTS.findall(script.text.replace("\\\n", " ")))))
    for name in sorted(set().union(*asked.values()) - exported):
        yield Found(NOT_EXPORTED, lines[name].line, lines[name].raw)


def _of_nodefile(script: Script) -> Iterator[Found]:
    select = script.request.find("select")
    processes = _MPIPROCS.search(select.value) if script.request.scheduler == "pbs" and select else None
    for word, name, value in script.assigned if processes and int(processes[1]) > 1 else ():
        counts = "PBS_NODEFILE" in value and "wc -l" in value and not _SINGLE_HOSTS.search(value)
        counts = counts and "$((" not in value
        if counts and _OF_NODES.search(name):
            yield Found(NODEFILE_LINES, word.line, word.raw)
    if processes and int(processes[1]) > 1 and any(map(_starts_a_node, script.trainings)):
        yield from _of_nodefile_lists(script)


def _starts_a_node(one: Launch) -> bool:
    """Whether this starts all ranks of a node, and not a rank for a line of $PBS_NODEFILE."""
    nproc = one.agent_options.get("nproc-per-node")
    return one.agent == "torchrun" and nproc is not None and nproc.text != "1"


def _of_nodefile_lists(script: Script) -> Iterator[Found]:
    """Lists of all lines of $PBS_NODEFILE, of which the items are counted or looped over as nodes."""
    lines = {
        (name, _ALL_LINES.fullmatch(value.strip("()")) is not None) for _, name, value in script.assigned
    }
    lists = {name for name, has_all in lines if has_all} - {name for name, has_all in lines if not has_all}
    for word, name, value in script.assigned:
        counted = _LENGTH.fullmatch(value)
        if counted and counted[1] in lists and _OF_NODES.search(name):
            yield Found(NODEFILE_LINES, word.line, word.raw)
    seen: set[int] = set()
    """Loops whose first training has been looked at, by their lines."""
    for one in filter(_starts_a_node, script.trainings):
        nnodes = one.agent_options.get("nnodes")
        counted = _LENGTH.fullmatch(nnodes.raw) if nnodes else None
        if nnodes and counted and counted[1] in lists:
            yield Found(NODEFILE_LINES, nnodes.line, nnodes.raw)
        loop = _loop_around(script, one) if one.starter == "ssh" else None
        if loop and loop.line not in seen:
            seen.add(loop.line)
            looped = loop.words[-1]
            item = _ITEMS.fullmatch(looped.raw)
            before = "\n".join(script.lines[looped.line : one.starter_line])
            if loop.texts[0] == "for":
                has_all = bool(_ALL_LINES.fullmatch(looped.raw) or (item and item[1] in lists))
            else:
                has_all = _FROM_NODEFILE.fullmatch(_end_of_loop(script, one).strip()) is not None
            if has_all and not re.search(r"\bcontinue\b", before) and not _CHOICE.search(before):
                yield Found(NODEFILE_LINES, loop.line, _quote(script, loop.line))


def _loop_around(script: Script, one: Launch) -> Command | None:
    """The head of the loop that starts this: a `for`, or the `read` of a loop over lines."""
    at = bisect.bisect(script.lines_of_heads, one.starter_line) if one.in_loop else 0
    return script.heads_of_loops[at - 1] if at else None


def _end_of_loop(script: Script, one: Launch) -> str:
    """What stands behind the next `done`."""
    lines = script.lines[one.starter_line : one.starter_line + _LONGEST_LOOP]
    found = (_END_OF_LOOP.match(line[:_HEAD_OF_LOOP]) for line in lines)
    return next((one[1] for one in found if one), "")


def _of_loop_input(script: Script) -> Iterator[Found]:
    """Not of what has an input of its own: from a file, or none, as in the background."""
    for one in script.launches:
        if one.starter not in ("ssh", "srun") or one.in_background or not one.in_loop:
            continue
        loop, line = _loop_around(script, one), _quote(script, one.starter_line)
        own = _OWN_INPUT[one.starter]
        is_closed = any(own.match(word.text) for word in one.starter_words)
        if loop is None or loop.texts[0] != "read" or "<" in line or is_closed:
            continue
        between = script.lines[loop.line - 1 : one.starter_line - 1]
        if len(between) <= _LONGEST_LOOP and not any("done" in text for text in between):  # or it has ended
            yield Found(LOOP_IS_READ, one.starter_line, line)


def _tasks_of_mpi(script: Script, one: Launch) -> int | None:
    """Processes of a node, where mpiexec is told how many."""
    values = {name: value.strip("'\"") for _, name, value in script.assigned}
    found = _PER_NODE.search(" ".join(word.text for word in one.starter_words))
    text = (found[1] or found[2]) if found else ""
    text = values.get(text.strip("${}"), "") if text.startswith("$") else text
    return int(text) if text.isascii() and text.isdigit() and len(text) < 5 else None


def _starts_one_node(one: Launch) -> bool:
    """pbsdsh without a number or name of a node starts on all."""
    texts = [word.text for word in one.starter_words]
    if one.starter == "pbsdsh":
        return any(text.startswith(("-n", "-h")) for text in texts)
    if one.starter == "srun":
        return any(
            option.name == "nodelist" and _ONE_HOST.fullmatch(option.value) for option in one.starter_options
        )
    return one.starter in ("ssh", "pbs_tmrsh")


def _tasks(script: Script, one: Launch) -> int | None:
    """Tasks of a node of this launch; None where that is not known."""
    is_slurm = script.request.scheduler == "slurm"
    return step(script.request, one.starter_options).tasks_per_node if is_slurm else None


def _has_one_task(asked: ScriptRequest, one: Launch) -> bool:
    """Whether srun starts it in one task, and nothing else would start it on another node. What starts ranks
    makes several of a task: on one node these may be all."""
    if one.starter != "srun" or one.in_loop or one.in_background:
        return False
    if one.agent and (asked.nodes == 1 or {"nnodes", "num-machines"} & one.agent_options.keys()):
        return False
    own = step(asked, one.starter_options)
    given = ScriptRequest("slurm", one.starter_options, ()).find("ntasks")
    if given:
        return own.number("ntasks") == 1
    return own.nodes == 1 and own.tasks_per_node == 1


def _line_of(one: Launch) -> int:
    return one.line


def step(whole: ScriptRequest, started: Sequence[AskedOption]) -> ScriptRequest:
    """What the request and these options of srun ask together."""
    own = [one for one in started if one.name != "ntasks" or not _NTASKS.fullmatch(one.value)]
    has_count = any(one.name == "ntasks" for one in own)
    asked = [one for one in whole.options if not has_count or one.name != "ntasks-per-node"]
    return replace(whole, options=(*asked, *own))


def _of_gpus_per_task(script: Script) -> Iterator[Found]:
    for started in [one.starter_options for one in script.trainings] or [()]:
        own = step(script.request, started)
        option, tasks = own.find("gpus-per-task"), own.find("ntasks-per-node", "ntasks")
        is_unknown = tasks is not None and "$" in tasks.value and own.tasks_per_node is None
        if option and own.tasks_per_node != 1 and not is_unknown:
            yield Found(GPUS_PER_TASK, option.line, f"--gpus-per-task={option.value}")


def _of_srun(script: Script) -> Iterator[Found]:
    exported = {name for _, name, _ in script.assigned}
    cpus = script.request.find("cpus-per-task", "c")
    for one in script.trainings:
        if one.starter != "srun":
            continue
        own = ScriptRequest("slurm", one.starter_options, ())
        inherits = {"SRUN_CPUS_PER_TASK"} & exported
        binding = own.find("cpu-bind")
        is_bound = binding is None or {"no", "none"}.isdisjoint(binding.value.split(","))
        if (
            cpus
            and cpus.value != "1"
            and is_bound
            and not own.find("cpus-per-task")
            and not inherits
            and not own.find("exclusive")
        ):
            yield Found(NO_CPUS, one.starter_line, _quote(script, one.starter_line))
        nodes = _nodes_of(script, one) or script.nodes or 2
        tasks = own.number("ntasks") or nodes * (_tasks(script, one) or 1)
        kill = own.find("kill-on-bad-exit")
        if tasks > 1 and (kill is None or kill.value == "0") and "SLURM_KILL_BAD_EXIT" not in exported:
            yield Found(NO_KILL, one.starter_line, _quote(script, one.starter_line))
        export = own.find("export")
        if export and "ALL" not in export.value.split(","):
            yield Found(EXPORT_DROPS, one.starter_line, f"--export={export.value}")
    export = script.request.find("export")
    if (
        export
        and script.request.scheduler == "slurm"
        and "ALL" not in export.value.split(",")
        and export.value
    ):
        is_undone = any(
            "SLURM_EXPORT_ENV" in word.text for one in script.commands for word in (*one.words, *one.assigned)
        ) or any(
            found.name == "export" and "ALL" in found.value
            for one in script.launches
            for found in one.starter_options
        )
        if not is_undone:
            yield Found(EXPORT_DROPS, export.line, f"--export={export.value}")


def _of_container(script: Script) -> Iterator[Found]:
    sets_nv = any(name in ("APPTAINER_NV", "SINGULARITY_NV") for _, name, _ in script.assigned)
    activated = [one for one in script.launches if _activates(one)]
    seen_nv = set()
    for one in script.launches:
        if not one.container:
            continue
        options = {word.text for word in one.container_words}
        is_given = sets_nv or script.rocm_line or options & {"--nv", "--nvccli"}
        if not is_given and _wants_gpu(script, one):
            if one.image not in seen_nv:
                yield Found(NO_NV, one.container_line, _quote(script, one.container_line))
            seen_nv.add(one.image)
        name = one.words[0].text if one.words else ""
        if name in ("module", "ml"):
            yield Found(MODULE_INSIDE, one.line, _quote(script, one.line))
        if one.in_shell or one.is_in_task:
            is_kept = one.shell_word is not None and _NODEFILE_KEPT.search(one.shell_word.raw) is not None
            for word in (*one.words, *one.assigned, *one.agent_options.values()):
                inside = word.raw if one.in_shell else word.single_quoted
                if "PBS_NODEFILE" in inside and (is_kept or not one.is_filled):
                    yield Found(NODEFILE_INSIDE, word.line, word.raw)
    if any(one.container and one.trains for one in script.launches) or any(
        one.container for one in activated
    ):
        for one in activated:
            is_venv = one.words[0].text in _SOURCE and len(one.words) == 2
            yield Found(VENV if is_venv else CONDA, one.line, _quote(script, one.line))


def _wants_gpu(script: Script, one: Launch) -> bool:
    """Whether this container is to have GPUs: the job asks for some, or nothing is known and "
    "torchrun starts."""
    if script.request.scheduler:
        asks_late = any("gpu" in script.lines[line - 1] for line in script.request.late)
        return (script.request.gpus_per_node != 0 or asks_late) and (one.trains or one.in_shell)
    return bool(one.agent) and number(one.agent_options.get("nproc-per-node")) is not None


def _activates(one: Launch) -> bool:
    texts = [word.text for word in one.words[:3]]
    if texts[:2] in (["conda", "activate"], ["mamba", "activate"], ["micromamba", "activate"]):
        return True
    return bool(texts) and texts[0] in _SOURCE and len(texts) > 1 and texts[1].endswith("/bin/activate")


def _of_request(script: Script) -> Iterator[Found]:
    asked = script.request
    for line in asked.late:
        yield Found(LATE, line, script.lines[line - 1].strip())
    first = min((one.line for one in script.commands), default=len(script.lines) + 1)
    for line, text in enumerate(script.lines[: first - 1] if asked.scheduler else (), 1):
        if _COMMENTED.match(text):
            yield Found(BLANK_IN_DIRECTIVE, line, text.strip())
    if asked.scheduler == "slurm":
        for option in asked.options:
            if _FILLED_IN.search(option.value):
                yield Found(VARIABLE_IN_DIRECTIVE, option.line, f"--{option.name}={option.value}")
        for names in (
            ("mem", "mem-per-cpu", "mem-per-gpu"),
            ("ntasks-per-node", "ntasks-per-gpu"),
            ("exclusive", "oversubscribe"),
        ):
            there = [found for found in map(asked.find, names) if found]
            if len(there) > 1:
                yield Found(
                    EXCLUSIVE, max(one.line for one in there), " and ".join(f"--{one.name}" for one in there)
                )
        gres, gpus = asked.find("gres"), asked.find("gpus-per-node", "gpus")
        if gres and gpus and "gpu" in gres.value:
            yield Found(EXCLUSIVE, max(gres.line, gpus.line), f"--gres and --{gpus.name}")
        yield from _of_ntasks(asked)
        output = asked.find("output", "error")
        for option in filter(None, (asked.find("output"), asked.find("error"))):
            if _NUMBERED.search(option.value.rpartition("/")[0]):
                yield Found(OUTPUT_FOLDER, option.line, f"--{option.name}={option.value}")
        time, signal = asked.find("time"), asked.find("signal")
        if time and not signal and script.trainings:
            yield Found(NO_SIGNAL, time.line, f"--time={time.value}")
        if script.lines and not script.lines[0].startswith("#!"):
            yield Found(NO_SHEBANG, 1, script.lines[0].strip())
    else:
        output = asked.find("o", "e")
        select = asked.find("select")
        old = asked.find("nodes", "ncpus", "ngpus", "mem", "ppn", "mpiprocs", "gpus")
        if select and old:
            yield Found(PBS_MIXED, max(select.line, old.line), f"-l select and -l {old.name}")
        walltime = asked.find("walltime")
        if walltime and script.trainings:
            yield Found(NO_SIGNAL, walltime.line, f"walltime={walltime.value}")
    if output and output.value == "/dev/null":
        yield Found(OUTPUT_NULL, output.line, "/dev/null")


def _of_ntasks(asked: ScriptRequest) -> Iterator[Found]:
    """Without --nodes, --ntasks-per-node is the most that a node gets."""
    option, nodes = asked.find("ntasks"), asked.number("nodes")
    count, of_node = asked.number("ntasks"), asked.number("ntasks-per-node")
    if option is None or not count or not of_node:
        return
    if count < of_node * (nodes or 1) or (nodes and count > of_node * nodes):
        where = f", --nodes={nodes}" if nodes else ""
        yield Found(NTASKS, option.line, f"--ntasks={count}, --ntasks-per-node={of_node}{where}")


def _of_interfaces(script: Script) -> Iterator[Found]:
    """Not of several names, nor of a beginning, such as hsn: NCCL takes each interface that has it."""
    words = [word for one in script.launches for word in one.assigned]
    for word in words:
        name, value = split(word)
        value = value.strip("'\"")
        if name not in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") or not value:
            continue
        is_list = "," in value or value.startswith(("^", "$"))
        is_beginning = name.startswith("NCCL") and value != "lo" and not value[-1].isdigit()
        if value == "lo" and (script.nodes or 1) > 1:
            yield Found(LOOPBACK, word.line, word.raw)
        elif not is_list and not is_beginning:
            yield Found(IFNAME, word.line, word.raw)


def _of_switches(script: Script) -> Iterator[Found]:
    for word in [word for one in script.launches for word in one.assigned]:
        name, value = split(word)
        if (name, value.strip("'\"")) in SLOW:
            yield Found(SLOW_TRANSPORT, word.line, word.raw)
        if (name, value.strip("'\"")) in _DEBUGGING:
            yield Found(DEBUG_SLOW, word.line, word.raw)


def _of_modules(script: Script) -> Iterator[Found]:
    """A purge behind all loads: one before the last of them is a fresh start."""
    is_loaded, purge = False, 0
    for one in script.commands:
        words = one.texts[:2]
        if words in (["module", "load"], ["module", "add"], ["ml", "load"]):
            is_loaded, purge = True, 0
        elif is_loaded and words in (["module", "purge"], ["ml", "purge"]):
            purge = one.line
    if purge:
        yield Found(PURGE_LATE, purge, _quote(script, purge))


def _of_time(script: Script) -> Iterator[Found]:
    option = script.request.find("time", "walltime")
    found = _NUMBER_OF_TIME.fullmatch(option.value) if option else None
    if option and found and int(found[1]) in _MEANT_AS_HOURS:
        is_in_seconds = script.request.scheduler == "pbs" and not found[2]
        trap = WALLTIME_IN_SECONDS if is_in_seconds else TIME_IN_MINUTES
        yield Found(trap, option.line, f"{option.name}={option.value}")


def _of_signal(script: Script) -> Iterator[Found]:
    """Only if the script shows all: what it reads by source may have a trap."""
    signal = script.request.find("signal")
    if script.request.scheduler != "slurm" or signal is None:
        return
    receiver, _, name = signal.value.rpartition(":")
    is_trapped = _signal_name(name.partition("@")[0]) in _trapped(script)
    text = f"--signal={signal.value}"
    if "B" not in receiver:
        if is_trapped and script.trainings and not _EXPORTED_FUNCTION.search(script.text):
            yield Found(SIGNAL_ELSEWHERE, signal.line, text)
        return
    if is_trapped and not _waits_elsewhere(script):
        for one in script.trainings:
            line = one.starter_line or one.line
            is_held = not (one.in_background or one.in_loop or "exec" in _quote(script, line).split())
            if is_held:
                yield Found(SIGNAL_LATE, line, f"{text}, {_quote(script, line)}")
    names = [one.texts[:2] for one in script.commands if one.words]
    hidden = [
        words
        for words in names
        if words[:1] in (["trap"], ["exec"])
        or (words[0] in ("source", ".") and not words[-1].endswith("/activate"))
    ]
    if not hidden and any(one.starter == "srun" for one in script.trainings):
        yield Found(SIGNAL_UNHEARD, signal.line, text)


def _waits_elsewhere(script: Script) -> bool:
    """Whether the shell may wait for a function in the background, in which the training is."""
    functions = set(_FUNCTION.findall(script.text))
    return any(
        one.texts[:1] == ["wait"] or (one.in_background and not functions.isdisjoint(one.texts[:1]))
        for one in script.commands
    )


def _trapped(script: Script) -> set[str]:
    """Signals for users that the script has a trap for; others, such as TERM, come at its end too."""
    traps = [one.texts for one in script.commands if one.texts[:1] == ["trap"]]
    names = {_signal_name(name) for texts in traps if texts[1:2] not in ([""], ["-"]) for name in texts[2:]}
    return names & {"USR1", "USR2"}


def _signal_name(text: str) -> str:
    name = text.upper()
    return {"10": "USR1", "12": "USR2"}.get(name, name[3:] if name.startswith("SIG") else name)


def _quote(script: Script, line: int) -> str:
    """What stands there, of a long line the beginning."""
    return script.lines[line - 1][:_LONGEST_QUOTE].strip() if 0 < line <= len(script.lines) else ""


_RULES: Sequence[Callable[[Script], Iterator[Found]]] = (
    _of_head,
    _of_quotes,
    _of_port,
    _of_random,
    _of_random_in_tasks,
    _of_pbs_nodeid,
    _of_ranks,
    _of_start,
    _of_tasks,
    _of_rendezvous,
    _of_fixed_rank,
    _of_devices,
    _of_ssh,
    _of_wait,
    _of_loop_input,
    _of_fewer_tasks,
    _of_visible_devices,
    _of_world_size,
    _of_exports,
    _of_nodefile,
    _of_gpus_per_task,
    _of_srun,
    _of_container,
    _of_request,
    _of_time,
    _of_interfaces,
    _of_switches,
    _of_modules,
    _of_signal,
)
