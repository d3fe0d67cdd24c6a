"""PBS's environment and node file as an allocation: one test for each rule."""

import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from entrypoint.cli.main import read_env_file
from entrypoint.core.errors import BadInput
from entrypoint.schedulers import hostnames, pbs
from entrypoint.schedulers.allocation import Allocation
from entrypoint.schedulers.request import PlacementRequest
from tests.unit import plans

OPENPBS = plans.RECORDINGS / "openpbs"


def granted(recording: str, hostname: str | None = None, **change: str | None) -> Allocation:
    """What the recording grants with its case's node file; None takes a variable away."""
    path = OPENPBS / f"{recording}.env"
    env = read_env_file(path)
    env.update({name: value for name, value in change.items() if value is not None})
    env = {name: env[name] for name in env if change.get(name, "") is not None}
    return pbs.allocation(env, PlacementRequest(nodefile=path.parent / "nodefile", hostname=hostname))


def from_lines(tmp_path: Path, *lines: str, hostname: str | None = None, rank: int | None = 0) -> Allocation:
    """What a node file of these lines gives."""
    nodefile = tmp_path / "nodefile"
    nodefile.write_text("".join(f"{line}\n" for line in lines))
    env = {"PBS_JOBID": "7.srv"} | ({} if rank is None else {"PBS_NODENUM": str(rank)})
    return pbs.allocation(env, PlacementRequest(nodefile=nodefile, hostname=hostname))


def test_a_task_is_read_whole() -> None:
    assert granted("array_sel2_scatter.idx3/pbsdsh-n1.pbsn2") == Allocation(
        scheduler="pbs",
        job_id="10[3].pbssrv",
        job_number=10,
        array_index=3,
        job_name="array_sel2_scatter",
        run_id="10_3",
        submit_dir="/home/alice",
        context="task",
        nodes=("pbsn1", "pbsn2"),
        node_rank=1,
        tasks_per_node=(1, 1),
        slots_per_node=(1, 1),
        gpus=None,
        gpus_unknown="neither CUDA_VISIBLE_DEVICES nor APPTRAIN_NGPUS is set",
        cpus=1,
        omp_num_threads="1",
        start_line="pbsdsh -n I -- apptrain launch -- CMD, I being the line of the node file, "
        "from 0, on which a host first stands",
        sources={
            "job_id": "PBS_JOBID",
            "array_index": "PBS_JOBID",
            "nodes": "--nodefile",
            "node_rank": "PBS_NODENUM",
            "slots_per_node": "--nodefile",
            "cpus": "NCPUS",
        },
    )


def test_the_node_file_is_the_variables_unless_an_option_replaces_it(tmp_path: Path) -> None:
    named, other = tmp_path / "10[3].pbssrv", tmp_path / "copy"
    named.write_text("n1\nn2\n")
    other.write_text("n3\n")
    env = {"PBS_JOBID": "10[3].pbssrv", "PBS_NODEFILE": str(named), "PBS_NODENUM": "0"}
    task = pbs.allocation(env, PlacementRequest())
    assert (task.nodes, task.sources["nodes"]) == (("n1", "n2"), "PBS_NODEFILE")
    assert pbs.allocation(env, PlacementRequest(nodefile=other)).nodes == ("n3",)


def test_hosts_come_in_order_of_first_appearance_with_their_lines_counted() -> None:
    revisited = granted("sel_revisit/pbsdsh-n1.pbsn1")
    assert (revisited.nodes, revisited.slots_per_node) == (("pbsn2", "pbsn1"), (2, 1))
    assert revisited.tasks_per_node == (1, 1)


def test_the_job_script_is_a_place_before_the_tasks() -> None:
    assert granted("sel2_scatter/script.pbsn1").context == "batch"
    assert granted("sel2_scatter/tmrsh-pbsn1").context == "task"
    assert granted("sel2_scatter/tmrsh-pbsn1", PBS_TASKNUM=None).context == "task"


@pytest.mark.parametrize(
    ("job_id", "number", "index", "run_id"),
    [
        ("123.srv.cluster.org", 123, 0, "123"),
        ("123", 123, 0, "123"),
        ("123[0].srv", 123, 0, "123_0"),
        ("123[17].srv", 123, 17, "123_17"),
    ],
)
def test_a_job_id_holds_a_number_and_an_index(job_id: str, number: int, index: int, run_id: str) -> None:
    task = granted("sel2_scatter/tmrsh-pbsn2", PBS_JOBID=job_id)
    assert (task.job_id, task.job_number, task.array_index, task.run_id) == (job_id, number, index, run_id)


@pytest.mark.parametrize(
    ("devices", "ngpus", "gpus", "source"),
    [
        (None, "4", 4, "APPTRAIN_NGPUS"),
        ("GPU-5d8ef1ac-93cb-7f4c-9e2a-f5b6cd0bf2b1,GPU-8a3b1f22", None, 2, "CUDA_VISIBLE_DEVICES"),
        ("0", "4", 1, "CUDA_VISIBLE_DEVICES"),
        ("", "4", 0, "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_gpus_are_the_visible_devices_else_what_qstat_told(
    devices: str | None, ngpus: str | None, gpus: int, source: str
) -> None:
    task = granted("sel2_scatter/tmrsh-pbsn2", CUDA_VISIBLE_DEVICES=devices, APPTRAIN_NGPUS=ngpus)
    assert (task.gpus, task.sources["gpus"]) == (gpus, source)


def test_cpus_are_those_that_qstat_told_where_ncpus_has_the_threads() -> None:
    task = granted("sel3_ncpus4_mpiprocs1/pbsdsh-n1.pbsn2", APPTRAIN_NCPUS="4")
    assert (task.cpus, task.sources["cpus"]) == (4, "APPTRAIN_NCPUS")


def test_threads_are_pbss_own_only_where_they_equal_ncpus() -> None:
    assert granted("sel3_scatter/tmrsh-pbsn2").omp_num_threads == "2"
    assert granted("sel3_scatter/tmrsh-pbsn2", OMP_NUM_THREADS="7").omp_num_threads is None
    assert granted("sel3_scatter/tmrsh-pbsn2", NCPUS=None, OMP_NUM_THREADS=None).omp_num_threads is None


def test_cpus_are_those_of_the_tasks_own_chunk() -> None:
    assert granted("sel_1_plus_2_scatter/pbsdsh-n0.pbsn1").cpus == 1
    assert granted("sel_1_plus_2_scatter/pbsdsh-n1.pbsn2").cpus == 2
    assert granted("sel_1_plus_2_scatter/pbsdsh-n1.pbsn2", NCPUS=None).cpus is None


@pytest.mark.parametrize("hostname", ["pbsn2", "PBSN2", "pbsn2.cluster.org"])
def test_the_hosts_name_agrees_with_its_number_long_or_short(hostname: str) -> None:
    assert granted("sel2_scatter/tmrsh-pbsn2", hostname=hostname).node_rank == 1


def test_without_a_number_the_hosts_name_tells_its_place() -> None:
    task = granted("sel2_scatter/tmrsh-pbsn2", hostname="pbsn2.cluster.org", PBS_NODENUM=None)
    assert (task.node_rank, task.sources["node_rank"]) == (1, "--hostname")


def test_the_long_and_the_short_name_of_a_host_are_one_host(tmp_path: Path) -> None:
    task = from_lines(tmp_path, "n1.cluster.org", "n2", "n1", "N2.cluster.org", "n2")
    assert (task.nodes, task.slots_per_node) == (("n1.cluster.org", "n2"), (2, 3))


def test_the_same_short_name_in_two_domains_is_two_hosts(tmp_path: Path) -> None:
    task = from_lines(tmp_path, "n1.cluster.org", "n1.cloud.org", hostname="n1.cloud.org", rank=1)
    assert (task.nodes, task.node_rank) == (("n1.cluster.org", "n1.cloud.org"), 1)


def test_addresses_that_begin_alike_are_different_hosts(tmp_path: Path) -> None:
    task = from_lines(
        tmp_path, "10.0.0.1", "10.0.0.2", "fd00::1", "fd00::2", "10", hostname="10.0.0.2", rank=1
    )
    assert task.nodes == ("10.0.0.1", "10.0.0.2", "fd00::1", "fd00::2", "10")


def test_blank_lines_spaces_at_the_ends_and_dos_line_ends_do_not_count(tmp_path: Path) -> None:
    nodefile = tmp_path / "nodefile"
    nodefile.write_bytes(b"\r\n n1 \r\n\r\nn2\r\nn1")
    task = pbs.allocation({"PBS_JOBID": "7", "PBS_NODENUM": "1"}, PlacementRequest(nodefile=nodefile))
    assert (task.nodes, task.slots_per_node) == (("n1", "n2"), (2, 1))


@pytest.mark.parametrize(
    ("count", "shown"), [(8, "n0,n1,n2,n3,n4,n5,n6,n7"), (9, "n0,n1,n2,n3,n4,n5,n6,n7,...")]
)
def test_a_host_that_is_not_in_the_file_is_refused_with_the_first_eight_that_are(
    tmp_path: Path, count: int, shown: str
) -> None:
    with pytest.raises(BadInput, match=rf"^host x .*\b{re.escape(shown)}[^.,\w]"):
        from_lines(tmp_path, *(f"n{number}" for number in range(count)), hostname="x", rank=None)


def test_a_node_file_has_as_many_bytes_as_one_of_a_large_job(tmp_path: Path) -> None:
    nodefile = tmp_path / "nodefile"
    nodefile.write_bytes(b"n1".ljust(8 << 20))
    env = {"PBS_JOBID": "7", "PBS_NODENUM": "0"}
    assert pbs.allocation(env, PlacementRequest(nodefile=nodefile)).nodes == ("n1",)
    nodefile.write_bytes(b"n1".ljust((8 << 20) + 1))
    with pytest.raises(BadInput, match=r"cannot be read \(it has more than 8388608 bytes\)"):
        pbs.allocation(env, PlacementRequest(nodefile=nodefile))


def test_a_job_without_a_name_or_a_folder_has_none_that_is_empty() -> None:
    task = granted("sel2_scatter/tmrsh-pbsn2", PBS_JOBNAME="", PBS_O_WORKDIR="")
    assert (task.job_name, task.submit_dir) == ("job", None)


hosts = st.lists(st.from_regex(r"[a-z][a-z0-9]{0,5}", fullmatch=True), min_size=1, max_size=6, unique=True)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(hosts=hosts, data=st.data())
def test_any_mix_of_long_and_short_lines_gives_each_host_once(
    tmp_path: Path, hosts: list[str], data: st.DataObject
) -> None:
    lines = data.draw(st.lists(st.sampled_from(hosts), min_size=1, max_size=20))
    domains = data.draw(
        st.lists(st.sampled_from(["", ".cluster.org"]), min_size=len(lines), max_size=len(lines))
    )
    spelled = [line + domain for line, domain in zip(lines, domains, strict=True)]
    firsts = list(dict.fromkeys(lines))
    rank = data.draw(st.integers(0, len(firsts) - 1))
    task = from_lines(
        tmp_path,
        *spelled,
        hostname=firsts[rank] + data.draw(st.sampled_from(["", ".cluster.org"])),
        rank=rank,
    )
    assert task.nodes == tuple(spelled[lines.index(host)] for host in firsts)
    assert task.slots_per_node == tuple(lines.count(host) for host in firsts)


@given(hosts)
def test_every_host_is_found_at_its_own_place(hosts: list[str]) -> None:
    full = [f"{host}.cluster.org" for host in hosts]
    for at, host in enumerate(hosts):
        assert hostnames.find(host, full) == hostnames.find(f"{host}.cluster.org", hosts) == [at]
        assert hostnames.find(f"{host}.cloud.org", full) == []


@pytest.mark.parametrize(
    ("name", "suffix", "found"),
    [
        ("n1", "-ib0", "n1-ib0"),
        ("n1.ice.example.org", "-ib0", "n1-ib0.ice.example.org"),
        ("n1-ib0", "-ib0", "n1-ib0"),
        ("N1-IB0.ice.example.org", "-ib0", "N1-IB0.ice.example.org"),
        ("n1.ice.example.org", "-ib0.fast.example.org", "n1-ib0.fast.example.org"),
        ("n1-ib0.fast.example.org", "-ib0.fast.example.org", "n1-ib0.fast.example.org"),
        ("n1", ".hsn", "n1.hsn"),
        ("n1.ice.example.org", "", "n1.ice.example.org"),
        ("127.0.0.1", "-ib0", "127.0.0.1"),
        ("fd00::7", "-ib0", "fd00::7"),
    ],
)
def test_the_name_on_the_fast_network_keeps_its_domain_and_has_the_suffix_once(
    name: str, suffix: str, found: str
) -> None:
    assert hostnames.with_suffix(name, suffix) == found
