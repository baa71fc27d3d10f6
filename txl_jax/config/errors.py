"""The errors of settings that cannot be used."""

from typing import Any

from txl_jax.messages import UserError, short_repr


class ConfigError(UserError, ValueError):
    """A setting that cannot be used; the message names the key, the value and the rule.

    Example:
      >>> import txl_jax
      >>> txl_jax.ExperimentConfig.from_dict({"train": {"steps": -5}})
      Traceback (most recent call last):
      ...
      txl_jax.config.errors.ConfigError: config key train.steps = -5: must be at least 1
    """


class UnknownKeyError(ConfigError):
    """A key that is no setting."""


def refusal(key: str, value: Any, why: str) -> ConfigError:
    """Returns the error for a value of a setting that breaks the rule ``why``."""
    return ConfigError(f"config key {key} = {short_repr(value)}: {why}")
