"""GPU architectures by SM version, as data."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Arch:
    """One compute capability: `sm90` and a device that has it."""

    name: str
    devices: str

    @property
    def sm(self) -> int:
        return int(self.name.removeprefix("sm"))


ARCHS = {
    arch.name: arch
    for arch in (
        Arch("sm80", "A100"),
        Arch("sm86", "A10, RTX 3090"),
        Arch("sm89", "L4, L40S, RTX 4090"),
        Arch("sm90", "H100, H200"),
        Arch("sm100", "B200"),
        Arch("sm103", "B300"),
        Arch("sm107", "Rubin"),
        Arch("sm110", "Thor"),
        Arch("sm120", "RTX PRO 6000, RTX 5090"),
        Arch("sm121", "DGX Spark"),
    )
}
GPUS = tuple(ARCHS)
CPU = "cpu"


def arch(name: str) -> Arch:
    """The architecture called `name`. ValueError when there is none."""
    if name not in ARCHS:
        raise ValueError(f"arch: expected one of {', '.join(ARCHS)}, got {name!r}")
    return ARCHS[name]


def of_device(device: str) -> str:
    """`sm90` for a CUDA device, `cpu` otherwise."""
    if not device.startswith("cuda"):
        return CPU
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    return f"sm{major}{minor}"
