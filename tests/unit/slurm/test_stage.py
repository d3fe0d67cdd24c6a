"""The job script for Slurm brings the image to the nodes' own disks before their containers start.

The two nodes are this machine, so they share the directory of the copies; tests/unit/host/test_stage.py tries what a
node does, tests/cluster/test_slurm.py nodes that have disks of their own.
"""

import os
import signal

import pytest

from entrypoint.cli import profiles
from tests.unit.bounds import shorten
from tests.unit.host.node import IMAGE_ID, sif
from tests.unit.slurm.cluster import BOUND, Cluster, said, until

SBCAST = """#!/bin/sh
echo "$*" >>"{here}/sbcasts"
for last; do before=$from from=$last; done
{what}
"""
NODE = """#!/bin/sh
# As the real one, but for what a test says of a node: "1 unfit there is no disk".
while read -r node what text; do
    if [ "$1 $node" = "{when} $SLURM_NODEID" ]; then echo "$node $what $text"; exit; fi
done <<END
{lines}
END
exec /bin/bash "$0.real" "$@"
"""
COPIES = 'cp -- "$before" "$last"'
CUT = 'head -c 500 "$before" >"$last"'
REFUSES = 'head -c 500 "$before" >"$last"; echo "sbcast: error: REQUEST_FILE_BCAST(b): No space left on device" >&2; exit 1'


class Staged:
    """A cluster with an image, a disk for copies, and a stand-in for sbcast."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.image = sif(cluster.checkout / "containers" / "image.sif")
        self.disk = cluster.folder / "disk of nodes"
        self.disk.mkdir()
        self.folder = self.disk / f"apptrain-image-{os.getuid()}.slurm-7"
        self.broadcasts(COPIES)

    def broadcasts(self, what: str) -> None:
        program = self.cluster.folder / "bin/sbcast"
        program.write_text(SBCAST.format(here=self.cluster.folder, what=what))
        program.chmod(0o755)

    def node_says(self, lines: str, when: str = "look") -> None:
        script = self.cluster.checkout / "host/stage.sh"
        real = script.with_name("stage.sh.real")
        if not real.exists():
            script.rename(real)
        script.write_text(NODE.format(when=when, lines=lines))
        script.chmod(0o755)
        # The job script calls bash, which is sh's language and more.
        (self.cluster.checkout / "host/staged.sh").touch()

    @property
    def sbcasts(self) -> list[str]:
        file = self.cluster.folder / "sbcasts"
        return file.read_text().splitlines() if file.exists() else []

    @property
    def left(self) -> list[str]:
        return [path.name for path in self.disk.iterdir()]

    def site(self, stage: str) -> str:
        """A profile with this in its section `stage`."""
        path = self.cluster.folder / "site.yaml"
        path.write_text(f"scheduler: slurm\nstage: {{{stage}}}\n")
        assert profiles.main([str(path)]) == 0
        return str(path)


@pytest.fixture
def staged(cluster: Cluster) -> Staged:
    return Staged(cluster)


def words(staged: Staged) -> list[str]:
    """What run.sh is told of the copy."""
    options = staged.cluster.run_options()
    return options[options.index("--staged") :][:4] if "--staged" in options else []


def test_the_image_is_broadcast_to_the_directory_that_was_asked_for(staged: Staged) -> None:
    ended = staged.cluster.run("--stage", str(staged.disk), "--device", "cpu")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert staged.sbcasts == [f"{staged.image} {staged.folder}/image.sif.1"]
    assert words(staged) == ["--staged", str(staged.folder), "1128", IMAGE_ID]
    line = f"apptrain: image: copied to {staged.disk} on 2 of 2 nodes in 0 s"
    assert line in ended.stdout.replace("in 1 s", "in 0 s").replace("in 2 s", "in 0 s").splitlines()
    assert (staged.folder / "image.sif").read_bytes() == staged.image.read_bytes()
    assert [call["argv"][:8] for call in staged.cluster.calls()[:1]] == [
        [
            *("--export=ALL", "--nodes=2", "--cpu-bind=none", "--mem=0", "--ntasks=2", "--ntasks-per-node=1"),
            *("--cpus-per-task=1", "--kill-on-bad-exit=0"),
        ]
    ]


@pytest.mark.parametrize("asked", [["--stage", "off"], ["--stage", "auto"], []])
def test_on_few_nodes_nothing_is_copied_by_itself(staged: Staged, asked: list[str]) -> None:
    ended = staged.cluster.run(*asked, "--device", "cpu")
    assert (ended.returncode, staged.sbcasts, words(staged)) == (0, [], [])
    assert len(staged.cluster.calls()) == 1


def test_it_is_copied_by_itself_where_the_profile_says_that_this_is_faster(staged: Staged) -> None:
    with staged.image.open("r+b") as file:
        file.truncate(1_000_000_000)
    slow = staged.site("shared_mb_s: 1, node_mb_s: 100000")  # break-even is at 12 nodes
    nodes = {"SLURM_JOB_NODELIST": "n[0-11]", "SLURM_JOB_NUM_NODES": "12", "SLURM_NTASKS": "12"}
    ended = staged.cluster.run("--device", "cpu", "--profile", slow, TMPDIR=str(staged.disk), **nodes)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert len(staged.sbcasts) == 1
    assert words(staged)[1] == str(staged.folder)


@pytest.mark.parametrize(("percent", "copies"), [(90, 0), (100, 1)])
def test_the_profile_says_how_much_of_the_image_a_start_reads(
    staged: Staged, percent: int, copies: int
) -> None:
    """A copy takes 11 s, and must save 10; two nodes read for 19.8 or 22 s."""
    with staged.image.open("r+b") as file:
        file.truncate(110_000_000)
    slow = staged.site(f"shared_mb_s: 10, node_mb_s: 100000, read_percent: {percent}")
    ended = staged.cluster.run("--device", "cpu", "--profile", slow, TMPDIR=str(staged.disk))
    assert (ended.returncode, ended.stderr, len(staged.sbcasts)) == (0, "", copies)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ("disk", "APPTRAIN_STAGE=disk: must be auto, off, or a directory of each node's own, a path from /"),
        ("", "APPTRAIN_STAGE is empty: give auto|off|DIR or leave it out"),
    ],
)
def test_another_word_is_refused(staged: Staged, asked: str, why: str) -> None:
    assert staged.cluster.refused(APPTRAIN_STAGE=asked) == why


def test_an_unpacked_image_is_not_copied(staged: Staged) -> None:
    staged.image.unlink()
    assert staged.cluster.refused("--stage", str(staged.disk)) == (
        f"--stage {staged.disk}: the image is not one SIF file that this node can read: give such a file in "
        "APPTRAIN_IMAGE, or leave --stage out"
    )


# --- what may go wrong, if the directory was asked for ------------------------------------------------------------


def ended_at_once(staged: Staged, status: int, *arguments: str) -> str:
    """The one line of a job that starts no rank, and leaves no copy."""
    ended = staged.cluster.run("--device", "cpu", "--stage", str(staged.disk), *arguments)
    assert ended.returncode == status, ended.stderr
    assert not any("launch" in call["argv"] for call in staged.cluster.calls())
    assert staged.left == []
    (line,) = said(ended)
    return line


def test_without_sbcast_the_job_is_refused(staged: Staged) -> None:
    (staged.cluster.folder / "bin/sbcast").unlink()
    assert ended_at_once(staged, 64) == (
        f"--stage {staged.disk}: there is no sbcast in PATH: give another directory, or leave --stage out"
    )


def test_if_sbcast_fails_on_every_node_another_attempt_may_help(staged: Staged) -> None:
    staged.broadcasts("echo 'sbcast: error: no luck' >&2; exit 3")
    assert ended_at_once(staged, 69) == (
        f"--stage {staged.disk}: sbcast ended with status 3: sbcast: error: no luck: try again, or leave --stage out"
    )


def test_an_sbcast_that_takes_too_long_is_ended(staged: Staged) -> None:
    shorten(staged.cluster.checkout / "host/staging.sh", COPY=1)
    staged.broadcasts("exec sleep 60")
    assert ended_at_once(staged, 69) == (
        f"--stage {staged.disk}: sbcast took more than 1 s: try again, or leave --stage out"
    )


@pytest.mark.parametrize(("how", "status"), [("kill -TERM $$", 143), ("exit 255", 255)])
def test_an_sbcast_that_breaks_off_at_once_has_taken_no_time(staged: Staged, how: str, status: int) -> None:
    staged.broadcasts(f"echo 'sbcast: fatal: no luck' >&2; {how}")
    assert ended_at_once(staged, 69) == (
        f"--stage {staged.disk}: sbcast ended with status {status}: sbcast: fatal: no luck: try again, or leave --stage out"
    )


def test_what_changes_sruns_lines_does_not_reach_the_nodes_answers(staged: Staged) -> None:
    """With SLURM_LABELIO each would begin with the number of its task."""
    changes = {"SLURM_LABELIO": "1", "SLURM_STDOUTMODE": "x-%t"}
    ended = staged.cluster.run("--device", "cpu", "--stage", str(staged.disk), **changes)
    assert ended.returncode == 0, ended.stderr
    asked = [call["env"] for call in staged.cluster.calls() if "stage.sh" in " ".join(call["argv"])]
    assert asked
    assert not any(changes.keys() & env.keys() for env in asked)


def test_if_no_node_can_be_asked_srun_says_why(staged: Staged) -> None:
    srun = staged.cluster.folder / "bin/srun"
    srun.rename(srun.with_name("srun.real"))
    srun.write_text(
        '#!/bin/sh\ncase $* in *stage.sh*) echo "srun: error: Requested nodes are busy" >&2; exit 1 ;; esac\n'
        'exec "$0.real" "$@"\n'
    )
    srun.chmod(0o755)
    assert ended_at_once(staged, 69) == (
        f"--stage {staged.disk}: no node answers: srun: error: Requested nodes are busy: "
        "try again, or leave --stage out"
    )


def test_a_copy_that_is_cut_counts_as_none(staged: Staged) -> None:
    staged.broadcasts(CUT)
    line = ended_at_once(staged, 69)  # one of the two has removed it, perhaps, before the other has looked
    assert "(its copy is not whole (500 of 1128 bytes))" in line


def test_a_directory_that_is_not_there_is_refused(staged: Staged) -> None:
    staged.disk.rmdir()
    ended = staged.cluster.run("--stage", str(staged.disk))
    line = f"--stage {staged.disk}: a ({staged.disk} is no directory), b ({staged.disk} is no directory): "
    assert (ended.returncode, said(ended)) == (64, [f"{line}give another directory, or leave --stage out"])
    assert staged.sbcasts == []
    assert not (staged.cluster.run_dir / "unfinished").exists(), "it was said here"


def test_a_node_without_room_ends_the_job(staged: Staged) -> None:
    staged.node_says("1 unfit there is no room")
    assert ended_at_once(staged, 64) == (
        f"--stage {staged.disk}: b (there is no room): give another directory, or leave --stage out"
    )
    assert staged.sbcasts == []


def test_a_node_whose_copy_is_cut_ends_the_job_that_needs_it(staged: Staged) -> None:
    staged.node_says("1 unfit its copy is not whole", when="check")
    assert ended_at_once(staged, 69) == (
        f"--stage {staged.disk}: b (its copy is not whole): try again, or leave --stage out"
    )


def test_the_first_node_cannot_be_left_out(staged: Staged) -> None:
    staged.node_says("0 unfit there is no room")
    assert ended_at_once(staged, 64, "--nnodes", "1:2") == (
        f"--stage {staged.disk}: a (there is no room), and a job's first node cannot be left out: "
        "give another directory, or leave --stage out"
    )
    assert staged.sbcasts == []


def second_prepare(staged: Staged, what: str) -> None:
    """What happens as the image is asked again, for a node that is left out."""
    staged.node_says("1 unfit there is no room")
    run = staged.cluster.checkout / "containers/run.sh"
    run.rename(run.with_name("run.sh.real"))
    asked = staged.cluster.folder / "asked"
    run.write_text(
        f'#!/bin/bash\nif [[ $* == *"entrypoint prepare"* ]] && ! mkdir "{asked}" 2>/dev/null; then {what}; fi\n'
        'exec "$0.real" "$@"\n'
    )
    run.chmod(0o755)


def test_no_copy_is_left_if_the_image_does_not_start_any_more(staged: Staged) -> None:
    second_prepare(staged, "echo 'FATAL: no such image' >&2; exit 255")
    ended = staged.cluster.run("--device", "cpu", "--stage", str(staged.disk), "--nnodes", "1:2")
    assert (ended.returncode, len(staged.sbcasts), staged.left) == (255, 1, []), ended.stderr


def test_no_copy_is_left_if_the_job_is_interrupted_then(staged: Staged) -> None:
    second_prepare(staged, f'touch "{staged.cluster.folder}/again"; exec sleep 60')
    words = ("--device", "cpu", "--stage", str(staged.disk), "--nnodes", "1:2")
    with staged.cluster.start(*words, batch=False) as process:
        until((staged.cluster.folder / "again").exists, "the second prepare")
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(BOUND) == 130
    assert staged.left == []


def test_a_node_without_room_is_left_out_if_fewer_are_enough(staged: Staged) -> None:
    staged.node_says("1 unfit there is no room")
    arguments = ("--device", "cpu", "--stage", str(staged.disk), "--nnodes", "1:2")
    ended = staged.cluster.run(*arguments, APPTRAIN_ARGS="-- my.py 'a b'")
    assert (ended.returncode, said(ended)) == (
        0,
        ["left out, for the image is not there: b (there is no room)"],
    )
    assert staged.sbcasts == [f"--nodelist=a {staged.image} {staged.folder}/image.sif.1"]
    argv = staged.cluster.srun()
    assert {"--nodes=1", "--ntasks=1", "--exclude=b"} <= set(argv)
    assert words(staged)[1] == str(staged.folder)
    assert argv[-2:] == ["my.py", "a b"]
    assert "apptrain: image: copied to" in ended.stdout
    assert "on 1 of 1 nodes" in ended.stdout
    assert staged.cluster.handed("APPTRAIN_ATTEMPT") == "0", "the one that was prepared, with a node less"


# --- and if it is the site's: one line, and the job runs from the shared image ------------------------------------------


def ran_without(staged: Staged, **env: str) -> list[str]:
    profile = staged.site("to: $DISK")
    ended = staged.cluster.run("--device", "cpu", "--profile", profile, DISK=str(staged.disk), **env)
    assert ended.returncode == 0, ended.stderr
    return said(ended)


def test_without_sbcast_the_image_is_read_where_it_is(staged: Staged) -> None:
    (staged.cluster.folder / "bin/sbcast").unlink()
    (line,) = ran_without(staged)
    assert line == "the image is read where it is, not copied to the nodes: there is no sbcast in PATH"
    assert (words(staged), staged.left) == ([], [])


def test_if_sbcast_refuses_the_image_is_read_where_it_is(staged: Staged) -> None:
    staged.broadcasts("echo 'sbcast: error: no luck' >&2; exit 1")
    (line,) = ran_without(staged)
    assert line.endswith("not copied to the nodes: sbcast ended with status 1: sbcast: error: no luck")
    assert (words(staged), staged.left) == ([], [])


def test_a_disk_that_fills_half_way_is_left_out_of_a_second_broadcast(staged: Staged) -> None:
    staged.broadcasts(f"case $* in *--nodelist=a*) {COPIES} ;; *) {REFUSES} ;; esac")
    staged.node_says("1 unfit its copy is not whole", when="check")
    (line,) = ran_without(staged)
    assert line == "the image is read where it is, by b (its copy is not whole)"
    assert [call.startswith("--nodelist=a ") for call in staged.sbcasts] == [False, True]
    assert [call[-6:] for call in staged.sbcasts] == [".sif.1", ".sif.2"]  # sbcast would add to the first one
    assert words(staged)[1] == str(staged.folder)


def test_a_second_broadcast_has_the_room_of_the_first(staged: Staged) -> None:
    seen = staged.cluster.folder / "seen"
    staged.broadcasts(
        f'ls "${{last%/*}}" >"{seen}"; case $* in *--nodelist=a*) {COPIES} ;; '
        '*) cp -- "$before" "$last"; echo "sbcast: error: REQUEST_FILE_BCAST(b): No space left on device" >&2; exit 1 ;; esac'
    )
    ran_without(staged)
    assert len(staged.sbcasts) == 2
    assert seen.read_text().split() == ["lock", "node"]


def test_a_node_without_room_reads_the_image_where_it_is(staged: Staged) -> None:
    staged.node_says("1 unfit there is no room")
    (line,) = ran_without(staged)
    assert line == "the image is read where it is, by b (there is no room)"
    assert staged.sbcasts[0].startswith("--nodelist=a ")
    assert words(staged)[1] == str(staged.folder)


def test_a_node_that_does_not_answer_is_named(staged: Staged) -> None:
    staged.node_says("1 nothing")
    (line,) = ran_without(staged)
    assert line == "the image is read where it is, by b (it did not answer)"


# --- attempts, ends -----------------------------------------------------------------------------------------------


def test_the_copy_stays_for_the_next_attempt_of_the_job(staged: Staged) -> None:
    taken = {"status": 69, "node": "a", "error": "port taken"}
    ended = staged.cluster.run(
        "--device", "cpu", "--stage", str(staged.disk), tasks={"0.0": taken, "0.1": taken}
    )
    assert ended.returncode == 0, ended.stderr
    launches = [call["argv"] for call in staged.cluster.calls() if "launch" in call["argv"]]
    assert len(launches) == 2
    assert all("--staged" in argv for argv in launches)
    assert len(staged.sbcasts) == 1


def test_a_copy_that_is_made_anew_does_not_go_to_a_node_that_was_left_out(staged: Staged) -> None:
    staged.node_says("1 unfit there is no room")
    run = staged.cluster.checkout / "containers/run.sh"
    run.rename(run.with_name("run.sh.real"))
    run.write_text(
        '#!/bin/bash\n"$0.real" "$@"; status=$?\n'
        f'[[ $* != *"entrypoint launch"* ]] || rm -rf "{staged.folder}"\nexit $status\n'
    )
    run.chmod(0o755)
    taken = {"status": 69, "node": "a", "error": "port taken"}
    words = ["--device", "cpu", "--stage", str(staged.disk), "--nnodes", "1:2"]
    assert staged.cluster.run(*words, tasks={"0.0": taken}).returncode == 0
    assert [call.split()[0] for call in staged.sbcasts] == ["--nodelist=a"] * 2


def test_if_no_attempt_follows_the_copies_are_removed(staged: Staged) -> None:
    taken = {"status": 69, "node": "a", "error": "port taken"}
    tasks = {f"{attempt}.{node}": taken for attempt in range(12) for node in range(2)}
    ended = staged.cluster.run("--device", "cpu", "--stage", str(staged.disk), tasks=tasks)
    assert (ended.returncode, staged.left) == (69, []), ended.stdout + ended.stderr


def test_if_a_task_could_not_remove_its_copy_the_job_does(staged: Staged) -> None:
    """One waited for another attempt, or its container did not start."""
    tasks = {
        "0.0": {"status": 69, "node": "a", "error": "x", "time": "101.0"},
        "0.1": {"status": 1, "rank": 1, "node": "b", "error": "boom", "time": "100.0"},
    }
    ended = staged.cluster.run("--device", "cpu", "--stage", str(staged.disk), tasks=tasks)
    assert (ended.returncode, staged.left) == (1, []), ended.stderr


def test_what_was_copied_before_the_node_went_down_is_copied_anew(staged: Staged) -> None:
    staged.folder.mkdir(mode=0o700)
    (staged.folder / "node").write_text(f"{os.uname().nodename} 11111111-2222-3333-4444-555555555555\n")
    staged.node_says("1 room")  # it has the same disk here, and would remove what the other one makes
    ended = staged.cluster.run("--device", "cpu", "--stage", str(staged.disk), SLURM_RESTART_COUNT="1")
    assert (ended.returncode, len(staged.sbcasts)) == (0, 1), ended.stderr


def test_a_job_that_is_interrupted_while_it_copies_leaves_nothing(staged: Staged) -> None:
    staged.broadcasts(f'{CUT}; touch "{staged.cluster.folder}/copying"; exec sleep 60')
    with staged.cluster.start("--device", "cpu", "--stage", str(staged.disk), batch=False) as process:
        until((staged.cluster.folder / "copying").exists, "a broadcast")
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(BOUND) == 130
    assert staged.left == []


def test_a_dry_run_copies_nothing(staged: Staged) -> None:
    ended = staged.cluster.run("--device", "cpu", "--stage", str(staged.disk), "--dry-run")
    assert (ended.returncode, staged.sbcasts, staged.left) == (0, [], [])


def test_the_copies_are_compared_whole_if_the_profile_says_so(staged: Staged) -> None:
    staged.broadcasts(f'{COPIES}; printf x | dd of="$last" bs=1 seek=700 conv=notrunc status=none')
    profile = staged.site("to: $DISK, digest: true")
    ended = staged.cluster.run("--device", "cpu", "--profile", profile, DISK=str(staged.disk))
    (line,) = said(ended)
    # Both nodes have the one disk here: who looks second may find that the other has removed the copy.
    assert line.startswith("the image is read where it is, not copied to the nodes: a (")
    assert " (the SHA-256 of its copy is " in line
    assert (ended.returncode, words(staged), staged.left) == (0, [], [])
