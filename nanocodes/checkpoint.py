"""Checkpoints on disk: the step folders of a run, written whole, checked, and read.

A run folder out/<run>/ holds config.json, tokenizer.json, metrics.jsonl, loss.png and a folder
step_<8 digits> for each checkpoint, named after its number of updates:

    model.safetensors    the parameters, under the names of Transformer's state_dict
    training_state.pt    the optimizer's state
    config.json          all fields of the config
    state.json           the number of updates, hashes, and the sha256 of the three other files
"""

import hashlib
import os
import shutil
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from nanocodes.files import read_json, sha256, write_json

FILES = ("model.safetensors", "training_state.pt", "config.json")


def backbone_hash(model):
    """sha256 of all parameters but the input's: equal for all input layers at one init_seed."""
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        if not name.startswith("input."):
            digest.update(weight.detach().cpu().view(torch.uint8).numpy())
    return digest.hexdigest()


# ---------------- Find and read


def step_folders(run):
    """The step folders of a run folder, oldest first."""
    return sorted(Path(run).glob("step_" + "[0-9]" * 8))


def find_checkpoint(path):
    """The step folder that `path` means: itself, or the newest in a run folder."""
    for step in [Path(path), *reversed(step_folders(path))]:
        if (step / "model.safetensors").is_file():
            return step
    raise ValueError(f"{path} holds no checkpoint; give a run folder or a step folder in one")


@contextmanager
def refused_unless_whole(step):
    """Whatever a missing, torn or strange file raises in the body becomes one refusal."""
    try:
        yield
    except Exception as error:  # there is no end to what a stranger's file may raise
        raise ValueError(f"{step} is no whole checkpoint ({error}); use another") from None


def read_weights(step, model):
    """The weights of a step folder, a state_dict that fits this model, which may be on "meta"."""
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    with safe_open(step / "model.safetensors", "pt") as file:
        saved_shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}
        if saved_shapes != shapes:
            raise ValueError("the weights do not have the shapes of config.json")
        weights = {name: file.get_tensor(name) for name in shapes}
    for weight in weights.values():
        if not (weight.is_floating_point() and weight.abs().max() < torch.inf):
            raise ValueError("some weights are no floats, or not finite")
    return weights


def read_optimizer_state(step, optimizer):
    """Load the optimizer's state of a step folder, made for parameters of the same shapes."""
    with refused_unless_whole(step):
        state = torch.load(step / "training_state.pt", "cpu", weights_only=True)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for number, values in state["state"].items():
            for name, value in values.items():
                if name != "step" and value.shape != parameters[number].shape:
                    raise ValueError(f"{name} {number} of the optimizer is of another shape")
        optimizer.load_state_dict(state)


# ---------------- Write


def save_checkpoint(model, optimizer, run, config, state, keep):
    """Write the step folder of state["update"], then remove all but the newest `keep`.

    `config` and `state` are dicts for the two JSON files; keep <= 0 keeps all. The folder gets
    its name only when everything is on the disk. Raises ValueError if there is no room.
    """
    step = Path(run) / f"step_{state['update']:08d}"
    partial = step.with_name(step.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        save_file(model.state_dict(), partial / "model.safetensors")
        torch.save(optimizer.state_dict(), partial / "training_state.pt")
    except (SafetensorError, RuntimeError) as error:
        shutil.rmtree(partial)
        raise ValueError(f"{step} cannot be written ({error}); make room, then --resume") from None
    write_json(partial / "config.json", config)
    write_json(partial / "state.json", state | {"sha256": file_hashes(partial)})
    for path in partial.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    os.replace(partial, step)
    if keep > 0:
        for old in step_folders(run)[:-keep]:
            shutil.rmtree(old)


def file_hashes(step):
    """The sha256 of every file of a checkpoint but state.json, as state.json holds them."""
    return {name: sha256(step / name) for name in FILES}


# ---------------- Resume


def is_intact(step):
    """Whether all files of a step folder are as save_checkpoint wrote them."""
    with suppress(FileNotFoundError, ValueError, KeyError, TypeError):
        state = read_json(step / "state.json")
        expected = {"update": int(step.name.removeprefix("step_")), "sha256": file_hashes(step)}
        # repr tells 1 from True and 1.0, which are equal
        is_same = all(repr(state[key]) == repr(value) for key, value in expected.items())
        return is_same and {"backbone_hash", "data_sha256"} <= state.keys()
    return False


def newest_intact_step(run, differences):
    """The newest intact step folder for which differences(step) is empty, or None.

    `differences` gives the fields, as text, in which a step's config is not that of the run. Steps
    passed over are renamed, so that they neither count as checkpoints nor are lost. Raises
    ValueError, and renames none, if there are intact steps and all of them are of other configs.
    """
    passed_over = []
    others = []  # sentences on intact steps of other configs
    found = None
    for step in reversed(step_folders(run)):
        if is_intact(step):
            different = differences(step)
            if not different:
                found = step
                break
            others.append(f"{step} was made with {', '.join(different)}; change that back")
        passed_over.append(step)
    if found is None and others:
        raise ValueError(others[0])
    for step in passed_over:
        print(f"passing over {step}: its files are not as they were saved; set aside as .damaged")
        step.rename(f"{step}.damaged-{time.time_ns()}")
    return found
