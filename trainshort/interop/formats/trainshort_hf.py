"""Our own Hugging Face folders (export --to hf), so that they come back: every name is ours after `model.`."""

from collections.abc import Iterator, Mapping
from typing import Any

from trainshort.config.run_config import ModelConfig
from trainshort.interop.formats.base import Format, ImportedModel, TensorSource, Weights, map_weight
from trainshort.interop.formats.read_config import length_of, read_section


class _Prefixed(Mapping[str, TensorSource]):
    """Any module of ours."""

    def __getitem__(self, module: str) -> TensorSource:
        return map_weight(f"model.{module}")

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __contains__(self, module: object) -> bool:
        return True


def read(theirs: dict[str, Any], weights: Weights) -> ImportedModel:
    length = theirs.get("trained_at")
    config = ModelConfig.parse(read_section(theirs, "model"))
    return ImportedModel(config, length_of(length))


OWN = Format(name="trainshort", summary="Folder that `trainshort export --to hf` wrote", read=read, lines=_Prefixed())
