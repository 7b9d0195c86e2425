"""``autotune doctor``: every check is made to fail, and says what to do."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from autotune.doctor import device, memory, packages, places, processor, run, service, toolchain
from autotune.doctor.finding import Finding, Level
from autotune.doctor.probes import Probes, real_probes
from autotune.doctor.torch_facts import Device, TorchFacts, ask_torch, facts_of
from autotune.shadowed import shadows
from engine.control_client import EngineUnreachable
from engine.models.parameters import MOST_PACKED_BYTES
from engine.sizes import format_size

ROOT = Path(run.autotune.__file__).resolve().parents[1]
H200 = Device("NVIDIA H200", (9, 0), 141 << 30)
CPU_BUILD = TorchFacts("2.13.0+cpu", None, is_available=False, triton="3.7.1")
CUDA_BUILD = TorchFacts(
    "2.13.0+cu130", "13.0", is_available=True, devices=(H200,), arches=("sm_80", "sm_90"), triton="3.7.1"
)
FALLEN = replace(CUDA_BUILD, is_available=False, devices=(), arches=(), said="driver too old")
NODES = ("nvidia0", "nvidiactl", "nvidia-uvm", "null")


@dataclass
class Fake:
    """A machine in words: files by path, folders by path, owners and modes."""

    files: dict[str, str] = field(default_factory=dict)
    folders: dict[str, tuple[str, ...]] = field(default_factory=dict)
    modes: dict[str, int] = field(default_factory=dict)
    foreign: set[str] = field(default_factory=set)  # of another user
    closed: set[str] = field(default_factory=set)  # not accessible
    programs: dict[str, str] = field(default_factory=lambda: {"gcc": "/usr/bin/gcc"})
    taken: dict[int, str] = field(default_factory=dict)
    torch: TorchFacts = CPU_BUILD
    owners: dict[str, list[str]] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)
    cwd: str = "/home/me"
    path: list[str] = field(default_factory=list)

    def probes(self) -> Probes:
        def exists(path: Path) -> os.stat_result | None:
            text = str(path)
            known = text in self.files or text in self.modes or text in self.folders or text == "/"
            if not known and not any(name.startswith(f"{text}/") for name in (*self.files, *self.modes, *self.folders)):
                return None
            mode = self.modes.get(text, stat.S_IFREG if text in self.files else stat.S_IFDIR | 0o700)
            uid = 1 if text in self.foreign else 0
            return os.stat_result((mode, 0, 0, 1, uid, 0, 0, 0, 0, 0))

        return Probes(
            read=lambda path: self.files.get(str(path)),
            entries=lambda path: self.folders.get(str(path), ()),
            access=lambda path, _: str(path) not in self.closed,
            stat=exists,
            which=self.programs.get,
            bind=lambda _, port: self.taken.get(port),
            torch=lambda: self.torch,
            owners=lambda: self.owners,
            environ=self.environ,
            uid=0,
            cwd=Path(self.cwd),
            path=self.path,
            include=Path("/usr/include/python3.11"),
        )

    def with_gpu(self, driver: str = "580.65.06", nodes: tuple[str, ...] = NODES) -> Fake:
        """An NVIDIA card, its driver unless that is empty, and its nodes."""
        self.folders["/sys/bus/pci/devices"] = ("0000:01:00.0", "0000:02:00.0")
        self.files["/sys/bus/pci/devices/0000:01:00.0/vendor"] = "0x10de\n"
        self.files["/sys/bus/pci/devices/0000:01:00.0/class"] = "0x030200\n"
        self.files["/sys/bus/pci/devices/0000:02:00.0/vendor"] = "0x8086\n"
        self.files["/sys/bus/pci/devices/0000:02:00.0/class"] = "0x030000\n"
        self.folders["/dev"] = nodes
        if driver:
            self.files["/proc/driver/nvidia/version"] = (
                f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {driver}  Wed\n"
            )
        return self


def levels(findings: Iterator[Finding]) -> list[tuple[str, Level]]:
    found = list(findings)
    assert all(one.found for one in found)
    assert all(bool(one.advice) == (one.level is not Level.OK) for one in found), found
    return [(one.check, one.level) for one in found]


def only(findings: Iterator[Finding]) -> Finding:
    (one,) = findings
    assert one.found
    assert bool(one.advice) == (one.level is not Level.OK), one
    return one


# -- device, driver, torch ------------------------------------------------------------------------------------------


def test_devices_and_drivers() -> None:
    assert only(device.check_driver(Fake().probes())).level is Level.OK
    assert levels(device.check_driver(Fake().with_gpu().probes())) == [
        ("device", Level.OK), ("device nodes", Level.OK)
    ]  # fmt: skip
    unloaded = only(device.check_driver(Fake().with_gpu(driver="").probes()))
    assert (unloaded.level, "driver is not loaded" in unloaded.found) == (Level.PROBLEM, True)
    for nodes in ((), ("nvidia0", "nvidiactl"), ("nvidiactl", "nvidia-uvm")):
        findings = list(device.check_driver(Fake().with_gpu(nodes=nodes).probes()))
        assert findings[-1].level is Level.PROBLEM, nodes
    closed = Fake(closed={"/dev/nvidia0"}).with_gpu()
    (_, last) = device.check_driver(closed.probes())
    assert (last.level, "may not open nvidia0" in last.found) == (Level.PROBLEM, True)


def test_a_gpu_that_is_not_used_is_said_loudly() -> None:
    cpu_build = only(device.check_torch(Fake(torch=CPU_BUILD).with_gpu().probes()))
    assert (cpu_build.level, cpu_build.found.startswith("THE GPU IS NOT USED")) == (Level.PROBLEM, True)
    fallen = only(device.check_torch(Fake(torch=FALLEN).with_gpu().probes()))
    assert (fallen.level, "SILENTLY RUNS ON THE PROCESSOR" in fallen.found) == (Level.PROBLEM, True)
    assert "driver too old" in fallen.found  # torch's own words
    assert "nvidia-smi" in fallen.advice
    nowhere = only(device.check_torch(Fake(torch=FALLEN).probes()))
    assert (nowhere.level, "SILENTLY RUNS ON THE PROCESSOR" in nowhere.found) == (Level.WARNING, True)


def test_why_torch_sees_no_gpu() -> None:
    old = only(device.check_torch(Fake(torch=FALLEN).with_gpu(driver="550.54.14").probes()))
    assert "driver 550.54 is too old for CUDA 13.0, which needs 580.00" in old.advice
    enough = only(device.check_torch(Fake(torch=replace(FALLEN, cuda="12.8")).with_gpu(driver="550.54.14").probes()))
    assert "too old" not in enough.advice
    hidden = Fake(torch=FALLEN, environ={"CUDA_VISIBLE_DEVICES": ""}).with_gpu()
    assert "CUDA_VISIBLE_DEVICES='' hides devices" in only(device.check_torch(hidden.probes())).advice


def test_torch_that_is_there_or_is_not() -> None:
    assert only(device.check_torch(Fake().probes())).level is Level.OK
    missing = Fake(torch=TorchFacts(error="no", is_missing=True))
    assert only(device.check_torch(missing.probes())).level is Level.WARNING
    broken = only(device.check_torch(Fake(torch=TorchFacts(error="ImportError: libx")).probes()))
    assert (broken.level, "libx" in broken.found) == (Level.PROBLEM, True)
    good = levels(device.check_torch(Fake(torch=CUDA_BUILD).with_gpu().probes()))
    assert good == [("torch", Level.OK), ("GPU 0", Level.OK)]


@pytest.mark.parametrize(
    ("capability", "arches", "level"),
    [
        ((9, 0), ("sm_80", "sm_90a"), Level.OK),
        ((8, 9), ("sm_80", "sm_86"), Level.OK),
        ((12, 0), ("sm_80", "compute_90"), Level.OK),
        ((12, 0), ("sm_80", "sm_90"), Level.PROBLEM),
        ((7, 5), ("sm_75", "sm_80"), Level.WARNING),
        ((6, 1), ("sm_75",), Level.PROBLEM),
    ],
)
def test_devices_that_torch_was_built_for(capability: tuple[int, int], arches: tuple[str, ...], level: Level) -> None:
    facts = replace(CUDA_BUILD, devices=(Device("card", capability, 1 << 34),), arches=arches)
    assert levels(device.check_torch(Fake(torch=facts).with_gpu().probes()))[1] == ("GPU 0", level)


def test_facts_come_from_another_process(tmp_path: Path) -> None:
    told = {"version": "2.13.0", "cuda": "13.0", "hip": None, "available": True, "arches": ["sm_90"], "triton": None}
    row = {"name": "card", "capability": [9, 0], "memory_bytes": 5}
    facts = facts_of({**told, "devices": [row]})
    assert facts.devices == (Device("card", (9, 0), 5),)
    assert ask_torch(str(tmp_path / "nothing")).error
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho noise\necho gone wrong >&2\nexit 3\n")
    fake.chmod(0o755)
    ended = ask_torch(str(fake)).error
    assert ended is not None
    assert "exit code 3" in ended
    assert "gone wrong" in ended


# -- toolchain --------------------------------------------------------------------------------------------------------


def test_compiler_and_headers_matter_on_a_gpu() -> None:
    headers = {"/usr/include/python3.11/Python.h": ""}
    assert only(toolchain.check_compiler(Fake().with_gpu().probes())).level is Level.OK
    assert only(toolchain.check_headers(Fake(files=headers).with_gpu().probes())).level is Level.OK
    bare = Fake(programs={})
    assert only(toolchain.check_compiler(bare.probes())).level is Level.OK  # nothing here compiles
    bare.with_gpu()
    assert only(toolchain.check_compiler(bare.probes())).level is Level.PROBLEM
    assert "-dev" in only(toolchain.check_headers(bare.probes())).advice
    named = only(toolchain.check_compiler(Fake(environ={"CC": "icc -O2"}).with_gpu().probes()))
    assert (named.level, "CC names icc" in named.found) == (Level.PROBLEM, True)
    no_triton = Fake(torch=replace(CUDA_BUILD, triton=None)).with_gpu()
    assert only(toolchain.check_triton(no_triton.probes())).level is Level.PROBLEM
    assert only(toolchain.check_triton(Fake().probes())).level is Level.OK


# -- processor --------------------------------------------------------------------------------------------------------


def with_flags(flags: str) -> Probes:
    return Fake(files={"/proc/cpuinfo": f"processor\t: 0\nflags\t\t: fpu sse2 {flags}\nbogomips\t: 1\n"}).probes()


AVX2 = with_flags("avx2 fma avx")
ON_CPU = {"model": "m", "device": "cpu", "dtype": "bfloat16", "products": "torch"}


@pytest.mark.parametrize("flag", ["avx512_bf16", "amx_bf16"])
def test_processors_that_multiply_bfloat16(flag: str) -> None:
    found = only(processor.check_processor(with_flags(f"avx512f {flag}"), ON_CPU))
    assert (found.level, found.found) == (Level.OK, f"multiplies bfloat16: {flag}")


def test_processors_that_do_not_and_no_engine_to_speak_of() -> None:
    for probes in (AVX2, with_flags("avx512f")):
        for engine in (None, {"model": "m"}):  # an older one tells nothing
            found = only(processor.check_processor(probes, engine))
            assert found.level is Level.OK
            assert "served by packed products" in found.found
            large = f"more than {format_size(MOST_PACKED_BYTES)} of matrices"
            assert f"{large} is several times faster with --dtype float32" in found.found
    bare = only(processor.check_processor(with_flags("avx2"), None))  # nothing is packed for it
    assert (bare.level, "packed" in bare.found, "--dtype float32" in bare.found) == (Level.OK, False, True)
    assert list(processor.check_processor(Fake().probes(), None)) == []
    arm = Fake(files={"/proc/cpuinfo": "processor : 0\nFeatures : fp asimd bf16\n"})
    assert list(processor.check_processor(arm.probes(), None)) == []


@pytest.mark.parametrize(
    ("differs", "level", "words"),
    [
        ({}, Level.WARNING, "m is in bfloat16 and served without packed products"),
        ({"products": "packed"}, Level.OK, "m is served by packed products"),
        ({"dtype": "float32"}, Level.OK, "m is in float32"),
        ({"device": "cuda"}, Level.OK, "m is on cuda"),
    ],
)
def test_what_a_processor_means_for_the_engine_here(differs: dict[str, str], level: Level, words: str) -> None:
    found = only(processor.check_processor(AVX2, {**ON_CPU, **differs}))
    assert (found.level, words in found.found) == (level, True), found
    assert "of matrices" not in found.found  # of this model alone
    assert ("--dtype float32" in found.advice) == (level is Level.WARNING)


def test_flags_that_packed_products_are_for_are_those_of_the_kernels() -> None:
    products = pytest.importorskip("kernels.cpu.products")
    for flags in ("avx2", "fma", "avx2 fma", "avx512f", "avx"):
        has_products = products.tiling_for(dict.fromkeys(flags.split(), True)) is not None
        assert ("packed" in only(processor.check_processor(with_flags(flags), None)).found) == has_products, flags


# -- memory -----------------------------------------------------------------------------------------------------------


def meminfo(available_mib: int, **more: int) -> dict[str, str]:
    rows = {"MemTotal": 16 << 20, "MemAvailable": available_mib << 10, **more}
    lines = [f"{name}: {value}{'' if name == 'HugePages_Total' else ' kB'}" for name, value in rows.items()]
    return {"/proc/meminfo": "\n".join(lines)}


@pytest.mark.parametrize(("available_mib", "level"), [(8000, Level.OK), (1000, Level.WARNING), (100, Level.PROBLEM)])
def test_memory_that_is_available(available_mib: int, level: Level) -> None:
    assert levels(memory.check_memory(Fake(files=meminfo(available_mib)).probes())) == [("memory", level)]


def test_memory_limits_of_both_kinds_of_cgroup() -> None:
    mib = 1 << 20
    new = {
        "/proc/self/cgroup": "0::/a.slice/b.service\n",
        "/sys/fs/cgroup/a.slice/b.service/memory.max": "max\n",
        "/sys/fs/cgroup/a.slice/memory.max": f"{600 * mib}\n",
        "/sys/fs/cgroup/a.slice/memory.current": f"{500 * mib}\n",
    }
    old = {
        "/proc/self/cgroup": "7:cpu:/x\n6:memory,hugetlb:/docker/abc\n",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": f"{1 << 63}\n",
        "/sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": f"{600 * mib}\n",
        "/sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes": f"{500 * mib}\n",
    }
    for files in (new, old):
        findings = levels(memory.check_memory(Fake(files={**meminfo(8000), **files}).probes()))
        assert findings == [("memory limit", Level.WARNING), ("memory", Level.PROBLEM)]
    free = {"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/memory.max": f"{64 << 30}\n"}
    assert levels(memory.check_memory(Fake(files={**meminfo(8000), **free}).probes())) == [("memory", Level.OK)]
    assert only(memory.check_memory(Fake().probes())).level is Level.WARNING


def test_swap_and_huge_pages() -> None:
    assert ("swap", Level.WARNING) in levels(memory.check_memory(Fake(files=meminfo(8000, SwapTotal=1024)).probes()))
    mode = "/sys/kernel/mm/transparent_hugepage/enabled"
    for text, level in (("always [madvise] never", Level.OK), ("always madvise [never]", Level.WARNING)):
        assert only(memory.check_huge_pages(Fake(files={mode: text}).probes())).level is level
    assert only(memory.check_huge_pages(Fake().probes())).level is Level.WARNING
    reserved = Fake(files={mode: "[always]", **meminfo(8000, HugePages_Total=512, Hugepagesize=2048)})
    last = list(memory.check_huge_pages(reserved.probes()))[-1]
    assert (last.level, "1.0 GiB" in last.found) == (Level.WARNING, True)


# -- sockets, state, ports --------------------------------------------------------------------------------------------

CONTROL = Path("/run/kv-autotune/engine.sock")
JOURNAL = Path("/var/lib/kv-autotune/journal.db")
SOCKET = stat.S_IFSOCK | 0o600


@pytest.mark.parametrize(
    ("fake", "level", "words"),
    [
        (Fake(modes={str(CONTROL): SOCKET}), Level.OK, "is there"),
        (Fake(modes={str(CONTROL): SOCKET}, closed={str(CONTROL)}), Level.PROBLEM, "not for this user"),
        (Fake(files={str(CONTROL): ""}), Level.PROBLEM, "is no socket"),
        (Fake(folders={"/run/kv-autotune": ()}), Level.OK, "this user's"),
        (Fake(folders={"/run/kv-autotune": ()}, closed={"/run/kv-autotune"}), Level.PROBLEM, "may not write"),
        (Fake(folders={"/run/kv-autotune": ()}, foreign={"/run/kv-autotune"}), Level.PROBLEM, "another user (1)"),
        (Fake(modes={"/run/kv-autotune": stat.S_IFDIR | 0o777}), Level.PROBLEM, "others may write"),
        (Fake(modes={"/run/kv-autotune": stat.S_IFDIR | 0o720}), Level.PROBLEM, "others may write"),
        (Fake(modes={"/run/kv-autotune": stat.S_IFDIR | 0o755}), Level.OK, "this user's"),
        (Fake(files={"/run/kv-autotune": ""}), Level.PROBLEM, "is no folder"),
        (Fake(folders={"/run": ()}), Level.OK, "can be made"),
        (Fake(folders={"/run": ()}, closed={"/run"}), Level.PROBLEM, "may not make it in /run"),
    ],
)
def test_the_control_socket_and_its_folder(fake: Fake, level: Level, words: str) -> None:
    found = only(places.check_socket(fake.probes(), CONTROL))
    assert (found.level, words in found.found) == (level, True), found


def test_a_socket_path_that_is_too_long() -> None:
    found = only(places.check_socket(Fake().probes(), Path("/run") / ("x" * 110)))
    assert (found.level, "at most 107" in found.found) == (Level.PROBLEM, True)


def test_the_journal_and_its_folder() -> None:
    assert only(places.check_state(Fake(files={str(JOURNAL): ""}).probes(), JOURNAL)).level is Level.OK
    closed = Fake(files={str(JOURNAL): ""}, closed={str(JOURNAL)})
    assert only(places.check_state(closed.probes(), JOURNAL)).level is Level.PROBLEM
    nowhere = Fake(folders={"/var": ()}, closed={"/var"})
    assert only(places.check_state(nowhere.probes(), JOURNAL)).level is Level.PROBLEM


def test_ports_and_open_files() -> None:
    def port(fake: Fake, number: int = 9466, answers: str | None = None) -> Finding:
        return only(places.check_port(fake.probes(), "admin port", "127.0.0.1", number, "admin.port", answers))

    assert port(Fake()).level is Level.OK
    taken = Fake(taken={9466: "Address already in use"})
    assert (port(taken).level, "in use" in port(taken).found) == (Level.PROBLEM, True)
    assert port(taken, answers="a daemon of ours answers").level is Level.OK
    assert port(taken, number=0).level is Level.OK
    limits = "/proc/self/limits"
    for number, level in (("256", Level.WARNING), ("1024", Level.OK), ("unlimited", Level.OK)):
        fake = Fake(files={limits: f"Limit  Soft  Hard  Units\nMax open files  {number}  4096  files\n"})
        assert only(places.check_open_files(fake.probes())).level is level


def test_real_ports_and_files(tmp_path: Path) -> None:
    probes = real_probes(sys.path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        assert probes.bind("127.0.0.1", taken.getsockname()[1])
    assert probes.bind("no such host.invalid", 1)
    assert probes.read(tmp_path) is None
    assert probes.entries(tmp_path / "none") == ()
    assert probes.stat(tmp_path / "none") is None


# -- packages ---------------------------------------------------------------------------------------------------------

HOME = Path("/opt/venv/site-packages")


def installed(**more: Any) -> Fake:
    files = {f"{HOME}/{name}/__init__.py": "" for name in ("autotune", "policies", "envs", "engine", "kernels")}
    return Fake(files={**files, **more.pop("files", {})}, **more)


@pytest.mark.parametrize("package", ["autotune", "policies", "envs", "engine", "kernels"])
def test_packages_that_stand_before_ours(package: str) -> None:
    assert levels(packages.check_shadows(installed(path=[str(HOME)]).probes(), HOME)) == [("packages", Level.OK)]
    for file in (f"/home/me/mine/{package}/__init__.py", f"/home/me/mine/{package}.py"):
        before = installed(files={file: ""}, path=["/home/me/mine", str(HOME)])
        (found,) = packages.check_shadows(before.probes(), HOME)
        assert (found.level, f"`import {package}` finds /home/me/mine/{package}" in found.found) == (
            Level.PROBLEM,
            True,
        )
        behind = installed(files={file: ""}, path=[str(HOME), "/home/me/mine"])
        assert levels(packages.check_shadows(behind.probes(), HOME)) == [("packages", Level.OK)]
        here = installed(files={file: ""}, path=[str(HOME)], cwd="/home/me/mine")
        assert levels(packages.check_shadows(here.probes(), HOME)) == [
            ("packages", Level.WARNING), ("packages", Level.OK)
        ]  # fmt: skip
    plain = installed(files={f"/home/me/mine/{package}/data.csv": ""}, path=["/home/me/mine", str(HOME)])
    assert levels(packages.check_shadows(plain.probes(), HOME)) == [("packages", Level.OK)]


def test_hugging_faces_kernels() -> None:
    fake = installed(path=[str(HOME)], owners={"kernels": ["kv-autotune", "kernels"]})
    found = only(packages.check_shadows(fake.probes(), HOME))
    assert (found.level, "'kernels'" in found.found) == (Level.PROBLEM, True)


def test_a_shadow_ends_the_command_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "envs").mkdir()
    (tmp_path / "envs" / "__init__.py").write_text("raise SystemExit('not ours')\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-m", "autotune", "--version"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines() == [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert f"our package 'envs' is found at {tmp_path / 'envs'}" in done.stderr
    assert list(shadows(ROOT)) == []
    assert len(list(shadows(ROOT, lambda _: None))) == 5


# -- configuration, engine, daemon ------------------------------------------------------------------------------------


def test_configurations(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    assert only(service.check_config(None)).level is Level.OK
    file.write_text("mode: advise\n")
    assert only(service.check_config(file)).level is Level.OK
    file.write_text("mode: fast\nnosuch: 1\n")
    assert levels(service.check_config(file)) == [("configuration", Level.PROBLEM)] * 2
    file.write_text(f"policy: {{use: predictor, profile: {tmp_path}/none.yaml}}\n")
    assert only(service.check_config(file)).level is Level.PROBLEM
    assert only(service.check_config(tmp_path / "none.yaml")).level is Level.PROBLEM
    assert service.readable_config(tmp_path / "none.yaml").mode == "active"


def says(**about: str) -> Callable[[], Mapping[str, str]]:
    return lambda: {"model": "m", **about}


def test_engines() -> None:
    def gone() -> Mapping[str, str]:
        raise EngineUnreachable("no engine listens here")

    bare, card = Fake().probes(), Fake().with_gpu().probes()
    assert only(service.check_engine(bare, gone, "1")).level is Level.WARNING
    assert only(service.check_engine(bare, says(), "1")).level is Level.WARNING
    assert only(service.check_engine(bare, says(version="2", device="cpu"), "1")).level is Level.WARNING
    assert only(service.check_engine(bare, says(version="1", device="cpu"), "1")).level is Level.OK
    assert only(service.check_engine(card, says(version="1", device="cuda"), "1")).level is Level.OK
    fallen = list(service.check_engine(card, says(version="1", device="cpu"), "1"))[-1]
    assert (fallen.level, fallen.found.startswith("THE ENGINE RUNS ON THE PROCESSOR")) == (Level.PROBLEM, True)


def test_daemons() -> None:
    assert only(service.check_daemon(None, "http://x")).level is Level.WARNING
    well: dict[str, Any] = {"mode": "active", "healthy": True, "policy": "p"}
    assert only(service.check_daemon(well, "http://x")).level is Level.OK
    assert only(service.check_daemon({**well, "healthy": False}, "http://x")).level is Level.PROBLEM


def test_pythons() -> None:
    assert run.check_python((3, 11), "Linux").level is Level.OK
    for version, system in (((3, 10), "Linux"), ((3, 14), "Linux"), ((3, 12), "Darwin")):
        assert run.check_python(version, system).level is Level.PROBLEM


# -- all of it --------------------------------------------------------------------------------------------------------


def test_the_command_on_this_machine(
    autotune: Any, fakes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.clock import RealClock

    asked: list[str] = []

    def told(python: str = sys.executable) -> TorchFacts:
        asked.append(python)
        return CPU_BUILD

    monkeypatch.setattr("autotune.doctor.probes.ask_torch", told)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    engine = fakes.FakeEngine(RealClock())
    config = tmp_path / "c.yaml"
    config.write_text("admin: {port: 0}\n")
    with fakes.FakeControlServer(engine, tmp_path / "e.sock"):
        where = ("--config", str(config), "--control", str(tmp_path / "e.sock"), "--port", "0")
        code, out, err = autotune("doctor", *where)
        findings = json.loads(autotune("doctor", *where, "--json")[1])
    assert err == ""
    assert len(asked) == 2  # once each, in a process of its own
    assert "engine: serves fake" in out
    assert code == int(any(finding["level"] == "problem" for finding in findings))
    checks = [finding["check"] for finding in findings]
    assert checks[:2] == ["Python", "packages"]
    assert {"device", "torch", "compiler", "memory", "control socket", "state", "configuration"} <= set(checks)
    config.write_text("mode: fast\n")
    code, out, _ = autotune("doctor", *where)
    assert code == 1
    assert "PROBLEM configuration: " in out


def test_a_port_that_the_engine_itself_has_is_no_problem() -> None:
    fake = Fake(taken={8000: "Address already in use"}, files={"/proc/cpuinfo": "flags : avx2 fma\n"})
    asked = run.Asked(None, engine=lambda _: {"version": "1", **ON_CPU}, daemon=lambda _: None)
    found = {finding.check: finding for finding in run.examine(fake.probes(), asked)}
    assert found["engine port"].level is Level.OK
    assert "the engine that serves m" in found["engine port"].found
    assert found["processor"].level is Level.WARNING


def test_doctor_imports_no_torch() -> None:
    program = (
        "import sys\n"
        "from dataclasses import replace\n"
        "from autotune.doctor.probes import real_probes\n"
        "from autotune.doctor.run import Asked, examine\n"
        "from autotune.doctor.torch_facts import TorchFacts\n"  # as another process tells them
        "probes = replace(real_probes(sys.path), torch=lambda: TorchFacts('2'))\n"
        "list(examine(probes, Asked(None, engine_port=0)))\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
