"""--prefetch: downloads all that a run reads from the network, in one process without a GPU."""

from distributed_training import console
from distributed_training.cli.checks import is_local_dataset, names_on_hub
from distributed_training.data.sources import announce
from distributed_training.data.token_cache import tokenize_corpus
from distributed_training.errors import EXIT_COMPLETED
from distributed_training.files.cache import cache_folder, huggingface_home
from distributed_training.model import resolve as models
from distributed_training.ranks.launch import Launch
from distributed_training.ranks.process_group import single_process
from distributed_training.settings.settings import Settings


def prefetch(settings: Settings, launch: Launch) -> int:
    """Download the model and the dataset, tokenize the dataset; return the exit code.

    A run with the same flags then needs no network; HF_HUB_OFFLINE=1 prevents it from trying to
    reach the hub. With --streaming a dataset of the hub is not downloaded.
    """
    with single_process(launch) as ctx:
        remote, _ = names_on_hub(settings.model.model, settings.data.dataset)
        verb = "Downloading, unless it is in the cache," if remote else "Reading"
        console.print0(f"⏳ {verb} {settings.model.model}")
        tokenizer, _ = models.find_tokenizer(settings, ctx)
        if not settings.data.streaming:
            announce(settings.data)
            for name, _ in settings.data.dataset:
                tokenize_corpus(settings.data, ctx, tokenizer, name, settings.training.eval_only)
        elif not is_local_dataset(settings.data.dataset_name):
            console.warn(
                f"--streaming reads {settings.data.dataset_name} from the hub while it trains."
            )
        console.print0(
            f"✅ Prefetched: files of the hub are in {huggingface_home()}, tokens in "
            f"{cache_folder(settings.data.cache_dir)}. With HF_HUB_OFFLINE=1 a run with these "
            "flags needs no network."
        )
    return EXIT_COMPLETED
