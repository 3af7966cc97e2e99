"""Test double: vllm/plugins/__init__.py."""
import os
from importlib.metadata import EntryPoint

DEFAULT_PLUGINS_GROUP = "vllm.general_plugins"


def load_general_plugins(entry_points):
    """Loads and calls the entry points that VLLM_PLUGINS names, or all without it, as vLLM does with
    the installed ones."""
    named = os.environ.get("VLLM_PLUGINS")
    for name, value in entry_points.items():
        if named is None or name in named.split(","):
            EntryPoint(name, value, DEFAULT_PLUGINS_GROUP).load()()
