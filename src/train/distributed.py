"""What a rank does together with the others: `World` has its device and its collectives. Only this module and
stop.py, which any program may copy, call torch.distributed.

No collective here pickles: what is not a tensor crosses as JSON in a tensor of bytes.
"""

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from train.environment import RankInfo
from train.status import TrainingRefused
from train.stop import leave_group

ROOM: Final = 2048
"""Bytes of a rank's value that is gathered: padded, one collective is enough."""
_PAUSE_S: Final = 0.05
"""Between two calls of what is done while others are late."""


class SaidByAnother(TrainingRefused):
    """Another rank says why; this one only ends with the same status."""

    def __init__(self) -> None:
        super().__init__("said-by-another-rank", "", rank=-1)


class Vote:
    """What a unanimous block finds that is to be the same on all ranks."""

    def __init__(self) -> None:
        self.value: Any = None
        """Set in the block: this rank's, as JSON."""
        self.is_agreed = True
        """Known after the block: whether all ranks have found the same."""


class World:
    """This rank's device and its way to the others."""

    def __init__(self, info: RankInfo, device: torch.device) -> None:
        """Join the process group, or make one of a single process. Blocks until all ranks are there."""
        self.info = info
        self.rank, self.size = info.rank, info.world_size
        self.device = device
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        bound = device if device.type == "cuda" else None
        if info.master is None:
            dist.init_process_group(self.backend, store=HashStore(), rank=0, world_size=1, device_id=bound)
        else:
            dist.init_process_group(self.backend, device_id=bound)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def wrap(self, model: nn.Module) -> DistributedDataParallel:
        """Average the model's gradients over the ranks; rank 0's weights and buffers become everyone's."""
        devices = [self.device.index] if self.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)

    def sum(self, values: Sequence[int], meanwhile: Callable[[], None] | None = None) -> list[int]:
        """Element-wise sums over all ranks. `meanwhile` is called now and then while others are late, in
        a thread: the main thread is seen to wait in a function of torch, and is not taken for busy."""
        tensor = torch.tensor(values, dtype=torch.int64, device=self.device)
        with _repeated(meanwhile):
            dist.all_reduce(tensor)
            if self.device.type == "cuda":  # the stream alone waits in NCCL's, and tolist is not seen
                torch.cuda.current_stream(self.device).synchronize()
            return [int(value) for value in tensor.tolist()]

    def barrier(self) -> None:
        """Return when every rank has come here."""
        self.sum([0])

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite tensors on the device with rank 0's, in place."""
        for tensor in tensors:
            data = tensor if tensor.is_contiguous() else tensor.contiguous()
            dist.broadcast(data, src=0)
            if data is not tensor:
                tensor.copy_(data)

    def broadcast_json(self, value: Any) -> Any:
        """Rank 0's value, through JSON, on every rank."""
        text = json.dumps(value).encode() if self.is_first else b""
        (length,) = self.sum([len(text)])
        data = torch.zeros(length, dtype=torch.uint8, device=self.device)
        if self.is_first:
            data.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        dist.broadcast(data, src=0)
        return json.loads(data.cpu().numpy().tobytes())

    def gather_json(self, value: Any) -> list[Any]:
        """Every rank's value, through JSON, on every rank, in their order; each of at most `ROOM` bytes."""
        text = json.dumps(value).encode().ljust(ROOM)
        mine = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self.device)
        all_of_them = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(all_of_them, mine)
        return [json.loads(data.cpu().numpy().tobytes()) for data in all_of_them]

    @contextmanager
    def unanimous(self) -> Iterator[Vote]:
        """Let a TrainingRefused of any rank end them all; the lowest rank that has one says it. Else the vote
        knows afterwards whether the ranks agree. One collective of three numbers for both."""
        refusal, vote = None, Vote()
        try:
            yield vote
        except TrainingRefused as error:
            refusal = error
        digest = _digest(vote.value)
        least = torch.tensor([self.rank if refusal else self.size, digest, -digest], device=self.device)
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        first, low, high = (int(number) for number in least.tolist())
        if first == self.rank and refusal:
            raise TrainingRefused(refusal.id, str(refusal), rank=self.rank) from refusal
        if first < self.size:
            raise SaidByAnother
        vote.is_agreed = low == -high

    def close(self) -> None:
        """Leave the others in good order; after an error end the process without this."""
        self.barrier()
        leave_group()


@contextmanager
def _repeated(action: Callable[[], None] | None) -> Iterator[None]:
    """Call it now and then until the block ends."""
    if action is None:
        yield
        return
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(_PAUSE_S):
            action()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _digest(value: Any) -> int:
    """63 bits that stand for a value of JSON: the negative fits into an int64, too."""
    text = json.dumps(value, sort_keys=True).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1


class SumLater:
    """Sums over all ranks, started now and read later, so that nobody waits for them in between."""

    def __init__(self, world: World, device_value: Tensor, values: Sequence[float]) -> None:
        """`device_value`: one element on the device, read by no one here; `values` are known already."""
        cuda = world.device.type == "cuda"
        host = torch.tensor([0.0, *values], dtype=torch.float64, pin_memory=cuda)
        self._sums = host.to(world.device, non_blocking=True)
        self._sums[0] += device_value
        self._work = dist.all_reduce(self._sums, async_op=True)
        self._event = torch.cuda.Event() if cuda else None  # type: ignore[no-untyped-call]
        if self._event is not None:
            self._work.wait()  # The stream waits, the process does not.
            self._host = torch.empty_like(host, pin_memory=True).copy_(self._sums, non_blocking=True)
            self._event.record()

    def read(self) -> list[float]:
        """The sums: `device_value`'s, then those of `values`."""
        if self._event is not None:
            self._event.synchronize()
            return [float(value) for value in self._host.tolist()]
        self._work.wait()
        return [float(value) for value in self._sums.tolist()]


def choose_device(wanted: str, info: RankInfo) -> torch.device:
    """The device of this rank, made current. Raises TrainingRefused where there is none for it."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if info.local_rank >= seen:
        raise TrainingRefused(
            "local-rank-above-gpus",
            f"LOCAL_RANK is {info.local_rank} on {info.node}, where torch sees {seen} GPUs: "
            "start at most one rank per GPU, or give device=cpu",
            rank=info.rank,
        )
    torch.cuda.set_device(info.local_rank)
    return torch.device("cuda", info.local_rank)


def use_threads(wanted: int, told: bool) -> None:
    """Have torch compute with so many threads; 0: as it was `told` by OMP_NUM_THREADS, else one."""
    if wanted or not told:
        torch.set_num_threads(wanted or 1)


def be_deterministic(wanted: bool, device: torch.device) -> None:
    """Choose CUDA's kernels; call it before the device is used. On a CPU there is no choice to make."""
    if device.type != "cuda":
        return
    torch.backends.cudnn.benchmark = not wanted
    torch.backends.cudnn.deterministic = wanted
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(True, warn_only=True)


def without_sync(model: DistributedDataParallel, wanted: bool) -> AbstractContextManager[None]:
    """Keep gradients to this rank in the passes of a step before its last one."""
    return model.no_sync() if wanted else nullcontext()
