"""Talk to a trained model in the terminal.

    python scripts/chat.py runs/mine
    python scripts/chat.py runs/mine --temperature 0 --max_new_tokens 50
    echo "How do I find the largest file?" | python scripts/chat.py runs/chat --system "Be short."

MODEL is the output folder of a run, whose exported model (hf/) is used; a folder with a model or
with LoRA adapters; or a name on the Hugging Face hub. A model with a chat template answers, and
remembers the conversation. Without one, or after a run that trained on text, each line that you
type is continued. /new starts a new conversation, Ctrl-C stops an answer, Ctrl-D ends. Without a
terminal each line of the input is answered.

It runs in one process, on a GPU in bf16 (fp16 on older ones). Exit codes: 0; 2 for wrong usage, or
a model that is missing or not complete.
"""

from distributed_training.cli.parser import Options, Parser
from distributed_training.errors import explained
from distributed_training.ranks import tuning
from distributed_training.settings import flag_types
from distributed_training.trained.source import Source, find_source


def main() -> None:
    """Read the arguments, load the model, and talk."""
    parser = Parser.of_script(__doc__)
    add = parser.add_argument
    add("model", metavar="MODEL", help="output folder of a run, folder of a model, name on the hub")
    temperature = "0: always the likeliest token (default: %(default)s)"
    add("--temperature", type=flag_types.real(100, zero=True), default=0.8, help=temperature)
    top_p = "draw from the likeliest tokens of this total probability (default: %(default)s)"
    add("--top_p", type=flag_types.real(1), default=0.95, help=top_p)
    seed = "the same answers to the same texts (default: different each time)"
    add("--seed", type=flag_types.whole(0, 2**63 - 1), help=seed)
    longest = "of an answer (default: %(default)s)"
    add("--max_new_tokens", type=flag_types.block_length, default=256, help=longest)
    add("--system", type=flag_types.label, metavar="TEXT", help="system message of conversations")
    devices = ("auto", "cpu")
    add("--device", choices=devices, default="auto", help="cpu: also if there is a GPU")
    args = parser.parse_args()
    tuning.choose_hardware(args.device)
    source = find_source(args.model)
    with explained():  # out of memory, for example
        run(args, source)


def run(args: Options, source: Source) -> None:
    """Load the model and talk; --help does not wait for these imports, which take seconds."""
    import torch

    from tools.chat import speaker, terminal

    sampling = speaker.Sampling(args.temperature, args.top_p, args.max_new_tokens)
    model = speaker.Speaker.load(source)
    partner = model.partner(sampling, args.system)
    if args.seed is None:
        torch.seed()
    else:
        torch.manual_seed(args.seed)
    terminal.talk(model, partner, sampling)
