"""Options of sbatch and qsub on the line of `apptrain submit`: what goes through, what gives way, what is refused."""

import shlex

import pytest

from entrypoint.batch.pbs.options import TABLE as QSUB
from entrypoint.batch.slurm.options import TABLE as SBATCH
from tests.unit.cli.site import Site

SLURM = """\
scheduler: slurm
tested: x
nodes: {gpus: 4, cpus: 64, whole: true}
request: {partition: gpu, time: "02:00:00", options: [--qos=short]}
"""
SELECT = """\
scheduler: pbs
tested: x
nodes: {gpus: 4, cpus: 48}
request: {partition: gpu, account: ab12, account_option: -P, options: [-l, storage=scratch/ab12], time: "02:00:00"}
"""
TOTALS = SELECT.replace("{partition", "{form: totals, partition")
WHOLE = [
    "--nodes=2",
    "--partition=gpu",
    "--gpus-per-node=4",
    "--cpus-per-task=64",
    "--mem=0",
    "--time=02:00:00",
]
CHUNKS = [
    "-l",
    "select=2:ncpus=48:ngpus=4",
    "-l",
    "place=scatter",
    "-l",
    "walltime=02:00:00",
    "-q",
    "gpu",
    "-P",
    "ab12",
]
MANY = "-J 0-19 -N x -m abe -M a@b -W depend=afterok:1 -Wumask=022 -r n"
SCRATCH = ["-l", "storage=scratch/ab12"]


def without(words: list[str], *left_out: str) -> list[str]:
    return [word for word in words if word not in left_out]


def words_and_said(site: Site, profile: str, typed: str) -> tuple[list[str], list[str]]:
    """(the words of sbatch or qsub but the script's and -v, the lines about them)."""
    site.write(profile)
    done = site.run("submit.py", "--cluster", "lab", "--dry-run", *shlex.split(typed), "--", "my.py", B="b")
    assert done.returncode == 0, done.stderr
    line = shlex.split(done.stdout)
    script = next(at for at, word in enumerate(line) if word.endswith(("multinode.sbatch", "multinode.pbs")))
    said = [line.removeprefix("apptrain: ") for line in done.stderr.splitlines()]
    return line[1:script], [line for line in said if " in place of " in line]


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("--constraint gpu", "--constraint gpu"),
        ("--array 0-19", "--array 0-19"),
        ("--job-name x", "--job-name x"),
        ("--mail-user a@b", "--mail-user a@b"),
        ("--mail-user=a@b", "--mail-user=a@b"),
        ("--exclude n1", "--exclude n1"),
        ("--dependency afterok:1", "--dependency afterok:1"),
        ("--comment 'two words'", "--comment 'two words'"),
        ("--exclusive --nice=5", "--exclusive --nice=5"),
        ("--output x.out", "--output x.out"),
        ("-J x -W -xn1 -C gpu -m block", "-J x -W -xn1 -C gpu -m block"),
        ("--options '--array=0-19'", "--array=0-19"),
        ("--options=--array=0-19 --options '-J x'", "--array=0-19 -J x"),
        ("--options '--environment=mine --uenv x'", "--environment=mine --uenv x"),
    ],
)
def test_an_option_of_sbatch_goes_through_as_it_was_typed(site: Site, typed: str, words: str) -> None:
    assert words_and_said(site, SLURM, typed) == ([*WHOLE, "--qos=short", *shlex.split(words)], [])


@pytest.mark.parametrize(
    ("typed", "ours", "said"),
    [
        ("--qos debug", "--qos=short", "--qos debug in place of --qos=short"),
        ("-q debug", "--qos=short", "-q debug in place of --qos=short"),
        ("--mem 100G", "--mem=0", "--mem 100G in place of --mem=0"),
        ("--cpus-per-task 8", "--cpus-per-task=64", "--cpus-per-task 8 in place of --cpus-per-task=64"),
        ("--options=--nodes=3", "--nodes=2", "--nodes=3 in place of --nodes=2"),
        ("--gpus-per-node a100:4", "--gpus-per-node=4", "--gpus-per-node a100:4 in place of --gpus-per-node=4"),
        ("--options=--qos=long --qos=debug", "--qos=short", "--qos=long in place of --qos=short"),
    ],
)  # fmt: skip
def test_an_option_of_the_users_wins_over_the_profiles_and_stands_once(
    site: Site, typed: str, ours: str, said: str
) -> None:
    words, lines = words_and_said(site, SLURM, typed)
    typed = typed.removeprefix("--options=").removeprefix("--qos=long ")
    assert words == [*without([*WHOLE, "--qos=short"], ours), *shlex.split(typed)]
    assert lines[0] == said


def test_what_asks_for_gpus_or_memory_in_another_way_leaves_none_of_ours(site: Site) -> None:
    for typed, gone in (
        ("--gres gpu:2", "--gpus-per-node=4"),
        ("--gpus-per-task=4", "--gpus-per-node=4"),
        ("--mem-per-cpu 4G", "--mem=0"),
        ("--mem-per-gpu=4G", "--mem=0"),
        ("--cpus-per-gpu=4", "--cpus-per-task=64"),
    ):
        site.write(SLURM)
        line = site.submit(*typed.split())
        assert line[1:-1] == [*without([*WHOLE, "--qos=short"], gone), *typed.split()]
        assert line[-1].startswith("--wrap=exec bash ")  # without the script's own lines


@pytest.mark.parametrize(
    ("typed", "cpus"),
    [
        ("--ntasks-per-node 4", "--cpus-per-task=16"),
        ("--tasks-per-node 4", "--cpus-per-task=16"),
        ("--options=--tasks-per-node=4", "--cpus-per-task=16"),
        ("--gpus-per-node 2 --ntasks-per-node=2", "--cpus-per-task=16"),
        ("--ntasks-per-node=4 -c 8", "-c 8"),
    ],
)
def test_tasks_of_a_node_share_its_cpus(site: Site, typed: str, cpus: str) -> None:
    """sbatch never grants more than a node has."""
    words, _ = words_and_said(site, SLURM.replace(", whole: true", ""), typed)
    assert cpus in " ".join(words)
    assert "--cpus-per-task=64" not in words


GRES = 'scheduler: slurm\nnodes: {gpus: 4}\nrequest: {gpus: "--gres=gpu:{gpus}", options: [%s]}\n'


@pytest.mark.parametrize(
    ("options", "typed", "gres"),
    [
        ("", "--gres=tmpfs:100G", "gpu:4,tmpfs:100G"),
        ("--gres=nvme:1", "", "gpu:4,nvme:1"),
        ("--gres=nvme:1", "--gres=gpu:2", "nvme:1,gpu:2"),
        ("--gres=nvme:1", "--gres=nvme:2", "gpu:4,nvme:2"),
    ],
)
def test_generic_resources_beside_gpus_are_asked_for_in_the_one_option_that_counts(
    site: Site, options: str, typed: str, gres: str
) -> None:
    site.write(GRES % options)
    assert [word for word in site.submit(*typed.split()) if "gres" in word] == [f"--gres={gres}"]


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("-N 3 -t 120 -p big -A me", "--nodes=3 --partition=big --account=me --time=120"),
        (
            "--queue big --project me --walltime 1:00:00",
            "--nodes=2 --partition=big --account=me --time=1:00:00",
        ),
    ],
)
def test_what_means_one_of_ours_is_that(site: Site, typed: str, words: str) -> None:
    given, said = words_and_said(site, SLURM, typed)
    assert (set(words.split()) <= set(given), len(given), said) == (True, 8, [])


@pytest.mark.parametrize(
    ("typed", "clock"),
    [
        ("120", "02:00:00"),
        ("90:30", "01:30:30"),
        ("1:02:03", "01:02:03"),
        ("100:00:00", "100:00:00"),
        ("1-12", "36:00:00"),
        ("1-12:30", "36:30:00"),
        ("2-0:30:15", "48:30:15"),
    ],
)
def test_each_of_slurms_forms_of_a_time_is_taken_and_pbs_gets_its_own(
    site: Site, typed: str, clock: str
) -> None:
    assert f"--time={typed}" in words_and_said(site, SLURM, f"--time {typed}")[0]
    assert f"walltime={clock}" in words_and_said(site, SELECT, f"--time {typed}")[0]


@pytest.mark.parametrize(
    ("profile", "typed", "words", "said"),
    [
        (SELECT, MANY, [*CHUNKS, *SCRATCH, *MANY.split()], []),
        (SELECT, "-q big", [*without(CHUNKS, "gpu", "-q")[:6], "-q", "big", "-P", "ab12", *SCRATCH], []),
        (SELECT, "-P cd34 -A mine", [*CHUNKS[:-2], *SCRATCH, "-P", "cd34", "-A", "mine"], ["-P cd34 in place of -P ab12"]),
        (SELECT, "-l storage=gdata/ab12", [*CHUNKS, "-l", "storage=gdata/ab12"], ["-l storage=gdata/ab12 in place of -l storage=scratch/ab12"]),
        (SELECT, "-lwalltime=600,jobfs=1gb", [*CHUNKS[:4], *CHUNKS[6:], *SCRATCH, "-l", "walltime=600", "-l", "jobfs=1gb"], ["-l walltime=600 in place of -l walltime=02:00:00"]),
        (SELECT, "-l select=3:ncpus=4", [*CHUNKS[2:], *SCRATCH, "-l", "select=3:ncpus=4"], ["-l select=3:ncpus=4 in place of -l select=2:ncpus=48:ngpus=4"]),
        (TOTALS, "-l mem=9gb -N x", ["-C", "", "-j", "oe", "-S", "/bin/bash", "-l", "ncpus=96", "-l", "ngpus=8", *CHUNKS[4:], *SCRATCH, "-l", "mem=9gb", "-N", "x"], []),
        (SELECT, "-l nodes=4:ppn=2", ["-C", "", "-N", "apptrain", "-j", "oe", "-S", "/bin/bash", *CHUNKS[4:], *SCRATCH, "-l", "nodes=4:ppn=2"], ["-l nodes=4:ppn=2 in place of -l select=2:ncpus=48:ngpus=4, -l place=scatter"]),
        (TOTALS, "-l select=3:ncpus=4", [*CHUNKS[4:], *SCRATCH, "-l", "select=3:ncpus=4"], ["-l select=3:ncpus=4 in place of -l ncpus=96, -l ngpus=8"]),
    ],
)  # fmt: skip
def test_options_of_qsub_go_through_and_win(
    site: Site, profile: str, typed: str, words: list[str], said: list[str]
) -> None:
    given, lines = words_and_said(site, profile, typed)
    assert (given[:-2], lines) == (words, said)
    assert given[-2:] == ["-v", "APPTRAIN_ARGS=-- my.py,APPTRAIN_PROFILE=lab"]


def test_variables_of_the_users_v_stand_in_the_one_list_that_qsub_takes(site: Site) -> None:
    words, _ = words_and_said(site, SELECT, "-v A=1,B -v APPTRAIN_PROFILE=x -v A=2")
    assert words.count("-v") == 1
    assert words[-1] == "A=2,APPTRAIN_ARGS=-- my.py,APPTRAIN_PROFILE=x,B=b"


@pytest.mark.parametrize(
    ("profile", "typed", "message"),
    [
        (SLURM, "--qsos x", "--qsos: no option of submit, of a job or of sbatch: did you mean --qos?"),
        (SLURM, "--frob=1", "--frob=1: no option of submit, of a job or of sbatch (see apptrain submit --help; sbatch gets it with --options=--frob=1)"),
        (SLURM, "-Z", "-Z: no option of submit, of a job or of sbatch (see apptrain submit --help; sbatch gets it with --options=-Z)"),
        (SLURM, "--env A=1", "--env: sbatch has no such option: give --pass NAME, or --export=ALL,NAME=VALUE"),
        (SELECT, "--storage gdata/ab12", "--storage: qsub has no such option: give -l storage=NAME"),
        (SLURM, "--qos", "--qos of sbatch needs a value: give --qos VALUE"),
        (SLURM, "--hold=1", "--hold=1: sbatch takes no value for --hold"),
        (SLURM, "--wrap x", "--wrap x cannot be handed to sbatch: our script starts CMD: -- my_script.py, or --no-python -- PROGRAM"),
        (SLURM, "-n 8", "-n 8 cannot be handed to sbatch: the ranks of a node are --nproc-per-node N, or tasks with --ntasks-per-node N"),
        (SLURM, "-D /x", "-D /x cannot be handed to sbatch: a job runs where it is submitted: cd to that folder, and submit there"),
        (SLURM, "--container x", "--container x cannot be handed to sbatch: the image is given with --image FILE"),
        (SLURM, "-l storage=gdata/ab12", "-l is qsub's, and this cluster has Slurm: give --gres, --licenses or --constraint"),
        (SELECT, "--array=0-19", "--array=0-19 is sbatch's, and this cluster has PBS: give -J RANGE"),
        (SELECT, "--hint x", "--hint is sbatch's, and this cluster has PBS: leave it out"),
        (SELECT, "-I", "-I cannot be handed to qsub: qsub -I by itself, and in that job bash pbs/multinode.pbs -- CMD"),
        (SELECT, "-l mem=9gb", "-l mem=9gb: qsub refuses it beside -l select=2:ncpus=48:ngpus=4: say what each node has in that: -l select=N:mem=9gb"),
        (SELECT, "-v A='1,2'", "-v 2: give NAME or NAME=VALUE, and no quotes and commas in a VALUE"),
        (SELECT, "-v APPTRAIN_ARGS=x", "-v APPTRAIN_ARGS: give its words to submit: options, -- and CMD"),
        (SLURM, "--array --dry-run", "--array of sbatch needs a value: give --array VALUE"),
        (SLURM, "--qos -J x", "--qos of sbatch needs a value: give --qos VALUE"),
        (SLURM, "--storage gdata/x", "--storage: sbatch has no such option: give --bind /PATH"),
        (SELECT, "-v NONE", "-v NONE: NONE is not set here: give NONE=VALUE"),
    ],
)  # fmt: skip
def test_an_option_that_nobody_has_or_that_cannot_be_is_refused(
    site: Site, profile: str, typed: str, message: str
) -> None:
    site.write(profile)
    said = site.refused("--cluster", "lab", *shlex.split(typed), "--", "my.py")
    assert said.removeprefix("apptrain: ").startswith(message)


def test_what_a_site_does_not_take_is_handed_over_with_a_line(site: Site) -> None:
    """The user's word wins over what the profile says of the site."""
    against = "lab.yaml says that a request there names no such thing: sbatch may refuse it"
    for request, typed in (
        ("{memory: none}", "--mem=100G"),
        ("{cpus: none}", "--cpus-per-task=8"),
        ("{nodes_only: true}", "--gres=gpu:2"),
    ):
        site.write(f"scheduler: slurm\ntested: x\nnodes: {{gpus: 4, whole: true}}\nrequest: {request}\n")
        done = site.run("submit.py", "--cluster", "lab", "--dry-run", "--qos=x", typed, "--", "my.py")
        assert done.returncode == 0, done.stderr
        lines = [line.partition(": ")[2] for line in done.stderr.splitlines() if "names no such" in line]
        assert lines == [f"{typed}: {against}"]
        assert typed in shlex.split(done.stdout)


def test_short_options_with_a_long_form_are_of_the_same_kind() -> None:
    """And no name stands in two rows."""
    for table in (SBATCH, QSUB):
        assert len(set(table.names)) == len(table.names)
        assert set(table.refused) <= set(table.names)
        for short, long in table.long.items():
            assert (short in table.valued) == (long in table.valued)


def test_gpus_is_taken_with_a_note(site: Site) -> None:
    site.write(SLURM.replace(", whole: true", ""))
    done = site.run("submit.py", "--cluster", "lab", "--dry-run", "--gpus", "2", "--", "my.py")
    assert (done.returncode, done.stderr.splitlines()[0]) == (
        0,
        "apptrain: --gpus is taken for --gpus-per-node",
    )
    assert "--gpus-per-node=2" in shlex.split(done.stdout)


@pytest.mark.parametrize(
    ("profile", "options", "typed", "word", "said"),
    [
        (SLURM, "-A, proj", "--account mine", "--account=mine", "--account=mine in place of -A proj"),
        (SLURM, "-p, debug", "--partition big", "--partition=big", "--partition=big in place of -p debug"),
        (SLURM, "--time=00:30:00", "--time 4:00:00", "--time=4:00:00", "--time=4:00:00 in place of --time=00:30:00"),
        (SLURM, "--nodes=4", "--nodes 8", "--nodes=8", "--nodes=8 in place of --nodes=4"),
        (SLURM, "--gpus-per-node=2", "--gpus-per-node 4", "--gpus-per-node=4", "--gpus-per-node=4 in place of --gpus-per-node=2"),
        (SELECT, "-P, proj", "--account mine", "mine", "-P mine in place of -P proj"),
        (SELECT, "-q, debug", "--partition big", "big", "-q big in place of -q debug"),
        (SELECT, "-l, walltime=60", "--time 4:00:00", "walltime=04:00:00", "-l walltime=04:00:00 in place of -l walltime=60"),
        (SELECT, "-l, 'select=1:ncpus=4'", "--nodes 8", "select=8:ncpus=48:ngpus=4", "-l select=8:ncpus=48:ngpus=4 in place of -l select=1:ncpus=4"),
        (TOTALS, "-l, ncpus=1", "--nodes 8", "ncpus=384", "-l ncpus=384 in place of -l ncpus=1"),
    ],
)  # fmt: skip
def test_what_the_user_asks_for_by_name_wins_over_the_profiles_further_options(
    site: Site, profile: str, options: str, typed: str, word: str, said: str
) -> None:
    asked = profile.replace("--qos=short", options).replace("-l, storage=scratch/ab12", options)
    words, lines = words_and_said(site, asked, typed)
    assert (word in words, lines) == (True, [said])
    words, lines = words_and_said(site, asked, "")
    *_, theirs = (one.strip("'") for one in options.split(", "))
    assert (theirs in words, lines) == (True, [])


@pytest.mark.parametrize(
    ("profile", "options", "typed"),
    [
        (SLURM, "--nodes=2-4", "--nodes 8"),
        (SLURM, "--gpus=32", "--gpus-per-node 4 --nodes 8"),
        (SELECT, "-l, 'select=1:ncpus=4'", "--nodes 8"),
        (TOTALS, "-l, ncpus=1", "--nodes 8"),
        (TOTALS, "-l, 'select=1:ncpus=4'", "--nodes 8"),
    ],
)
def test_an_option_of_the_profile_that_has_given_way_leaves_nothing_open(
    site: Site, profile: str, options: str, typed: str
) -> None:
    site.write(profile.replace("--qos=short", options).replace("-l, storage=scratch/ab12", options))
    done = site.run("submit.py", "--cluster", "lab", "--dry-run", *typed.split(), "--", "my.py")
    assert "apptrain: 8 nodes x 4 ranks on cuda, " in done.stderr, done.stderr
