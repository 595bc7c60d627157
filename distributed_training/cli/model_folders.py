"""What to do about a folder that is no model or data set; imported after such an error only."""

import shlex
from pathlib import Path


def advice_without_config(name: str) -> str:
    """Return what to do about a folder without config.json that --model names."""
    exported = Path(name, "hf")
    if (exported / "config.json").is_file():
        return f"name {shlex.quote(str(exported))}, which the run exported."
    if any(Path(name, inside, "adapter_config.json").is_file() for inside in ("", "hf")):
        return "it has adapters alone: train with --merge_lora, which exports a complete model."
    return f"name the folder of a model, such as the hf/ of a run{or_of_hub(name)}."


def or_of_hub(name: str) -> str:
    """Return what else to do if a folder has the name of something on the hub; "" for a path."""
    if name.startswith((".", "/")) or name.count("/") > 1 or not Path(name).is_dir():
        return ""
    return (
        f"; if you mean {name} of the hub, rename this folder, which hides it, or start in another "
        "folder"
    )
