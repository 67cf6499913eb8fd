"""The classes of a model's repeated blocks, by which FSDP files say what to wrap."""

from __future__ import annotations

from memcalc.configs.launch_file import LaunchFile
from memcalc.errors import PlanError
from memcalc.models import MODELS, Model

__all__ = ["block_classes", "check_block"]

_BY_NAME = (
    ("codellama", "LlamaDecoderLayer"), ("tinyllama", "LlamaDecoderLayer"), ("llama", "LlamaDecoderLayer"),
    ("mistral", "MistralDecoderLayer"), ("mixtral", "MixtralDecoderLayer"), ("phi-3", "Phi3DecoderLayer"),
    ("phi", "PhiDecoderLayer"), ("qwen2", "Qwen2DecoderLayer"), ("qwen3-30b", "Qwen3MoeDecoderLayer"),
    ("qwen3", "Qwen3DecoderLayer"), ("gemma-2-", "Gemma2DecoderLayer"), ("gemma", "GemmaDecoderLayer"),
    ("powerlm", "GraniteDecoderLayer"),
    ("gpt-neox", "GPTNeoXLayer"), ("pythia", "GPTNeoXLayer"), ("gpt-j", "GPTJBlock"), ("falcon", "FalconDecoderLayer"),
    ("opt", "OPTDecoderLayer"), ("bloom", "BloomBlock"), ("mpt", "MptBlock"), ("starcoder", "GPTBigCodeBlock"),
    ("gpt2", "GPT2Block"), ("distilgpt2", "GPT2Block"), ("bert", "BertLayer"), ("vit", "ViTLayer"), ("t5", "T5Block"),
    ("flan-t5", "T5Block"),
)  # fmt: skip
"""The first name a model's begins with decides (``_no_split_modules`` and the layers of transformers 4.57)."""


def block_classes(model: Model) -> str:
    """The class of transformers that a named model's blocks have; blank where it is not known.

    >>> from memcalc.models import MODELS
    >>> block_classes(MODELS["bert-base"]), block_classes(MODELS["mlp"])
    ('BertLayer', '')
    """
    named = model.name.partition(" (")[0]  # what stands after it are numbers that were changed
    return next((name for prefix, name in _BY_NAME if named in MODELS and named.startswith(prefix)), "")


def check_block(file: LaunchFile, model: Model, blocks: tuple[str, ...] = ()) -> str:
    """A note where a file wraps a class of which nothing is known; raises PlanError for one the model does not have.

    ``blocks`` are the classes that a model's own config.json tells; without them those of a named model are taken.
    """
    wanted = [word.strip() for word in file.block_class.split(",") if word.strip()]
    known = blocks or tuple(filter(None, [block_classes(model)]))
    if wanted and known and not set(known) & set(wanted):
        raise PlanError(
            f"{file.name} wraps {', '.join(wanted)}, which {model.name} does not have; its blocks are {' and '.join(known)}: name that, "
            "or leave the class out"
        )
    return f"{file.name}: whether {model.name} has blocks of class {', '.join(wanted)} is not known" * bool(
        wanted and not known
    )
