"""Lines that only a GPU runs, with torch.cuda's functions replaced: which of them are called, when,
and with what.

None of this shows that a GPU does what is asked for; tools/benchmarks/gpu_check.sh does.
"""

import platform
import warnings
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
import transformers
from conftest import skip
from transformers.integrations import sdpa_attention

from distributed_training import hardware
from distributed_training.cli.parse import parse_arguments
from distributed_training.data.batches import StepBatch, copy_ahead
from distributed_training.data.sequences import COMPILED_LENGTHS
from distributed_training.errors import MissingRequirement, UserError
from distributed_training.loss_chunks import IGNORED
from distributed_training.memory.fit import workload_of
from distributed_training.model import loss
from distributed_training.model.attention import set_attention
from distributed_training.model.compiled_loss import CompiledOutputLayer
from distributed_training.model.config import gpt2_config
from distributed_training.model.prepare import configure_transformers
from distributed_training.model.weights import from_config
from distributed_training.ranks import compiler, gpus, tuning, unusable_gpu
from distributed_training.ranks.context import DistContext
from distributed_training.ranks.launch import Launch
from distributed_training.ranks.meeting import Arrival, RankDevice, compare_devices
from distributed_training.ranks.tuning import choose_device, choose_hardware, choose_precision
from distributed_training.records.metrics_file import PHASES
from distributed_training.run import start_log
from distributed_training.run.start_log import say_settings
from distributed_training.run.step_meter import StepMeter
from distributed_training.workload.architectures import read_architecture
from distributed_training.workload.workload import Device, Kernels, Workload

GPU = torch.device("cuda", 0)
ALONE = Launch("python", 0, 0, 1, 1, 0, "127.0.0.1", 29500)


def test_phases_of_a_step_are_timed_by_the_gpu_without_waiting_for_it(monkeypatch):
    clock, waits = SimpleNamespace(milliseconds=0.0), []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = clock.milliseconds

        def synchronize(self):
            waits.append(self.at)

        def elapsed_time(self, end):
            return end.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append("the whole GPU"))
    timer = StepMeter(MagicMock(device=GPU), MagicMock(), MagicMock(), 0, measured_step=9)
    timer.pause()
    for step in range(1, 4):
        for number, phase in enumerate(PHASES, 1):
            clock.milliseconds += 1000 * step * number
            timer.mark(phase)
        timer.end_step()
    assert waits == []
    assert timer.read() == [10, 20, 30]
    assert waits == [60_000]  # milliseconds: the end of the third step
    seconds = [list(step.values()) for step in timer.steps]
    assert seconds == [[n, 2 * n, 3 * n, 4 * n] for n in (1, 2, 3)]


def test_batches_are_locked_and_sent_without_waiting_one_ahead():
    sent = []

    class Batch:
        def pin_memory(self):
            self.locked = True
            return self

        def to(self, device, non_blocking):
            sent.append((device, self.locked, non_blocking))
            return self

    step_batches = [StepBatch([(Batch(), Batch(), None)], tokens) for tokens in range(3)]
    for number, step_batch in enumerate(copy_ahead(iter(step_batches), GPU), 1):
        assert step_batch == step_batches[number - 1]
        assert len(sent) == 2 * min(number + 1, 3)
    assert set(sent) == {(GPU, True, True)}


# For each rank of a node its local rank and the GPUs that it sees, then the GPUs that are used.
VISIBLE = {
    "torchrun": ([(0, "ab"), (1, "ab")], "ab"),
    "more GPUs than ranks": ([(0, "abcd"), (1, "abcd")], "ab"),
    "one of its own for each task of srun": ([(0, "a"), (1, "b")], "ab"),
    "srun --gpus-per-task=1 --gpu-bind=none": ([(0, "ab"), (1, "ab")], "ab"),
    "two of their own": ([(0, "ab"), (1, "cd"), (2, "ef")], "ade"),
    "more ranks than GPUs": ([(0, "ab"), (1, "ab"), (2, "ab")], None),
    "srun binds all tasks to one GPU": ([(0, "a"), (1, "a")], None),
}


@pytest.mark.parametrize("case", VISIBLE)
def test_every_rank_has_its_own_gpu(monkeypatch, case):
    ranks, expected = VISIBLE[case]
    monkeypatch.setenv("SLURM_GPUS_PER_TASK", "1")  # tells nothing about what a rank sees
    monkeypatch.setenv("DS_ACCELERATOR", "")
    monkeypatch.setenv("LOCAL_RANK", "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "ones", MagicMock())
    arrivals, used = [], ""
    for rank, seen in ranks:
        monkeypatch.setattr(torch.cuda, "device_count", lambda seen=seen: len(seen))
        uuid = lambda device, seen=seen: SimpleNamespace(uuid=seen[device.index])  # noqa: E731
        monkeypatch.setattr(torch.cuda, "get_device_properties", uuid)
        size = {"world_size": len(ranks), "local_world_size": len(ranks)}
        launch = Launch("srun", rank, rank, node=0, master_addr="n1", master_port=1, **size)
        device = choose_device(launch)
        used += seen[device.index]
        arrivals.append(Arrival(str(rank), "n1", RankDevice.of(device)))
    with pytest.raises(UserError, match="same GPU") if expected is None else nullcontext():
        compare_devices(arrivals)
    compare_devices([a._replace(host=f"n{rank}") for rank, a in enumerate(arrivals)])
    assert expected in (used, None)


def test_precision_on_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    for capability, chosen in (((7, 5), "fp16"), ((8, 0), "bf16")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, own=capability: own)
        assert choose_precision("auto", GPU) == chosen
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    with pytest.raises(UserError, match="Tesla T4"):
        choose_precision("bf16", GPU)


@pytest.mark.parametrize(
    "flags, chosen, is_slow",
    [
        ("fpu avx2 fma", "fp32", True),
        ("fpu avx2 avx512f avx512_vnni", "fp32", True),
        ("fpu avx512f avx512_bf16", "bf16", False),
        ("fpu amx_bf16 amx_tile", "bf16", False),
        ("", "fp32", False),  # nothing is known, for example on macOS
    ],
)
def test_precision_on_a_cpu(monkeypatch, capsys, flags, chosen, is_slow):
    """auto leaves out a bf16 that is emulated; a notice says that it is slow."""
    for module in (hardware, start_log):
        monkeypatch.setattr(module, "cpu_fact", lambda name: flags)
    monkeypatch.setattr(hardware, "cpu_computes_bf16", hardware.cpu_computes_bf16.__wrapped__)
    cpu, training = torch.device("cpu"), parse_arguments(["--strategy", "dp"]).training
    assert choose_precision("auto", cpu) == chosen
    for precision in ("auto", "bf16", "fp32"):
        ctx = SimpleNamespace(device=cpu, precision=choose_precision(precision, cpu), world_size=1)
        say_settings(training, ctx)
        said = "--precision fp32" in capsys.readouterr().out
        assert said == (is_slow and precision == "bf16")


# --------------------------------------------------------- a GPU that is there and cannot be used


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """machine(NAME, …) has the device files /dev/NAME, and torch cannot use any GPU."""
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(hardware, "DEVICES", tmp_path / "dev")
    monkeypatch.setattr(hardware, "SYSTEM", tmp_path / "sys")
    monkeypatch.setattr(gpus, "WSL_DRIVER", tmp_path / "libcuda.so.1")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    gpus._nvidia_smi_lists_gpus.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)  # asked of the driver

    def build(*names, driver=None, vram=None, smi=None):
        if smi:
            (tmp_path / "bin").mkdir()
            (tmp_path / "bin/nvidia-smi").write_text(f"#!/bin/sh\n{smi}\n")
            (tmp_path / "bin/nvidia-smi").chmod(0o755)
        for name in names:
            path = tmp_path / ("libcuda.so.1" if name == "libcuda" else f"dev/{name}")
            path.parent.mkdir(exist_ok=True)
            path.touch()
        for number, size in enumerate(vram or []):
            card = tmp_path / f"sys/class/drm/card{number}/device"
            card.mkdir(parents=True)
            (card / "mem_info_vram_total").write_text(f"{size}\n")
        monkeypatch.setattr(unusable_gpu, "_cuda_of_driver", lambda: driver)

    return build


@pytest.mark.parametrize(
    ("names", "vram", "vendor"),
    [
        ([], [], None),
        (["nvidiactl", "nvidia-uvm"], [], None),  # a login node with the driver
        (["nvidia0", "nvidia1"], [], "NVIDIA"),
        (["dxg"], [], None),  # Windows' graphics of another vendor
        (["dxg", "libcuda"], [], "NVIDIA"),
        (["kfd"], [512 << 20], None),  # the GPU in a processor
        (["kfd"], [512 << 20, 16 << 30], "AMD"),
        ([], [16 << 30], None),  # a container without the device
    ],
)
def test_a_gpu_is_a_device_that_the_process_may_open(machine, names, vram, vendor):
    machine(*names, vram=vram)
    assert gpus.vendor_to_use() == vendor
    assert gpus.usable_gpus() == 0
    if vendor is None:
        gpus.require_usable()
        assert choose_device(ALONE) == torch.device("cpu")
    else:
        with pytest.raises(MissingRequirement, match=f"{vendor} GPU.*--device cpu"):
            choose_device(ALONE)


@pytest.mark.parametrize(
    ("smi", "vendor"),
    [
        ("echo 'GPU 0: Orin (UUID: GPU-1)'", "NVIDIA"),
        ("echo 'No devices found'", None),
        ("echo 'NVIDIA-SMI has failed'; exit 9", None),
    ],
)
def test_nvidia_smi_counts_if_it_lists_a_gpu(machine, smi, vendor):
    machine(smi=smi)
    assert gpus.vendor_to_use() == vendor


def test_a_gpu_of_another_job_does_not_count(machine, monkeypatch):
    """Slurm's control group denies access whatever the mode; a mode that denies it is a fault."""
    machine("nvidia0")
    monkeypatch.setattr(gpus.os, "access", lambda *_: False)
    (hardware.DEVICES / "nvidia0").chmod(0o666)
    assert gpus.vendor_to_use() is None
    (hardware.DEVICES / "nvidia0").chmod(0o660)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(MissingRequirement, match=r"may not open .*nvidia0"):
        gpus.require_usable()


@pytest.mark.parametrize(
    ("value", "hidden"),
    [
        *[(value, True) for value in ("", "-1", " ", "NoDevFiles", "-1,0")],
        *[(value, False) for value in ("0", "1,2", "7", "GPU-8932f937", "MIG-GPU-1", "0,-1")],
    ],
)
def test_gpus_are_hidden_as_cuda_hides_them(machine, monkeypatch, value, hidden):
    machine("nvidia0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert (gpus.vendor_to_use() is None) == hidden


def test_device_cpu_hides_the_gpus(machine, monkeypatch):
    machine("nvidia0", "kfd", vram=[16 << 30])
    monkeypatch.setattr(gpus.os, "environ", {})
    choose_hardware("auto")
    assert gpus.vendor_to_use() == "NVIDIA"
    choose_hardware("cpu")
    assert gpus.vendor_to_use() is None and choose_device(ALONE).type == "cpu"


TOO_OLD = "The NVIDIA driver on your system is too old (found version 12020). Please update your"


@pytest.mark.parametrize(
    ("names", "built_for", "driver", "torch_says", "says"),
    [
        (["nvidia0"], (None, None), (12, 2), "", "without CUDA: .*pip install .*/cu126;"),
        (["nvidia0"], (None, None), (13, 1), "", "without CUDA: .*pip install .*/cu130;"),
        (["nvidia0"], (None, None), (11, 4), "", "without CUDA: update the driver.*CUDA 11.4 only"),
        (["nvidia0"], (None, None), None, "", "without CUDA: install a build for CUDA"),
        (["nvidia0"], (None, "6.4"), (13, 0), "", "without CUDA: .*/cu130;"),
        (
            *(["nvidia0"], ("13.0", None), (12, 2), TOO_OLD),
            r"too old \(found version 12020\)\); the driver supports CUDA 12.2: update .*/cu126;",
        ),
        (
            *(["nvidia0"], ("13.0", None), None, "Found no NVIDIA driver on your system. Please x"),
            "--gpus all",
        ),
        (["nvidia0"], ("13.0", None), (13, 0), "Error 802: not yet initialized", "Error 802.*smi"),
        (["kfd"], ("13.0", None), None, "", "AMD GPU, but .* without ROCm: install a build for"),
        (["kfd"], (None, "6.4"), None, "No HIP GPUs are available", "No HIP GPUs.*rocm-smi"),
    ],
)
def test_the_reason_and_the_remedy(
    machine, monkeypatch, names, built_for, driver, torch_says, says
):
    def fail():
        raise RuntimeError(torch_says)

    machine(*names, driver=driver, vram=[16 << 30])
    monkeypatch.setattr(torch.version, "cuda", built_for[0])
    monkeypatch.setattr(torch.version, "hip", built_for[1])
    monkeypatch.setattr(torch.cuda, "init", fail)
    with pytest.raises(MissingRequirement, match=says) as error:
        gpus.require_usable()
    assert "\n" not in str(error.value) and "Please" not in str(error.value)


def test_a_list_that_names_no_gpu_of_the_machine_is_an_error(machine, monkeypatch):
    def fail():
        raise RuntimeError("No CUDA GPUs are available")

    machine("nvidia0", driver=(13, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", fail)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(MissingRequirement, match="CUDA_VISIBLE_DEVICES=7: choose GPUs that"):
        gpus.require_usable()


@pytest.mark.parametrize(
    ("assigned", "device", "noticed"),
    [("2", "auto", True), ("0", "auto", False), (None, "auto", False), ("2", "cpu", False)],
)
def test_gpus_that_slurm_assigned_and_nobody_sees(monkeypatch, capsys, assigned, device, noticed):
    monkeypatch.delenv("SLURM_GPUS_ON_NODE", raising=False)
    if assigned:
        monkeypatch.setenv("SLURM_GPUS_ON_NODE", assigned)
    flags = ["--device", device, "--epochs", "10", "--batch_size", "32", "--lr", "0.001"]
    ctx = SimpleNamespace(device=torch.device("cpu"), precision="fp32", world_size=1)
    say_settings(parse_arguments(flags).training, ctx)
    lines = capsys.readouterr().out.splitlines()
    assert ("Slurm" in lines[0]) == noticed
    assert lines[-2].startswith("Device: cpu")
    assert lines[-1] == "Epochs: 10, Batch size: 32, LR: 0.001"


# ----------------------------------------------------------------- what the user's environment sets


@pytest.mark.parametrize(
    ("launcher", "own", "of_the_parent", "threads"),
    [
        ("python", {"OMP_NUM_THREADS": "1"}, {}, "1"),  # the shell has exported it for the command
        ("python", {}, {}, "4"),
        ("srun", {"OMP_NUM_THREADS": "1", "SLURM_CPUS_PER_TASK": "6"}, {}, "1"),
        ("srun", {"SLURM_CPUS_PER_TASK": "6"}, {}, "6"),
        ("torchrun", {"OMP_NUM_THREADS": "1"}, {}, "4"),  # torchrun has set it
        ("torchrun", {"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "1"}, "1"),
        ("torchrun", {"OMP_NUM_THREADS": "3"}, {}, "3"),
        ("deepspeed", {"OMP_NUM_THREADS": "1"}, {}, "1"),
        ("python", {"OMP_NUM_THREADS": "1", "ACCELERATE_MIXED_PRECISION": "no"}, {}, "4"),
    ],
)
def test_threads_that_the_user_has_chosen_are_kept(
    monkeypatch, tmp_path, launcher, own, of_the_parent, threads
):
    entries = [f"{name}={value}" for name, value in {"PATH": "/bin", **of_the_parent}.items()]
    (tmp_path / "environ").write_bytes("\0".join(entries).encode())
    monkeypatch.setattr(tuning, "_environment_of_parent", lambda: tmp_path / "environ")
    monkeypatch.setattr(tuning, "available_cores", lambda: 8)
    monkeypatch.setattr(tuning, "return_freed_memory", lambda: None)
    monkeypatch.setattr(tuning.os, "environ", {"PATH": "/bin", **own})
    tuning.tune_process(Launch(launcher, 0, 0, 2, 2, 0, "a", 29500), *[False] * 4)
    assert tuning.os.environ["OMP_NUM_THREADS"] == threads


@pytest.mark.parametrize(
    ("release", "files", "own", "expected"),
    [
        ("6.8.0-45-generic", [], {}, "expandable_segments:True"),
        ("6.8.0-1010-nvidia-64k", [], {}, "expandable_segments:True"),  # Grace: ARM, no Jetson
        ("5.15.153.1-microsoft-standard-WSL2", ["dev/dxg"], {}, None),
        ("6.6.0-of-the-user", ["dev/dxg"], {}, None),  # WSL with another kernel
        ("5.15.136-tegra", ["etc/nv_tegra_release"], {}, None),
        ("5.15.136-of-the-user", ["etc/nv_tegra_release"], {}, None),
        ("5.15.136-tegra", [], {}, None),  # a container on a Jetson
        ("6.8.0-45-generic", [], {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, "backend:native"),
    ],
)
def test_segments_grow_where_the_driver_maps_memory(
    monkeypatch, tmp_path, release, files, own, expected
):
    for name in ("dev", "etc"):
        (tmp_path / name).mkdir()
    for name in files:
        (tmp_path / name).touch()
    monkeypatch.setattr(hardware, "DEVICES", tmp_path / "dev")
    monkeypatch.setattr(gpus, "JETSON", tmp_path / "etc/nv_tegra_release", raising=False)
    monkeypatch.setattr(platform, "release", lambda: release)
    monkeypatch.setattr(gpus, "vendor_to_use", lambda: "NVIDIA")
    monkeypatch.setattr(tuning.os, "environ", {"PATH": "/bin", **own})
    tuning.tune_process(ALONE, *[False] * 4)
    assert tuning.os.environ.get("PYTORCH_CUDA_ALLOC_CONF") == expected


def test_settings_of_glibc_that_the_user_has_chosen_are_kept(monkeypatch):
    calls = []
    library = SimpleNamespace(mallopt=lambda number, value: calls.append(number))
    monkeypatch.setattr(tuning.ctypes, "CDLL", lambda _: library)
    own = {"MALLOC_TRIM_THRESHOLD_": "0", "GLIBC_TUNABLES": "glibc.malloc.top_pad=4096"}
    monkeypatch.setattr(tuning.os, "environ", own)
    tuning.keep_freed_memory(large=False)
    assert calls == [-3]  # M_MMAP_THRESHOLD


QWEN = {"model_type": "qwen2", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
QWEN |= {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 64}


def heads_of_saved_keys(masked: bool) -> int:
    """Run transformers' attention on 8 heads of queries and 2 of keys and values of width 4."""
    query, key, value = (torch.ones(1, heads, 4, 4, requires_grad=True) for heads in (8, 2, 2))
    mask, saved = torch.ones(1, 1, 4, 4, dtype=torch.bool) if masked else None, []
    attention = SimpleNamespace(num_key_value_groups=4, is_causal=True, training=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        sdpa_attention.sdpa_attention_forward(attention, query, key, value, mask)
    # Query, key, value and output; a mask has one head for all.
    heads = sorted(tensor.shape[1] for tensor in saved if tensor.ndim == 4)
    return heads[-4]


@pytest.mark.parametrize(
    "device, precision, capability, masked",
    [
        ("cpu", "fp32", None, False),
        ("cpu", "fp32", None, True),
        ("cuda", "fp32", (9, 0), False),
        ("cuda", "bf16", (9, 0), False),
        ("cuda", "fp16", (8, 0), False),
        ("cuda", "fp16", (7, 5), False),
    ],
)
def test_keys_and_values_are_repeated_where_no_kernel_groups_them(
    monkeypatch, device, precision, capability, masked
):
    """The memory-efficient kernel has no grouped queries, and the math kernel stores all scores."""
    if not hasattr(sdpa_attention, "use_gqa_in_sdpa"):
        skip(f"transformers {transformers.__version__} always repeats keys and values")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(sdpa_attention, "use_gqa_in_sdpa", lambda mask, *_: mask is None)
    ctx = DistContext(MagicMock(), torch.device(device), "gloo", MagicMock(), precision=precision)
    configure_transformers(False, ctx)
    model = read_architecture(QWEN, "qwen")
    kernels, where = Kernels(attention_mask=masked), Device(device, ctx.capability)
    work = Workload(model, 1, precision=precision, device=where, kernels=kernels)
    assert heads_of_saved_keys(masked) * model.attention.head_dim == work.stored_keys


def test_filters_of_warnings_that_the_user_has_chosen_are_kept(monkeypatch):
    monkeypatch.setattr(tuning.os, "environ", {"OMP_NUM_THREADS": "1", "PATH": "/bin"})
    monkeypatch.setattr(tuning, "return_freed_memory", lambda: None)
    for options, first in ((["error"], "error"), ([], "ignore")):
        monkeypatch.setattr(tuning.sys, "warnoptions", options)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tuning.tune_process(ALONE, *[False] * 4)
            assert warnings.filters[0][0] == first


@pytest.mark.parametrize(
    "device, compilers, variables, installed, said",
    [
        ("cuda", ["clang"], {}, {"triton", "Python.h"}, None),
        ("cuda", ["g++"], {}, {"triton", "Python.h"}, "no C compiler"),
        ("cuda", ["gcc"], {"CC": "icx"}, {"triton", "Python.h"}, "icx"),
        ("cuda", ["gcc"], {}, {"triton"}, "Python.h"),
        ("cuda", ["gcc"], {}, {"Python.h"}, "pip install triton"),
        ("cpu", ["icpx"], {"CXX": "icpx"}, {"Python.h"}, None),
        ("cpu", ["gcc"], {}, {"Python.h"}, r"no C\+\+ compiler"),
    ],
)
def test_what_torch_compile_needs_is_checked_first(
    monkeypatch, tmp_path, device, compilers, variables, installed, said
):
    for name in compilers:
        (tmp_path / name).touch(0o755)
    if "Python.h" in installed:
        (tmp_path / "Python.h").touch()
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"PATH": str(tmp_path), **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(compiler.sysconfig, "get_path", lambda *_: str(tmp_path))
    find = lambda name: name if name in installed else None  # noqa: E731
    monkeypatch.setattr(compiler.importlib.util, "find_spec", find)
    match = rf"--compile_loss: .*{said}"
    with pytest.raises(UserError, match=match) if said else nullcontext():
        compiler.check_compile(device, "--compile_loss")


def test_each_length_and_number_of_rows_has_its_own_graph():
    """Graphs for any length are slower; 12 blocks that differ exceed torch's limit of 8."""
    from torch._dynamo import config, reset
    from torch._inductor import config as inductor

    class Layer(torch.nn.Module):
        def forward(self, hidden):
            return 2 * hidden

    def compile_graph(graph, inputs):
        graphs.append(all(isinstance(t, torch.Tensor) for t in inputs))  # no symbols of lengths
        return graph

    def unchanged(module, *names):
        return module.patch({name: getattr(module, name) for name in names})  # restored at its end

    limits = ("cache_size_limit", "accumulated_cache_size_limit")
    of_dynamo = unchanged(config, "optimize_ddp", "automatic_dynamic_shapes", *limits)
    with of_dynamo, unchanged(inductor, "fallback_random", "disable_padding_cpu"):
        compiler.configure_compiler(torch.device("cpu"), gathers_single_layers=False)
        graphs, layer = [], Layer()
        layer.compile(backend=compile_graph)
        for rows, length in [(4, 64), (4, 128), (2, 128), (4, 192), (4, 256)] * 2:
            for with_gradients in (True, False):
                with torch.set_grad_enabled(with_gradients):
                    layer(torch.zeros(rows, length, 8))
        assert all(getattr(config, name) >= 48 * 2 * COMPILED_LENGTHS for name in limits)
    reset()
    assert graphs == [True] * 10


def test_rows_of_logits_are_aligned_in_each_precision_of_a_gpu():
    """cuBLAS uses the matrix units at full speed if rows begin at multiples of 16 bytes."""
    for size in (2, 4):
        columns = 50_257 + -50_257 % loss.ALIGNMENT["cuda", size]
        assert columns * size % 16 == 0


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "dtype, autocast, rows",
    [
        (torch.bfloat16, False, 104),
        (torch.float32, True, 104),
        (torch.float32, False, 101),  # a padded weight would be a copy
    ],
)
def test_a_compiled_head_has_aligned_rows_and_the_same_loss(
    monkeypatch, dtype, autocast, rows, bias
):
    monkeypatch.setattr(loss, "ALIGNMENT", {("cpu", 2): 8, ("cpu", 4): 8})
    torch.manual_seed(0)
    head = torch.nn.Linear(16, 101, bias=bias, dtype=dtype)
    hidden, targets = torch.randn(2, 6, 16, dtype=dtype), torch.randint(0, 101, (2, 6))
    targets[0, :3] = IGNORED
    products, product = [], torch.nn.functional.linear
    monkeypatch.setattr(
        loss.F, "linear", lambda h, w, b=None: products.append(len(w)) or product(h, w, b)
    )

    def loss_and_gradient() -> tuple[float, torch.Tensor]:
        head.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            value = head(hidden, targets, torch.tensor(9))
        value.backward()
        return value.item(), head.weight.grad.double()

    head.__class__ = loss.OutputLayer
    chunked, chunked_gradient = loss_and_gradient()
    products.clear()
    head.__class__ = CompiledOutputLayer
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    compiled, gradient = loss_and_gradient()
    assert products == [rows]
    assert compiled == pytest.approx(chunked, rel=1e-2)
    assert (gradient - chunked_gradient).norm() < 2e-2 * chunked_gradient.norm()


def test_a_padded_head_compiles_into_one_graph(monkeypatch):
    """The question whether autocast is enabled breaks no graph."""
    monkeypatch.setattr(loss, "ALIGNMENT", {("cpu", 2): 8})
    head, graphs = torch.nn.Linear(16, 101), []
    head.__class__ = CompiledOutputLayer
    torch._dynamo.reset()  # another test may have compiled a head of other sizes
    head.compile(backend=lambda graph, _: graphs.append(graph) or graph, fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        head(torch.randn(2, 6, 16), torch.randint(0, 101, (2, 6)), torch.tensor(9))
    torch._dynamo.reset()
    assert len(graphs) == 1 and "pad" in graphs[0].code


AMPERE = SimpleNamespace(capability=(8, 0), precision="bf16")


@pytest.mark.parametrize(
    "name, isolates, ctx, says",
    [
        ("eager", False, AMPERE, None),
        ("sdpa", True, AMPERE, None),
        ("flash_attention_2", False, AMPERE, "FlashAttention2"),  # it is not installed
        ("flex_attention", False, AMPERE, "flex_attention cannot be used"),  # GPT-2 lacks it
        ("eager", True, AMPERE, "need sdpa"),
        ("flash_attention_2", True, AMPERE, "need sdpa"),  # it would ignore the documents
        (
            "flash_attention_2",
            False,
            SimpleNamespace(capability=(7, 5), precision="fp16"),
            "Ampere",
        ),
        ("flash_attention_3", False, SimpleNamespace(capability=(9, 0), precision="fp32"), "bf16"),
        ("flash_attention_2", False, SimpleNamespace(capability=(0, 0), precision="bf16"), "GPU"),
    ],
)
def test_the_attention_function_is_passed_on_or_refused(name, isolates, ctx, says):
    config = gpt2_config("tiny-gpt2", 0.0, 0)
    with pytest.raises(UserError, match=says) if says else nullcontext() as error:
        set_attention(config, name, isolates, ctx)
    assert error is None or "\n" not in str(error.value)
    if says is None:
        with torch.device("meta"):
            block = from_config(config).transformer.h[0]
        assert block.attn.config._attn_implementation == name


def test_scores_that_eager_attention_stores_are_not_planned():
    settings = parse_arguments(["--strategy", "dp", "--attn_implementation", "eager"])
    model = read_architecture(QWEN, "qwen")
    with pytest.raises(UserError, match="--attn_implementation eager"):
        workload_of(settings, model, 1, "fp32", 64, Device())


@pytest.mark.parametrize(
    "device, dtype, hip, overloads, in_fp32",
    [
        ("cuda", torch.bfloat16, None, ["default", "dtype"], True),
        ("cuda", torch.float16, None, ["default", "dtype"], True),
        ("cuda", torch.bfloat16, "6.4", ["default", "dtype"], False),  # ROCm raises an error
        ("cuda", torch.bfloat16, None, ["default"], False),  # before torch 2.8
        ("cuda", torch.float32, None, ["default", "dtype"], False),
        ("cpu", torch.bfloat16, None, ["default", "dtype"], False),
    ],
)
def test_logits_are_multiplied_to_fp32_where_the_product_exists(
    monkeypatch, device, dtype, hip, overloads, in_fp32
):
    monkeypatch.setattr(torch.version, "hip", hip)
    product = SimpleNamespace(overloads=lambda: overloads)
    monkeypatch.setattr(torch.ops, "aten", SimpleNamespace(mm=product))
    chosen, plain = MagicMock(name="mm"), MagicMock(name="linear")
    monkeypatch.setattr(torch, "mm", chosen)
    monkeypatch.setattr(loss.F, "linear", plain)
    hidden = SimpleNamespace(device=SimpleNamespace(type=device), dtype=dtype)
    loss._logits(hidden, MagicMock(__len__=lambda _: 128), None, 128)
    assert (chosen.called, plain.called) == (in_fp32, not in_fp32)
    if in_fp32:
        assert chosen.call_args.kwargs == {"out_dtype": torch.float32}
