"""What a blank cell means: the defaults of the framework a row's source used, each with where it is documented.

Keys are columns of the file, and what the file has no column for: ``torch`` (release), ``optimizer_kind``, ``loss`` (how
its logits are held), ``fsdp`` (1 or 2), ``allocator`` (PYTORCH_CUDA_ALLOC_CONF), ``context`` (MiB outside of torch,
lowest-highest), ``dropout FAMILY`` and ``implementation FAMILY`` (fields of Implementation; of GPTBigCode its own), ``qkv`` (one ``fused`` product),
``head`` (its ``own`` matrix, even where the config ties it) and ``flash`` (takes queries as they are ``grouped``).
"""

from __future__ import annotations

from memcalc.bench.framework import Framework
from memcalc.bench.of_libraries import OF_LIBRARIES
from memcalc.bench.of_pytorch import OF_PYTORCH

__all__ = ["FRAMEWORKS", "framework_of"]

FRAMEWORKS = (*OF_PYTORCH, *OF_LIBRARIES)

_NONE = Framework(name="PyTorch", sources=())


def framework_of(source: str) -> Framework:
    """The framework a source used; plain PyTorch where the table has none.

    >>> framework_of("Lightning-AI/litgpt extensions/thunder/README.md").name
    'LitGPT with thunder'
    """
    found = [
        (len(start), framework) for framework in FRAMEWORKS for start in framework.sources if source.startswith(start)
    ]
    return max(found, key=lambda pair: pair[0])[1] if found else _NONE
