"""The way out: what `leave` does."""

import pytest
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from train import stop


@pytest.mark.parametrize("group", [False, True])
def test_who_leaves_ends_with_the_status_and_leaves_gloos_group_to_the_end(group: bool) -> None:
    if group:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    with pytest.raises(SystemExit) as ended:
        stop.leave(75)
    assert ended.value.code == 75
    assert dist.is_initialized() == group
    if group:
        dist.destroy_process_group()
