"""Which model is trained, and how its forward pass is computed."""

from dataclasses import dataclass
from typing import ClassVar

from distributed_training.known_models import EMBEDDED_MODEL
from distributed_training.settings import flag_types
from distributed_training.settings.fields import DROPPED, MODEL, REPORTED, ROUNDING, flag, switch


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The model: its origin, its adapters, its forward pass."""

    title: ClassVar[str] = "Model"

    model: str = flag(
        EMBEDDED_MODEL,
        flag_types.place,
        (
            "tiny-gpt2 (embedded, needs no network), gpt2, gpt2-medium, gpt2-large, gpt2-xl, "
            "another causal language model on the Hugging Face hub, or a local folder"
        ),
        names="model_name_or_path model_name",
        effect=MODEL,
    )
    model_revision: str | None = flag(
        None,
        flag_types.label,
        "branch, tag or commit of a model on the hub (default: main)",
        metavar="REV",
        effect=MODEL,
    )
    from_scratch: bool = switch(
        False,
        "take the architecture only; random weights drawn from --seed",
        effect=MODEL,
        at_resume=REPORTED,
    )
    dropout: float | None = flag(
        None,
        flag_types.probability,
        "dropout probability (default: the model's own)",
        effect=DROPPED,
        at_resume=REPORTED,
    )
    fused_gelu: bool = switch(
        True,
        "compute GPT-2's activation as gelu_new, not as the same function in one kernel",
        effect=ROUNDING,
        at_resume=REPORTED,
        planned=True,
    )
    attn_implementation: str | None = flag(
        None,
        flag_types.choice,
        "attention function of transformers (default: sdpa, where the model has it)",
        choices=("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"),
        effect=ROUNDING,
        at_resume=REPORTED,
    )
    gradient_checkpointing: bool = switch(
        False,
        "recompute activations in the backward pass to save memory",
        names="activation_checkpointing",
        effect=ROUNDING,
        planned=True,
    )
    lora_r: int | None = flag(
        None,
        flag_types.rank_of_adapters,
        "train adapters of this rank (LoRA) only (default: train the whole model)",
        metavar="R",
        effect=MODEL,
        planned=True,
    )
    lora_alpha: float | None = flag(
        None,
        flag_types.positive_float,
        "scale adapters by A / R (default: 2 R)",
        metavar="A",
        needs="lora_r",
        effect=MODEL,
    )
    lora_dropout: float = flag(
        0.0,
        flag_types.probability,
        "dropout before the adapters",
        needs="lora_r",
        effect=DROPPED,
        at_resume=REPORTED,
    )
    lora_rslora: bool = switch(
        False,
        "scale adapters by A / √R instead of A / R (rsLoRA)",
        names="use_rslora",
        needs="lora_r",
        effect=MODEL,
    )
    lora_dora: bool = switch(
        False,
        "also train the magnitude of each output of the adapted layers (DoRA)",
        names="use_dora",
        needs="lora_r",
        effect=MODEL,
        planned=True,
    )
    lora_targets: str | None = flag(
        None,
        flag_types.label,
        "ends of the names of layers, or all-linear (default: the architecture's usual)",
        metavar="LIST",
        names="lora_target_modules",
        needs="lora_r",
        effect=MODEL,
        planned=True,
    )
    merge_lora: bool = switch(
        False,
        "export the whole model with the adapters added, instead of the adapters",
        needs="lora_r",
    )
    load_in_4bit: bool = switch(
        False,
        "keep frozen weights in 4 bits (QLoRA); needs --lora_r and bitsandbytes",
        needs="lora_r",
        effect=MODEL,
        planned=True,
    )
    compile: bool = switch(
        False,
        "compile the transformer blocks and the loss with torch.compile",
        names="torch_compile",
        effect=ROUNDING,
        planned=True,
    )
    compile_loss: bool = switch(
        False,
        "compile the loss: softmax and gradient, not in fp16; the first step takes seconds longer "
        "(GPT-2's output layer on a CPU: 25 % less time in bf16, 2 % in fp32; GPU: not measured)",
        effect=ROUNDING,
        planned=True,
    )

    @property
    def compiler_flag(self) -> str | None:
        """The flag that needs the compiler, if there is one."""
        return "--compile" if self.compile else "--compile_loss" if self.compile_loss else None
