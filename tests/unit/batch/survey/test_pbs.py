"""entrypoint/batch/pbs/survey.py: what qstat and pbsnodes say, and which queue is taken."""

import pytest

from entrypoint.batch.pbs import survey as pbs
from entrypoint.batch.survey.answer import SiteSurvey
from entrypoint.core.errors import BadInput
from tests.unit.batch.survey.login import Login

OPEN = "    queue_type = Execution\n    enabled = True\n    started = True\n"


def queue(name: str, *attributes: str) -> str:
    return f"Queue: {name}\n{OPEN}" + "".join(f"    {attribute}\n" for attribute in attributes) + "\n"


def node(name: str, gpus: int = 4, *attributes: str) -> str:
    available = {"host": name, "mem": "527831088kb", "ncpus": 64, "ngpus": gpus}
    lines = [f"resources_available.{key} = {value}" for key, value in available.items()]
    return f"{name}\n" + "".join(f"     {line}\n" for line in [*lines, *attributes]) + "\n"


def survey(login: Login, queues: str, nodes: str, server: str = "Server: pbssrv\n") -> SiteSurvey:
    login.has({"qstat -Qf": queues, "qstat -Bf": server, "pbsnodes -a": nodes})
    return pbs.survey(login.machine())


def values(found: SiteSurvey) -> dict[str, object]:
    return {line.key: line.value for line in found.lines if line.value is not None}


def why(found: SiteSurvey, key: str) -> str:
    return next(line.why for line in found.lines if line.key == key and line.value is not None)


def asked(found: SiteSurvey) -> dict[str, str]:
    return {line.key: line.questions[0] for line in found.lines if line.questions}


def test_values_are_those_of_the_hosts_with_gpus(login: Login) -> None:
    gpu = queue("gpu", "resources_max.walltime = 00:30:00", "default_chunk.ngpus = 1")
    nodes = (
        node("c1", 0)
        + node("g1", 4, "resources_available.gpu_type = a100")
        + node("g2", 4, "resources_available.gpu_type = a100")
    )
    found = survey(login, queue("cpu") + gpu, nodes)
    assert (found.name, found.node, found.gpus, found.models) == ("pbssrv", "g1", 4, "a100")
    assert values(found) == {
        "scheduler": "pbs",
        "clusters": ("pbssrv",),
        "nodes.gpus": 4,
        "nodes.cpus": 64,
        "nodes.memory_gib": 503,
        "request.partition": "gpu",
        "request.time": "00:30:00",
        "request.gpus": "ngpus={gpus}",
    }


def test_the_model_is_that_of_a_hosts_part_with_gpus_wherever_it_is_listed() -> None:
    available = "resources_available."
    several = {
        "g1[0]": {f"{available}host": "g1", f"{available}ngpus": "0", f"{available}gpu_type": "none"},
        "g1[1]": {f"{available}host": "g1", f"{available}ngpus": "4", f"{available}gpu_type": "a100"},
    }
    (found,) = pbs.hosts(several)
    assert (found.name, found.gpus, found.model, found.model_by) == ("g1", 4, "a100", "gpu_type")


@pytest.mark.parametrize(
    "sign",
    [
        "resources_min.ngpus = 1",
        "resources_default.ngpus = 1",
        "default_chunk.ngpus = 4",
        "resources_max.ngpus = 16",
        "resources_available.ngpus = 8",
        "default_chunk.Qlist = x",
    ],
)
def test_a_queue_with_gpus_is_known_by_what_it_asks_for(sign: str, login: Login) -> None:
    nodes = node("c1", 0) + node("g1", 4, "resources_available.Qlist = w, x")
    found = survey(login, queue("a") + queue("b", sign) + queue("c"), nodes)
    assert (values(found)["request.partition"], "request.partition" in asked(found)) == ("b", False)


def test_a_queue_that_a_node_names_has_its_gpus(login: Login) -> None:
    nodes = node("c1", 0) + node("g1", 4, "queue = b") + node("g2", 8, "queue = d")
    found = survey(login, queue("a") + queue("b"), nodes)
    assert (values(found)["request.partition"], values(found)["nodes.gpus"]) == ("b", 4)


@pytest.mark.parametrize(
    "state", ["down", "offline", "down,offline", "state-unknown,down", "Stale", "offline,job-busy"]
)
def test_hosts_that_are_down_or_offline_are_no_hosts_with_gpus(state: str, login: Login) -> None:
    retired = "".join(node(f"old{i}", 8, f"state = {state}", "queue = old") for i in range(3))
    up = node("new1", 4, "state = free") + node("new2", 4, "state = job-exclusive,resv-exclusive")
    found = survey(login, queue("old") + queue("new", "resources_min.ngpus = 1"), retired + up)
    assert (found.node, values(found)["nodes.gpus"], values(found)["request.partition"]) == ("new1", 4, "new")
    assert why(found, "nodes.gpus") == "pbsnodes: ngpus of 2 hosts, such as new1"
    assert asked(found).keys().isdisjoint({"request.partition", "request.gpus"})


def test_where_no_host_with_gpus_is_up_it_is_said(login: Login) -> None:
    nodes = node("c1", 0, "state = free") + node("g1", 4, "state = down") + node("g2", 4, "state = offline")
    found = survey(login, queue("gpu"), nodes)
    assert values(found)["nodes.gpus"] == 4
    assert why(found, "nodes.gpus") == "pbsnodes: ngpus of 2 hosts, such as g1; no host with GPUs is up"


def test_a_host_is_up_if_one_of_its_vnodes_is() -> None:
    host = {"resources_available.host": "g1", "resources_available.ngpus": "2"}
    (found,) = pbs.hosts({"g1[0]": {**host, "state": "offline"}, "g1[1]": {**host, "state": "free"}})
    assert (found.gpus, found.is_up) == (4, True)


def test_amounts_that_a_chunk_asks_for_do_not_tell_where_it_runs(login: Login) -> None:
    chunk = ("default_chunk.Qlist = x", "default_chunk.mem = 4gb", "default_chunk.ncpus = 1")
    nodes = node("c1", 0) + node("g1", 4, "resources_available.Qlist = x")
    assert values(survey(login, queue("a") + queue("b", *chunk), nodes))["request.partition"] == "b"


def test_a_queue_without_gpus_is_not_taken_for_its_name(login: Login) -> None:
    found = survey(login, queue("gpu_old", "resources_max.ngpus = 0") + queue("gpu"), node("g1"))
    assert values(found)["request.partition"] == "gpu"


@pytest.mark.parametrize("closed", ["enabled = False", "started = False", "from_route_only = True"])
def test_a_queue_that_takes_no_jobs_is_not_taken(closed: str, login: Login) -> None:
    found = survey(login, queue("gpu1", closed) + queue("gpu2"), node("g1"))
    assert values(found)["request.partition"] == "gpu2"
    assert "request.partition" not in asked(found)


def test_open_queues_for_long_runs_come_first_and_the_others_are_named(login: Login) -> None:
    queues = queue("gpu-debug") + queue("gpu-group", "acl_group_enable = True") + queue("gpu") + queue("gpu2")
    found = survey(login, queues, node("g1"), "Server: pbssrv\n    default_queue = gpu2\n")
    assert values(found)["request.partition"] == "gpu2"
    assert asked(found)["request.partition"] == (
        "is gpu2 the right queue? With GPUs there are also: gpu-debug, gpu-group, gpu"
    )


def test_where_all_nodes_have_gpus_any_queue_has_them(login: Login) -> None:
    found = survey(login, queue("debug") + queue("prod"), node("g1"))
    assert values(found)["request.partition"] == "prod"
    assert why(found, "request.partition") == "qstat -Qf: all nodes have GPUs"


def test_a_queue_that_is_taken_for_its_name_says_so_and_one_without_a_limit_too(login: Login) -> None:
    found = survey(login, queue("gpu") + queue("cpu"), node("g1") + node("c1", 0))
    assert why(found, "request.partition") == "qstat -Qf: its name"
    assert why(found, "request.time") == "no limit was found"


def test_a_queue_with_a_limit_names_it(login: Login) -> None:
    found = survey(
        login, queue("gpu", "resources_max.walltime = 12:00:00", "resources_min.ngpus = 1"), node("g1")
    )
    assert why(found, "request.partition") == "qstat -Qf: its resources, or its nodes have GPUs"
    assert why(found, "request.time") == "qstat -Qf: resources_max.walltime is 12:00:00"


def test_where_no_queue_is_known_to_have_gpus_they_are_named(login: Login) -> None:
    found = survey(login, queue("short") + queue("long"), node("g1") + node("c1", 0))
    assert "request.partition" not in values(found)
    assert asked(found)["request.partition"] == "which queue has the GPUs? There are: short, long"


def test_nodes_without_gpus_are_asked_about(login: Login) -> None:
    found = survey(login, queue("workq"), node("c1", 0))
    assert (found.node, found.gpus, found.models) == ("", 0, "")
    assert values(found)["nodes.gpus"] == 0
    assert (
        asked(found)["nodes.gpus"]
        == "pbsnodes shows no GPUs: how many has a node? Until then submit with --device cpu"
    )


@pytest.mark.parametrize(
    ("server", "name", "clusters"),
    [
        ("Server: pbs.lab.org\n", "pbs", ("pbs.lab.org", "pbs")),
        ("Server: pbs\n    default_queue = a\n", "pbs", ("pbs",)),
        ("", "", None),
    ],
)
def test_a_jobs_id_ends_with_the_servers_name_with_or_without_its_domain(
    server: str, name: str, clusters: tuple[str, ...] | None, login: Login
) -> None:
    found = survey(login, queue("gpu"), node("g1"), server)
    assert (found.name, values(found).get("clusters")) == (name, clusters)
    assert ("clusters" in asked(found)) == (clusters is None)


def test_what_all_hosts_with_gpus_have_is_what_the_least_has(login: Login) -> None:
    less = node("g2").replace("527831088kb", "64gb").replace("ncpus = 64", "ncpus = 48")
    found = values(survey(login, queue("gpu"), node("g1") + less + node("c1", 0).replace("64", "8")))
    assert (found["nodes.cpus"], found["nodes.memory_gib"]) == (48, 64)


def test_a_model_that_no_request_can_name_is_left_out_of_it(login: Login) -> None:
    nodes = node("a1", 4, "resources_available.gpu_type = a100, 80 GB") + node("v1", 2)
    found = survey(login, queue("gpu"), nodes)
    assert values(found)["request.gpus"] == "ngpus={gpus}"
    assert asked(found)["request.gpus"] == (
        "there are other nodes too: 1 with 2 x GPU: is 4 x a100, 80 GB right?"
    )


def test_the_vnodes_of_a_host_count_together(login: Login) -> None:
    half = "     resources_available.host = g1\n     resources_available.mem = 64gb\n     resources_available.ncpus = 16\n     resources_available.ngpus = 2\n"
    found = values(survey(login, queue("gpu"), f"g1[0]\n{half}\ng1[1]\n{half}"))
    assert (found["nodes.gpus"], found["nodes.cpus"], found["nodes.memory_gib"]) == (4, 32, 128)


@pytest.mark.parametrize("sharing", ["default_excl", "default_exclhost", "force_excl", "force_exclhost"])
def test_nodes_that_jobs_do_not_share_come_whole(sharing: str, login: Login) -> None:
    assert values(survey(login, queue("gpu"), node("g1", 4, f"sharing = {sharing}")))["nodes.whole"] is True


def test_nodes_that_jobs_share_do_not(login: Login) -> None:
    found = values(survey(login, queue("gpu"), node("g1", 4, "sharing = ignore_excl")))
    assert not found.get("nodes.whole")
    nodes = node("g1", 4, "sharing = default_shared") + node("g2", 4, "sharing = force_exclhost")
    assert "nodes.whole" not in values(survey(login, queue("gpu"), nodes))


def test_one_of_several_models_is_asked_for_by_name(login: Login) -> None:
    nodes = "".join(node(f"a{i}", 4, "resources_available.gpu_type = a100") for i in range(3))
    found = survey(login, queue("gpu"), nodes + node("v1", 8, "resources_available.gpu_type = v100"))
    assert (found.gpus, found.models) == (4, "a100")
    assert values(found)["request.gpus"] == "ngpus={gpus}:gpu_type=a100"
    assert asked(found)["request.gpus"] == "there are other nodes too: 1 with 8 x v100: is 4 x a100 right?"


def test_gpus_that_are_counted_by_another_resource_are_asked_for_by_it(login: Login) -> None:
    nodes = node(
        "g1", 0, "resources_available.naccelerators = 2", "resources_available.accelerator_model = H100"
    )
    found = survey(login, queue("gpu"), nodes)
    assert (found.gpus, found.models, values(found)["request.gpus"]) == (2, "H100", "naccelerators={gpus}")


def test_a_line_that_goes_on_is_one() -> None:
    told = "Queue: a\n    state_count = Transit:0 Beg\n\tun:0\n    comment = one\n        two\n    enabled = True\n"
    assert pbs.parse(told, "Queue: ") == {
        "a": {"state_count": "Transit:0 Begun:0", "comment": "onetwo", "enabled": "True"}
    }


def test_torque_is_refused_with_what_to_do_instead(login: Login) -> None:
    with pytest.raises(BadInput, match=r"pbsnodes shows Torque, .* submit pbs/multinode\.pbs by hand"):
        survey(login, queue("batch"), "n1\n     state = free\n     np = 16\n     gpus = 2\n")


def test_a_server_that_does_not_answer_is_refused_in_its_own_words(login: Login) -> None:
    login.script("qstat", "#!/bin/sh\necho 'Connection refused' >&2\nexit 111")
    with pytest.raises(BadInput) as refused:
        pbs.survey(login.machine())
    assert (
        str(refused.value)
        == "qstat -Qf: status 111: Connection refused: ask again where qstat -Qf lists queues"
    )
