"""A replay has the settings that the run had at the step, also before a resume that changed them."""

import json

import pytest

from distributed_training.checkpoints.signature import INFORMATIONAL_FLAGS
from distributed_training.cli.flags import shown_flags
from distributed_training.cli.parse import parse_arguments
from distributed_training.errors import UserError
from distributed_training.rank_shares import shown_shares
from distributed_training.run.signatures import after_resume, signature_at
from tools.replay.run_settings import RunSettings


def identity_of(settings, ranks=1):
    """The part of a run signature that depends on flags."""
    flags = settings.flags()
    told = {name: flags[name] for name in INFORMATIONAL_FLAGS} | {"ranks": ranks}
    told["rank_shares"] = shown_shares(settings.training.rank_shares)
    told["reduce_dtype"] = settings.strategy.reduce_dtype
    return {"hard": {}, "soft": {"seed": flags["seed"]}, "told": told}


def recorded(step, *starts, skipped=(), ranks=1):
    """What a run recorded whose starts had these flags, each after the last step before it."""
    results = {}
    for last_step, flags in starts:
        settings = parse_arguments(flags.split())
        identity = identity_of(settings, ranks)
        if last_step:
            results["signatures"] = after_resume(results, identity, last_step)
        results |= {"run_signature": identity, "flags": shown_flags(settings.flags())}
    return RunSettings("runs/mine", step, json.loads(json.dumps(results)), [*skipped])


def taken(run, flags, world_size=1):
    settings = parse_arguments([*flags.split(), "--output_dir", "runs/mine", "--replay", "2"])
    return run.taken(settings, world_size)


FIRST, LATER = "--max_steps 6 --lr 1e-3 --warmup_ratio 0.1", "--max_steps 12 --lr 1e-4"
LATER += " --warmup_steps 3 --weight_decay 0.5 --adam_beta2 0.9 --lr_scheduler constant"


def test_the_settings_of_the_step_are_taken():
    for strategy in ("", " --strategy zero2"):
        starts = (0, FIRST + strategy), (6, LATER + strategy)
        for step, flags in ((6, FIRST), (7, LATER)):
            run = recorded(step, *starts)
            then = parse_arguments((flags + strategy).split())
            settings = taken(run, LATER + strategy)
            assert settings.training == then.training
            assert settings.strategy == then.strategy  # DeepSpeed's configuration has them, too
            assert run.check(identity_of(settings), ()) == []


def test_a_setting_that_the_replay_changes_stays_changed():
    run = recorded(2, (0, FIRST), (6, LATER))
    settings = taken(run, f"{LATER} --weight_decay 0.25")
    assert (settings.training.weight_decay, settings.training.lr) == (0.25, 1e-3)
    assert run.check(identity_of(settings), ()) == ["weight_decay 0.01 in that run, 0.25 now"]


def test_what_cannot_be_taken_is_named():
    # The ranks have met in the precision of the replay.
    run = recorded(2, (0, f"{FIRST} --precision fp32"), (6, f"{FIRST} --precision bf16"))
    run.signature["told"]["precision"] = "fp32"
    settings = taken(run, f"{FIRST} --precision bf16")
    assert settings.training.precision == "bf16"
    now = identity_of(settings)
    now["told"]["precision"] = "bf16"
    assert run.check(now, ()) == ["precision fp32 in that run, bf16 now"]
    run = recorded(2, (0, f"{FIRST} --seed 1"), (6, f"{FIRST} --strategy zero1 --seed 1"))
    settings = taken(run, f"{FIRST} --strategy zero1 --seed 1")
    assert run.check(identity_of(settings), ()) == ["strategy dp in that run, zero1 now"]
    with pytest.raises(UserError, match="seed 1 in that run, 2 now"):
        run.check(identity_of(parse_arguments(["--seed", "2"])), ())
    # The checkpoint of the resume is gone, so that steps of both starts are repeated.
    run = recorded(8, (0, "--max_steps 9 --lr 1e-3"), (6, "--max_steps 9 --lr 1e-4"))
    assert run.changed_since(6) == []
    [clause] = run.changed_since(4)
    assert clause == "lr 0.001 up to step 6 in that run, 0.0001 from then on and now"


def test_the_micro_batch_of_the_step_is_taken():
    """Of --auto_micro_batch, and of another start on as many ranks."""
    ran = "--batch_size 2 --gradient_accumulation_steps 4"
    asked = "--batch_size 8 --strategy zero2"
    run = recorded(2, (0, f"{ran} --strategy zero2"))
    for flags, size in ((f"{asked} --auto_micro_batch", 2), (asked, 8)):
        settings = taken(run, flags)
        assert settings.training.batch_size == size
        assert settings.training.global_batch(1) == 8
        assert settings.strategy.config["train_micro_batch_size_per_gpu"] == size
    assert taken(run, f"{asked} --auto_micro_batch", 2).training.batch_size == 8
    run = recorded(2, (0, ran), (6, "--batch_size 8"))
    assert taken(run, "--batch_size 8").training.batch_size == 2
    auto = "--strategy auto --batch_size auto --global_batch_size 8"
    assert taken(recorded(2, (0, ran)), auto).training.batch_size == 2


def test_skipped_steps_are_those_of_the_run():
    run = recorded(9, (0, "--skip_steps 3"), (4, "--skip_steps 7"), skipped=(3, 7))
    for flags in ("--lr 1e-3", "--skip_steps 7"):
        settings = taken(run, flags)
        assert settings.training.skip_steps == (3, 7)
        run.check(identity_of(settings), settings.training.skip_steps)
    settings = taken(run, "--skip_steps 3,8")
    with pytest.raises(UserError, match="--skip_steps 3,7 in that run"):
        run.check(identity_of(settings), settings.training.skip_steps)


def test_signatures_of_several_resumes():
    run = recorded(1, (0, "--lr 1"), (6, "--lr 2"), (9, "--lr 3"), (4, "--lr 4"))
    steps = [one["from_step"] for one in run.results["signatures"]]
    assert steps == [1, 5]  # the last resume was from a checkpoint before the others
    rates = [signature_at(run.results, step)["told"]["lr"] for step in (1, 4, 5, 20)]
    assert rates == [1, 1, 4, 4]
