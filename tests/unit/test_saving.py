"""Checkpoints that a thread writes while training continues, in this process."""

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from one_rank import one_rank

from distributed_training.checkpoints import save_thread, saver
from distributed_training.checkpoints.contents import WholeParts
from distributed_training.checkpoints.folder import CheckpointFolder
from distributed_training.checkpoints.host_copy import HostCopy, elements_of_files, page_locked
from distributed_training.checkpoints.loading import read_shards
from distributed_training.checkpoints.save_thread import Place, SaveThread, Taken, Times
from distributed_training.checkpoints.saver import Saver
from distributed_training.checkpoints.saving import PieceFile, PieceWriter
from distributed_training.checkpoints.verify import find_damage
from distributed_training.errors import FirstError, TrainingError
from distributed_training.ranks import failures
from distributed_training.strategies.table import STRATEGIES

CPU = torch.device("cpu")
WHOLE = WholeParts({"model/config.json": b"{}"}, {})


@pytest.fixture
def ctx():
    with one_rank() as context:
        yield context


@pytest.fixture
def model() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(50, 40)


@pytest.fixture
def save(ctx, model, tmp_path):
    """A Saver of the model, which `update` trains; its checkpoints are in the folder `tmp_path`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def update() -> None:
        model(torch.randn(4, 50)).square().sum().backward()
        optimizer.step()

    update()
    contents = SimpleNamespace(
        shards=STRATEGIES["dp"].states_of(model, optimizer, CPU),
        kind="text",
        describe=lambda folder: WHOLE.description,
        whole_parts=lambda description: WHOLE,
    )
    of_run = Saver(CheckpointFolder(tmp_path, 2, True), contents, ctx)

    def start(step: int, background: bool = True, **counters) -> None:
        of_run.save(step, {"counters": {"step": step, **counters}}, background, announced=True)

    return SimpleNamespace(saver=of_run, start=start, update=update, contents=contents)


@pytest.fixture
def disk(monkeypatch):
    """Files are written only while `open` is set; `written` has their folders."""
    gate, written, write = threading.Event(), [], PieceFile.write

    def wait_and_write(file, folder, *args):
        assert gate.wait(20)
        written.append(folder.name)
        return write(file, folder, *args)

    monkeypatch.setattr(PieceFile, "write", wait_and_write)
    yield SimpleNamespace(open=gate, written=written)
    gate.set()  # no thread stays


def manifest_of(folder: Path) -> dict:
    return json.loads((folder / "manifest.json").read_text())


def weights_in(folder: Path, contents) -> list[torch.Tensor]:
    """Read a checkpoint into the model, and return its weights."""
    read_shards(folder, {**manifest_of(folder), "adam_step": 1}, contents.shards)
    return [shard.key.detach().clone() for shard in contents.shards.shards]


def test_the_updates_of_later_steps_are_not_in_the_file(save, disk, model, tmp_path):
    """The thread writes after the update; nor are later counters."""
    before = [parameter.detach().clone() for parameter in model.parameters()]
    skipped: list[int] = []
    save.start(1, skipped_steps=skipped)
    save.update()
    skipped.append(2)
    assert not torch.equal(model.weight, before[0]) and not list(tmp_path.glob("step*"))
    disk.open.set()
    save.saver.wait()
    found = tmp_path / "step-00000001"
    assert manifest_of(found)["counters"]["skipped_steps"] == []
    assert find_damage(found, manifest_of(found)) == ""
    assert all(map(torch.equal, weights_in(found, save.contents), before))


def test_the_copy_is_kept_and_filled_again(save, tmp_path):
    save.start(1)
    kept = save.saver._copy
    save.saver.wait()
    save.update()
    now = [shard.key.detach().clone() for shard in save.contents.shards.shards]
    save.start(2)
    save.saver.wait()
    assert save.saver._copy is kept
    assert all(map(torch.equal, weights_in(tmp_path / "step-00000002", save.contents), now))


def test_one_save_at_a_time_and_the_next_one_says_how_long_it_waited(save, disk, tmp_path, capsys):
    save.start(1)
    threading.Timer(0.3, disk.open.set).start()
    started = time.monotonic()
    save.start(2)
    waited = time.monotonic() - started
    assert waited > 0.25 and (tmp_path / "step-00000001").is_dir()
    save.saver.wait()
    assert disk.written == [".partial-step-00000001", ".partial-step-00000002"]
    first, second = capsys.readouterr().out.splitlines()
    assert "save before" not in first and "s of it for the save before; written in" in second
    found = save.saver
    assert found.count == 2 and found.wait_seconds > 0.25 and found.write_seconds > 0.25


def test_only_so_many_checkpoints_are_kept(save, tmp_path):
    """With the best one, whose mark is written after its checkpoint, also by the thread."""
    save.start(1)
    save.saver.when_complete(lambda: save.saver.folder.replace_best(1, keeps_old=True))
    for step in (2, 3, 4):
        save.start(step)
    save.saver.wait()
    kept = ["best", "latest", *(f"step-0000000{step}" for step in (1, 3, 4))]
    assert sorted(path.name for path in tmp_path.iterdir()) == kept
    assert (tmp_path / "best").read_text() == "step-00000001\n"


def test_what_waits_for_a_checkpoint_is_done_after_it(save, disk, tmp_path):
    found = []
    save.start(1)
    save.saver.when_complete(lambda: found.append((tmp_path / "step-00000001").is_dir()))
    assert found == []
    disk.open.set()
    save.saver.wait()
    save.saver.when_complete(lambda: found.append("now"))
    assert found == [True, "now"]


def fill_disk(monkeypatch) -> None:
    def no_room(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(PieceFile, "write", no_room)


@pytest.mark.parametrize("noticed", ["in the next step", "by the next save", "at the end"])
def test_a_full_disk_loses_no_checkpoint(save, monkeypatch, tmp_path, noticed):
    save.start(1)
    save.saver.wait()
    fill_disk(monkeypatch)
    save.start(2)  # training continues
    save.saver._thread.wait()
    notice = {"in the next step": save.saver.check, "at the end": save.saver.wait}
    with pytest.raises(TrainingError, match=r"step-00000002 could not be written: No space"):
        notice.get(noticed, lambda: save.start(3))()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001"]


def test_the_best_checkpoint_stays_if_a_better_one_cannot_be_written(save, monkeypatch, tmp_path):
    """The write may fail before the mark is requested."""
    save.start(1)
    save.saver.when_complete(lambda: save.saver.folder.replace_best(1, keeps_old=False))
    save.saver.wait()
    fill_disk(monkeypatch)
    save.start(2)
    save.saver._thread.wait()
    save.saver.when_complete(lambda: save.saver.folder.replace_best(2, keeps_old=False))
    assert (tmp_path / "step-00000001").is_dir()
    assert (tmp_path / "best").read_text() == "step-00000001\n"


def test_a_folder_that_cannot_be_created_is_an_error(save, tmp_path):
    save.saver.folder = save.saver.folder._replace(path=tmp_path / "file" / "checkpoints")
    (tmp_path / "file").touch()
    save.start(1)
    with pytest.raises(TrainingError, match=r"step-00000001 could not be written: .*file"):
        save.saver.wait()


def test_without_memory_for_the_copy_training_waits_and_says_so(
    save, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(saver, "room_for_copies", lambda size, ctx: (False, 3 << 30))
    for step in (1, 2):
        save.start(step)
        save.saver.wait()
    out = capsys.readouterr().out
    assert out.count("Training waits until each checkpoint is written") == 1
    assert "3.0 GB free" in out and "written in" not in out
    assert save.saver._copy is None and (tmp_path / "step-00000002").is_dir()
    assert find_damage(tmp_path / "step-00000002", manifest_of(tmp_path / "step-00000002")) == ""


def test_a_save_that_the_run_waits_for_allocates_no_copy(save, tmp_path):
    """After a signal memory may be short; a copy that there is already is used."""
    save.start(1, background=False)
    assert save.saver._copy is None
    save.start(2)
    kept = save.saver._copy
    save.start(3, background=False)
    save.saver.wait()
    assert kept and save.saver._copy is kept and (tmp_path / "step-00000003").is_dir()


def test_states_on_disk_are_written_while_training_waits(save, tmp_path, monkeypatch):
    monkeypatch.setattr(type(save.contents.shards), "on_disk", True)
    save.start(1)
    assert save.saver._copy is None
    save.saver.wait()


@pytest.mark.parametrize("elements", [1, 7, 10_000])
def test_memory_of_the_copy_is_what_the_files_need(ctx, save, monkeypatch, tmp_path, elements):
    monkeypatch.setattr("distributed_training.checkpoints.saving.PIECE_FILE_BYTES", 12 * elements)
    planned = elements_of_files(save.contents.shards, ctx)
    writer = HostCopy(planned, CPU).fill(tmp_path, save.contents.shards, ctx)
    assert planned == [file.used for file in writer.unwritten]
    assert sum(planned) == 3 * (50 * 40 + 40)


# -------------------------------------------------------------------------------- several ranks


def thread_of(
    rank: int, store, folder: Path, error: Exception | None = None, pieces: list | None = None
) -> SaveThread:
    """The thread of one of two ranks, whose file has one weight; it reports `pieces` if given."""
    ctx = SimpleNamespace(store=store, rank=rank, is_main=rank == 0, real_world_size=2)
    place = Place(CheckpointFolder(folder, None, True), 1, 0)
    if rank == 0:
        place.unfinished.mkdir()
        store.set(place.folder_key, "")
    memory = torch.empty(9)
    writer = PieceWriter(place.unfinished, rank, lambda number: memory)
    writer.add(f"weight of {rank}", 0, {"weight": torch.ones(3)})
    writer.flush()
    writer.pieces = pieces or writer.pieces
    taken = Taken(writer, lambda: None, FirstError(error), {}, None if rank else WHOLE)
    return SaveThread(place, taken, Times(time.monotonic(), 0.0, 0.0, True), False, ctx)


def test_rank_0_completes_the_checkpoint_when_all_have_written(tmp_path):
    store = dist.HashStore()
    first = thread_of(0, store, tmp_path)
    first._ended.wait(0.2)
    assert not first.has_ended and not (tmp_path / "step-00000001").exists()
    second = thread_of(1, store, tmp_path)
    first.wait()
    second.wait()
    manifest = manifest_of(tmp_path / "step-00000001")
    assert first.failed == "" and find_damage(tmp_path / "step-00000001", manifest) == ""
    assert {"rank-00000-000.safetensors", "rank-00001-000.safetensors"} < {*manifest["files"]}
    assert store.num_keys() == 0  # it does not grow


def test_the_report_of_a_rank_with_many_pieces_fits_in_the_store(tmp_path):
    """TCPStore takes at most 8 MiB. A mixture of 90 layers with 256 experts each has more."""
    store = dist.TCPStore("127.0.0.1", 0, 1, True)
    pieces = [
        {"name": f"model.layers.{n // 768}.mlp.experts.{n % 768 // 3}.{n % 3}.weight", "start": 0}
        | {"numel": 14_680_064, "file": "rank-00001-000.safetensors"}
        for n in range(90 * 768)
    ]
    assert len(json.dumps(pieces)) > 8 << 20
    threads = [thread_of(0, store, tmp_path), thread_of(1, store, tmp_path, pieces=pieces)]
    for thread in threads:
        thread.wait()
    assert [thread.failed for thread in threads] == ["", ""]
    assert manifest_of(tmp_path / "step-00000001")["pieces"][1:] == pieces


def test_the_error_of_another_rank_names_it_and_nothing_unfinished_stays(tmp_path):
    store = dist.HashStore()
    threads = [
        thread_of(rank, store, tmp_path, OSError(28, "No space left") if rank else None)
        for rank in (0, 1)
    ]
    threads[0].wait()
    assert "No space left" in threads[0].failed and "[rank 1]" in threads[0].failed
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_ends_does_not_wait_for_a_rank_that_was_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(save_thread, "RANKS_SECONDS", 0.1)
    store = dist.HashStore()
    first = thread_of(0, store, tmp_path)
    started = time.monotonic()
    first.let_write()
    assert not first.has_ended and time.monotonic() - started < 5
    thread_of(1, store, tmp_path)  # for the thread of rank 0 to end
    first.wait()


def test_a_process_that_ends_waits_for_a_rank_that_writes(tmp_path, monkeypatch):
    """Rank 1 needs six times as long as rank 0 waits for a rank without progress."""
    monkeypatch.setattr(save_thread, "RANKS_SECONDS", 0.2)
    monkeypatch.setattr(save_thread, "TELL_SECONDS", 0)
    write = PieceWriter.write

    def write_slowly(writer: PieceWriter, progress) -> None:
        for _ in range(writer.rank * 24):
            time.sleep(0.05)
            progress()
        time.sleep(writer.rank * 0.6)  # as if it flushed the file
        write(writer, progress)

    monkeypatch.setattr(PieceWriter, "write", write_slowly)
    store = dist.HashStore()
    first, _ = thread_of(0, store, tmp_path), thread_of(1, store, tmp_path)
    first.let_write()
    assert first.has_ended and first.failed == "" and (tmp_path / "step-00000001").is_dir()
    assert store.num_keys() == 0


def exit_codes(monitor, monkeypatch) -> list[int]:
    """Let a monitor note the exit code instead of ending this process, now or later."""
    codes = list[int]()
    monkeypatch.setattr(failures, "exit_now", codes.append)
    monkeypatch.setattr(monitor.stop, "ignore", lambda: None)
    monkeypatch.setattr(monitor, "_exit_at_latest", lambda *_: None)
    return codes


def test_a_process_that_fails_lets_its_thread_write(save, disk, monkeypatch, tmp_path):
    """A checkpoint that was announced by nothing but the next step must not be lost."""
    codes = exit_codes(save.saver.ctx.monitor, monkeypatch)
    save.start(1)
    threading.Timer(0.2, disk.open.set).start()
    save.saver.ctx.monitor.end_failed(TrainingError("The loss is not finite."))
    assert codes == [1] and (tmp_path / "step-00000001").is_dir()


def test_a_second_ctrl_c_does_not_wait_for_the_thread(save, disk, monkeypatch, tmp_path):
    codes = exit_codes(save.saver.ctx.monitor, monkeypatch)
    save.start(1)
    save.saver.ctx.monitor.end_failed(KeyboardInterrupt())
    assert codes == [1] and not (tmp_path / "step-00000001").exists()


def test_the_copies_of_a_gpu_run_beside_its_kernels(monkeypatch):
    """Page-locked memory, a stream that waits for the update, and kernels that wait for it."""
    calls = []

    class Stream:
        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            calls.append(f"{self.name} waits for {other.name}")

    event = SimpleNamespace(
        record=lambda: calls.append("record"), synchronize=lambda: calls.append("synchronize")
    )
    memory = torch.empty

    def empty(*size, pin_memory=False, **options):
        calls.extend(["pinned"] * pin_memory)
        return memory(*size, **options)

    current, side = Stream("current"), Stream("side")
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: replace_context(calls))
    monkeypatch.setattr(torch, "empty", empty)
    state = SimpleNamespace(shards=[])
    copy = HostCopy([3], torch.device("cuda", 0))
    copy.fill(Path(), state, SimpleNamespace(rank=0, world_size=1, device=None))
    copy.wait()
    inside = ["begin", "record", "end"]
    waits = ["side waits for current", *inside, "current waits for side", "synchronize"]
    assert calls == ["pinned", *waits]


def test_without_page_locked_memory_the_copy_is_in_other_memory(monkeypatch, capsys):
    """WSL2 limits it, also where the memory is free; the run would end at its first save."""
    memory = torch.empty

    def empty(*size, pin_memory=False):
        if pin_memory and size[0] > 3:
            raise RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`")
        return memory(*size)

    monkeypatch.setattr(torch, "empty", empty)
    assert [tensor.numel() for tensor in page_locked([3, 4])] == [3, 4]
    said = capsys.readouterr().out
    assert "page-locked" in said and "out of memory" in said and "DSA" not in said


class replace_context:
    def __init__(self, calls):
        self.calls = calls

    def __enter__(self):
        self.calls.append("begin")

    def __exit__(self, *_):
        self.calls.append("end")
