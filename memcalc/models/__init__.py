"""Model families (how a model is built) and named models (with which numbers)."""

from __future__ import annotations

from memcalc.catalog import Catalog
from memcalc.models.bert import BERT
from memcalc.models.clip import CLIP
from memcalc.models.decoder import DECODER
from memcalc.models.family import Block, Family
from memcalc.models.gpt2 import GPT2
from memcalc.models.llama import LLAMA
from memcalc.models.llava import LLAVA
from memcalc.models.megatron import MEGATRON
from memcalc.models.megatron_t5 import MEGATRON_T5
from memcalc.models.mlp import MLP
from memcalc.models.module import MODULE, TOKEN_MODULE
from memcalc.models.moe import MOE
from memcalc.models.named import MODELS
from memcalc.models.resnet import RESNET
from memcalc.models.size import SIZE
from memcalc.models.t5 import T5
from memcalc.models.vit import VIT
from memcalc.models.whisper import MBART, WHISPER
from memcalc.spec import HEAD, ROOT, Model, Module, Weight

__all__ = ["FAMILIES", "HEAD", "MODELS", "ROOT", "Block", "Family", "Model", "Module", "Weight"]

FAMILIES: Catalog[Family] = Catalog(
    "model family",
    [
        MLP,
        GPT2,
        LLAMA,
        DECODER,
        BERT,
        VIT,
        MOE,
        RESNET,
        T5,
        MEGATRON,
        MEGATRON_T5,
        CLIP,
        LLAVA,
        WHISPER,
        MBART,
        SIZE,
        MODULE,
        TOKEN_MODULE,
    ],
)
