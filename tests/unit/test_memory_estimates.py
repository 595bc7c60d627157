"""Estimates of memory and the advice that follows from them."""

import itertools
import time
from dataclasses import replace

import pytest
from conftest import STRATEGIES

from distributed_training.cli.parse import parse_arguments
from distributed_training.errors import UserError
from distributed_training.hardware import TURING
from distributed_training.loss_chunks import number_of_chunks
from distributed_training.memory.estimate import predict, supporting
from distributed_training.memory.find_architecture import find_architecture
from distributed_training.memory.fit import (
    Limits,
    check_is_planned,
    fitting_split,
    recommend,
    remedies,
    workload_of,
)
from distributed_training.memory.measure import over_ranks
from distributed_training.units import GB, KB, MB
from distributed_training.workload.activations import loss_terms
from distributed_training.workload.workload import Device, Kernels, Workload, adapters

GPT2 = find_architecture("gpt2")
# GPT-2's elements: in matrices, in the rest (DeepSpeed flattens them apart), in the largest matrix.
MATRICES, REST, LARGEST = 124_318_464, 121_344, 38_597_376
# In bf16 page-locked for offload: fp32 masters and gradients (497,273,856 bytes each for the
# matrices, 485,376 for the rest), a 16-bit copy (248,636,928 and 242,688) and the largest gradient
# (77,194,752). CPU Adam allocates the moments.
LOCKED_BY_OFFLOAD = (2 * 2**29 + 2**28) + (2 * 2**19 + 2**18) + 2**27 + 8 * (MATRICES + REST)


def test_options_of_fsdp_are_not_estimated():
    with pytest.raises(UserError):
        strategy = parse_arguments(["--fsdp", "full_shard offload"]).strategy
        check_is_planned(strategy, eval_only=False)


def test_cuda_locks_host_memory_in_powers_of_two():
    on_cpu = 18 * (MATRICES + REST) + 2 * LARGEST
    for device, expected in (("cpu", on_cpu), ("cuda", LOCKED_BY_OFFLOAD)):
        work = Workload(find_architecture("gpt2"), 1, 4, 512, device=Device(device))
        assert predict(work, "offload").host == expected


def test_memory_that_only_a_gpu_needs():
    """cuBLAS's workspaces of two threads; the fp64 copy of the largest gradient under offload."""
    for capability, workspace in (((8, 0), 8 * MB + 128 * KB), ((9, 0), 32 * MB)):
        work = Workload(find_architecture("gpt2"), 4, 4, 512, device=Device("cuda", capability))
        need, on_cpu = predict(work, "dp"), predict(replace(work, device=Device("cpu")), "dp")
        terms = {term.name: term.size for term in need.terms}
        assert terms["cuBLAS workspaces"] == 2 * workspace
        assert "cuBLAS workspaces" not in {term.name for term in on_cpu.terms}
    # A fourth of all elements is less than the embedding; infinity shards each parameter.
    for strategy, elements in (("offload", (MATRICES + REST) // 4), ("infinity", LARGEST // 4)):
        terms = {term.name: term.size for term in predict(work, strategy).terms}
        assert terms["largest gradient in fp64"] == pytest.approx(8 * elements, rel=1e-6)


@pytest.mark.parametrize(
    ("optimizer", "bytes_"), [("adamw", 12), ("adamw_8bit", 12), ("sgd", 4), ("adafactor", 4)]
)
def test_a_rank_copies_its_part_of_the_states_for_a_save(optimizer, bytes_):
    """In fp32, as in the file. Infinity, whose states are on disk, copies none."""
    work = Workload(GPT2, 4, optimizer=optimizer)
    for strategy in supporting(work):
        expected = 0 if strategy == "infinity" else bytes_ * GPT2.total // 4
        assert predict(work, strategy).saving == expected


def test_every_way_that_is_advised_fits():
    advised, model = 0, find_architecture("gpt2-xl")
    for gpu, ranks, batch, strategy in itertools.product((3, 24), (1, 4), (2, 6), STRATEGIES):
        work = Workload(model, ranks, batch, 512)
        limits = Limits(gpu << 30, 16 << 30, None, ranks)
        needs = remedies(work, strategy, limits).values()
        assert all(limits.hold(need) and need.total <= 0.9 * limits.gpu for need in needs)
        advised += len(needs)
    assert advised > 20


def test_ranks_of_fsdp_share_weights_in_4_bits_and_each_has_their_scales():
    model = find_architecture("Llama-2-13B")
    assert model.total == 13_015_864_320  # as published
    work = Workload(model, 2, 1, 512, lora=adapters(model, 16, None, in_4bit=True))
    whole = predict(work, "dp").parameters - 4 * sum(work.trained)
    shard = predict(work, "fsdp").parameters - 2 * sum(work.trained)
    in_4bit = model.layers * sum(model.matrices)
    scales = whole - in_4bit // 2 - 2 * (model.total - in_4bit)
    assert scales == pytest.approx(in_4bit / 2 / 32, rel=0.02)
    assert shard == pytest.approx((whole + scales) / 2, rel=1e-6)
    block = {term.name: term.size for term in predict(work, "fsdp").terms}["a gathered block"]
    assert block == pytest.approx(in_4bit // 2 // model.layers, rel=0.01)
    assert not {"zero3", "infinity"} & {*supporting(work)} and "fsdp" in supporting(work)
    dora = replace(work, lora=replace(work.lora, magnitudes=True))
    assert supporting(dora) == ["dp", "zero1", "zero2", "offload"]


@pytest.mark.parametrize(
    "name, parameters",
    [("Llama-3-8B", 8_030_261_248), ("Qwen2.5-7B", 7_615_616_512)],  # as published
)
def test_adapters_of_a_model_with_7_billion_parameters_fit_24_gb(name, parameters):
    model = find_architecture(name)
    assert model.total == parameters
    work = Workload(model, 1, 1, 512, lora=adapters(model, 16, None))
    need, changed = recommend(work, Limits(24 << 30))
    assert need.strategy == "dp" and changed == work
    assert need.parameters == 2 * model.total + 4 * sum(work.trained)


def test_checkpointing_is_recommended_before_offloading():
    model = find_architecture("Llama-2-7B")
    work = Workload(model, 1, 1, 4096, lora=adapters(model, 16, None))
    need, changed = recommend(work, Limits(24 << 30))
    assert need.strategy == "dp"
    assert changed == replace(work, gradient_checkpointing=True)
    # In 4 bits the weights are a quarter, and a smaller GPU is enough.
    packed = replace(work, lora=replace(work.lora, frozen_in_4bit=True))
    assert recommend(work, Limits(8 << 30))[0].strategy == "infinity"
    assert recommend(packed, Limits(8 << 30))[0].strategy == "dp"


def test_compiled_logits_are_computed_at_once_below_2_31_on_a_gpu():
    work = Workload(find_architecture("gpt2"), 1, 41, 1024, kernels=Kernels(compiled=True))
    assert work.loss_in_graph and not replace(work, device=Device("cpu")).loss_in_graph
    assert not replace(work, batch_size=42).loss_in_graph


@pytest.mark.parametrize("batch_size, measured", [(32, 18_897_529_856), (4, 3_944_737_792)])
def test_compiled_peak_is_that_of_an_h200(batch_size, measured):
    """Measured with tools/benchmarks/gpu_check.sh, see tools/benchmarks/RESULTS.md."""
    work = Workload(find_architecture("gpt2"), 1, batch_size, 1024, kernels=Kernels(compiled=True))
    assert predict(work, "dp").peak == pytest.approx(measured, rel=0.04)


def test_cuda_graphs_leave_less_memory_to_the_update():
    """The gradients stay, and the pool of the graphs keeps the most that a micro-batch needs."""
    for batch_size, accumulation in ((1, 1), (4, 1), (4, 2)):
        options = {"optimizer": "adafactor", "accumulation": accumulation}
        plain = Workload(GPT2, 1, batch_size, 1024, **options)
        eager, need = (predict(work, "dp") for work in (plain, recorded(plain)))
        (workspaces,) = (term.size for term in eager.terms if term.name == "cuBLAS workspaces")
        states = eager.parameters + eager.optimizer + eager.gradients
        temporaries = eager.at("update") - states - workspaces
        assert temporaries > 100 * MB
        phases = [need.at(phase) for phase in ("loss", "backward", "end of backward")]
        # The kernels of a capture have workspaces of their own.
        accumulated = predict(replace(plain, accumulation=2), "dp")
        assert phases[0] == accumulated.at("loss") + workspaces
        assert need.at("update") == need.peak == max(phases) + temporaries
    less = predict(recorded(replace(plain, batch_size=1)), "dp")
    assert need.peak - less.peak > 3 * 1024 * 12 * 32 * 768  # the activations of three sequences


def recorded(work: Workload) -> Workload:
    return replace(work, kernels=replace(work.kernels, recorded=True))


def test_cuda_graphs_are_planned_for_the_runs_that_have_them():
    """dp on one GPU; a run with the flag has no gradient checkpointing."""
    flags = ["--cuda_graph", "--model", "gpt2", "--batch_size", "8"]
    settings, device = parse_arguments(flags).replace(to_choose=()), Device()
    work = workload_of(settings, GPT2, 1, "bf16", 1024, device)
    assert work == recorded(Workload(GPT2, 1, 8, 1024)) and work.has_graphs
    assert supporting(work) == ["dp"]
    for other in (Workload(GPT2, 2), Workload(GPT2, 1, device=Device("cpu"))):
        assert supporting(recorded(other)) == supporting(other)
        assert predict(recorded(other), "dp") == predict(other, "dp")
    small, plain = Limits(6 * GB), replace(work, kernels=Kernels())
    assert "--gradient_checkpointing" in remedies(plain, "dp", small)
    found = remedies(work, "dp", small)
    assert found and "--gradient_checkpointing" not in found
    need, changed = recommend(work, small)
    assert need.strategy == "dp" and changed == replace(work, batch_size=4, accumulation=2)
    one = replace(work, batch_size=1)  # fits with gradient checkpointing only
    less = predict(replace(one, gradient_checkpointing=True), "dp").total
    assert recommend(one, Limits(less)) == (None, one)


def test_blocks_in_bf16_are_not_planned_with_checkpointing():
    """The run would refuse both flags together."""
    plain = Workload(GPT2, 1, 1, 1024)
    work = replace(plain, kernels=Kernels(bf16_blocks=True))
    limits = Limits(predict(replace(plain, gradient_checkpointing=True), "dp").total)
    assert recommend(plain, limits)[1].gradient_checkpointing
    assert not recommend(work, limits)[1].gradient_checkpointing
    assert "--gradient_checkpointing" in remedies(plain, "dp", Limits(6 * GB))
    assert "--gradient_checkpointing" not in remedies(work, "dp", Limits(6 * GB))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_blocks_in_bf16_change_the_plan_of_dp_in_bf16_only(strategy, precision):
    plain = Workload(GPT2, 2, precision=precision)
    work = replace(plain, kernels=Kernels(bf16_blocks=True))
    peaks = [predict(each, strategy).peak for each in (work, plain)]
    assert (peaks[0] < peaks[1]) == ((strategy, precision) == ("dp", "bf16"))


@pytest.mark.parametrize(
    "device, precision, bytes_of_a_logit",
    [
        ("cpu", "fp32", (8, 4)),
        ("cpu", "bf16", (10, 2)),
        ("cuda", "bf16", (10, 6)),
        ("cuda", "fp16", (10, 10)),  # computed by the eager code
    ],
)
def test_a_compiled_chunk_of_the_loss_has_no_logarithms(device, precision, bytes_of_a_logit):
    work = Workload(find_architecture("gpt2"), 1, 4, 1024, precision, device=Device(device))
    rows = -(-4096 // number_of_chunks(4096, 50257, device))
    for compiled, size in zip((False, True), bytes_of_a_logit, strict=True):
        chosen = replace(work, kernels=Kernels(compiled_loss=compiled))
        [chunk] = [term for term in loss_terms(chosen) if "chunk" in term.name]
        assert chunk.size == rows * 50257 * size


def test_states_of_the_optimizers():
    """GPT-2's matrices have these rows and columns; its vectors have 121,344 elements."""
    rows_and_columns = 12 * (4 * 768 + 2 * 768 + 2 * 5 * 768) + (50257 + 768) + (1024 + 768)
    model = find_architecture("gpt2")
    expected = {
        "adamw": 8 * model.total,
        "sgd": 0,
        "adafactor": 4 * (rows_and_columns + 121_344),
        "muon": 8 * model.total - 4 * 12 * 12 * 768**2,  # 12 × 768² elements in a block's matrices
        "adamw_8bit": (2 + 8 / 256) * (model.total - 118_272) + 8 * 118_272,
    }
    for optimizer, size in expected.items():
        work = Workload(model, 1, optimizer=optimizer)
        assert work.optimizer_states(work.trained) == pytest.approx(size, rel=1e-3), optimizer


def test_magnitudes_of_dora_are_planned():
    """One for each output of an adapted layer; a stage that gathers single layers has no DoRA."""
    model = find_architecture("gpt2")
    plain, dora = (adapters(model, 8, "all-linear", dora=kind) for kind in (False, True))
    outputs = 12 * (3 * 768 + 768 + 4 * 768 + 768)
    of_lora, of_dora = Workload(model, 2, lora=plain), Workload(model, 2, lora=dora)
    assert sum(of_dora.trained) - sum(of_lora.trained) == outputs
    assert {*supporting(of_lora)} - {*supporting(of_dora)} == {"infinity"}
    for strategy in supporting(of_dora):
        more, less = predict(of_dora, strategy), predict(of_lora, strategy)
        assert more.peak > less.peak and more.activations > less.activations, strategy
        if strategy == "zero2":  # fp32 weight and two moments of half of the magnitudes
            assert more.optimizer - less.optimizer == pytest.approx(12 * outputs / 2, rel=1e-3)


def test_muon_gathers_matrices():
    """The momentum of every matrix, in fp32; the largest one has temporaries. Under ZeRO-3 one rank
    gathers a matrix, and sends the update back.
    """
    work = Workload(find_architecture("gpt2"), 4)
    adamw, muon = (predict(replace(work, optimizer=name), "fsdp") for name in ("adamw", "muon"))
    assert {*STRATEGIES} - {*supporting(replace(work, optimizer="muon"))} == {"infinity"}
    matrices = 12 * 12 * 768**2
    assert adamw.optimizer - muon.optimizer == pytest.approx(4 * matrices / 4, rel=1e-4)
    assert muon.sent - adamw.sent == 4 * matrices * 3 // 4
    elements, side = 4 * 768**2, 768**2  # of the largest matrix, and of a product
    assert muon.at("update") - muon.optimizer == (
        adamw.at("update") - adamw.optimizer + 10 * elements
    )
    adamw, muon = (predict(replace(work, optimizer=name), "zero3") for name in ("adamw", "muon"))
    assert muon.sent - adamw.sent == 8 * matrices // 4 * 3 // 4  # there and back, by one rank of 4
    older = replace(work, optimizer="muon", device=Device("cuda", TURING))  # bf16 is emulated
    assert older.update_temporaries(0) == 12 * elements + 8 * side


def test_memory_by_category_is_that_of_the_largest_rank():
    def rank(gradients, activations):
        live = {"gradients": gradients, "activations": activations}
        kinds = dict.fromkeys(("nvme_bytes", "nvme_written_bytes_per_step"), 0)
        kinds |= dict.fromkeys(("moments_bytes", "placement"))
        return {**kinds, "phases_bytes": {}, "categories_bytes_by_rank": live}

    memory = over_ranks([rank(34, 9), rank(57, 8)])
    assert memory["categories_bytes"] == {"gradients": 57, "activations": 9}
    memory = over_ranks([rank(34, None), rank(57, None)])  # on a CPU without --profile_memory
    assert memory["categories_bytes"] == {"gradients": 57, "activations": None}


def test_advice_for_any_batch_is_there_at_once():
    """After an out-of-memory error, where a signal can no longer end the process."""
    started = time.monotonic()
    work = Workload(find_architecture("gpt2"), world_size=1, batch_size=10**12, seq_length=512)
    ways = remedies(work, "dp", Limits(16 * GB))
    assert time.monotonic() - started < 2
    assert any(flags.startswith("--batch_size ") for flags in ways)


@pytest.mark.parametrize("batch_size", [1, 12, 97])
def test_the_split_that_fits_is_the_largest(batch_size):
    work = Workload(find_architecture("gpt2"), world_size=2, batch_size=batch_size, seq_length=256)
    for memory in (3, 6, 9, 20, 60):
        limits = Limits(memory * GB)
        sizes = (size for size in range(batch_size, 0, -1) if batch_size % size == 0)
        splits = [replace(work, batch_size=n, accumulation=batch_size // n) for n in sizes]
        wanted = next((split for split in splits if limits.hold(predict(split, "zero2"))), None)
        assert fitting_split(work, "zero2", limits.hold) == wanted


def test_a_rank_needs_the_memory_of_its_share():
    work = Workload(GPT2, 2, 4, 512).with_share(1.5)
    assert work.sequences == 6 and work.with_share(1.4).sequences == 6
    assert replace(work, batch_size=3).with_share(5 / 3).sequences == 5
    assert replace(work, batch_size=1).with_share(0.25).sequences == 1
    six = predict(Workload(GPT2, 2, 6, 512), "dp")
    assert predict(work, "dp").sizes() == six.sizes()


def test_advice_to_a_rank_with_a_share_is_in_the_terms_of_the_flags():
    """--batch_size is the average of the ranks."""
    work = Workload(GPT2, 2, 8, 1024).with_share(1.75)
    limits = Limits(8 * GB)
    assert not limits.fits(work, "dp")
    found = [line for line in remedies(work, "dp", limits) if line.startswith("--batch_size")]
    assert found == ["--batch_size 4 --gradient_accumulation_steps 2"]
    [need] = [remedies(work, "dp", limits)[line] for line in found]
    assert need.sizes() == predict(Workload(GPT2, 2, 7, 1024, accumulation=2), "dp").sizes()
