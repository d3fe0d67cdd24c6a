"""Whether the image's stack runs on a node: NVIDIA's rules, what is said, and how the driver is asked."""

from entrypoint.node.gpu import DriverReport, Gpu, ImageStack, Needs

FACTS = {
    "name": "cu132",
    "python": "3.13",
    "torch": "2.15.0",
    "torchvision": "0.29.2",
    "cuda": "13.2",
    "cudnn": "9.26.0",
    "nccl": "2.30.7",
    "driver": "580",
    "compute_capability": ["7.5", "8.0", "8.6", "9.0", "10.0", "12.0"],
    "lock_sha256": "5e1f",
    "others": {
        "cu118": {"driver": "450.80.02", "compute_capability": ["6.0", "7.0", "7.5", "8.0"]},
        "cu126": {"driver": "525", "compute_capability": ["5.0", "6.0", "7.0", "7.5", "8.0", "8.6", "9.0"]},
    },
}
CU126 = Needs(driver="525", capabilities=((5, 0), (6, 0), (7, 0), (7, 5), (8, 0), (8, 6), (9, 0)))
CU132 = ImageStack(
    name="cu132",
    cuda="13.2",
    lock="5e1f",
    driver="580",
    capabilities=((7, 5), (8, 0), (8, 6), (9, 0), (10, 0), (12, 0)),
    others={
        "cu118": Needs(driver="450.80.02", capabilities=((6, 0), (7, 0), (7, 5), (8, 0))),
        "cu126": CU126,
    },
)
V100 = Gpu(name="Tesla V100-SXM2-32GB", capability=(7, 0))
H100 = Gpu(name="NVIDIA H100 80GB HBM3", capability=(9, 0))
TAKE_CU126 = "use the stack cu126 (make image STACK=cu126, and name that image in APPTRAIN_IMAGE)"
HAS_NONE = "the stack cu132 (CUDA 13.2) has no kernels for"
ITS_OWN = "only for 7.5, 8.0, 8.6, 9.0, 10.0, 12.0"
NOT_FOUND = "libcuda.so.1: cannot open shared object file: No such file or directory"


def healthy(*gpus: Gpu, driver: str = "580.65.06", cuda: tuple[int, int] = (13, 0)) -> DriverReport:
    return DriverReport(driver=driver, cuda=cuda, gpus=gpus)
