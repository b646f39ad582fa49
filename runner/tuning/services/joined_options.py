"""Whether a service that is joined trains as `tune()` was told: what differs is refused, or said."""

from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

from tuneloop.runner.errors import TuneRefused
from tuneloop.runner.tuning.config import OF_GROUPS, AlgorithmConfig, TunerModelConfig

#: What a service says of itself, by our names; nothing from one that is older than that.
Configured = Mapping[str, Any]


def compare_options(
    url: str, configured: Configured, algorithm: AlgorithmConfig | None, model: TunerModelConfig | None
) -> list[str]:
    """A sentence for each option that has no effect there. Raises TuneRefused if something else would be trained."""
    if not configured:
        return []
    refused = [*_other_algorithm(configured, algorithm), *_other_weights(configured, model)]
    if refused:
        raise TuneRefused(f"the service at {url} {'; and it '.join(refused)}")
    differences = [*_other_steps(configured, algorithm), *_other_model(configured, model)]
    return [f"the service at {url} {each}" for each in differences]


def _other_algorithm(configured: Configured, algorithm: AlgorithmConfig | None) -> Iterator[str]:
    here = configured["algorithm_type"]
    if algorithm is not None and here != algorithm.algorithm_type:
        yield (
            f"trains by {here}, not by {algorithm.algorithm_type}: say AlgorithmConfig(algorithm_type={here!r}), or "
            f"start it with algorithm.algorithm_type: {algorithm.algorithm_type}"
        )


def _other_weights(configured: Configured, model: TunerModelConfig | None) -> Iterator[str]:
    if model is None:
        return
    rank = model.tinker_config.rank if model.tinker_config else None
    here = configured["lora_rank"]
    if rank != here:
        trained, wanted = _weights(here), _weights(rank)
        yield f"trains {trained}, not {wanted}: say so in tinker_config, or start it with model.lora.rank: {rank or 0}"


def _weights(rank: int | None) -> str:
    return f"an adapter of rank {rank}" if rank else "all weights"


def _other_steps(configured: Configured, algorithm: AlgorithmConfig | None) -> Iterator[str]:
    if algorithm is None:
        return
    rate, runs = algorithm.learning_rate, algorithm.batch_size * algorithm.group_size
    rows = configured["train_batch_size"]
    if configured["learning_rate"] != rate:
        yield f"has the learning rate {configured['learning_rate']:g}: learning_rate {rate:g} has no effect"
    if algorithm.algorithm_type in OF_GROUPS and configured["group_size"] != algorithm.group_size:
        yield (
            f"compares {configured['group_size'] or 'no'} runs of a task (buffer.group_size), and group_size is "
            f"{algorithm.group_size}: groups are cut, or wait for buffer.group_timeout"
        )
    if configured["batch_timeout"] is None and rows > runs:
        yield (
            f"waits for {rows} experiences (buffer.train_batch_size), and a step has {runs} runs: it may make one "
            "version of several steps; set buffer.batch_timeout"
        )
    if rows < runs:
        yield f"makes several versions of a step of {runs} runs: its buffer.train_batch_size is {rows}"
    if configured["save_interval"] > 1:
        yield f"publishes every {configured['save_interval']}th of its steps (trainer.save_interval)"


def _other_model(configured: Configured, model: TunerModelConfig | None) -> Iterator[str]:
    if model is None:
        return
    if configured["model"] != (folder := PurePath(model.model_path).name):
        yield f"trains {configured['model']}: model_path {folder} has no effect"
    here = configured["max_model_len"]
    if here is not None and model.max_model_len is not None and here < model.max_model_len:
        yield f"takes {here} tokens: max_model_len {model.max_model_len} has no effect"
