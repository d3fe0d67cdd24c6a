"""entrypoint/batch/slurm/survey.py: what sinfo and scontrol say, and which partition is taken."""

import pytest

from entrypoint.batch.slurm import survey as slurm
from entrypoint.core.errors import BadInput
from tests.unit.batch.survey.login import Login

CONFIG = """Configuration data as of 2026-11-23T12:00:00
AccountingStorageEnforce = none
ClusterName             = testbed
MaxMemPerNode           = UNLIMITED
SelectType              = select/cons_tres
SLURM_VERSION           = 24.11.5
SwitchType              = switch/hpe_slingshot
"""
NODE = "NodeName=g1 CPUAlloc=0 CPUEfctv=62 CPUTot=64 RealMemory=262144 MemSpecLimit=4096 Partitions=gpu"


def found(login: Login, sinfo: str, config: str = CONFIG, node: str = "") -> dict[str, object]:
    """The values by their keys."""
    login.has({"sinfo": sinfo, "scontrol show config": config, "scontrol --oneliner show node g1": node})
    return {line.key: line.value for line in slurm.survey(login.machine()).lines if line.value is not None}


def asked(login: Login, sinfo: str, config: str = CONFIG) -> dict[str, str]:
    """The questions by their keys."""
    login.has({"sinfo": sinfo, "scontrol show config": config})
    return {line.key: line.questions[0] for line in slurm.survey(login.machine()).lines if line.questions}


def test_sinfo_is_asked_for_exactly_the_columns_that_are_read(login: Login) -> None:
    login.script(
        "sinfo",
        '#!/bin/sh\n[ "$*" = "--noheader --exact --format=%P %a %l %D %c %m %h %G %N" ] && echo "gpu up 1:00 2 8 4096 NO gpu:2 g[1-2]"',
    )
    assert slurm.survey(login.machine()).gpus == 2


def test_values_are_those_of_the_partition_with_gpus(login: Login) -> None:
    sinfo = "cpu* up 1-00:00:00 90 128 262144 NO (null) c[1-90]\ngpu up 12:00:00 4 64 262144 NO gpu:a100:4(S:0-1) g[1-4]"
    assert found(login, sinfo) == {
        "scheduler": "slurm",
        "clusters": ("testbed",),
        "nodes.gpus": 4,
        "nodes.cpus": 64,
        "nodes.memory_gib": 256,
        "request.partition": "gpu",
        "request.time": "01:00:00",
        "request.gpus": "--gpus-per-node={gpus}",
    }


def test_what_slurm_keeps_for_itself_is_not_asked_for(login: Login) -> None:
    values = found(login, "gpu up 12:00:00 1 64 262144 NO gpu:4 g1", node=NODE)
    assert (values["nodes.cpus"], values["nodes.memory_gib"]) == (62, 252)


def test_no_more_memory_is_asked_for_than_a_job_may_have(login: Login) -> None:
    config = CONFIG.replace("UNLIMITED", "102400")
    assert found(login, "gpu up 12:00:00 1 64 262144 NO gpu:4 g1", config)["nodes.memory_gib"] == 100


def test_nodes_of_an_exclusive_partition_come_whole_with_all_their_memory(login: Login) -> None:
    values = found(login, "gpu up 12:00:00 1 64 262144 EXCLUSIVE gpu:4 g1", node=NODE)
    assert values["nodes.whole"] is True
    assert "nodes.memory_gib" not in values


def test_the_least_of_alike_nodes_counts(login: Login) -> None:
    sinfo = "gpu up 1:00:00 4 64 262144 NO gpu:a100:4 g[1-4]\ngpu up 1:00:00 2 48 131072 NO gpu:a100:4 g[5-6]"
    values = found(login, sinfo)
    assert (values["nodes.cpus"], values["nodes.memory_gib"]) == (48, 128)


@pytest.mark.parametrize(
    ("lines", "taken"),
    [
        (["gpu up", "debug* up"], "debug"),  # the default, although its name is that of a test
        (["gpu-debug up", "gpu up", "gpu-dev up"], "gpu"),
        (["gpu inact", "gpu2 up"], "gpu2"),
        (["gpu inact"], "gpu"),
    ],
)
def test_a_partition_that_is_up_and_not_for_tests_is_taken_before_others(
    lines: list[str], taken: str, login: Login
) -> None:
    sinfo = "\n".join(f"{line} 1:00:00 2 64 262144 NO gpu:a100:4 g[1-2]" for line in lines)
    assert found(login, sinfo)["request.partition"] == taken


def test_the_partition_with_most_gpus_is_taken_and_the_others_are_named(login: Login) -> None:
    sinfo = "small up 1:00:00 2 64 262144 NO gpu:a100:4 g[1-2]\nbig up 2:00:00 9 64 262144 NO gpu:h100:4 g[3-11]\nold drain 2:00:00 90 64 262144 NO gpu:v100:4 v[3-92]"
    assert found(login, sinfo)["request.partition"] == "big"
    assert asked(login, sinfo)["request.partition"] == (
        "is big the right partition? With GPUs there are also: small (2 nodes with 4 x a100, 1:00:00)"
    )


def test_one_of_several_models_is_asked_for_by_name(login: Login) -> None:
    sinfo = "gpu up 1:00:00 2 64 262144 NO gpu:a100:4 g[1-2]\ngpu up 1:00:00 1 64 262144 NO gpu:v100:2 g3"
    values = found(login, sinfo)
    assert (values["nodes.gpus"], values["request.gpus"]) == (4, "--gpus-per-node=a100:{gpus}")
    assert asked(login, sinfo)["request.gpus"] == (
        "gpu has other nodes too: 1 node with 2 x v100: is 2 nodes with 4 x a100 right?"
    )


@pytest.mark.parametrize(
    ("select", "version"),
    [("select/cons_res", "22.05.1"), ("select/linear", "24.05.0"), ("select/cons_tres", "18.08.4")],
)
def test_a_slurm_without_gpus_per_node_is_asked_by_gres(select: str, version: str, login: Login) -> None:
    config = CONFIG.replace("select/cons_tres", select).replace("24.11.5", version)
    values = found(login, "gpu up 1:00:00 2 64 262144 NO gpu:a100:4 g[1-2]", config)
    assert (values["request.gpus"], values["request.form"]) == ("--gres=gpu:{gpus}", "wrapped")


def test_the_version_that_knows_gpus_per_node_is_asked_so(login: Login) -> None:
    config = CONFIG.replace("24.11.5", "19.05.0")
    assert "request.form" not in found(login, "gpu up 1:00:00 2 64 262144 NO gpu:4 g[1-2]", config)


@pytest.mark.parametrize(
    ("gres", "cards"),
    [
        ("(null)", {}),
        ("gpu:4", {"": 4}),
        ("gpu", {"": 1}),
        ("gpu:a100", {"a100": 1}),
        ("gpu:a100:4(S:0,2-3),nvme:1600", {"a100": 4}),
        ("craynetwork:4,gpu:a100:2,gpu:a100:2", {"a100": 4}),
        ("gpu:a100:2,gpu:v100:1", {"a100": 2, "v100": 1}),
        ("gpu:a100:0", {}),
        ("gpumem:80", {}),
    ],
)
def test_gpus_are_counted_by_model(gres: str, cards: dict[str, int]) -> None:
    assert slurm.resources(gres) == cards


def test_whole_gpus_are_taken_before_slices(login: Login) -> None:
    values = found(login, "gpu up 1:00:00 1 64 262144 NO gpu:a100_1g.5gb:28,gpu:a100:4 g1")
    assert (values["nodes.gpus"], values["request.gpus"]) == (4, "--gpus-per-node=a100:{gpus}")


def test_lines_that_say_nothing_of_nodes_are_left_out() -> None:
    answer = "gpu up infinite 0 0 0 NO (null) \n\nslurm is\ngpu up infinite n/a 0 0 NO (null) a\ngpu up 1:00 1 64+ 250+ NO gpu:1 a"
    (group,) = slurm.parse(answer)
    assert (group.cpus, group.memory_mb, group.gpus) == (64, 250, 1)


def test_a_cluster_without_gpus_is_asked_about(login: Login) -> None:
    sinfo = "cpu* up 1-00:00:00 90 128 262144 NO (null) c[1-90]"
    assert found(login, sinfo)["nodes.gpus"] == 0
    assert asked(login, sinfo) == {"request.partition": NO_GRES.format("cpu")}


NO_GRES = (
    "sinfo shows no GPUs (GRES (null)): have the nodes of {} any that Slurm does not count, or those of another "
    "partition? Then write `nodes: {{gpus: N, whole: true}}` and `request: {{nodes_only: true}}`. Until then submit with "
    "--device cpu"
)


@pytest.mark.parametrize("name", ["gh", "gpu-a100", "h100", "rtx-dev", "gpu_h200", "acc", "v100s"])
def test_where_slurm_counts_no_gpus_a_partition_of_that_name_is_asked_about(login: Login, name: str) -> None:
    sinfo = f"cpu* up 1-00:00:00 90 128 262144 NO (null) c[1-90]\n{name} up 2-00:00:00 9 72 110000 NO (null) g[1-9]"
    assert (found(login, sinfo)["request.partition"], asked(login, sinfo)["request.partition"]) == (
        name,
        NO_GRES.format(name),
    )


@pytest.mark.parametrize("name", ["big", "ghost", "highmem", "gg"])
def test_any_other_name_does_not_look_like_gpus(login: Login, name: str) -> None:
    sinfo = f"cpu* up 1-00:00:00 90 128 262144 NO (null) c[1-90]\n{name} up 2-00:00:00 9 72 110000 NO (null) g[1-9]"
    assert found(login, sinfo)["request.partition"] == "cpu"


def test_nodes_of_another_processor_are_said_to_be_such(login: Login) -> None:
    node = NODE.replace("CPUAlloc=0", "Arch=aarch64 CPUAlloc=0")
    sinfo = "gh up 12:00:00 1 72 262144 NO gpu:gh200:4 g1"
    assert found(login, sinfo, node=node)["nodes.architecture"] == "aarch64"
    lines = {line.key: line for line in slurm.survey(login.machine()).lines}
    assert lines["nodes.driver"].questions == (
        "which NVIDIA driver have the nodes (nvidia-smi)? On aarch64 each stack needs 580 or newer",
    )
    assert "nodes.architecture" not in found(login, sinfo, node=NODE.replace("CPUAlloc=0", "Arch=x86_64"))


def test_what_scontrol_does_not_say_is_asked(login: Login) -> None:
    login.has({"sinfo": "gpu up 1:00:00 1 64 1 NO gpu:a100:4 g["})
    lines = slurm.survey(login.machine()).lines
    assert {line.key for line in lines if line.questions} == {
        "clusters",
        "nodes.memory_gib",
        "request.account",
    }


def test_an_enforced_account_is_asked_for(login: Login) -> None:
    config = CONFIG.replace("= none", "= associations,limits")
    question = asked(login, "gpu up 1:00:00 1 64 262144 NO gpu:a100:4 g1", config)["request.account"]
    assert (
        question
        == "does a job need an account? (AccountingStorageEnforce=associations,limits; `sacctmgr show assoc`)"
    )


def test_the_network_between_nodes_is_slurms_to_tell(login: Login) -> None:
    login.has({"sinfo": "gpu up 1:00:00 1 64 262144 NO gpu:a100:4 g1", "scontrol show config": CONFIG})
    told = slurm.survey(login.machine())
    assert (told.name, told.node, told.switch, told.models) == (
        "testbed",
        "g1",
        "switch/hpe_slingshot",
        "a100",
    )


def test_a_controller_that_is_not_there_is_refused_in_its_own_words(login: Login) -> None:
    login.script(
        "sinfo", "#!/bin/sh\necho 'slurm_load_partitions: Unable to contact slurm controller' >&2\nexit 1"
    )
    with pytest.raises(BadInput) as refused:
        slurm.survey(login.machine())
    assert str(refused.value) == (
        "sinfo: status 1: slurm_load_partitions: Unable to contact slurm controller: ask again where sinfo lists partitions"
    )
