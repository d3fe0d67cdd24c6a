"""Which variables reach the ranks, and the line about those that do not."""

import re
import subprocess
from pathlib import Path

import pytest

from entrypoint.core.errors import BadInput
from entrypoint.plan import passed

CHECKOUT = Path(__file__).resolve().parents[3]
MALFORMED = ("*", "A-B", "A=1", "1A", "*_A", "A*B", "A,B")
"""Words that are neither NAME nor PREFIX_*."""
FRAMEWORKS = {
    *(
        "FSDP_VERSION",
        "PARALLELISM_CONFIG_TP_SIZE",
        "FP8_BACKEND",
        "ACCELERATE_USE_FSDP",
        "MEGATRON_LM_TP_DEGREE",
    ),
    *(
        "HF_TOKEN",
        "TRANSFORMERS_CACHE",
        "TOKENIZERS_PARALLELISM",
        "PL_GLOBAL_SEED",
        "CUBLAS_WORKSPACE_CONFIG",
    ),
    *(
        "OFI_NCCL_PROTOCOL",
        "FI_PROVIDER",
        "NCCL_DEBUG",
        "OMP_NUM_THREADS",
        "SSL_CERT_FILE",
        "REQUESTS_CA_BUNDLE",
    ),
}


def test_what_frameworks_document_reaches_the_ranks() -> None:
    assert passed.reaches(FRAMEWORKS, {}) == FRAMEWORKS


def test_bash_and_python_read_the_same_table() -> None:
    script = (
        f"checkout={CHECKOUT}; source host/schedulers.sh; source host/environment.sh; PASSED=() NEVER=(); read_table; "
        'printf \'%s\\n\' "${PASSED[@]}" / "${FILES[@]}" / "${NEVER[@]}"'
    )
    line = ["bash", "-euc", script]
    done = subprocess.run(line, cwd=CHECKOUT, capture_output=True, text=True, check=True)
    tables = [tuple(part.split()) for part in done.stdout.split("/\n")]
    assert tables == [passed.table(kind) for kind in ("pass", "file", "never")]
    assert min(map(len, tables)) > 1


@pytest.mark.parametrize("word", MALFORMED)
def test_a_malformed_name_is_refused(word: str) -> None:
    with pytest.raises(BadInput) as refused:
        passed.check({"APPTRAIN_PASS": f"X Y_* {word}"})
    said = f"APPTRAIN_PASS: {word} is not NAME or PREFIX_*: give names with blanks between them"
    assert str(refused.value) == said


def test_no_secret_of_a_scheduler_reaches_a_rank_whatever_is_asked_for() -> None:
    asked = {"APPTRAIN_PASS": "SLURM_* PBS_JOBCOOKIE MINE"}
    assert passed.reaches(["SLURM_JWT", "PBS_JOBCOOKIE", "SLURM_X", "MINE"], asked) == {"SLURM_X", "MINE"}


def test_nodes_of_one_machine_keep_to_its_loopback_unless_asked() -> None:
    name = "NCCL_SOCKET_IFNAME"
    assert passed.reaches([name], {}) == set()
    assert passed.reaches([name], {"APPTRAIN_PASS": name}) == {name}


def test_what_was_left_out_before_is_told_too() -> None:
    env = {"MINE": "", "HOME": "", "APPTRAIN_DEVICE": "cpu", passed.NOT_PASSED: "OF_HOST MINE"}
    assert passed.left_out(env) == ["MINE", "OF_HOST"]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ([], ""),
        (["SSH_TTY", "PATH", "LMOD_CMD", "SLURM_JWT", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"], ""),
        (["B", "A"], "the ranks do not get A, B (APPTRAIN_PASS='NAME PREFIX_*' passes more)"),
        (["C", "B", "A"], "the ranks do not get A, B, C (APPTRAIN_PASS='NAME PREFIX_*' passes more)"),
        (
            ["D", "C", "B", "A"],
            "the ranks do not get A, B, C and 1 more, all in RUN/not-passed.txt (APPTRAIN_PASS='NAME PREFIX_*' passes more)",
        ),
        (
            ["GLOO_SOCKET_IFNAME"],
            "the ranks do not get GLOO_SOCKET_IFNAME (--interface) (APPTRAIN_PASS='NAME PREFIX_*' passes more)",
        ),
        (
            [*"ABCDE", "MY_DATA", "OTHER"],
            "the ranks do not get MY_DATA, which train.py mentions, A, B and 4 more, all in RUN/not-passed.txt "
            "(APPTRAIN_PASS='NAME PREFIX_*' passes more)",
        ),
    ],
)
def test_what_the_script_mentions_is_named_first(names: list[str], said: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os\nfolder = os.environ['MY_DATA']\nnot_this = 'OTHERS'\n")
    assert passed.said(passed.meant(names), script, Path("RUN/not-passed.txt")) == said


def test_a_script_is_read_up_to_a_mebibyte(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    for size, said in (
        (1 << 20, "the ranks do not get A, which train.py mentions ("),
        ((1 << 20) + 1, "the ranks do not get A ("),
    ):
        script.write_text("A".ljust(size))
        assert passed.said(["A"], script, tmp_path).startswith(said)


@pytest.mark.parametrize("size", [None, passed.MOST_SCRIPT + 1])
def test_a_script_that_cannot_be_read_mentions_nothing(size: int | None, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    if size:
        script.write_text("A " * size)
    assert passed.said(["A"], script, tmp_path).startswith("the ranks do not get A (")
    assert passed.said(["A"], None, tmp_path).startswith("the ranks do not get A (")


BATCH = """
    GPU_DEVICE_ORDINAL HYDRA_BOOTSTRAP HYDRA_LAUNCHER_EXTRA_ARGS I_MPI_HYDRA_BOOTSTRAP
    I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS OMPI_MCA_plm_slurm_args PRTE_MCA_plm_slurm_args ROCR_VISIBLE_DEVICES
    SRUN_DEBUG ZE_AFFINITY_MASK ENVIRONMENT HOME HOSTNAME LANG PATH PWD SHELL SHLVL TMPDIR _
"""
"""What a task of a batch job had on a real Slurm that the image does not get, beside SLURM_*."""


def test_nothing_is_said_of_what_a_scheduler_sets_by_itself() -> None:
    assert passed.meant(BATCH.split()) == []
    recorded = sorted((Path(__file__).parents[2] / "recordings").rglob("*.env"))
    assert len(recorded) > 100
    of_recorder = {"CASE", "MYVAR"}
    for file in recorded:
        names = set(re.findall(r"^(\w+)=", file.read_text(), re.MULTILINE)) - of_recorder
        assert passed.meant(sorted(names - passed.reaches(names, {}))) == [], file


def test_what_a_site_or_another_launcher_has_set_is_told_apart() -> None:
    env = {"RANK": "7", "MASTER_PORT": "1", "PET_X": "", "OTHER": "", passed.NOT_PASSED: "MASTER_ADDR RANK"}
    assert passed.preset(env) == ["MASTER_ADDR", "MASTER_PORT", "PET_X", "RANK"]


def test_wished_is_what_was_named_and_what_the_table_has_for_others_than_places() -> None:
    names = [
        "HF_HOME",
        "HF_HUB_OFFLINE",
        "http_proxy",
        "SSL_CERT_FILE",
        "USER",
        "MINE",
        "MY_1",
        "PATH",
        "NCCL_X",
    ]
    env = dict.fromkeys(names, "")
    assert passed.wished(env) == ["HF_HUB_OFFLINE", "NCCL_X"]
    asked = {**env, "APPTRAIN_PASS": "MY_* HF_HOME"}
    assert passed.wished(asked) == ["HF_HOME", "HF_HUB_OFFLINE", "MY_1", "NCCL_X"]
    assert passed.wished({**asked, passed.PASSED: "MY_1 PATH NCCL_X NCCL_GONE"}) == ["MY_1", "NCCL_X"]
