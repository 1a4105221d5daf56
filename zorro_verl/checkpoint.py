"""A checkpoint: its config, its model without weights and with them. What is wrong with one is said in a line."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import huggingface_hub
import torch
import transformers
from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from zorro_verl.equivalence import use_runnable_experts
from zorro_verl.families import auto_class, check_supported
from zorro_verl.verify_request import local_folder


def config_of(model: str) -> PretrainedConfig:
    """The config of a checkpoint of a supported type."""
    config = read_config(model)
    check_supported(config)
    return config


def read_config(model: str) -> PretrainedConfig:
    """The config of a checkpoint of any type that transformers knows."""
    folder = local_folder(model)
    if folder is None:
        check_reachable(model)
    with quiet_loading(), one_line(f"the config of {model!r} can't be used"):
        # Else it would ask on the terminal whether to run the code of a type that is not supported anyway.
        return AutoConfig.from_pretrained(folder or model, trust_remote_code=False)


def skeleton(config: PretrainedConfig) -> PreTrainedModel:
    """The model that veRL would load, without weights."""
    with quiet_loading(), one_line("no model can be built from its config"), torch.device("meta"):
        return auto_class(config).from_config(config)


def load(model: str, config: PretrainedConfig, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """The model that veRL would load."""
    return filled(auto_class(config), local_folder(model) or model, dtype=dtype).to(device)


def filled(
    model_class: type,
    *source: Any,
    wanted: Callable[[str], bool] = lambda name: True,
    shown: Callable[[str], str] = lambda name: name,
    **arguments: Any,
) -> PreTrainedModel:
    """``model_class.from_pretrained``, in which no wanted parameter is random.

    Args:
        source, arguments: go to it.
        wanted: whether the checkpoint has to have a parameter.
        shown: its name in messages.

    Raises:
        ValueError: weights that can't be read, are lacking or have other shapes than the config says.
    """
    with quiet_loading(), one_line("the weights can't be loaded"):
        # Mismatches are named below: the loader's own report of them is a table, and its error points there.
        model, found = model_class.from_pretrained(
            *source, **arguments, ignore_mismatched_sizes=True, output_loading_info=True
        )
    if mismatched := sorted((name, *map(tuple, shapes)) for name, *shapes in found["mismatched_keys"]):
        name, has, expected = mismatched[0]
        raise ValueError(f"model: expected {shown(name)} of shape {expected}, got {has}{_more(len(mismatched) - 1)}")
    if lacking := sorted(filter(wanted, found["missing_keys"])):
        names = ", ".join(map(shown, lacking[:3]))
        raise ValueError(f"model: the checkpoint lacks {names}{_more(len(lacking) - 3)}")
    use_runnable_experts(model)
    return model


@contextmanager
def one_line(what: str) -> Iterator[None]:
    """Within this context, what readers of files raise becomes a ValueError that says what failed, and why."""
    try:
        yield
    except (
        ArithmeticError,
        EOFError,
        KeyError,
        OSError,
        pickle.UnpicklingError,
        RuntimeError,
        SafetensorError,
        StrictDataclassError,
        TypeError,
        ValueError,
    ) as error:
        # What follows the first sentence is advice for other callers, or points to a report that isn't shown.
        reason = " ".join(str(error).split()).partition(". ")[0]
        raise ValueError(f"model: {what} ({type(error).__name__}{reason and ': '}{reason})") from error


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Within this context, transformers and the hub say only what is an error, and show no progress of their own."""
    logging, hub_logging = transformers.utils.logging, huggingface_hub.utils.logging
    verbosity, hub_verbosity = logging.get_verbosity(), hub_logging.get_verbosity()
    had_bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    hub_logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        hub_logging.set_verbosity(hub_verbosity)
        if had_bars:
            logging.enable_progress_bar()


def check_reachable(name: str, file: str = "config.json", argument: str = "model", folder: str = "checkpoint") -> None:
    """Ask the hub once for a file that isn't in the cache; the loaders ask six times, for half a minute.

    Args:
        name: on the hub.
        file: of it.
        argument, folder: what the user gave the name as, and what kind of folder could stand there, for the error.

    Raises:
        ValueError: it isn't there, or the hub can't be reached.
    """
    try:
        if not try_to_load_from_cache(name, file):
            get_hf_file_metadata(hf_hub_url(name, file))
    except (OSError, ValueError, httpx.HTTPError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{argument}: expected a {folder} folder or a name on a hub that can be reached, got {name!r} "
            f"({reason:.200})"
        ) from error


def _more(count: int) -> str:
    return " and more" * (count > 0)
