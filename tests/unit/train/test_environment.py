import socket
from pathlib import Path

import pytest

from train.environment import RankInfo, read_rank_info
from train.status import TrainingRefused

TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
}


def test_the_ranks_place_is_what_torchrun_says() -> None:
    ours = {"APPTRAIN_NODE": "gpu-2", "APPTRAIN_RUN_DIR": "/runs/a", "APPTRAIN_HEARTBEAT": "/dev/shm/b"}
    ours |= {"APPTRAIN_ATTEMPT": "2", "APPTRAIN_JOB_ID": "10[3].pbssrv"}
    assert read_rank_info({**TORCHRUN, **ours}) == RankInfo(
        rank=3,
        local_rank=1,
        world_size=4,
        local_world_size=2,
        master="n1:29500",
        node="gpu-2",
        run_dir=Path("/runs/a"),
        attempt=2,
        job_id="10[3].pbssrv",
        heartbeat=Path("/dev/shm/b/3"),
    )


def test_without_torchrun_the_process_is_a_world_of_its_own() -> None:
    assert read_rank_info({}) == RankInfo(node=socket.gethostname())
    assert read_rank_info({"APPTRAIN_ATTEMPT": "3"}).attempt == 3
    assert read_rank_info({"APPTRAIN_JOB_ID": "7"}).job_id == "7"


def test_an_ipv6_address_stands_in_brackets() -> None:
    assert read_rank_info({**TORCHRUN, "MASTER_ADDR": "::1"}).master == "[::1]:29500"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"LOCAL_RANK": ""},
            "LOCAL_RANK is not set beside RANK or WORLD_SIZE: start the ranks with torchrun",
        ),
        ({"RANK": ""}, "RANK is not set beside RANK or WORLD_SIZE: start the ranks with torchrun"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT='x' is not a number: start the ranks with torchrun"),
        ({"RANK": "-1"}, "RANK='-1' is not a number: start the ranks with torchrun"),
        (
            {"RANK": "4"},
            "RANK=4, LOCAL_RANK=1, WORLD_SIZE=4, LOCAL_WORLD_SIZE=2 do not fit together: "
            "start the ranks with torchrun",
        ),
    ],
)
def test_what_torchrun_would_never_set_is_refused(change: dict[str, str], message: str) -> None:
    with pytest.raises(TrainingRefused) as refusal:
        read_rank_info({**TORCHRUN, **change})
    assert str(refusal.value) == message
