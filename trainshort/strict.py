"""Settings that are typed, frozen, given by name, and refuse what they do not know. No torch.

Everything that can be set in this package, by a config, a command line or a plug-in, is a class of this kind.
"""

from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from trainshort.errors import InputError
from trainshort.registry import did_you_mean


class Settings(BaseModel):
    """Base of every config: frozen, no unknown keys, field docstrings double as help texts."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True)

    @classmethod
    def read(cls, values: dict[str, Any], *, origin: Path | None = None) -> Self:
        """Validate plain data; a mistake becomes one sentence that names the setting, and the file it came from.

        >>> TrainConfig.read({"stepz": 3})
        InputError: Unknown setting 'stepz'. Did you mean 'steps'?
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise InputError(f"In {origin}: {explain(cls, error)}" if origin else explain(cls, error)) from None

    def replace(self, **changes: Any) -> Self:
        """A copy with some settings changed, validated again. Sections are given as dicts and merged."""
        return type(self).read(self.changed(changes))

    def changed(self, changes: dict[str, Any]) -> dict[str, Any]:
        """The values of a copy, not validated yet."""
        values = self.model_dump()
        for name, change in changes.items():
            section = getattr(self, name, None)
            if isinstance(change, dict) and isinstance(section, Settings):
                values[name] = section.changed(change)
            else:
                values[name] = change
        return values

    def identity(self) -> dict[str, Any]:
        """What the settings say, in the form of 0.1.0: those added since are left out while they mean the same.

        Run names, result names and generation states have digests over this, and a new setting must not change them.
        """
        first = FIRST.get(type(self).__name__, "").split()
        values = self.model_dump(mode="json")
        for name, info in type(self).model_fields.items():
            if isinstance(part := getattr(self, name), Settings):
                values[name] = part.identity()
            elif first and name not in first and part == MEANT.get(name, info.get_default(call_default_factory=True)):
                del values[name]
        return values


FIRST = {
    "RunConfig": "format model data optim train",
    "ModelConfig": "vocabulary layers width heads kv_heads ffn position activation biases final_norm tie_embeddings "
    "embedding_scale embedding_norm init adaptive dropout attention_dropout activation_dropout head_dropout norm_eps "
    "max_bias learned_slopes rotary_base t5_buckets t5_max_distance learned_length window backend tolerance",
    "DataConfig": "corpus tokenizer vocabulary folder packing",
    "OptimConfig": "name lr min_lr warmup warmup_from schedule betas momentum weight_decay clip",
    "TrainConfig": "length batch micro_batch steps seed precision checkpoint_activations compile log_every valid_every "
    "valid_tokens save_every keep patience parallel tensorboard",
}
"""The settings of 0.1.0."""
MEANT = {"ends": "dropped"}
"""What 0.1.0 did where the default of a setting added since is another; its runs stay what they are."""


_ALTERNATIVES = (("str",), ("int",), ("float",), ("bool",))
"""Where pydantic says which type of several did not fit; no setting has such a name."""


def explain(cls: type[BaseModel], error: ValidationError, prefix: str = "") -> str:
    """The first mistake of a pydantic error as one sentence; the others follow from mending it."""
    first = error.errors(include_url=False)[0]
    if isinstance(told := first.get("ctx", {}).get("error"), InputError):
        return str(told)  # a sentence already
    path = first["loc"][:-1] if first["loc"][-1:] in _ALTERNATIVES else first["loc"]
    where = prefix + ".".join(str(part) for part in path)
    if first["type"] == "extra_forbidden":
        section, _, key = where.rpartition(".")
        close = did_you_mean(key, _fields_at(cls, first["loc"][:-1]))
        return f"Unknown setting '{where}'.{close.replace(chr(39), chr(39) + section + '.', 1) if section else close}"
    reason = first["msg"].removeprefix("Value error, ").replace("valid tuple", "list")
    if first["type"] == "model_type":
        reason = "it is a group of settings"
    if not where:
        return reason + "."
    if first["type"] == "value_error":
        return f"In '{where}': {reason}."
    return f"Setting '{where}' cannot be {first['input']!r}: {reason[0].lower() + reason[1:]}."


def _fields_at(cls: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    """Names of the settings in the section that `loc` leads to."""
    for part in loc:
        annotation = cls.model_fields[str(part)].annotation
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        cls = next(c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel))
    return list(cls.model_fields)
