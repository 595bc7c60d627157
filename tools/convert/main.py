"""Inspect a checkpoint, or convert it to another format.

    python scripts/convert_checkpoint.py runs/mine --inspect
    python scripts/convert_checkpoint.py runs/mine/checkpoints/step-00000100 --to hf my-model
    python scripts/convert_checkpoint.py runs/mine --to torch weights
    python scripts/convert_checkpoint.py trainer/checkpoint-500 --to checkpoint start

--to checkpoint reads checkpoints of Hugging Face's Trainer, of DeepSpeed (also universal ones) and
of FSDP (torch.distributed.checkpoint). For a run's folder its newest checkpoint is used. No network
and no GPU is needed. To train from a Hugging Face folder without optimizer states, no conversion is
needed: pass it to real_model_example.py as --model DIR.
"""

from distributed_training.cli.parser import Parser
from distributed_training.console import visible
from distributed_training.errors import UserError, explained
from distributed_training.settings import flag_types


def main() -> None:
    """Read the arguments, and run the command."""
    parser = Parser.of_script(__doc__)
    add = parser.add_argument
    source = "the folder of a checkpoint, of a run, or for --to checkpoint of another program's"
    add("source", type=flag_types.path, metavar="CKPT", help=source)
    add("target", type=flag_types.path, metavar="OUT", nargs="?", help="the new folder, for --to")
    add("--to", choices=("hf", "torch", "checkpoint"), help="the format of OUT")
    add("--inspect", action="store_true", help="describe CKPT, and verify its files")
    dtypes = ("fp32", "bf16", "fp16")
    add("--dtype", choices=dtypes, default="fp32", help="of hf's weights (default: fp32)")
    shard_size = "largest size of one file of hf's weights, which are in memory together (default: "
    add("--max_shard_size", default="1GB", help=f"{shard_size}%(default)s)")
    trust = "load a DeepSpeed or FSDP checkpoint, although the code in its pickles is executed"
    add("--trust_checkpoint", action="store_true", help=trust)
    args = parser.parse_intermixed_args()
    if args.inspect == bool(args.to) or bool(args.to) != bool(args.target):
        parser.error("give either --inspect or --to FORMAT OUT")
    with explained():
        run(args)


def run(args) -> None:
    """Inspect or convert the checkpoint; the imports take seconds, which --help should not wait."""
    from distributed_training.checkpoints import convert

    if not args.inspect:
        folder = convert.convert_checkpoint(
            args.source,
            args.target,
            args.to,
            args.dtype,
            args.max_shard_size,
            args.trust_checkpoint,
        )
        print(f"📁 {folder}")
    elif args.source.is_dir():
        print(visible(convert.inspect(convert.OwnCheckpoint(args.source))))
    else:
        raise UserError(f"{args.source}: no such folder.")
