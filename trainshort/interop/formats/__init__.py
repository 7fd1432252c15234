"""Model formats that can be imported or converted: one module per format."""

from trainshort.interop.formats import (  # noqa: F401  (importing a module registers its format)
    baichuan,
    bloom,
    btlm,
    fairseq,
    falcon,
    gpt2,
    gpt_neox,
    llama,
    mpt,
    refact,
    trainshort_hf,
)
from trainshort.interop.formats.base import convertible, formats

__all__ = ["convertible", "formats"]
