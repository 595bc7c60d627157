"""Hand a trained model over to llama.cpp or Ollama, and prove that it still says the same.

    python scripts/hand_over.py runs/mine --to gguf --llama_cpp ~/llama.cpp
    python scripts/hand_over.py runs/mine --to ollama --llama_cpp ~/llama.cpp
    python scripts/hand_over.py runs/mine --verify http://localhost:8080
    python scripts/hand_over.py runs/mine --verify runs/mine/model.gguf --engine ~/node
    python scripts/hand_over.py runs/mine --score gpt2 --data held_out.jsonl
    python scripts/hand_over.py runs/mine --score gpt2 --tasks lambada_openai

MODEL is the output folder of a run, an exported folder, or LoRA adapters, which are merged first.
llama.cpp's own converter writes the GGUF file. --verify asks a server with the OpenAI completion
interface (llama-server, vLLM, Ollama; URL#NAME for one of several models), or a GGUF file, 20
prompts, and compares 32 tokens of each answer with transformers in fp32 on the CPU. If they differ,
it names the most likely cause. A server without /v1/completions is compared with conversations
only. --score asks whether training helped: the loss of another model, for example the base model,
and of MODEL on documents that neither was trained on, or values of lm-eval, and whether the
difference can be distinguished from chance.

Exit codes: 0 written, equal, or not worse; 1 different, worse, or the converter failed; 2 wrong
usage.
"""

from pathlib import Path

from distributed_training.cli.parser import Options, Parser
from distributed_training.errors import UserError, explained
from distributed_training.ranks import tuning
from distributed_training.settings import flag_types
from distributed_training.trained.source import Source, find_source


def main() -> int:
    """Read the arguments, and write the files or compare; return the exit code."""
    parser = Parser.of_script(__doc__)
    add = parser.add_argument
    add("model", metavar="MODEL", help="output folder of a run, folder of a model, or adapters")
    add("--to", choices=("gguf", "ollama"), help="write a GGUF file, or a Modelfile for Ollama")
    add("--verify", metavar="URL|FILE", type=flag_types.place, help="compare with transformers")
    add("--score", metavar="BEFORE", help="compare with another model, such as the base model")
    data = "documents for --score (default: the run's validation data)"
    add("--data", metavar="FILE", type=flag_types.place, help=data)
    add("--tasks", metavar="NAMES", help="tasks of lm-eval for --score, in place of documents")
    include = "folder with your own tasks for lm-eval"
    add("--include_path", metavar="DIR", type=flag_types.path, help=include)
    converter = "folder with convert_hf_to_gguf.py (default: the variable LLAMA_CPP)"
    add("--llama_cpp", metavar="DIR", type=flag_types.path, help=converter)
    out = "the new file (default: model.gguf or Modelfile in MODEL)"
    add("--out", metavar="FILE", type=flag_types.path, help=out)
    engine = "folder with node_modules/node-llama-cpp (default: llama-cpp-python)"
    add("--engine", dest="library", metavar="DIR", type=flag_types.path, help=engine)
    args = parser.parse_args()
    if sum(map(bool, (args.to, args.verify, args.score))) != 1:
        parser.error("give one of --to FORMAT, --verify URL|FILE and --score BEFORE")
    if (not args.score and (args.data or args.tasks)) or (args.data and args.tasks):
        parser.error("--data and --tasks are for --score, and exclude each other")
    if args.score:
        with explained():
            return score(args)
    if args.verify and not _is_url(args.verify) and not Path(args.verify).is_file():
        raise UserError(f"--verify {args.verify}: no such file; a URL begins with http://.")
    tuning.choose_hardware("cpu")
    source = find_source(args.model)
    with explained():  # out of memory, for example
        return write(args, source) if args.to else compare(args, source)


def _is_url(text: str) -> bool:
    return text.startswith(("http://", "https://"))


def write(args: Options, source: Source) -> int:
    """Write what --to names."""
    from tools.hand_over.writing import write_gguf, write_modelfile

    folder = Path(args.model) if Path(args.model).is_dir() else Path()
    out = args.out or folder / ("model.gguf" if args.to == "gguf" else "Modelfile")
    if out.exists():
        raise UserError(f"{out} exists: remove it, or name another file by --out.")
    if not out.parent.is_dir():
        raise UserError(f"{out.parent}: no such folder, for --out.")
    if args.to == "gguf":
        write_gguf(source, args.llama_cpp, out)
    else:
        write_modelfile(source, args.llama_cpp, out)
    return 0


def compare(args: Options, source: Source) -> int:
    """Compare the engine that --verify names with transformers; return 1 if they differ."""
    from tools.hand_over.comparing import compare_with

    return compare_with(args.model, source, args.verify, args.library)


def score(args: Options) -> int:
    """Compare MODEL with the model that --score names; return 1 if it is worse."""
    tuning.choose_hardware("auto")
    from tools.hand_over.comparing import results_of
    from tools.hand_over.score import WORSE, score_documents, score_tasks

    before, after = find_source(args.score), find_source(args.model)
    if args.tasks:
        return int(WORSE in score_tasks(before, after, args.tasks, args.include_path))
    return int(score_documents(before, after, results_of(Path(args.model)), args.data) == WORSE)
