"""The config: one YAML file per run, strictly checked before anything heavy is imported."""

from diffrl.config.checks import check_model, check_plugin
from diffrl.config.help import help_config
from diffrl.config.load import check_resume, dump, find_config, load_config
from diffrl.config.schema import Config
from diffrl.config.source import read_parameters

__all__ = [
    "Config",
    "check_model",
    "check_plugin",
    "check_resume",
    "dump",
    "find_config",
    "help_config",
    "load_config",
    "read_parameters",
]
