"""The settings of a whole experiment, in sections, and their descriptions."""

import dataclasses
import inspect
import json
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from txl_jax.config.analysis import Analyses
from txl_jax.config.combinations import RunConfig
from txl_jax.config.fields import Section, sentences
from txl_jax.config.nested import replace_nested, unknown_key


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExperimentConfig(Analyses, RunConfig):
    """All settings of an experiment; settings that contradict each other raise ConfigError.

    Example:
      >>> import txl_jax
      >>> exp = txl_jax.ExperimentConfig.from_dict({"seed": 3, "train": {"steps": 500}})
      >>> exp.train.steps, exp.optimizer.name
      (500, 'adam')
    """

    def to_dict(self) -> dict[str, Any]:
        """Returns a nested dict of every setting for JSON, with lists in place of tuples."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_dict(cls, nested: Mapping[str, Any]) -> "ExperimentConfig":
        """Returns the experiment of a nested dict; a missing key takes its default.

        Raises:
          ConfigError: a key is unknown, a value has a wrong type or is out of range, or settings
            contradict each other.
        """
        return replace_nested(cls(), nested)


class Setting(NamedTuple):
    """The dotted key, type, default, rule ("" if none) and documentation of a setting."""

    key: str
    type: str
    default: Any
    rule: str
    doc: str


def describe_settings(section: Section | None = None, prefix: str = "") -> Iterator[Setting]:
    """Yields every setting of a section in order; the default section is a whole experiment."""
    section = section or ExperimentConfig()
    docs = sentences(type(section))  # type: ignore[arg-type]
    for one in dataclasses.fields(section):  # type: ignore[arg-type]
        key, value = prefix + one.name, getattr(section, one.name)
        if isinstance(value, Section):
            yield from describe_settings(value, f"{key}.")
        else:
            most = one.metadata.get("most")
            rules = (one.metadata.get("rule"), "" if most is None else f"at most {most}")
            rule = ", ".join(filter(None, rules))
            yield Setting(key, inspect.formatannotation(one.type), value, rule, docs[one.name])


def format_settings(exp: ExperimentConfig | None, prefix: str = "") -> str:
    """Lists the settings whose keys start with ``prefix``: value, type, rule and documentation.

    The values are those of ``exp``, or else the defaults. Changed values show their default too.
    Raises ConfigError if no key starts with ``prefix``.
    """
    lines = []
    for now, default in zip(describe_settings(exp), describe_settings(), strict=True):
        if now.key.startswith(prefix):
            differs = f"  (default: {default.default!r})" if now.default != default.default else ""
            lines.append(f"{now.key} = {now.default!r}{differs}")
            about = "; ".join(filter(None, (now.type, now.rule, now.doc)))
            lines.append(textwrap.indent(textwrap.fill(about, 96), "    "))
    if not lines:
        raise unknown_key(prefix, ExperimentConfig())
    return "\n".join(lines)
