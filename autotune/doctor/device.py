"""GPU, driver and torch: whether the engine would run where its owner thinks it does."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from autotune.doctor.finding import Finding, ok, problem, warning
from autotune.doctor.probes import Probes
from autotune.doctor.torch_facts import TorchFacts
from engine.sizes import format_size

_NVIDIA: Final = "0x10de"
_DISPLAY: Final = "0x03"  # PCI class of graphics devices
_DRIVER: Final = Path("/proc/driver/nvidia/version")
_PCI: Final = Path("/sys/bus/pci/devices")
_VERSION: Final = re.compile(r"\s(\d+)\.(\d+)(?:\.\d+)?\s")
# The oldest driver whose CUDA runs programs built for a major version (NVIDIA's table of minor-version compatibility).
_OLDEST_DRIVER: Final = {11: (450, 80), 12: (525, 60), 13: (580, 0)}
_HIDING: Final = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
_INSTALL: Final = "pip install 'kv-autotune[engine]'"
_LEAST_CAPABILITY: Final = (8, 0)  # Ampere: what Triton and our kernels are compiled for


def nvidia_devices(probes: Probes) -> list[str]:
    """NVIDIA's graphics devices on the PCI bus, or as the driver lists them: whatever torch thinks of them."""
    found = [
        name
        for name in probes.entries(_PCI)
        if (probes.read(_PCI / name / "vendor") or "").strip() == _NVIDIA
        and (probes.read(_PCI / name / "class") or "").startswith(_DISPLAY)
    ]
    return found or list(probes.entries(Path("/proc/driver/nvidia/gpus")))


def driver_version(probes: Probes) -> tuple[int, int] | None:
    """Major and minor version of the loaded NVIDIA driver, None if there is none."""
    found = _VERSION.search(probes.read(_DRIVER) or "")
    return (int(found[1]), int(found[2])) if found else None


def check_driver(probes: Probes) -> Iterator[Finding]:
    """Devices on the bus, a driver for them, and whether this user may open them."""
    devices, driver = nvidia_devices(probes), driver_version(probes)
    if not devices and driver is None:
        yield ok("device", "no NVIDIA device here: engines run on the processor")
        return
    if driver is None:
        yield problem(
            "device",
            f"an NVIDIA device is there ({', '.join(devices)}), but its driver is not loaded",
            "install NVIDIA's driver for this kernel, then look at `modprobe nvidia` and `dmesg`",
        )
        return
    yield ok("device", f"NVIDIA driver {driver[0]}.{driver[1]:02}, {len(devices) or 'no'} device(s) on the bus")
    nodes = [name for name in probes.entries(Path("/dev")) if re.fullmatch(r"nvidia(\d+|ctl|-uvm)", name)]
    if "nvidiactl" not in nodes or "nvidia-uvm" not in nodes or not any(name[-1].isdigit() for name in nodes):
        yield problem(
            "device nodes",
            f"of /dev/nvidia0, nvidiactl and nvidia-uvm there are: {', '.join(nodes) or 'none'}",
            "run `nvidia-modprobe -u -c 0` as root; in a container, start it with the NVIDIA runtime; under systemd, "
            "install the unit with GPU=1",
        )
        return
    closed = [name for name in nodes if not probes.access(Path("/dev") / name, os.R_OK | os.W_OK)]
    if closed:
        yield problem(
            "device nodes",
            f"this user may not open {', '.join(closed)}",
            "add the user to the nodes' group (`ls -l /dev/nvidia*`)",
        )
        return
    yield ok("device nodes", f"open to this user: {', '.join(nodes)}")


def check_torch(probes: Probes) -> Iterator[Finding]:
    """Whether torch can be imported, and uses the device that is there."""
    facts, devices = probes.torch(), nvidia_devices(probes)
    has_gpu = bool(devices) or driver_version(probes) is not None
    if facts.is_missing:
        yield warning(
            "torch", "not installed: this environment can run daemons, not engines", f"for an engine: {_INSTALL}"
        )
        return
    if facts.error is not None:
        yield problem("torch", f"cannot be imported: {facts.error}", f"install it again: {_INSTALL}")
        return
    if facts.cuda is None:
        yield _without_cuda(facts, has_gpu=has_gpu)
        return
    if not facts.is_available:
        yield _fallen_back(facts, probes, has_gpu=has_gpu)
        return
    yield ok("torch", f"{facts.version} for CUDA {facts.cuda} sees {len(facts.devices)} GPU(s)")
    yield from _each_device(facts)


def _without_cuda(facts: TorchFacts, *, has_gpu: bool) -> Finding:
    if not has_gpu:
        return ok("torch", f"{facts.version}, built for processors, as this machine has no NVIDIA device")
    return problem(
        "torch",
        f"THE GPU IS NOT USED: torch {facts.version} was built without CUDA, so each engine here runs on the processor",
        "install a CUDA build of torch (PyPI's own, or the index of your CUDA version that PyTorch's installation page "
        "names), without TORCH_INDEX",
    )


def _fallen_back(facts: TorchFacts, probes: Probes, *, has_gpu: bool) -> Finding:
    """A CUDA build that sees no device: it says nothing and computes on the processor."""
    loud = f"torch {facts.version} was built for CUDA {facts.cuda} and sees no GPU: it SILENTLY RUNS ON THE PROCESSOR"
    said = f" (it says: {facts.said})" if facts.said else ""
    hiding = [f"{name}={probes.environ[name]!r}" for name in _HIDING if name in probes.environ]
    if not has_gpu:
        return warning(
            "torch",
            loud + said + "; no NVIDIA device is visible here",
            "if there should be none, the CPU build of torch saves gigabytes; if there should be one, look at "
            "`lspci -d 10de:` and at how this container or machine was started",
        )
    driver, oldest = driver_version(probes), _OLDEST_DRIVER.get(_major(facts.cuda))
    if driver is not None and oldest is not None and driver < oldest:
        advice = (
            f"driver {driver[0]}.{driver[1]:02} is too old for CUDA {facts.cuda}, which needs "
            f"{oldest[0]}.{oldest[1]:02}: install a newer driver, or a torch built for an older CUDA"
        )
    elif hiding:
        advice = f"{', '.join(hiding)} hides devices: unset it"
    else:
        advice = "run `nvidia-smi`; if that fails too, the driver is broken: load its modules again, or restart"
    return problem("torch", loud + said, advice)


def _each_device(facts: TorchFacts) -> Iterator[Finding]:
    for index, device in enumerate(facts.devices):
        major, minor = device.capability
        what = f"{device.name}, {format_size(device.memory_bytes)}, compute capability {major}.{minor}"
        if facts.arches and not _is_built_for(device.capability, facts.arches):
            yield problem(
                f"GPU {index}",
                f"{what}: torch has no kernels for it, only for {', '.join(facts.arches)}",
                "install a torch that is built for this device",
            )
        elif device.capability < _LEAST_CAPABILITY:
            least = ".".join(map(str, _LEAST_CAPABILITY))
            yield warning(
                f"GPU {index}",
                f"{what}: older than {least}, which the kernels here are compiled and checked for",
                "expect it not to work; run `make gpu-check`",
            )
        else:
            yield ok(f"GPU {index}", what)


def _is_built_for(capability: tuple[int, int], arches: tuple[str, ...]) -> bool:
    """Whether binaries of the same major version that are no newer are there, or any intermediate code to compile."""
    for arch in arches:
        kind, _, digits = arch.partition("_")
        digits = digits.rstrip("af")
        if not digits.isdecimal():
            continue
        built = (int(digits[:-1]), int(digits[-1]))
        if kind == "sm" and built[0] == capability[0] and built <= capability:
            return True
        if kind == "compute" and built <= capability:
            return True
    return False


def _major(version: str | None) -> int:
    digits = (version or "").partition(".")[0]
    return int(digits) if digits.isdecimal() else 0
