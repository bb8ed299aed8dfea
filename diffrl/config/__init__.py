"""The config: one YAML file per run, strictly checked before anything heavy is imported."""

from diffrl.config.checks import check_lora, check_model, check_plugin
from diffrl.config.load import dump, find_config, load_config, make_config
from diffrl.config.schema import Config
from diffrl.config.source import read_parameters

__all__ = [
    "Config",
    "check_lora",
    "check_model",
    "check_plugin",
    "dump",
    "find_config",
    "load_config",
    "make_config",
    "read_parameters",
]
