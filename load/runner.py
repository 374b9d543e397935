"""One run from options to files: read the trace, ask the gateway what it serves, replay, write, report."""

from __future__ import annotations

import asyncio
import platform
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from load import report
from load.client import GatewayClient, GatewayError, Model, Prompt, connect
from load.live import Progress, ReplayOptions, Stop, replay
from load.record import ResultError, RunInfo, RunWriter
from load.slo import percentile
from load.workload import prompts, traces
from shared.clock import SystemClock
from shared.errors import ModelError, UserError
from shared.models import resolve
from shared.settings import CommonSettings
from shared.settings import load as load_settings
from shared.units import format_seconds

_PROBE_WORDS = (16, 64)
_REFRESH_S = 0.25


class PromptKind(StrEnum):
    """What prompts are made of; ``auto`` takes token ids where the vocabulary's size is known, else text."""

    AUTO = "auto"
    TOKENS = "tokens"
    TEXT = "text"


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What `moonbus load run` was asked to do."""

    trace: Path
    url: str
    out: Path
    overwrite: bool
    limit: int | None
    block_tokens: int
    scaling: prompts.Scaling
    prompt_kind: PromptKind
    replay: ReplayOptions
    """An empty model means the first one the gateway names."""
    slo_ttft_s: float
    slo_tbt_s: float
    timeout_s: float
    ask_slo: bool = False
    """Tell the gateway the bounds, so that it turns away what it cannot serve within them."""


async def run(options: RunOptions, console: Console) -> None:
    """Replays and leaves ``run.json``, ``requests.jsonl`` and the report in ``options.out``.

    SIGINT and SIGTERM end it early, see :class:`load.live.Stop`. Raises :class:`shared.errors.UserError` with
    one line when the trace, the gateway or the folder cannot be used.
    """
    trace = traces.read(options.trace, limit=options.limit, block_tokens=options.block_tokens)
    clock = SystemClock()
    headers = {"x-moonbus-ttft-slo-ms": f"{options.slo_ttft_s * 1e3:g}",
               "x-moonbus-tbt-slo-ms": f"{options.slo_tbt_s * 1e3:g}"} if options.ask_slo else {}
    async with connect(options.url, clock=clock.monotonic, timeout_s=options.timeout_s, headers=headers) as client:
        model = _pick(await client.models(), options.replay.model, options.url)
        scaling = options.scaling
        if scaling.max_input is None and model.max_model_len is not None:
            room = model.max_model_len - (scaling.max_output or 0)
            if room < 1:
                raise UserError(f"--max-output is {scaling.max_output} and model {model.id} takes "
                                f"{model.max_model_len} tokens in all; give a smaller --max-output")
            scaling = replace(scaling, max_input=room)
        replay_options = replace(options.replay, model=model.id)
        contents = await _contents(client, options.prompt_kind, replay_options, model)
        plans = _planned(trace, scaling)
        info = RunInfo(
            source="live", trace=trace.name, url=options.url, model=model.id, api=replay_options.api,
            started_at_s=clock.wall(), rate_scale=replay_options.rate_scale, length_scale=scaling.length_scale,
            max_input=scaling.max_input, output_scale=scaling.output_scale, max_output=scaling.max_output,
            max_in_flight=replay_options.max_in_flight, seed=replay_options.seed, slo_ttft_s=options.slo_ttft_s,
            slo_tbt_s=options.slo_tbt_s, planned=len(plans), host=f"{platform.system()} {platform.machine()}",
            version=_version(),
        )
        progress, stop = Progress(), Stop()
        with RunWriter(options.out, overwrite=options.overwrite) as writer, _signals(stop):
            writer.info(info)
            shower = asyncio.create_task(_show(progress, len(plans), stop, console), name="progress")
            try:
                duration_s = await replay(client, plans, contents=contents, options=replay_options,
                                          clock=clock.monotonic, write=writer.row, progress=progress, stop=stop)
            except OSError as error:
                raise ResultError(f"cannot write to {options.out}: {error.strerror or error}; "
                                  "what was written before is kept") from error
            finally:
                shower.cancel()
                await asyncio.gather(shower, return_exceptions=True)
            writer.info(msgspec.structs.replace(info, duration_s=duration_s, interrupted=stop.sending.is_set()))
    report.write_report(options.out)


def _planned(trace: traces.Trace, scaling: prompts.Scaling) -> list[prompts.Plan]:
    try:
        planner = prompts.Planner(block_tokens=trace.block_tokens, scaling=scaling)
    except ValueError as error:
        raise UserError(f"--length-scale: {error}") from error
    return [planner.plan(arrival) for arrival in trace.arrivals]


def _pick(models: list[Model], wanted: str, url: str) -> Model:
    if not models:
        raise GatewayError(f"{url} serves no model yet; wait until a worker has registered "
                           "(`moonbus workers` lists them)")
    for model in models:
        if wanted in ("", model.id):
            return model
    raise GatewayError(f"{url} does not serve model {wanted}; it serves {', '.join(model.id for model in models)}")


async def _contents(client: GatewayClient, kind: PromptKind, options: ReplayOptions,
                    model: Model) -> Callable[[prompts.Plan], Prompt]:
    """How plans become prompts for this gateway."""
    vocab_size = None
    if options.api == "completions" and kind is not PromptKind.TEXT:
        vocab_size = model.vocab_size or _local_vocab(model.id)
        if vocab_size is None and kind is PromptKind.TOKENS:
            raise GatewayError(f"the gateway does not tell the vocabulary of {model.id} and the model is not in "
                               "the cache directory here; use --prompt text")
    if vocab_size is not None:
        # The middle half: special tokens sit at either end of a vocabulary.
        vocabulary = range(vocab_size // 4, max(vocab_size * 3 // 4, vocab_size // 4 + 1))
        return partial(prompts.token_ids, vocabulary=vocabulary, seed=options.seed)
    samples: list[tuple[int, int]] = []
    for num_words in _PROBE_WORDS:
        answer = await client.stream(options.api, model=model.id, prompt=prompts.probe_text(num_words), max_tokens=1)
        if not answer.ok or answer.prompt_tokens is None:
            raise GatewayError("the request that measures tokens per word did not succeed: "
                               f"{answer.code or answer.status} {answer.message or 'no usage in the stream'}")
        samples.append((num_words, answer.prompt_tokens))
    return partial(prompts.text, words_per_token=prompts.words_per_token(samples), seed=options.seed)


def _local_vocab(name: str) -> int | None:
    """The vocabulary's size from the model's files, when they lie in the cache directory here."""
    try:
        return resolve(name, load_settings(CommonSettings, "load").cache_path()).vocab
    except ModelError:
        return None  # served from elsewhere


@contextmanager
def _signals(stop: Stop) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.press)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


async def _show(progress: Progress, planned: int, stop: Stop, console: Console) -> None:
    """Keeps the progress line true until cancelled."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[detail]}"),
               TimeElapsedColumn())
    with Bar(*columns, console=console) as bar:
        task = bar.add_task("replaying", total=planned, detail="")
        try:
            while True:
                if stop.everything.is_set():
                    bar.update(task, description="cancelling")
                elif stop.sending.is_set():
                    bar.update(task, description="finishing; Ctrl-C again cancels")
                bar.update(task, completed=progress.done, detail=_detail(progress))
                await asyncio.sleep(_REFRESH_S)
        finally:
            bar.update(task, completed=progress.done, detail=_detail(progress))


def _detail(progress: Progress) -> str:
    median = format_seconds(percentile(list(progress.recent_ttft_s), 50)) if progress.recent_ttft_s else "–"
    lost = progress.outcomes["failed"] + progress.outcomes["dropped"]
    return (f"sent {progress.sent}  in flight {progress.in_flight}  rejected {progress.outcomes['rejected']}  "
            f"lost {lost}  TTFT p50 {median}")


def _version() -> str:
    try:
        return version("moonbus")
    except PackageNotFoundError:
        return "(not installed)"  # run from a checkout
