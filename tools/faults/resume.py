"""Faults of a resumed run."""

from tools.faults.bench import Launch
from tools.faults.checks import SPLIT, WHOLE, WORK
from tools.faults.fault import Fault, Report
from tools.faults.state_checks import Resume

GROUP = "resume"
# Step 7 of 10 is in the second of two epochs; with dropout, a resume has to continue all of it.
SHARDED = Launch(
    f"{WORK} --no_eval --dropout 0.1 --batch_size 1 --gradient_accumulation_steps 4 "
    "--strategy zero2",
    2,
)
SAME_RANKS = Resume(SHARDED, SHARDED, saved=7)
# One process saves; two ranks that shard all states continue.
MORE_RANKS = Resume(
    Launch(f"{WHOLE.flags} --no_eval"), Launch(f"{SPLIT} --no_eval --strategy fsdp", 2), saved=3
)

FAULTS = (
    Fault(
        "moments_lost",
        GROUP,
        "A resume loads the weights, and zeros as Adam's moments.",
        (
            Report(
                "KempnerInstitute/KempnerForge",
                115,
                "A new AdamW has no states yet, so every resume dropped the saved moments",
            ),
            Report(
                "EvolvingLMMs-Lab/OneVision-Encoder",
                65,
                "Checkpoints lacked the optimizer's states; the loss jumps after a resume",
            ),
            Report(
                "ServiceNow/Fast-LLM",
                436,
                "Optimizer states are not loaded if the number of ranks has changed",
            ),
        ),
        "The loss jumps, or stops falling, at each resume, and needs many steps to recover.",
        SAME_RANKS,
        "Save at step N and train to N + 3. Resume from N and train to N + 3. The losses of step "
        "N + 1 agree with this fault, too; those of N + 2 must agree as well.",
    ),
    Fault(
        "schedule_restarts",
        GROUP,
        "After a resume the schedule of the learning rate starts from the beginning.",
        (
            Report(
                "lightly-ai/lightly-train",
                301,
                "The scheduler's state was not saved; a resume reset the learning rate",
            ),
            Report(
                "torch-points3d/torch-points3d",
                630,
                "A resume reset the learning rate to its first value",
            ),
            Report(
                "NVIDIA-NeMo/Automodel", 763, "After a resume the learning rate is that of step 0"
            ),
        ),
        "The warm-up is repeated, and the learning rate of the last step is too high.",
        SAME_RANKS,
        "Plot the learning rate over the steps of both runs: one curve without a jump, which ends "
        "at its final value.",
    ),
    Fault(
        "dropout_repeats",
        GROUP,
        "A resumed run draws the random numbers of dropout from the beginning again.",
        (
            Report(
                "huggingface/transformers",
                17032,
                "Resuming with save_strategy=epoch does not load the state of the random numbers",
            ),
            Report("ai2cm/ace", 690, "The random state has its initial value again after a resume"),
        ),
        "Nothing to see. A run that is often interrupted repeats the same few masks.",
        SAME_RANKS,
        "Resume with dropout. The loss of the next step must have all digits of the loss in the "
        "run that was not interrupted.",
    ),
    Fault(
        "order_of_first_epoch",
        GROUP,
        "A resume in a later epoch continues in the order of the first epoch.",
        (
            Report(
                "huggingface/accelerate",
                4071,
                "skip_first_batches reset the sampler's epoch to 0, so the order differed",
            ),
            Report(
                "huggingface/accelerate",
                2016,
                "A resume in the second epoch continues as in the first one",
            ),
        ),
        "Nothing to see. In that epoch some sequences are trained twice, and others never.",
        SAME_RANKS,
        "Resume in the middle of the second epoch, not of the first. The losses of the next steps "
        "must equal those of the run that was not interrupted.",
    ),
    Fault(
        "stale_working_copy",
        GROUP,
        "A resume loads the fp32 weights, but not the copy with which the model computes.",
        (
            Report(
                "NVIDIA/Megatron-LM",
                6920,
                "After a load the parameters are not gathered again: silently another model",
            ),
            Report(
                "pytorch/xla",
                6862,
                "A load must copy the sharded master weights to the model's weights",
            ),
        ),
        "One step has the loss of an untrained model. Its update has a wrong direction.",
        SAME_RANKS,
        "Evaluate directly before a save, and directly after the load: the losses must be equal.",
    ),
    Fault(
        "position_of_old_ranks",
        GROUP,
        "Each rank counts its own samples, so another number of ranks finds a wrong position.",
        (
            Report(
                "ecmwf/WeatherGenerator",
                1524,
                "The number of samples is wrong if the number of ranks changes twice",
            ),
            Report(
                "PrimeIntellect-ai/prime-rl",
                1035,
                "Resumes on one GPU agree, but on two they continue at other samples",
            ),
            Report(
                "allenai/OLMo",
                182,
                "Restores the position from the number of examples, so the batch may change",
            ),
        ),
        "Nothing to see. Sequences are trained twice, or never.",
        MORE_RANKS,
        "Save on one number of ranks and resume on another one, with the same global batch. The "
        "losses of the next steps must agree with those of the run that was not interrupted.",
    ),
    Fault(
        "shard_of_rank_0",
        GROUP,
        "Every rank loads rank 0's part of Adam's moments.",
        (
            Report(
                "huggingface/transformers",
                23111,
                "With FSDP only the optimizer states of rank 0 were saved",
            ),
        ),
        "The loss is too high for some steps after a resume, as with a higher learning rate.",
        MORE_RANKS,
        "Save in one process and resume on two ranks that shard the optimizer states. The losses "
        "after the first update must agree with those of the run that was not interrupted.",
    ),
)
