"""Finds the lines of logs that the catalogue knows, and those that look like an error, in one pass of
bounded memory. `Scan.read` takes one open file after another; `Scan.found` has what was there.

A log of 2 GB has some ten million lines, and nearly none is of interest. Each pattern has a word that few
lines have, its key. Small blocks are looked at: their lines without digits, the shapes, are made a set, and
if all were seen before, the block holds nothing new. Else each of its words is looked up; if it is a key, the
lines with it are read.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import field, replace
from functools import lru_cache
from typing import BinaryIO

from entrypoint.core.frozen import dataclass
from entrypoint.core.plain import ENDS_TRACEBACK
from entrypoint.explain import lines, messages
from entrypoint.explain.catalogue import Entry, Pattern

BLOCK = 1 << 20
LONGEST = 1 << 12
"""Bytes of a line that are looked at, around what was found."""
MOST_OF_ONE = 6000
"""Lines kept of one entry, of failures and of warnings; of one in one file, half of them the newest; and
of one in each further file, the first and the newest:"""
MOST_IN_A_FILE, LEAST_IN_A_FILE = 12, 2
COUNTED, TRIED = 2000, 20_000
"""Lines of one entry in one file, and lines looked at for unknown errors; further ones are not looked for."""
MOST_TRIED = 200_000
"""Lines with one key in one file: a word that so many have says nothing."""
TAIL = 1 << 17
"""Bytes at the end of a file, where the last word of a failure stands: all that is there is looked for."""
SMALL = 1 << 16
"""Bytes that are looked at together: what a processor keeps at hand."""
MOST_SHAPES, MOST_SHAPE_BYTES = 100_000, 16 << 20
"""Remembered; beyond, all are forgotten."""
NEW_SHARE, PASSED_OVER = 0.9, 15
"""With so many new shapes in a small block, the shapes of so many further ones are not looked at."""
_DIGITS = b"0123456789"
_TURNED = bytes.maketrans(b"\r", b"\n")
NEAR, NEAR_BYTES = 30, 1 << 14
"""Lines, and bytes, around one that may have its time or rank."""
_remembered = lru_cache(maxsize=256)
"""For what is asked of the lines near each one that is read: if many are, their neighbours are the same."""
FRAME_LINES = 6
"""Lines of the last frame of a traceback, with its source and what is marked in it, of two ranks at once."""
_TRACEBACK = b"Traceback (most recent call last)"
_IGNORED, NEAR_IGNORED = b"Exception ignored in", 10
"""How Python begins what a finalizer raised, and lines of that: it ends nothing."""
MOST_NODES, MOST_RESTARTS = 10_000, 1000
_LETTERS = bytes(c if chr(c).isalpha() and c < 128 else 32 for c in range(256))
"""Leaves the letters, and spaces for all else."""
OF_ERRORS = frozenset(
    b"""ERROR FATAL CRITICAL Fatal fatal Error error panic WARN Assertion Cause Process
    entrypoint Traceback""".split()
)
"""Words that an unknown error may have."""
OF_OURS = frozenset({b"apptrain"})
"""That of messages of ours."""
OF_RESTARTS = frozenset(
    b"restart Restart RESTART restarting Restarting requeued Requeued attempt Attempt ATTEMPT try Try".split()
)
"""Words that a line may have with which a program begins anew."""
_ENDINGS = (b"Error", b"Exception", b"Exit")
_EXCEPTION = re.compile(
    rb"(?:[A-Za-z_][\w]{0,80}\.){0,8}[A-Z]\w{0,80}(?:Error|Exception|Interrupt|Exit|Failure)(?:: .*|:?\s*)$"
)
_RAISED = re.compile(rb"(?:[A-Za-z_]\w{0,80}\.){0,8}[A-Z]\w{0,80}(?:Error|Exception): \S")
"""An exception without its traceback: an error, but it need not have ended anything."""
_NAME_ALONE = re.compile(rb"[\w.]{1,200}(?:Error|Exception):")
_OF_WORKER = re.compile(
    rb"([\w.]{1,200}): Caught \w{1,80} in (?:DataLoader worker|pin memory thread|replica)"
)
"""An exception, as torch raises it again outside the worker whose traceback follows."""
_ERROR = re.compile(
    rb"^(?:\[[^\]]{1,40}\]:? ?)?(?:\w{1,20}: "
    rb"){0,3}(?:ERROR|FATAL|CRITICAL|[Ff]atal|[Ee]rror|panic)\b|: (?:fatal )?error: | - (?:ERROR|CRITICAL) - "
    rb"|\[(?:ERROR|error|CRITICAL|FATAL)\]|\bNCCL WARN\b|^Assertion | Assertion `"
)
_TOLERATED = re.compile(
    rb"\b[Ff]all(?:ing|s|en)? ?back\b|(?<!-W )\b[Ii]gnor(?:ing|ed|e)\b(?! explicit)"
    rb"|\b[Uu]sing (?:the )?(?:CPU|cpu)\b"
    rb"|\b[Uu]sing .{1,60} instead\b|\b[Ff]rom scratch\b|\b[Ss]kipp(?:ing|ed)\b|\b[Rr]ecovered\b|non-fatal"
)
"""The program says that it goes on without."""
_MILD = re.compile(
    rb"\b[Rr]etry(?:ing)?\b(?! counter)|\b[Aa]ttempt \d{1,6}(?:/\d{1,6}| of \d{1,6})? failed\b"
    rb"|\b[Tt]rying (?:again|the next|port|batch|\d)|thrown while requesting"
    rb"|(?<!NCCL )(?<![=/])\b(?:WARN(?:ING)?|INFO|DEBUG)\b|[a-z]Warning\b|\b[Ww]arning: "
    rb"|^wandb: (?:ERROR|W&B)"
    rb"|^\s*(?:[\w.-]{1,64}: )?\[?(?:rank\d+\]:)?\[?W(?:\d{3,4} | )"
)
_OF_TRAIN = b"train: WARNING: "
"""Warnings of ours name what is wrong."""
_OF_SHELL = re.compile(
    rb"^(?:/\S*/)?(?:cp|mv|rm|mkdir|rmdir|ls|ln|cat|tar|touch|chmod|chown|chgrp|find|rsync|du|df|source|ulimit"
    rb"|module|bash|sh|[\w.-]+\.(?:sh|sbatch|slurm|pbs)|slurm_script|[\w.-]+\.SC): "
    rb"|^(?:CommandNotFoundError|Environment(?:Name|Location)NotFound|CondaError)\b|Lmod has detected"
    rb"|ModuleCmd_Load"
)
"""A command of a job script that failed: the script goes on, if it does not ask to be ended."""
_BY_SIGNAL = re.compile(rb": line \d{1,6}: +\d{1,10} [A-Z]")
"""How bash tells that a signal ended a process of a job script, which need not have been a small one."""
_OF_FILES = re.compile(
    rb"^(?:/\S*/)?(?:cp|mv|rm|mkdir|rmdir|ls|ln|cat|tar|touch|chmod|chown|chgrp|find|rsync|du|df): "
)
_OF_THE_END = re.compile(rb"^\s*$|\b[Ee]xit|\bsrun: |slurmstepd|\bPBS\b|\b[Tt]erminated\b|\bmpirun\b|^-{5,}")
"""Lines that may stand behind a command that ended its job script."""
NEAR_COMMAND = 4
"""Lines behind a command, by which its job script went on."""
_GENERAL = frozenset({"rendezvous", "internet"})
_IN_SENTENCES = frozenset({"quota", "disk-full", "read-only", "permission-denied", "file-missing"})
"""Families, and other causes, whose words are those of the system, and in many sentences."""
_BEFORE_REPORT = re.compile(rb"(?:[\w.]|[:\]\[>)(|=*-]\s{0,8}[\"']?)$")
_OF_FAILURE = re.compile(
    rb"error|fatal|fail|exception|cannot|can't|could ?n.t|could not|unable|abort|critical|kill|cancel|invalid"
    rb"|unknown|refused|timed? ?out|\[E",
    re.I,
)
"""A line that reports an error begins with it, has it behind a colon or the like, or says that something
failed."""
_STEP = re.compile(
    rb"\b(?:[Ss]teps?|[Ee]pochs?|[Ii]ter(?:ation)?s?|[Bb]atch|[Tt]rial|[Ff]old|[Rr]ound|[Ee]pisode)\b"
    rb"(?:\W{0,3}|[ :=]{4,12})(\d{1,12}(?:\.\d{1,12})?)\b"
    rb"|\b(\d{1,12})/\d{1,12} \[|\[ {0,8}(\d{1,12})/\d{1,12}\]|(?:^|\] )it {1,8}(\d{1,12})\b"
)
"""A line of progress, with the number of the step."""
LATER, LATER_STEPS = 5.0, 2
"""Seconds after a line, and steps that then tell that its program went on."""
NEAR_CHAIN = 4
"""Lines behind an exception that may say that another one followed."""
NEAR_WORDS = 120
"""Bytes before words that may say that they are no report."""
STEPS = 3
"""Different steps behind a line, by which its program went on: ranks that do not wait yet make one more."""
_BY_SCHEDULER = re.compile(
    rb"\*\*\* (?:JOB|STEP) .{1,200}\bCANCELLED\b|\boom[-_]kill event|=>> PBS: job killed"
)
"""The scheduler has ended a process or the job."""
_OF_APPTAINER = re.compile(rb"FATAL: {3}\S")
"""Apptainer has ended, with this code:"""
_CODE_OF_APPTAINER = re.compile(rb"(?i)\b(?:code|status)\W{0,3}255\b")
_RESUMES = re.compile(rb"\b(?:[Ll]oad|[Rr]esum|[Rr]estor|[Rr]estart|[Cc]ontinu)(?:e[ds]?|ing)\b")
"""What a program says that begins at a checkpoint."""
_RESTART = re.compile(
    rb"will restart worker group|\b[Rr]estarting (?:the )?(?:job|run|training|from)\b"
    rb"|\b[Jj]ob (?:was |is )?requeued\b"
    rb"|(?:RESTART|[Rr]estart)[ _-]?(?:COUNT|[Cc]ount)[^\w.-]{1,4}[1-9]\d{0,3}\b"
    rb"|^(?:[\w./-]{1,64}: )?\W{0,6}(?:ATTEMPT|[Aa]ttempt|[Tt]ry) ?#?(?:[2-9]|\d\d)"
    rb"(?: ?(?:of|/) ?\d{1,4})?\W{0,6}$"
    rb"|^[#=*-]{2,40} ?(?:ATTEMPT|[Aa]ttempt|[Tt]ry) ?#?(?:[2-9]|\d\d)\b"
    rb"|^apptrain: this run directory has been used before"
)
"""torchrun, or a job script, begins anew in the same log."""
_OF_RESTART = b"estart", b"RESTART", b"equeue", b"ttempt", b"ATTEMPT", b"try ", b"Try ", b"used before"
"""One of these is in each such line."""
_RUNS_AGAIN = re.compile(rb"\bDUE TO (?:PREEMPTION|NODE FAILURE|JOB REQUEUE)\b")
"""After this the scheduler may start the job again, and write to the same log."""
_CLOCK = re.compile(rb"(?<![\d:])(\d\d):(\d\d):(\d\d)\b")
NEXT_RUN = 60
"""Seconds between two lines by which a job script tells that it begins, and between the end of a run and the
steps of another: the scheduler kills within 30."""
MOST_HEADS = 20
"""Lines like the first one of a file: more do not tell where a run begins."""
_LOGGED = re.compile(rb"\b(?:ERROR|CRITICAL|[Ee]xception:|[Ee]rror:)")
"""Before the traceback of an exception that the program has caught and logged."""
_QUOTED = re.compile(rb'(?:^|[\s>=:-])"[^"]*$')
_OF_MESSAGE = re.compile(
    rb"\b(?:msg|message|err|error|exc\w*|text|log|event|reason|cause|stderr|stdout|output|what|fatal|fail\w*)"
    rb"\b[\"']?\s?[:=]\s?\"[^\"]*$"
    rb"|(?<![\w.-])(?!on_)[\w.-]{0,40}(?:msg|message|err|error|exc\w*|reason|cause|trace\w*|stack\w*|detail\w*"
    rb"|descr\w*|status|output|fail\w*)(?:=|[\"']\s?:\s?)\"[^\"]*$"
    rb"|\b(?:with|error|failed|died|raised) \"[^\"]*$",
    re.I,
)
"""Before words in quotes: those of somebody else, if they are no field of a log in JSON or logfmt, and
nothing says that they were an error."""
_LISTED = re.compile(rb"\[(?:(['\"])[^'\"]{0,80}\1, ?){0,20}['\"][^'\"]*$")
_OF_ERRORS = re.compile(
    rb"(?:errors?|messages?|reasons?|failures?|exceptions?|causes?)[\"']?\s?[:=]\s?\[[^\[]*$", re.I
)
"""Before words in a list, as a configuration has it; and before a list of what was."""
_CONDITIONAL = re.compile(
    rb"\b(?:[Ii]f (?:you|it|there|this|that|the|your|any|an?|NCCL|CUDA) |[Ii]n case of |[Ww]henever "
    rb"|[Tt]o (?:avoid|prevent) )[^.;:]*$|\b(?:[Ii]f|[Ww]hen) [\"'`]?$|\s{2,}# "
)
"""Before words that say what may happen: advice, or a comment."""
_USAGE = re.compile(rb"\s*(?:--[a-zA-Z][\w-]*[ =,:]|-[a-zA-Z][ ,]|# )")
"""Begin of a line of a usage text, or of a comment."""
_NONE = rb"\s?\"?(?:no|none|null|false|off)\"?\s*(?:$|[,;)}\]])"
_DENIED = re.compile(
    rb"\?(?:\s|$)|s?(?: (?:events?|errors?|kills?|count))?(?:\"?\s?=|\"\s?:)\s?\"?(?:0\"?\s*(?:$|[,;)}\]])|"
    + _NONE
    + rb")|(?:s| (?:events?|errors?|kills?|count))\s?:\s?0\s*(?:$|[,;)}\]])|\s?:"
    + _NONE,
    re.I,
)
"""Behind words that say what did not happen, or that only ask."""
_UNCAUGHT = re.compile(
    rb", in (?:<module>|_run_module_as_main|_bootstrap|_wrap|_worker_loop|_main|spawn_main)\s*$"
)
"""The first frame of a traceback that ends a process; a program outlives its threads. That of an
exception which the program caught and shows begins where it was caught."""
_SHORTENED = re.compile(rb"^Error executing job with overrides|Original Traceback")
"""Hydra, and DataLoader, leave out the first frames."""
_CHAINED = b"During handling of the above exception, another exception occurred"
_CLEANS_UP = re.compile(
    rb", in \w{0,60}(?:save|clean_?up|tear_?down|destroy|finalize|__exit__"
    rb"|(?:close|finish|flush|shut_?down)\b)",
    re.I,
)
"""A frame of what saves, or cleans up, while an exception is on its way."""
_OF_CHAIN = b" the above exception", b"The above exception was"
_MARKS = re.compile(rb"[^ ]{0,60}\s*[~^]+\s*$|[^ ]{0,60}\s*\[Previous line repeated")
_FINISHED = re.compile(rb"'train_runtime'|`Trainer\.fit` stopped: ")
"""The program came to its end, in the words of a library."""
_SAYS_DONE = re.compile(
    rb"\b[Tt]raining (?:is |has )?(?:finished|complete|completed|done)\b|\b[Ff]inished training\b"
    rb"|^(?:[Aa]ll )?[Dd]one(?:[.!]|\s*$)|^(?:\S{1,20} )?[Ff]inished(?:[,.!]|$)"
)
"""In those of the program, or of a job script that goes on after a failure."""
_ENDED_WELL = re.compile(
    rb"\b[Ee]xit(?:ed|ing)?[ _-]?(?:with )?(?:[Ss]tatus|[Cc]ode|value)?(?: of)?[ :=]{1,3}0(?![\w.:])"
    rb"|\bState: COMPLETED\b|'train_runtime'|`Trainer\.fit` stopped: |\bapptrain: done: "
)
"""A job script, or a library, says that the program ended without a failure."""
END_LINES = 12
"""Lines at the end of a file that may say so."""
_FRAME = re.compile(rb'.{0,60}?  File "[^"]{1,400}", line \d+')
_NATIVE_FRAME = re.compile(rb"frame #\d{1,4}: ")
"""Of a stack of C++, as torch shows it, also with warnings."""
_SOURCE = re.compile(rb"[^ ]{0,60} ?    ")
"""The line behind it is source code, which says what might be raised and not what was."""
_TELLS = re.compile(rb"Root Cause|Process name: \[|Traceback \(most recent call last\)")
_BOX = re.compile(rb"(?:^|\s)(rank|host|exitcode|time)\s*: (\S+)")
"""torchrun's summary of a failure has such lines."""
_RECORDED = re.compile(rb"traceback\s*: (?=Traceback)")
"""With @record also the traceback of the process, each of its lines behind two blanks:"""
_INDENT = b"  "
_BLOCK = re.compile(rb" ?\[\d{1,6}\]:\s*$")
_END_OF_BLOCK = re.compile(rb" ?(?:\[\d{1,6}\]:|[-=]{20,})\s*$")
_AGENT = re.compile(
    rb"\btorchrun\b|\btorch[./]distributed[./](?:elastic|run)\b|\(exitcode: -?\d+\) local_rank: \d+ \(pid"
)
_OF_OTHERS = re.compile(
    rb"\]: ?Traceback |\]:\[W|[Ww]atchdog|"
    rb"Connection (?:reset|closed) by |(?:recvValue|sendBytes|recvBytes) failed"
)
"""What a rank says of the end of another."""
_LABEL = re.compile(rb"(?:[\w.-]{1,64}: )?\[rank(\d{1,6})\]:")
_OF_SRUN = re.compile(
    rb"srun: error: (?P<node>[\w.-]{1,64}): tasks? (?P<task>\d+)(?P<more>[\d,-]*): (?P<how>.{1,60})"
)
_OF_MPI = re.compile(
    rb"(?:Process name: \[(?:\[\d+,\d+\]|[^\[\],]{1,80}),"
    rb"|(?:mpirun|mpiexec|prterun) noticed that process rank )(\d+)"
)
"""`[[JOB,1],RANK]`, or since Open MPI 5 `[prterun-HOST-PID@1,RANK]`."""
_BY_OTHERS = re.compile(rb"Terminated|Killed \(by|Cancelled")
"""How srun names the end of tasks that it has ended itself."""


@dataclass(frozen=True)
class Evidence:
    """A line that says something."""

    entry: Entry | None
    """None: it looks like an error, and is not known."""
    text: str
    file: str
    number: int
    """Of the line, from 1."""
    order: tuple[int, int]
    """(number of the file, of the line)."""
    time: float | None
    rank: int | None
    node: str
    device: str
    is_exception: bool = False
    is_mild: bool = False
    """It calls itself a warning, or says that something is tried again or left out. NCCL calls errors so
    too."""
    is_of_shell: bool = False
    """A command of a job script failed, after which the script mostly goes on."""
    went_on: bool = False
    """Steps of the program follow, and it is not the last word of a process."""
    may_have_gone_on: bool = False
    """A step follows, or was just before a later failure."""
    is_caught: bool = False
    """Its traceback does not begin where the program does: mostly it was caught."""
    is_printed: bool = False
    """It was caught, and no line of a log stands before its traceback."""
    is_chained: bool = False
    """Another exception was raised while it was handled."""
    is_of_cleaning_up: bool = False
    """It was raised while another one was handled, by what saves or cleans up."""
    is_last: bool = False
    """It ended a process, or the scheduler did."""
    is_passing: bool = False
    """The program, or the job script, says that it went on, or the line is no report of an error: alone it is
    no cause."""
    steps_before: int = 0
    """Different steps just before it."""
    is_later: bool = False
    """torchrun's report tells it of a process, and names another one that failed first."""


@dataclass(frozen=True)
class ProcessEnd:
    """How the process of a rank or task ended, as torchrun, srun or mpirun tells."""

    rank: int | None
    node: str
    file: str = ""
    number: int = 0
    """Of the line."""
    is_one: bool = True
    """The line names no other tasks beside it."""
    is_task: bool = False
    """The rank is the number of a task of srun."""
    is_abort: bool = False
    """By SIGABRT, as an echo ends a process: an exception of Python ends it with status 1."""
    time: float = math.inf
    """As torchrun's summary tells it."""


@dataclass(frozen=True)
class Recorded:
    """The traceback of one process in torchrun's report."""

    end: ProcessEnd
    until: int
    """Number of its last line."""
    is_root: bool
    """It is the failure that torchrun has observed first."""


@dataclass(frozen=True)
class Restart:
    """A place in a file from which on the lines are of a further run of the job."""

    number: int
    """Of the line."""
    steps: int
    """Different steps in the lines behind it."""
    is_head: bool = False
    """A line like the first one of the file: a job script may print one for each of its parts."""


@dataclass
class Scan:
    """`found`, `counts`, `ends`, `nodes` and `places` grow with each file that is read."""

    index: Index
    counts: Counter[str] = field(default_factory=Counter)
    """Lines of each entry."""
    helped: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    """Where a pattern of `all` or `then` was seen last, by entry and place in it."""
    ends: list[ProcessEnd] = field(default_factory=list)
    """Of those that failed by themselves."""
    nodes: set[str] = field(default_factory=set)
    """All that were named, also on lines that are no evidence."""
    places: dict[int, str] = field(default_factory=dict)
    """The node of a rank."""
    lengths: dict[str, int] = field(default_factory=dict)
    """Lines of each file."""
    ended_well: dict[str, int] = field(default_factory=dict)
    """Of files of which the last lines say that the program ended without a failure: that line."""
    restarts: dict[str, list[Restart]] = field(default_factory=dict)
    """Of each file that has any."""
    size: int = 0
    """Bytes that were read."""
    lines: int = 0
    is_ours: bool = False
    """Whether apptrain said something."""
    has_agents: bool = False
    """Whether a node's ranks have a launcher, ours or torchrun: srun's tasks are nodes then, not ranks."""

    _kept: dict[tuple[str, str, bool], list[Evidence]] = field(default_factory=dict)
    """What was found, by file, entry, and whether the program went on."""
    _sizes: Counter[tuple[str, bool]] = field(default_factory=Counter)
    """How many of these are kept of all files."""
    _is_tail: bool = False
    """Whether the lines that are looked at are of the file's end."""
    _seen: set[bytes] = field(default_factory=set)
    _seen_bytes: int = 0
    _hot: set[bytes] = field(default_factory=set)
    """Shapes of lines that were read: a block with one is looked at again."""
    _pass_over: int = 0
    """Small blocks of which the shapes are not looked at."""
    _files: int = 0
    _counts: Counter[str] = field(default_factory=Counter)
    """Lines of this file of each entry, and those that were tried of each kind."""
    _tried: Counter[bytes] = field(default_factory=Counter)
    """Lines of this file with a key."""
    _recorded: dict[bytes, Recorded] = field(default_factory=dict)
    """The newest one of this file, by the label before its lines."""
    _head: bytes = b""
    """The first line of this file, if it tells when a run begins; and those like it, of later."""
    _heads: list[Restart] = field(default_factory=list)

    @property
    def found(self) -> list[Evidence]:
        """In the order of the files and lines."""
        return sorted((one for rows in self._kept.values() for one in rows), key=_order)

    def read(self, file: BinaryIO, name: str, most: int) -> bool:
        """Reads at most `most` bytes of an open file; whether that was all of it. Raises OSError,
        EOFError and what a decompressor raises."""
        self._files += 1
        self._counts.clear()
        self._tried.clear()
        self._recorded.clear()
        number, left = 1, most
        before = ahead = rest = self._head = b""
        self._heads.clear()
        block = file.read(min(BLOCK, left))
        while block:
            left -= len(block)
            self.size += len(block)
            following = file.read(min(BLOCK, left)) if left > 0 else b""
            raw = rest + block
            end = raw.rfind(b"\n") + 1 if following else len(raw)
            if not end and len(raw) > BLOCK:
                end = len(raw) - LONGEST  # an endless line, in pieces
            rest = raw[end:]
            text = before + ahead + _cleaned(raw[:end])
            begin, end = len(before), _last_to_look_at(text, len(before)) if following else len(text)
            if number == 1:
                self._head = _head(text)
            tail = len(text) + len(following) - TAIL if len(following) < BLOCK else len(text)
            number += self._block(text, begin, end, name, number, tail)
            before, ahead = text[max(0, end - NEAR_BYTES) : end], text[end:]
            if not following:
                number += not text.endswith(b"\n")
            block = following
        self.lines += number - 1
        self._note_end(name, number - 1, before)
        return left > 0

    def _note_end(self, name: str, count: int, tail: bytes) -> None:
        """`count`: lines of the file; `tail`: the last ones."""
        rows = tail.removesuffix(b"\n").split(b"\n")[-END_LINES:]
        for number, row in enumerate(rows, count - len(rows) + 1):
            if _ENDED_WELL.search(row, 0, 400):
                self.ended_well[name] = number
        if 0 < len(self._heads) <= MOST_HEADS:
            self.restarts.setdefault(name, []).extend(self._heads)
        self.lengths[name] = count

    def _block(self, block: bytes, begin: int, end: int, name: str, first: int, tail: int) -> int:
        """Looks at whole lines between two places; how many there were. What is around them is seen too.
        `tail`: where the file's begins."""
        at, count = begin, 0
        while at < end:
            until = block.find(b"\n", at + SMALL, end) + 1 or end
            self._small(block, at, until, name, first + count, is_tail=until > tail)
            count += block.count(b"\n", at, until)
            at = until
        return count

    def _small(self, block: bytes, begin: int, end: int, name: str, first: int, *, is_tail: bool) -> None:
        """Looks at the lines of a block between two places."""
        self._is_tail = is_tail
        part = block[begin:end]
        shapes = self._shapes(part)
        if shapes:
            if self._is_head_sought() and self._head.translate(None, _DIGITS) in shapes:
                self._find_heads(block, begin, end, first)
            fresh = shapes - self._seen
            if not fresh and self._hot.isdisjoint(shapes) and not is_tail:
                return
            self._keep(fresh)
            self._pass_over = PASSED_OVER if len(fresh) > NEW_SHARE * len(shapes) else 0
        places = self._places(part, is_tail=is_tail)
        if not places:
            self._hot -= shapes  # there are so many of them that no more are read
        number, last = first, begin
        for start, shape, stands_for in _to_read(part, sorted(places), self.index.figures):
            number += block.count(b"\n", last, begin + start)
            last = begin + start
            if len(self._hot) < MOST_SHAPES:
                self._hot.add(shape)
            self._line(block, begin + start, begin + places[start], name, number, stands_for)

    def _shapes(self, part: bytes) -> set[bytes]:
        """The lines without their digits; none where those before were all new, so that it does not pay."""
        if self._pass_over and not self._is_head_sought():
            self._pass_over -= 1
            return set()
        return set(part.translate(_TURNED, _DIGITS).split(b"\n"))

    def _is_head_sought(self) -> bool:
        return bool(self._head) and len(self._heads) <= MOST_HEADS

    def _find_heads(self, block: bytes, begin: int, end: int, number: int) -> None:
        """Looks for lines like the first one of the file, of later. `begin`, `end`: of the lines to look at;
        `number`: of the first one. Where there are many, they do not tell where a run begins."""
        head, shape, at = self._head, self._head.translate(None, _DIGITS), begin
        while at < end and len(self._heads) <= MOST_HEADS:
            stop = block.find(b"\n", at) % (len(block) + 1)
            row = block[at:stop]
            if row.translate(None, _DIGITS) == shape and abs(_clock(row) - _clock(head)) >= NEXT_RUN:
                behind = _split(block[stop + 1 : stop + NEAR_BYTES])[:NEAR]
                self._heads.append(Restart(number, _steps(behind), is_head=True))
            at, number = stop + 1, number + 1

    def _keep(self, fresh: set[bytes]) -> None:
        if len(self._seen) > MOST_SHAPES or self._seen_bytes > MOST_SHAPE_BYTES:
            self._seen.clear()
            self._seen_bytes = 0
        self._seen |= fresh
        self._seen_bytes += sum(map(len, fresh))

    def _places(self, part: bytes, *, is_tail: bool) -> dict[int, int]:
        """Where lines begin that are to be read, with where in them something was found."""
        all_words = part.translate(_LETTERS).split()
        words = self.index.words.intersection(all_words)
        places: dict[int, int] = {}
        for word in words & self.index.by_key.keys():
            patterns = self.index.by_key[word]
            if not is_tail:
                patterns = [one for one in patterns if self._counts[one[0].id] < COUNTED]
            if patterns and (is_tail or self._tried[word] < MOST_TRIED):
                self._tried[word] += _lines_with(part, word, patterns, places)
        for kind, of_kind in (("error", OF_ERRORS), ("ours", OF_OURS), ("restart", OF_RESTARTS)):
            self._try(kind, words & of_kind, part, places, is_tail=is_tail)
        if any(end in part for end in _ENDINGS):
            self._try("exception", _raised(all_words), part, places, is_tail=is_tail)
        return places

    def _try(
        self, kind: str, words: Iterable[bytes], part: bytes, places: dict[int, int], *, is_tail: bool
    ) -> None:
        """Adds the lines with these words, as far as those of this kind are looked for."""
        counts, tried = self._counts, f"tried {kind}"
        if is_tail or (counts[kind] < COUNTED and counts[tried] < TRIED):
            for word in words:
                counts[tried] += _lines_with(part, word, (), places)

    def _line(
        self,
        block: bytes,
        start: int,
        at: int,
        name: str,
        number: int,
        stands_for: int = 1,
        *,
        ends_traceback: bool = False,
    ) -> None:
        """`start`: of the line in the block; `at`: where something in it was found; `stands_for`: it and the
        lines like it that are not read."""
        end = _end(block, start)
        if end - start > LONGEST:
            start = max(start, at - LONGEST // 2)
            end = min(end, start + LONGEST)
        line = block[start:end]
        if b" NCCL INFO " in line:
            return  # it tells of no failure
        before = _split(block[max(0, start - NEAR_BYTES) : start])[-NEAR:]
        behind = _split(block[end + 1 : end + NEAR_BYTES])[:NEAR]
        if _is_quoted(line, before):
            return
        order = (self._files, number)
        body = lines.body(line)
        if _TRACEBACK in line:
            self._remember_recorded(block, start, end, before, number)
        recorded = self._recorded_at(line, number)
        if recorded:
            body = body.removeprefix(_INDENT)
        self._help(line, body, order)
        self.is_ours = self.is_ours or messages.PREFIX.match(body) is not None
        if not self.has_agents and (self.is_ours or _is_of_agent(line, before)):
            self.has_agents = True
            self.ends = [replace(one, rank=None) if one.is_task else one for one in self.ends]
        node, rank = lines.node(line), lines.rank(line)
        self._remember(line, behind[:12], node, rank, name, number)
        self._remember_restart(body, before, behind, name, number)
        entry = self.index.entry(line, body, _last_frame(before))
        entry = messages.rather(entry, body)
        if entry is not None and _is_mention(entry, line, body):
            entry = None
        if entry is None and _TRACEBACK in line:
            self._end_of_traceback(block, start, end, name, number)
        is_exception = False
        traceback = _traceback(before)
        is_ignored = _is_ignored(before[-NEAR_IGNORED:])
        if entry is None:
            if is_ignored:
                return
            is_raised = traceback is not None and (ends_traceback or _EXCEPTION.match(body) is not None)
            is_exception = is_raised and not body.startswith(b"SystemExit")
            if not is_exception and not _ERROR.search(body) and not _RAISED.match(body):
                return
        key = entry.id if entry else ("exception" if is_exception else "error")
        self.counts[key] += stands_for
        self._counts[key] += stands_for
        if self._counts[key] > COUNTED and not self._is_tail:
            return
        is_caught = not recorded and _is_caught(body, before, behind, is_exception=ends_traceback)
        is_end = _is_last_word(body, before, behind, is_exception=ends_traceback)
        is_last = is_end and not is_ignored and not is_caught
        is_mild = is_ignored or (not is_end and not is_exception and _is_mild(line, body))
        is_doubtable = not is_last and (entry is None or entry.kind == "cause")
        file_rank, file_node = lines.of_file(name)
        of_traceback = lines.rank(traceback) if traceback and _EXCEPTION.match(body) else None
        process = recorded.end if recorded else ProcessEnd(None, "")
        self._add(
            key,
            Evidence(
                entry=entry,
                text=_text(body, behind),
                file=name,
                number=number,
                order=order,
                time=process.time if process.time < math.inf else _time(line, before),
                rank=_first(process.rank, rank, file_rank, of_traceback, _rank_behind(line, behind[:12])),
                node=process.node or node or file_node,
                device=lines.device(line),
                is_exception=is_exception,
                is_mild=is_mild,
                is_of_shell=_OF_SHELL.search(body) is not None and _BY_SIGNAL.search(body) is None,
                is_passing=not is_last and not is_exception and _is_passing(entry, line, body, behind),
                went_on=not is_last and _goes_on(line, before, behind),
                may_have_gone_on=is_doubtable and _may_go_on(behind),
                is_caught=is_caught,
                is_printed=is_caught and is_end,
                is_chained=any(_CHAINED in one for one in behind[:NEAR_CHAIN]),
                is_of_cleaning_up=is_last and _is_of_cleaning_up(before),
                is_last=is_last,
                steps_before=_steps(before),
                is_later=recorded is not None and not recorded.is_root,
            ),
        )

    def _add(self, key: str, one: Evidence) -> None:
        """Keeps the first lines of an entry and file, and the newest ones: what ended a run is mostly its
        last word. What a program went on after takes no other's place."""
        sort = key, one.is_mild or one.went_on
        rows = self._kept.setdefault((one.file, *sort), [])
        if len(rows) >= (MOST_IN_A_FILE if self._sizes[sort] < MOST_OF_ONE else LEAST_IN_A_FILE):
            del rows[len(rows) // 2]
        else:
            self._sizes[sort] += 1
        rows.append(one)

    def _end_of_traceback(self, block: bytes, start: int, end: int, name: str, number: int) -> None:
        """Looks for an exception whose name does not say that it is one. `start`, `end`: of the line that
        begins the traceback."""
        label = _RECORDED.sub(b"", block[start:end]).partition(_TRACEBACK)[0]
        frames, at = 0, end + 1
        while at < min(len(block), end + NEAR_BYTES):
            number += 1
            stop = _end(block, at)
            row = block[at:stop][:LONGEST]
            if _FRAME.match(row):
                frames += 1
            elif row.startswith(label) and row.strip() and not _is_code(row[len(label) :]):
                body = lines.body(row)
                if self._recorded_at(row, number):
                    body = body.removeprefix(_INDENT)
                is_seen = _EXCEPTION.match(body) or _ERROR.search(body) or self.index.entry(row, body)
                if frames and not is_seen and ENDS_TRACEBACK.match(body):
                    self._line(block, at, at, name, number, ends_traceback=True)
                return
            at = stop + 1

    def _remember_recorded(
        self, block: bytes, start: int, end: int, before: Sequence[bytes], number: int
    ) -> None:
        """Notes of whom a traceback in torchrun's report is. `start`, `end`: of the line that begins it."""
        found = _RECORDED.search(block, start, end)
        if not found or len(self._recorded) > MOST_NODES:
            return
        label = _label(block[start : found.start()])
        rows = [one[len(label) :] for one in before if one.startswith(label)]
        head = next((at for at in reversed(range(len(rows))) if _BLOCK.match(rows[at])), None)
        if head is None:
            return
        until, at = number, end + 1
        while at < min(len(block), end + NEAR_BYTES):
            stop = _end(block, at)
            if block.startswith(label, at) and _END_OF_BLOCK.match(block[at:stop][len(label) :]):
                break
            until, at = until + 1, stop + 1
        is_root = head > 0 and b"Root Cause" in rows[head - 1]
        self._recorded[label] = Recorded(_box(rows[head:]), until, is_root)

    def _recorded_at(self, row: bytes, number: int) -> Recorded | None:
        """The traceback of torchrun's report that a line is of; None for any other line."""
        one = self._recorded.get(_label(row)) if self._recorded and _INDENT in row else None
        return one if one and number <= one.until else None

    def _remember_restart(
        self, body: bytes, before: Sequence[bytes], behind: Sequence[bytes], name: str, number: int
    ) -> None:
        """What the scheduler ended goes on with the first step behind that; one alone may be its last."""
        is_ended = b"srun: error: Node failure on " in body or (
            b"DUE TO" in body and _RUNS_AGAIN.search(body) is not None
        )
        if not is_ended and not _is_restart(body):
            return
        steps = _steps(behind)
        if is_ended and (steps < LATER_STEPS or _is_continued(body, before, behind)):
            return
        if is_ended:
            number += next(at for at, one in enumerate(behind, 1) if _told_steps(one))
        known = self.restarts.setdefault(name, [])
        if len(known) < MOST_RESTARTS:
            known.append(Restart(number, steps))

    def _remember(
        self, line: bytes, behind: Sequence[bytes], node: str, rank: int | None, name: str, number: int
    ) -> None:
        """Which nodes and ends a line tells of."""
        if len(self.nodes) > MOST_NODES or len(self.ends) > MOST_NODES:
            return
        if node:
            self.nodes.add(node)
        if node and rank is not None:
            self.places.setdefault(rank, node)
        if b"Root Cause" in line:
            self.ends.append(replace(_box(behind), file=name, number=number))
            self.nodes |= {self.ends[-1].node} - {""}
            return
        of_srun, of_mpi = _OF_SRUN.search(line), _OF_MPI.search(line)
        if of_srun and not _BY_OTHERS.search(of_srun["how"]):
            end = ProcessEnd(
                rank=None if self.has_agents else int(of_srun["task"][:6]),
                node=of_srun["node"].decode(),
                file=name,
                number=number,
                is_one=not of_srun["more"],
                is_task=True,
                is_abort=of_srun["how"].startswith(b"Aborted"),
            )
            self.ends.append(end)
        elif of_mpi:
            self.ends.append(ProcessEnd(int(of_mpi[1][:6]), "", name, number))

    def _help(self, line: bytes, body: bytes, order: tuple[int, int]) -> None:
        for entry in self.index.helped:
            for place, pattern in enumerate((*entry.all, *entry.then)):
                if pattern.is_in(line, body):
                    self.helped[entry.id, place] = order


def _raised(words: Sequence[bytes]) -> Iterator[bytes]:
    """Those that end as the names of exceptions do, each once; found when the first one is asked for."""
    yield from {one for one in words if one.endswith(_ENDINGS)}


def _is_code(text: bytes) -> bool:
    """Whether a line of a traceback, behind its label, shows code, or what of it failed."""
    return (_SOURCE.match(text) or _MARKS.match(text)) is not None


def _label(row: bytes) -> bytes:
    """What stands before the two blanks of a line in torchrun's report, as srun --label writes it."""
    return row.partition(_INDENT)[0]


def _order(one: Evidence) -> tuple[int, int]:
    return one.order


def _is_of_agent(line: bytes, before: Sequence[bytes]) -> bool:
    """Whether it shows torchrun: itself, its modules, or its table of failures."""
    return any(map(_shows_agent, (line, *before)))


@_remembered
def _shows_agent(row: bytes) -> bool:
    return _AGENT.search(row) is not None


def _is_restart(body: bytes) -> bool:
    return any(word in body for word in _OF_RESTART) and _RESTART.search(body) is not None


def _head(text: bytes) -> bytes:
    """The first line, if it is one by which a job script tells when it begins; else empty."""
    row = text[: _end(text, 0)]
    is_one = _CLOCK.search(row) and not _STEP.search(row, 0, 400) and not _MILD.search(row)
    return row if is_one and len(row) <= LONGEST and lines.rank(row) is None else b""


def _clock(row: bytes) -> int:
    """Seconds of the day; 0 for a line without a time."""
    found = _CLOCK.search(row)
    return int(found[1]) * 3600 + int(found[2]) * 60 + int(found[3]) if found else 0


def _cleaned(block: bytes) -> bytes:
    """Without escapes of a terminal."""
    if b"\x1b" in block:
        block = lines.ESCAPES.sub(b"", block)
    return block.replace(b"\0", b"") if b"\0" in block else block


def _last_to_look_at(text: bytes, begin: int) -> int:
    """Where the lines end that have all that is near them; the others are looked at with what follows."""
    most = len(text) - NEAR_BYTES
    end = text.rfind(b"\n", begin, max(begin, most)) + 1
    if end:
        return end
    return most if most - begin > BLOCK else begin


def _is_mention(entry: Entry, line: bytes, body: bytes) -> bool:
    """Whether the line only speaks of it: in quotes of somebody else, as what may happen, as what did not, or
    as a function that was being called."""
    if _NATIVE_FRAME.match(body):
        return True
    spans = [span for pattern in entry.any if (span := pattern.span(line, body))]
    return bool(spans) and all(_is_about(line, *span) for span in spans)


def _is_about(line: bytes, begin: int, end: int) -> bool:
    before, behind = line[:begin], line[end:]
    if _DENIED.match(behind) or _USAGE.match(before) or _CONDITIONAL.search(before[-NEAR_WORDS:]):
        return True
    body = lines.body(line)
    is_raised = b"`" not in line[: len(line) - len(body)] and _RAISED.match(body)
    is_error = is_raised or _ERROR.search(before)
    if _LISTED.search(before) and not is_error and not _OF_ERRORS.search(before):
        return True
    if before.count(b"`") % 2 and b"`" in behind and not is_error:
        return True
    is_quoted = b'"' in behind and before.count(b'"') % 2 and _QUOTED.search(before)
    return bool(is_quoted) and not _OF_MESSAGE.search(before)


def _is_passing(entry: Entry | None, line: bytes, body: bytes, behind: Sequence[bytes]) -> bool:
    if _TOLERATED.search(line):
        return True
    if _OF_FILES.search(body):
        return _script_goes_on(behind[:NEAR_COMMAND])
    if entry is None or (entry.family not in _GENERAL and entry.id not in _IN_SENTENCES):
        return False
    spans = [span for pattern in entry.any if (span := pattern.span(line, body))]
    return not any(_is_report(line, body, *span) for span in spans)


def _script_goes_on(behind: Sequence[bytes]) -> bool:
    """Whether something else follows than its end, another command that failed, or a traceback."""
    for one in behind:
        if _TRACEBACK in one:
            return False
        if not _OF_THE_END.search(one) and not _OF_SHELL.search(one):
            return True
    return False


def _is_report(line: bytes, body: bytes, begin: int, end: int) -> bool:
    before = line[len(line) - len(body) : begin]
    is_at_begin = not before.strip() or _BEFORE_REPORT.search(before) is not None
    return is_at_begin or _OF_FAILURE.search(line[:begin] + line[end:]) is not None


def _is_quoted(line: bytes, before: Sequence[bytes]) -> bool:
    """Whether it is a frame of a traceback or its source code, or a command that `set -x` shows."""
    if line.startswith((b"+ ", b"++ ")) or _FRAME.match(line):
        return True
    return bool(before) and _SOURCE.match(line) is not None and _FRAME.match(before[-1]) is not None


def _text(body: bytes, behind: Sequence[bytes]) -> str:
    """What a line says; with an exception whose line has its name alone, also the next line; of one that was
    carried on from a worker, the worker's own."""
    text = body.strip()
    if _NAME_ALONE.fullmatch(text):
        text += b" " + next((said for one in behind[:2] if (said := lines.body(one).strip())), b"")
    elif of_worker := _OF_WORKER.match(text):
        own = (said for one in behind if (said := lines.body(one).strip()).startswith(of_worker[1] + b":"))
        text = next(own, text)
    return text.decode("utf-8", "replace")[:400]


def _first(*values: int | None) -> int | None:
    return next((one for one in values if one is not None), None)


def _time(line: bytes, before: Sequence[bytes]) -> float | None:
    """That of the line, else of the nearest one before it."""
    for one in (line, *reversed(before)):
        found = _own_time(one)
        if found is not None:
            return found
    return None


@_remembered
def _own_time(row: bytes) -> float | None:
    return lines.time(row)


def _rank_behind(line: bytes, behind: Sequence[bytes]) -> int | None:
    """Of a line that does not name its rank, that of the error which follows at once: NCCL warns first, and
    torch prints some errors without a label."""
    is_warning = b" NCCL WARN " in line
    if not is_warning and not _EXCEPTION.match(lines.body(line)):
        return None
    for one in behind if is_warning else behind[:3]:
        found = _LABEL.match(one)
        if found:
            return None if not is_warning and _OF_OTHERS.search(one) else int(found[1])
    return None


def _steps(behind: Sequence[bytes]) -> int:
    """How many different steps these lines tell of; step 0 alone may come before any is made."""
    found = set(map(_told_steps, behind)) - {()}
    return len(found) if found != {(b"0",)} else 0


@_remembered
def _told_steps(row: bytes) -> tuple[bytes, ...]:
    """The numbers of the steps that a line tells of."""
    return tuple(b"".join(step) for step in _STEP.findall(row, 0, 400))


def _is_continued(line: bytes, before: Sequence[bytes], behind: Sequence[bytes]) -> bool:
    """Whether the steps behind a line go on from the last one before it, and nothing says that a run which is
    started again begins there, at a checkpoint: no word, and no step or further end much later."""
    ended = lines.time(line)
    told = (one for one in behind if _number(one) or _BY_SCHEDULER.search(one))
    if ended is not None and any((_own_time(one) or ended) > ended + NEXT_RUN for one in told):
        return False
    last = next((found for one in reversed(before) if (found := _number(one))), [])
    at, following = next(((at, found) for at, one in enumerate(behind) if (found := _number(one))), (0, []))
    is_resumed = any(_RESUMES.search(one) for one in behind[:at])
    return not is_resumed and len(last) == len(following) and last < following


def _number(row: bytes) -> list[float]:
    """The numbers of the step that this line tells of; none for another line."""
    return [float(step) for step in _told_steps(row)]


@_remembered
def _says_done(row: bytes) -> bool:
    return _SAYS_DONE.search(row, 0, 400) is not None


@_remembered
def _has_finished(row: bytes) -> bool:
    return _FINISHED.search(row, 0, 400) is not None


def _goes_on(line: bytes, before: Sequence[bytes], behind: Sequence[bytes]) -> bool:
    """Whether the program plainly did. Two steps are enough if they have times of later."""
    steps = _steps(behind)
    is_retried = steps >= LATER_STEPS and _is_mild(line, lines.body(line))
    if steps and any(map(_says_done, behind)):
        return True
    if steps >= STEPS or is_retried or any(map(_has_finished, behind)):
        return True
    if _OF_SHELL.search(lines.body(line)):
        return steps > 0
    time = _time(line, before)
    if time is None:
        return False
    return _steps([one for one in behind if (_own_time(one) or time) > time + LATER]) >= LATER_STEPS


def _may_go_on(behind: Sequence[bytes]) -> bool:
    """Whether the program perhaps did: what it has in a buffer may come late."""
    return _steps(behind) > 0 or any(map(_says_done, behind))


def _is_last_word(
    body: bytes, before: Sequence[bytes], behind: Sequence[bytes], *, is_exception: bool = False
) -> bool:
    """Whether a process or the job has ended with this: steps behind it are output that was still buffered,
    which Python writes to a file after the traceback. An exception that was logged need not end anything, and
    a job script may go on without what it asked of Apptainer."""
    if _BY_SCHEDULER.search(body):
        return True
    if _OF_APPTAINER.match(body):
        own = (one for one in behind if not _OF_APPTAINER.match(lines.body(one)))
        return any(_CODE_OF_APPTAINER.search(one) for one in own)
    if not (is_exception or _EXCEPTION.match(body)) or not _last_frame(before):
        return False
    begin = next((at for at in reversed(range(len(before))) if _TRACEBACK in before[at]), 0)
    frames = [one for one in before[begin + 1 :] if _FRAME.match(one)]
    if not any(b'"<string>"' not in one or b"spawn_main" in one for one in frames):
        return False  # python -c: a job script tries something
    return begin == 0 or not _LOGGED.search(before[begin - 1])


def _is_caught(
    body: bytes, before: Sequence[bytes], behind: Sequence[bytes], *, is_exception: bool = False
) -> bool:
    """Whether the traceback that this line ends begins where an exception was caught, and not where the
    program or a thread of it begins."""
    if not is_exception and not _EXCEPTION.match(body):
        return False
    if any(words in one for one in behind[:NEAR_CHAIN] for words in _OF_CHAIN):
        return False  # the traceback of the whole begins behind it
    begin = next((at for at in reversed(range(len(before))) if _TRACEBACK in before[at]), None)
    if begin is None or any(_SHORTENED.search(one) for one in before[max(0, begin - 2) : begin + 1]):
        return False
    first = next((one for one in before[begin + 1 :] if _FRAME.match(one)), b"")
    return bool(first) and _UNCAUGHT.search(first) is None


def _is_of_cleaning_up(before: Sequence[bytes]) -> bool:
    begin = next((at for at in reversed(range(len(before))) if _CHAINED in before[at]), len(before))
    return any(_FRAME.match(one) and _CLEANS_UP.search(one) for one in before[begin:])


def _last_frame(before: Sequence[bytes]) -> bytes:
    """Empty where there is none just before the line behind these."""
    return next((one for one in reversed(before[-FRAME_LINES:]) if _FRAME.match(one)), b"")


def _is_mild(line: bytes, body: bytes) -> bool:
    if _TOLERATED.search(line):
        return True
    return _MILD.search(line) is not None and not body.startswith(_OF_TRAIN)


def _is_ignored(before: Sequence[bytes]) -> bool:
    """Whether the line behind these ends the traceback of a finalizer."""
    begin = next((at for at, one in enumerate(before) if _IGNORED in one), None)
    return begin is not None and not any(_EXCEPTION.match(lines.body(one)) for one in before[begin + 1 :])


def _traceback(before: Sequence[bytes]) -> bytes | None:
    """A line of the traceback of which the line behind these is the end, it may be: where it begins, or a
    frame near its end, as many are longer than what is looked at."""
    begin = next((one for one in reversed(before) if _TRACEBACK in one), None)
    return begin or _last_frame(before) or None


def _box(rows: Iterable[bytes]) -> ProcessEnd:
    found: dict[bytes, str] = {}
    for row in rows:
        cell = _BOX.search(row)
        if cell:
            found.setdefault(cell[1], cell[2].decode("utf-8", "replace")[:100])
    rank = found.get(b"rank", "")
    time = lines.time(found.get(b"time", "").replace("_", " ").encode())
    return ProcessEnd(
        rank=int(rank) if rank.isdigit() and len(rank) < 7 else None,
        node=found.get(b"host", ""),
        is_abort=found.get(b"exitcode") == "-6",
        time=math.inf if time is None else time,
    )


def _to_read(part: bytes, starts: Iterable[int], figures: Iterable[bytes]) -> list[tuple[int, bytes, int]]:
    """Of the lines that begin at `starts`, those to read: where each begins, its shape, and how many it
    stands for. If many differ in their digits alone, and not in those of `figures`, the first and the last
    ones are read: no more would be kept. All are read that name a node or begin a report, as these differ."""
    alike: dict[bytes, list[int]] = {}
    for at in starts:
        alike.setdefault(part[at : _end(part, at)].translate(None, _DIGITS), []).append(at)
    kept = []
    for shape, all_places in alike.items():
        for places in _by_figures(part, shape, all_places, figures):
            count, row = len(places), part[places[0] : _end(part, places[0])]
            if count > 2 * MOST_IN_A_FILE and not _TELLS.search(row) and not lines.node(row):
                del places[MOST_IN_A_FILE:-MOST_IN_A_FILE]
            kept += [(at, shape, 1) for at in places[:-1]] + [(places[-1], shape, 1 + count - len(places))]
    return sorted(kept)


def _by_figures(
    part: bytes, shape: bytes, starts: list[int], figures: Iterable[bytes]
) -> Iterable[list[int]]:
    """Lines of one shape, if they are many, apart by which of `figures` they have."""
    if len(starts) <= 2 * MOST_IN_A_FILE:
        return [starts]
    told = [one for one in figures if one.translate(None, _DIGITS) in shape]
    found: dict[tuple[bytes, ...], list[int]] = {}
    for at in starts:
        row = part[at : _end(part, at)]
        found.setdefault(tuple(one for one in told if one in row), []).append(at)
    return found.values()


def _lines_with(
    block: bytes, word: bytes, patterns: Sequence[tuple[Entry, Pattern]], places: dict[int, int]
) -> int:
    """Adds the lines with a word that may match one of the patterns, if there are any, by where they
    begin; how many there were."""
    at, count = block.find(word), 0
    while at >= 0:
        start = max(block.rfind(b"\n", 0, at), block.rfind(b"\r", 0, at)) + 1
        end = _end(block, at)
        count += 1
        if _may_be(block, start, end, at, patterns):
            places.setdefault(start, at)
        at = block.find(word, end)
    return count


def _may_be(block: bytes, start: int, end: int, at: int, patterns: Sequence[tuple[Entry, Pattern]]) -> bool:
    """Whether a line is worth reading. `at`: where its word is."""
    if end - start > LONGEST:
        start = max(start, at - LONGEST // 2)
        end = min(end, start + LONGEST)
    if not patterns:
        line = lines.body(block[start:end])
        return (
            _ERROR.search(line) is not None
            or _EXCEPTION.match(line.removeprefix(_INDENT)) is not None
            or _TELLS.search(line) is not None
            or messages.PREFIX.match(line) is not None
            or _is_restart(line)
        )
    return any(
        block.find(pattern.longest, start, end) >= 0 and pattern.may_be_in(block[start:end])
        for _, pattern in patterns
    )


def _end(block: bytes, at: int) -> int:
    """Of the line."""
    end = block.find(b"\n", at)
    end = end if end >= 0 else len(block)
    turned = block.find(b"\r", at, end)
    return turned if turned >= 0 else end


def _split(block: bytes) -> list[bytes]:
    rows = block.replace(b"\r", b"\n").split(b"\n")
    return [row for row in rows if row]


class Index:
    """The patterns by their keys. It does not change."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.helped = [entry for entry in entries if entry.all or entry.then]
        self.by_key: dict[bytes, list[tuple[Entry, Pattern]]] = {}
        self._of_any: dict[bytes, list[tuple[int, Entry, Pattern]]] = {}
        for place, entry in enumerate(entries):
            for pattern in (*entry.any, *entry.all, *entry.then):
                self.by_key.setdefault(key(pattern), []).append((entry, pattern))
            for pattern in entry.any:
                self._of_any.setdefault(key(pattern), []).append((place, entry, pattern))
        self.words = frozenset(self.by_key) | OF_ERRORS | OF_OURS | OF_RESTARTS
        """Those for which a block is searched."""
        parts = {part for entry in entries for part in entry.none}
        parts |= {part for rows in self.by_key.values() for _, one in rows for part in one.parts}
        self.figures = sorted(part for part in parts if part != part.translate(None, _DIGITS))
        """Parts of patterns with digits, in which alone two lines may differ and be of different entries."""

    def entry(self, line: bytes, body: bytes, frame: bytes = b"") -> Entry | None:
        """The first entry that a line is of. `frame`: the last one of a traceback before it."""
        words = set(line.translate(_LETTERS).split())
        found = [
            (place, entry)
            for word in words & self._of_any.keys()
            for place, entry, pattern in self._of_any[word]
            if pattern.is_in(line, body)
            and not any(one in line for one in entry.none)
            and entry.frame in frame
        ]
        return min(found, key=_place)[1] if found else None


def _place(found: tuple[int, Entry]) -> int:
    return found[0]


def key(pattern: Pattern) -> bytes:
    """The word of a pattern that fewest lines have, by a rule of thumb: one inside a part, the longest, none
    of those that many logs have."""
    inner, outer = [], []
    for part in pattern.parts:
        words = part.translate(_LETTERS).split()
        if not words:
            continue
        begins, ends = part[:1].isalpha(), part[-1:].isalpha()
        inner += words[begins : len(words) - ends]
        outer += words
    for words in (inner, outer):
        good = [word for word in words if word not in COMMON and len(word) > 2]
        if good:
            return max(good, key=len)
    return max(outer, key=len)


COMMON = frozenset(
    b"""the for with and not was were has have this that from are but all one you your can cannot could
    process processes device devices node nodes rank ranks memory model time error errors failed
    file files data training train loss step torch cuda CUDA GPU gpu NCCL nccl python site
    packages lib job task tasks called used using INFO WARN srun sbatch slurmstepd world size
    batch number running worker workers distributed running version RuntimeError ValueError
    ERROR found""".split()
)
"""Words that many lines of good runs have."""
