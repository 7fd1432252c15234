"""Hugging Face folders that `trainshort export --to hf` wrote. The name of each tensor starts with `model.`."""

from collections.abc import Iterator, Mapping
from typing import Any

from trainshort.config.run_config import ModelConfig
from trainshort.interop.formats.base import Format, ImportedModel, TensorSource, Weights, map_weight
from trainshort.interop.formats.read_config import parse_length, read_section


class _PrefixedModuleMap(Mapping[str, TensorSource]):
    """A module map that accepts every trainshort module. The source has the same name after the prefix `model.`.

    The map cannot be listed, because the modules depend on the config of the model.
    """

    def __getitem__(self, module: str) -> TensorSource:
        return map_weight(f"model.{module}")

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __contains__(self, module: object) -> bool:
        return True


def read_exported_config(source_config: dict[str, Any], weights: Weights) -> ImportedModel:
    """Read the `config.json` of an export. Its section `model` is the config of the trainshort model.

    Args:
        source_config: The content of `config.json`.
        weights: Not used. All formats have this parameter.

    Raises:
        InputError: If the section is invalid.
    """
    config = ModelConfig.parse(read_section(source_config, "model"))
    training_length = parse_length(source_config.get("trained_at"))
    return ImportedModel(config, training_length)


OWN = Format(
    name="trainshort",
    summary="Folder that `trainshort export --to hf` wrote",
    read_config=read_exported_config,
    module_map=_PrefixedModuleMap(),
)
