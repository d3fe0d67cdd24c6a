"""Which variables of a user's shell reach the ranks, and what is said of those that do not.

`passed.txt` is the table, which host/environment.sh reads too. `reaches` is the rule for the nodes of
`apptrain run`. Whoever leaves variables out (that, or containers/run.sh) hands their names to `launch` in
NOT_PASSED; `said` is the line about them. `wished` names those that a run needs to be the same again. No
value is ever looked at.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from entrypoint.core import files
from entrypoint.core.errors import BadInput

NOT_PASSED = "APPTRAIN_NOT_PASSED"
"""Names with blanks between them; no rank sees it."""
PASSED = "APPTRAIN_PASSED"
"""The same of those that pass into an image: beside them stand the image's own."""
FILE = "not-passed.txt"
"""All these names, in the run directory."""
TABLE = Path(__file__).with_name("passed.txt")
FORM = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\*?", re.ASCII)
"""NAME or PREFIX_*."""
OF_SHELL = (
    *("HOME", "LANG", "LC_ALL", "LC_CTYPE", "PATH", "SHELL", "TMPDIR"),
    # An image's own: what it is, what it holds, and where the host's driver is.
    *("APPTRAIN_IMAGE_ID", "APPTRAIN_IMAGE_PARTITION", "APPTRAIN_STACK", "LD_LIBRARY_PATH"),
)
"""What the nodes of `apptrain run` get beside the table."""
OF_PLACES = (
    *("USER", "LOGNAME", "TZ", "TERM", "COLUMNS", "LINES", "NVIDIA_VISIBLE_DEVICES"),
    *("http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy"),
    *("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "ALL_PROXY", "NO_PROXY"),
    # Caches, which containers/run.sh sets if nobody has.
    *("HF_HOME", "TORCH_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"),
)
"""What says in the table where a run is, and nothing of it."""
OF_NODES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""What they do not get of the table: nodes of one machine talk over its loopback interface."""
UNASKED = """
    PWD OLDPWD SHLVL _ HOSTNAME MAIL EDITOR PAGER LESS* LS_COLORS COLORTERM SSH_* XDG_* DBUS_*
    DISPLAY WINDOWID TERM_* VTE_* GPG_* DEBIAN_* HIST* MAKE* MFLAGS VENV PYTHON NODES CONFIG
    IMAGE_VENV STACK EXTRA OFFLINE IMAGE image DIR CLUSTER GPUS PARTITION ACCOUNT TIME OPTIONS
    PROFILE PS1 MODULE* __MODULES_* LMOD_* __LMOD_* LOADEDMODULES _LMFILES_ _ModuleTable* BASH_* BASHRCSOURCED
    MANPATH INFOPATH CONDA_* _CE_* VIRTUAL_ENV* PYENV_* NVM_* SUDO_* USERNAME TMUX* STY LC_* LANGUAGE
    INVOCATION_ID SYSTEMD_* JOURNAL_STREAM PYTEST_* HOME LANG PATH SHELL TMPDIR LD_LIBRARY_PATH
    SLURM_* SLURMD_* SBATCH_* SALLOC_* SRUN_* PBS_* NCPUS ENVIRONMENT KRB5CCNAME SELINUX_* which_declare
    GPU_DEVICE_ORDINAL ROCR_VISIBLE_DEVICES ZE_AFFINITY_MASK HYDRA_BOOTSTRAP HYDRA_LAUNCHER_EXTRA_ARGS HYDI_*
    I_MPI_HYDRA_* OMPI_* PRTE_* PMI_* PMI2_* PMIX_* PALS_* APPTAINER_* SINGULARITY_*
"""
"""Of shells, terminals, logins, modules, make, schedulers, containers, and the starters of MPI, for which
Slurm sets some in each job: nobody means them for ranks."""
MEETING = ("MASTER_ADDR", "MASTER_PORT")
STALE = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE"),
    "PYTHON_EXEC",
)
"""With TORCHELASTIC_* and PET_*: what an outer torchrun left behind, or was told. An inherited
TORCHELASTIC_USE_AGENT_STORE hangs every rank, PET_* change torchrun's options unseen, PYTHON_EXEC the Python
of its ranks."""
SHOWN = 3
"""Variables that are named of many."""
MOST_SCRIPT = 1 << 20
"""Bytes of a script that is searched for names."""


def table(kind: str) -> tuple[str, ...]:
    """The table's words of a kind: `pass`; `file`, paths that must be there too; `never`."""
    lines = (line.split() for line in TABLE.read_text(encoding="utf-8").splitlines())
    return tuple(word for line in lines if line[:1] == [kind] for word in line[1:])


def reaches(names: Iterable[str], env: Mapping[str, str]) -> set[str]:
    """Which of these the nodes of `apptrain run` get; APPTRAIN_PASS adds names and PREFIX_*."""
    asked = env.get("APPTRAIN_PASS", "").split()
    passed = [*table("pass"), *table("file"), *OF_SHELL]
    return {
        name
        for name in names
        if (matches(name, asked) or (matches(name, passed) and name not in OF_NODES))
        and not matches(name, table("never"))
    }


def check(env: Mapping[str, str]) -> None:
    """Raises BadInput for a word of APPTRAIN_PASS that is no FORM, as host/environment.sh refuses it."""
    for word in env.get("APPTRAIN_PASS", "").split():
        if not FORM.fullmatch(word):
            raise BadInput(
                "pass-malformed",
                f"APPTRAIN_PASS: {word} is not NAME or PREFIX_*: give names with blanks between them",
            )


def wished(env: Mapping[str, str]) -> list[str]:
    """The names in this environment, of a node, that somebody has set for the ranks: those that APPTRAIN_PASS
    names, and those of the table that do not only say where the run is."""
    asked = env.get("APPTRAIN_PASS", "").split()
    candidates = set(env[PASSED].split() if PASSED in env else env)
    of_table = {name for name in candidates if matches(name, table("pass")) and not matches(name, OF_PLACES)}
    named = {name for name in candidates if matches(name, asked)}
    return sorted((of_table | named) & env.keys())


def left_out(env: Mapping[str, str]) -> list[str]:
    """The names in this environment that the nodes of `apptrain run` do not get, and those that have been
    left out before."""
    before = env.get(NOT_PASSED, "").split()
    own = {name for name in env if not name.startswith("APPTRAIN_")}
    return sorted({*before, *(own - reaches(own, env))})


def meant(names: Sequence[str]) -> list[str]:
    """Those that may have been meant for the ranks."""
    others = [*UNASKED.split(), *table("never"), *MEETING, *stale(names)]
    return sorted(name for name in names if not matches(name, others))


def stale(names: Iterable[str]) -> list[str]:
    """Those that no rank may inherit."""
    return sorted(name for name in names if name in STALE or name.startswith(("TORCHELASTIC_", "PET_")))


def preset(env: Mapping[str, str]) -> list[str]:
    """What a site, an image or another launcher has set, and each rank gets from us, or not at all."""
    names = {*env, *env.get(NOT_PASSED, "").split()}
    return sorted({*stale(names), *(names & set(MEETING))})


def said(names: Sequence[str], script: Path | None, whole: Path) -> str:
    """The line about these; empty for none. `script`: those that it mentions come first. `whole`: where
    all are."""
    mentioned = _mentioned(names, script)
    ordered = [*mentioned, *(name for name in names if name not in mentioned)]
    shown = [_shown(name, script if name in mentioned else None) for name in ordered[:SHOWN]]
    more = f" and {len(names) - SHOWN} more, all in {whole}" if len(names) > SHOWN else ""
    listed = ", ".join(shown) + more
    return f"the ranks do not get {listed} (APPTRAIN_PASS='NAME PREFIX_*' passes more)" if names else ""


def _shown(name: str, script: Path | None) -> str:
    options = {"GLOO_SOCKET_IFNAME": " (--interface)", "NCCL_SOCKET_IFNAME": " (--interface)"}
    return f"{name}, which {script.name} mentions" if script else name + options.get(name, "")


def _mentioned(names: Sequence[str], script: Path | None) -> list[str]:
    """Those that a script's text has as a word; none of one that cannot be read."""
    if script is None:
        return []
    try:
        text = files.read(script, MOST_SCRIPT).decode(errors="replace")
    except (OSError, ValueError):
        return []
    words = set(re.findall(r"\w+", text))
    return [name for name in names if name in words]


def matches(name: str, wanted: Iterable[str]) -> bool:
    return any(name.startswith(w[:-1]) if w.endswith("*") else name == w for w in wanted)
