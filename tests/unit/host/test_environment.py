"""host/environment.sh, through containers/run.sh: what passes into the image."""

import getpass
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.host.node import IMAGE_ID, NODE, RUN_SH, Node, bound, said
from tests.unit.plan.test_passed import MALFORMED


def test_only_what_the_table_names_passes(node: Node) -> None:
    host = {
        "SLURM_JOB_ID": "7",
        "SLURMD_NODENAME": NODE,
        "PBS_NODENUM": "0",
        "NCPUS": "4",
        "APPTRAIN_ATTEMPT": "2",
        "CUDA_VISIBLE_DEVICES": "",
        "NCCL_DEBUG": "INFO",
        "OMP_NUM_THREADS": "3",
        "TORCH_LOGS": "x",
        "http_proxy": "a",
        "NO_PROXY": "b",
        "WANDB_MODE": "offline",
        "TZ": "UTC",
    }
    kept_out = {
        "PBS_JOBCOOKIE": "secret",
        "SLURM_JWT": "secret",
        "PYTHONPATH": "/x",
        "PYTHONDONTWRITEBYTECODE": "1",
        "LD_LIBRARY_PATH": "/x",
        "VIRTUAL_ENV": "/x",
        "CONDA_PREFIX": "/x",
        "LANG": "de_DE.UTF-8",
        "LC_ALL": "C",
        "CUDA_HOME": "/x",
        "APPTRAIN_STACK": "/x",
        "APPTRAIN_IMAGE_ID": "another's",
        "APPTRAIN_OUTCOME": "/x",
        "PYTHON_EXEC": "/x",
        "SHELL": "/bin/tcsh",
        "ANYTHING": "else",
    }
    inside = node.inside(**host, **kept_out)
    not_passed = inside.pop("APPTRAIN_NOT_PASSED").split()
    passed = set(inside.pop("APPTRAIN_PASSED").split())
    assert passed >= host.keys()
    assert passed.isdisjoint(kept_out)
    of_image = {name for name in kept_out if name.startswith("APPTRAIN_")}
    assert set(not_passed) >= kept_out.keys() - of_image
    assert set(not_passed).isdisjoint({*host, *of_image})
    tmp = Path(inside["TMPDIR"])
    assert tmp.parent == node.disk
    assert inside == host | {
        "PATH": str(node.env["PATH"]),
        "PWD": str(node.work),
        "HOME": str(node.home),
        "USER": "alice",
        "LOGNAME": "alice",
        "PYTHONPATH": "/.apptrain",  # this image is not ours
        "TMPDIR": str(tmp),
        "TRITON_CACHE_DIR": f"{tmp}/triton_cache_dir",
        "TORCHINDUCTOR_CACHE_DIR": f"{tmp}/torchinductor_cache_dir",
        "MPLCONFIGDIR": f"{tmp}/mplconfigdir",
        "XDG_CACHE_HOME": f"{tmp}/xdg_cache_home",
        "HF_HOME": f"{node.home}/.cache/huggingface",
        "TORCH_HOME": f"{node.home}/.cache/torch",
        "PYTHONNOUSERSITE": "1",
        "APPTRAIN_IMAGE_ID": IMAGE_ID,
    }


VALUES = (
    "",
    "two words ",
    "a,b:c=d",
    "$HOME $(id) `id`",
    "'\"\\",
    "end\\",
    "line\nline\n",
    "\t\r*~#%",
    "é€😀",
    "x" * 100_000,
)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value[:20]))
def test_values_and_arguments_arrive_as_they_are(node: Node, value: str) -> None:
    script = "import json, os, sys; print(json.dumps([os.environ['HF_X'], sys.argv[1]]))"
    ended = node.run(sys.executable, "-c", script, value, HF_X=value)
    assert (ended.returncode, ended.stderr, json.loads(ended.stdout)) == (0, "", [value, value])


def test_the_user_adds_names_and_prefixes(node: Node) -> None:
    host = {"MY_NAME": "1", "MY_OTHER": "2", "COMET_KEY": "3", "COMETS": "4"}
    inside = node.inside(APPTRAIN_PASS="MY_NAME\n COMET_* NOT_SET", **host)
    assert {name: inside.get(name) for name in host} == host | {"MY_OTHER": None, "COMETS": None}


@pytest.mark.parametrize(
    "name", ["PYTHONPATH", "LD_PRELOAD", "PBS_JOBCOOKIE", "SLURM_JWT", "PATH", "CONDA_PREFIX", "LC_ALL"]
)
def test_what_never_passes_is_refused_by_name(node: Node, name: str) -> None:
    ended = node.run("true", APPTRAIN_PASS=f"A {name}")
    assert node.refused(ended) == f"APPTRAIN_PASS: {name} never passes: set it in CMD, with env NAME=VALUE"


def test_a_variable_passes_as_it_is_whatever_run_sh_calls_its_own(node: Node) -> None:
    mine = dict.fromkeys(
        ("version", "device", "node", "entry", "names", "outcome", "SHARED", "PASSED"), "mine"
    )
    inside = node.inside(**mine, APPTRAIN_PASS=" ".join(mine))
    assert {name: inside.get(name) for name in mine} == mine


def test_what_never_passes_is_left_out_of_a_prefix(node: Node) -> None:
    assert "SLURM_JWT" not in node.inside(APPTRAIN_PASS="S*", SLURM_JWT="secret")


def test_certificates_pass_if_the_image_shows_their_file(node: Node) -> None:
    seen = node.home / "ca.pem"
    unseen = node.path / "site.pem"
    seen.touch()
    unseen.touch()
    host = {"SSL_CERT_FILE": str(seen), "SSL_CERT_DIR": "/etc/site/certs", "REQUESTS_CA_BUNDLE": str(unseen)}
    ended = node.run(sys.executable, "-c", "import os; print(sorted(os.environ))", **host)
    assert "SSL_CERT_FILE" in ended.stdout
    assert "SSL_CERT_DIR" not in ended.stdout
    assert "REQUESTS_CA_BUNDLE" not in ended.stdout
    begin, names, remedy = said(ended).replace(": ", "|").replace(" (", "|").split("|")
    assert begin == "not passed, the image does not show their files"
    assert sorted(names.split()) == ["REQUESTS_CA_BUNDLE", "SSL_CERT_DIR"]
    assert remedy == "APPTRAIN_BIND shows them)"
    del host["SSL_CERT_DIR"]
    bound = node.inside(**host, APPTRAIN_BIND=str(unseen))
    assert {name: bound.get(name) for name in host} == host


@pytest.mark.parametrize("word", MALFORMED)
def test_a_malformed_name_is_refused(node: Node, word: str) -> None:
    ended = node.run("true", APPTRAIN_PASS=f"X {word}")
    assert (
        node.refused(ended)
        == f"APPTRAIN_PASS: {word} is not NAME or PREFIX_*: give names with blanks between them"
    )


def test_names_that_are_no_identifiers_are_skipped(node: Node) -> None:
    inside = node.inside(**{"SLURM_A-B": "1", "SLURM_a.b": "2", "SLURM_C": "3"})
    assert [name for name in inside if name.startswith("SLURM")] == ["SLURM_C"]


def test_a_value_that_is_not_utf_8_is_said_and_left_out(node: Node) -> None:
    ended = node.run("sh", "-c", 'echo "${HF_X-none} $HF_Y"', HF_X=b"caf\xe9", HF_Y="here")
    assert (ended.returncode, ended.stdout) == (0, "none here\n")
    assert said(ended) == "not passed, the value is not UTF-8: HF_X"


def test_an_argument_that_is_not_utf_8_is_refused(node: Node) -> None:
    ended = node.run("true", b"caf\xe9")
    assert node.refused(ended) == (
        "an argument is not UTF-8, which would arrive changed: rename or encode it otherwise"
    )


def test_what_steers_apptainer_from_outside_is_said_once_and_not_obeyed(node: Node) -> None:
    ours = {"APPTAINER_CACHEDIR": "/c", "SINGULARITY_TMPDIR": "/t", "APPTAINER_CONFIGDIR": "/d"}
    foreign = {
        "APPTAINER_BIND": "/none",
        "APPTAINERENV_X": "1",
        "APPTAINERENV_OMP_NUM_THREADS": "9",
        "APPTAINERENV_A-B": "1",
        "SINGULARITYENV_Y": "2",
        "SINGULARITY_BIND": "/none",
        "APPTAINER_NV": "1",
    }
    ended = node.run("sh", "-c", "echo $OMP_NUM_THREADS", OMP_NUM_THREADS="2", **ours, **foreign)
    assert (ended.returncode, ended.stdout) == (0, "2\n")
    listed = (
        said(ended)
        .removeprefix("not obeyed: ")
        .removesuffix(" (APPTRAIN_BIND and APPTRAIN_PASS are for that)")
    )
    assert sorted(listed.split()) == sorted(foreign)
    own = node.calls()[0]["own"]
    given = {name for name in own if name.startswith("APPTAINERENV_")}
    assert own.keys() - given == ours.keys()
    assert given & foreign.keys() == {"APPTAINERENV_OMP_NUM_THREADS"}


def test_binds_of_a_sites_module_count_if_its_profile_says_so(node: Node) -> None:
    lib, conf = node.path / "lib", node.path / "conf"
    lib.mkdir()
    conf.mkdir()
    node.python("exit 0")
    module = {"APPTAINER_BIND": f"{lib}:/host/lib:ro,{conf}:/opt/conf:rw", "APPTAINERENV_X": "1"}
    ended = node.task("--obey-binds", SINGULARITY_BINDPATH=str(conf), **module)
    assert (ended.returncode, said(ended)) == (
        0, "not obeyed: APPTAINERENV_X (APPTRAIN_BIND and APPTRAIN_PASS are for that)"
    )  # fmt: skip
    mounted = [word for option, word in itertools.pairwise(node.argv()) if option == "--mount"]
    assert mounted[:3] == [bound(lib, "/host/lib") + ",ro", bound(conf, "/opt/conf"), bound(conf)]
    assert not {"APPTAINER_BIND", "SINGULARITY_BINDPATH"} & node.calls()[-1]["own"].keys()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("/none:/host", "APPTAINER_BIND /none is not there on this node: correct it, or use a directory that all nodes share"),
        ("/usr:/host:image-src=/x", "APPTAINER_BIND: /usr:/host:image-src=/x is not SRC[:DST[:ro]] with paths from /: give one bind a line"),
        (r"/a\:b", r"APPTAINER_BIND: /a\:b has a backslash, which is not read here: give this path in APPTRAIN_BIND"),
    ],
)  # fmt: skip
def test_a_bind_of_a_module_that_cannot_be_made_is_refused(node: Node, value: str, message: str) -> None:
    assert node.refused(node.task("--obey-binds", APPTAINER_BIND=value)) == message


@pytest.mark.parametrize(
    "task", [{"SLURM_NODEID": "1"}, {"SLURM_NODEID": "0", "SLURM_LOCALID": "1"}, {"PBS_NODENUM": "2"}]
)
def test_what_is_the_same_for_all_tasks_is_said_by_the_first(node: Node, task: dict[str, str]) -> None:
    assert node.run("true", APPTAINER_BIND="/none", **task).stderr == ""


def test_directories_of_caches_are_replaced_unless_they_are_asked_for(node: Node) -> None:
    mine = {"TRITON_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/b"}
    ended = node.run("sh", "-c", "echo $TRITON_CACHE_DIR $HF_HOME", **mine)
    assert re.fullmatch(rf"{node.disk}/apptrain\.\w{{6}}/triton_cache_dir /b/huggingface\n", ended.stdout)
    said_so = said(ended).split(":")
    assert said_so[0] == "set to directories on each node's disk"
    assert sorted(said_so[1].removesuffix(" (APPTRAIN_PASS keeps yours)").split()) == sorted(mine)
    assert node.inside(APPTRAIN_PASS="TRITON_CACHE_DIR XDG_*", **mine).items() >= mine.items()


def test_a_task_without_a_user_name_gets_one(node: Node) -> None:
    inside = node.inside(USER=None, LOGNAME=None)
    assert (inside["USER"], inside["LOGNAME"]) == (getpass.getuser(), getpass.getuser())


UTF_8 = [
    "",
    "plain",
    "\n\t\x7f",
    "caf\u00e9",
    "\u0080\u07ff",
    "\u0800\u0fff",
    "\ud7ff\ue000\uffff",
    "\U00010000\U0010ffff",
    "a\u20acb",
]
NOT_UTF_8 = [
    *(
        b"\x80",
        b"\xbf",
        b"\xc1\xbf",
        b"\xc2",
        b"\xc2a",
        b"\xe0\x9f\xbf",
        b"\xe1\x80",
        b"\xed\xa0\x80",
        b"\xf0\x8f\xbf\xbf",
    ),
    *(b"\xf1\x80\x80", b"\xf4\x90\x80\x80", b"\xf5\x80\x80\x80", b"\xff", b"a\xe9b"),
]


@pytest.mark.parametrize("text", [text.encode() for text in UTF_8] + NOT_UTF_8)
def test_what_is_utf_8_is_known_byte_by_byte(text: bytes) -> None:
    """Python decides what it is."""
    script = 'LC_ALL=C; checkout=$1; OF_ALLOCATION=(); source "$1/host/environment.sh"; is_utf8 "$2"'
    ended = subprocess.run(["bash", "-c", script, "bash", os.fsencode(RUN_SH.parents[1]), text], check=False)
    try:
        text.decode()
    except UnicodeDecodeError:
        assert ended.returncode == 1
    else:
        assert ended.returncode == 0
