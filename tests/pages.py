"""The examples of README and docs/, run as a reader would, and compared with what the page shows.

It knows how a page marks an example, and what may differ from one run to the next. Above each example stands a line
that no reader sees:

    <!-- run: slurm -->              run in this scene; the examples of a page share one shell, from top to bottom
    <!-- not run: needs a GPU -->    why no test runs it; the page says so too, if a reader could think otherwise

A line `...` stands for any lines, or for none. With APPTRAIN_TEST_PAGES=write the tests write what was printed into
the pages, where it differs and no `...` is shown.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen

WRITES = os.environ.get("APPTRAIN_TEST_PAGES") == "write"
CHECKOUT = Path(__file__).resolve().parents[1]
PAGES = sorted([CHECKOUT / "README.md", *CHECKOUT.glob("docs/*.md")])
EXAMPLE = re.compile(
    r"(?:^<!-- (?P<how>run|not run): (?P<what>[^\n]*) -->\n)?^```\w*\n(?P<text>.*?)^```$", re.M | re.S
)
ANYTHING = "..."
ALICE = "/home/alice/apptrain"
"""The checkout on all pages, and where the reader is."""

FILES = {
    "my_script.py": "import os\nprint('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n",
    "threads.py": 'import os\nos.environ["OMP_NUM_THREADS"] = "1"\nimport torch\n',
    "fail.py": "import os\nif os.environ['RANK'] == '3':\n    raise RuntimeError('no such data')\n",
}
"""What the reader has written there."""

VARIES: Mapping[str, tuple[str, str]] = {
    "the id of a run on one machine": (r"\b\d{8}-\d{6}-\d+\b", "ID"),
    "a job's number": (r"(\bapptrain-|\bapptrain\.o|\bjob |--rdzv-id=)\d+(?:_\d+)?", r"\1N"),
    "PBS's id of a job": (r"\b\d+\.pbssrv\b", "N.pbssrv"),
    "a port": (r"(?<=[a-z0-9]:)\d{5}\b|(?<=master_port  )( +)\d{5}|(?<=join_port  )( +)\d{5}", "PORT"),
    "how many images are right": (r"\d+\.\d+% \(\d+ of 360\)", "ACCURACY"),
    "how many cores a rank has": (r"(?<=, OMP_NUM_THREADS=)\d+$", "N"),
    "the end of a bar": (r"(?<=\d \[)\d\d:\d\d<\d\d:\d\d, .*(?=\]$)", "AS FAST AS IT IS"),
    "a mean of all steps": (r"\d+(?= \(mean )", "N"),
    "a time, a rate, a size": (
        r"(?<![\w.])[+-]?\d+(?:\.\d+)?(?:e-?\d+)? ?(?:s|GB/s|MB/s|Gflop/s|MB|GB|GiB|MiB|KiB|images/s|step/s)\b",
        "AMOUNT",
    ),
    "the parts of a start": (r"(?<=the ranks started after AMOUNT: ).*", "PARTS"),
    "a date": (r"\b20\d\d-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d)?)?", "DATE"),
    "how wide a column is": (r" {2,}", "  "),
    "which nodes are the slowest": (r"^(slowest pair: )\S+ to \S+,", r"\1NODES,"),
    "what the doctor finds of a node": (r"^([a-z]+-[a-z]\d+  )\d+  .*", r"\1FIGURES"),
}
"""Name of what differs to its pattern, and what stands for it; in this order."""


SLOW = re.compile("have not come|has not started yet|all nodes have come")
"""Lines that a job prints too if the machine is slow."""


def as_usual(line: str) -> str:
    """The line without what differs from run to run."""
    for pattern, instead in VARIES.values():
        line = re.sub(pattern, instead, line)
    return line.rstrip()


@dataclass(frozen=True, kw_only=True)
class Step:
    """A command, and what the page shows for it."""

    command: str
    shown: list[str]
    place: str
    """FILE:LINE."""


@dataclass(frozen=True, kw_only=True)
class Example:
    how: str
    """run or not run; empty for a block without either."""
    what: str
    """The scene, or the reason."""
    steps: list[Step]
    place: str


def examples(page: Path) -> Iterator[Example]:
    """The sessions of a page: blocks in which a line begins with `$ `."""
    text = page.read_text()
    for found in EXAMPLE.finditer(text):
        line = text.count("\n", 0, found.start("text")) + 1
        if re.search(r"^\$ ", found["text"], re.M):
            yield Example(
                how=found["how"] or "",
                what=found["what"] or "",
                steps=list(_steps(found["text"].splitlines(), page.name, line)),
                place=f"{page.name}:{line}",
            )


def _steps(lines: list[str], name: str, first: int) -> Iterator[Step]:
    command, shown, place = "", list[str](), ""
    for number, line in enumerate(lines, first):
        if command.endswith("\\") and not shown:
            command += f"\n{line}"
        elif line.startswith("$ "):
            if command:
                yield Step(command=command, shown=shown, place=place)
            command, shown, place = line[2:], [], f"{name}:{number}"
        else:
            shown.append(line)
    yield Step(command=command, shown=shown, place=place)


def differences(shown: list[str], printed: list[str]) -> list[str]:
    """What a page shows and a run did not print, with `-`, and the other way round, with `+`.

    Ranks of several nodes print in any order, so only the number of equal lines counts. With a line `...` more may
    have been printed.
    """
    ours = Counter(as_usual(line) for line in shown if line != ANYTHING)
    theirs = Counter(as_usual(line) for line in printed if not SLOW.search(line))
    missing = [f"- {line}" for line in (ours - theirs).elements()]
    more = [] if ANYTHING in shown else [f"+ {line}" for line in (theirs - ours).elements()]
    return missing + more


@dataclass
class Shell:
    """A reader's shell, which keeps its folder and its variables from one command to the next."""

    process: "Popen[str]"
    """A bash that reads commands from its standard input."""
    until_ended: Callable[[], None] = lambda: None
    """Waits for the jobs that were submitted."""
    known: dict[str, str] = field(default_factory=dict)
    """A job's number on the page to its number here."""

    END = "-- end of what it printed --"

    def run(self, step: Step) -> list[str]:
        """The lines that the command prints, after the jobs that it looks at have ended."""
        command = step.command
        for number, here in self.known.items():
            command = re.sub(
                rf"(?<=apptrain-){number}\b|(?<=\.o){number}\b|(?<=qdel ){number}\b|(?<=-xf ){number}\b",
                here,
                command,
            )
        if re.search(r"\.out\b|\.o\d+\b|chain\.jobs|qstat -xf", command):
            self.until_ended()
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(f"{{ {command}\n}} </dev/null 2>&1; echo; echo '{self.END}'\n")
        self.process.stdin.flush()
        lines = []
        while (line := self.process.stdout.readline()) and line.rstrip("\n") != self.END:
            lines.append(line.rstrip("\n").rpartition("\r")[2])
        if lines and not lines[-1]:
            del lines[-1]
        self._learn(step.shown, lines)
        return lines

    def as_on_the_page(self, line: str) -> str:
        """With the page's numbers of jobs."""
        for number, here in self.known.items():
            line = re.sub(
                rf"(\bapptrain-|\bapptrain\.o|\bjob ){here}\b|\b{here}(?=\.pbssrv)", rf"\g<1>{number}", line
            )
        return line

    def _learn(self, shown: list[str], printed: list[str]) -> None:
        for pattern in (r"^Submitted batch job (\d+)$", r"^(\d+)\.pbssrv$"):
            numbers = [re.findall(pattern, "\n".join(lines), re.M) for lines in (shown, printed)]
            self.known |= dict(zip(*numbers, strict=False))


def tell(page: Path, shell: Shell, scene: str, names: Mapping[str, str]) -> list[str]:
    """Runs the page's examples of this scene; what differs, each with its place. `names`: what stands for a path of
    this run on the page."""
    told = []
    for example in examples(page):
        for step in example.steps if (example.how, example.what) == ("run", scene) else ():
            printed = shell.run(step)
            for path, name in names.items():
                printed = [line.replace(path, name) for line in printed]
            if (found := differences(step.shown, printed)) and WRITES and ANYTHING not in step.shown:
                _write(page, step, [shell.as_on_the_page(line) for line in printed])
            elif found:
                told.append("\n".join([f"{step.place}: $ {step.command}", *found, "printed:", *printed]))
    return told


def _write(page: Path, step: Step, printed: list[str]) -> None:
    before = "\n".join([f"$ {step.command}", *step.shown])
    page.write_text(page.read_text().replace(before, "\n".join([f"$ {step.command}", *printed]), 1))
