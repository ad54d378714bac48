"""The decode loop: prefill, one region call a token, deferred stop check, and what transformers would return.

`sample` stands where transformers' own sampling loop stands and honours its contract. It chooses once, before the first
token: a region or the original path. Whatever fails later ends in `recovery`, in the same call.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import torch

from hepatch import generate_call, probes, ranges
from hepatch.call_log import logged
from hepatch.errors import FailedError, HepatchError
from hepatch.facts import Call
from hepatch.guards import judge
from hepatch.readback import Outcome, Readback, WatchedStreamer
from hepatch.recovery import finish_eagerly, start_again
from hepatch.region_store import RegionKey
from hepatch.report import LastCall, logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from hepatch.attachments import Attachment
    from hepatch.backends import KV
    from hepatch.generate_call import GenerateCall
    from hepatch.region import Region
    from hepatch.region_store import Lease
    from hepatch.step_state import StepState


def one_at_a_time(decoding: Callable[..., Any]) -> Callable[..., Any]:
    """Makes threads that generate with one engine take turns.

    While a region serves, the model's modules are not what they are at other times, for every thread.
    """

    @functools.wraps(decoding)
    def alone(
        original: Callable[..., Any],
        attachment: Attachment,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *more: Any,
    ) -> Any:
        if kwargs.get("streamer") is not None:
            kwargs = {**kwargs, "streamer": WatchedStreamer(kwargs["streamer"], attachment.lock)}
        with attachment.lock:
            return decoding(original, attachment, args, kwargs, *more)

    return alone


@logged
@one_at_a_time
def sample(original: Callable[..., Any], attachment: Attachment, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs one call of ``GenerationMixin._sample``.

    Args:
        original: transformers' own loop, bound to the model that generates.
        attachment: of the engine that owns the model.
        args: positional arguments.
        kwargs: keyword arguments.

    Returns:
        What `original` would return.

    Raises:
        RefusedError, FailedError: under `HEPATCH_STRICT=1`, instead of going on eagerly.
    """
    try:
        call = generate_call.read(original, args, kwargs)
        reason = _reason_for_eager(attachment, call)
    except HepatchError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, the original path serves the call
        # A model or an argument that this code does not know how to read. Nothing has been done yet.
        attachment.unreadable(error)
        with attachment.backend.own_layers():
            return original(*args, **kwargs)
    if reason is None:
        with attachment.in_use():
            return _Run(attachment, original, call).generate()
    attachment.counters.eager_calls += 1
    with attachment.backend.own_layers():
        result = original(*args, **kwargs)
    attachment.last_call = _last_call(call.input_ids, result, "eager", reason, region_steps=0)
    return result


@logged
@one_at_a_time
def watch(
    original: Callable[..., Any], attachment: Attachment, args: tuple[Any, ...], kwargs: dict[str, Any], mode: str
) -> Any:
    """Runs a decoding loop that a region has no part in, and takes note of it for the report.

    Args:
        original: the loop, bound to the model that generates.
        attachment: of the engine that owns the model.
        args: positional arguments; the prompt comes first.
        kwargs: keyword arguments.
        mode: what the loop is, as a phrase.

    Raises:
        RefusedError: under `HEPATCH_STRICT=1`.
    """
    prompt = args[0] if args else kwargs.get("input_ids")
    if prompt is None:
        with attachment.backend.own_layers():
            return original(*args, **kwargs)
    try:
        call = Call(training=attachment.training, total_tokens=0, unsupported=(mode,))
        reason = attachment.refuse(judge(attachment.facts(call)))
    except HepatchError:
        raise
    except Exception as error:  # noqa: BLE001 - as in `sample`: what cannot be judged is still the user's call
        attachment.unreadable(error)
        with attachment.backend.own_layers():
            return original(*args, **kwargs)
    attachment.counters.eager_calls += 1
    with attachment.backend.own_layers():
        result = original(*args, **kwargs)
    attachment.last_call = _last_call(prompt, result, "eager", reason, region_steps=0)
    return result


def _reason_for_eager(attachment: Attachment, call: GenerateCall) -> str | None:
    """The guards' answer; None means that a region may run."""
    total = max(call.max_length, call.input_ids.shape[-1])
    facts = attachment.facts(
        Call(
            training=attachment.training,
            total_tokens=total,
            unsupported=(*call.unsupported, *attachment.unsupported(call.model_kwargs)),
            rows=call.input_ids.shape[0],
            prompt_tokens=call.input_ids.shape[-1],
        ),
        needed_bytes=attachment.needed_bytes(call.input_ids.shape[0], total) if not call.unsupported else 0,
    )
    refusals = judge(facts)
    if not refusals and attachment.forward is None:
        attachment.admit()
        # Admission may have found an obstacle, which is a fact like any other.
        refusals = judge(attachment.facts(facts.call))
    return attachment.refuse(refusals) if refusals else None


class _Run:
    """One call through a region."""

    def __init__(self, attachment: Attachment, original: Callable[..., Any], call: GenerateCall) -> None:
        self.attachment = attachment
        self.original = original
        self.call = call
        self.region_steps = 0
        self.known = call.prompt
        self.scores: list[torch.Tensor] = []
        self.logits: list[torch.Tensor] = []
        self.readback: Readback | None = None
        self.streamer: WatchedStreamer | None = call.streamer
        if self.streamer is not None and not isinstance(self.streamer, WatchedStreamer):
            # Not by keyword, as generate passes it.
            self.streamer = WatchedStreamer(call.streamer, attachment.lock)
        self.lease: Lease
        # Of this call also where a streamer releases the engine's in its middle.
        self.kv: KV | None = None
        self.state: StepState | None = None
        self.region: Region | None = None
        # The caller's own, where generate is called while one is handled.
        self.handled = sys.exc_info()[1]
        self._answer: Any = None

    def generate(self) -> Any:
        """The whole call, from prompt to result."""
        doing = "prefill over the static cache"
        try:
            # Buffers that are born under inference mode could not be written outside it;
            # and a region is compiled for one mode.
            with torch.inference_mode(False), torch.no_grad(), self.attachment.backend.serving():
                self._prefill()
                doing = "a decode step"
                outcome = self._decode()
                doing = "reading the result"
                self._settle()
                if outcome.is_clean:
                    return self._result(outcome)
                self.known = outcome.broken - 1
        except BaseException as error:
            if self.region is not None:
                self.region.put_back()
            if not isinstance(error, Exception):
                raise
            return self._recover(error, doing)
        return self._finish_eagerly("scores that are no distribution (NaN or infinity)")

    def _prefill(self) -> None:
        """Runs the prompt and chooses its token."""
        attachment, call = self.attachment, self.call
        assert call.request is not None
        region, self.lease = attachment.ready(call.request, (call.batch, call.prompt, call.max_length))
        kv, state, forward = attachment.kv, attachment.state, attachment.forward
        self.kv, self.state = kv, state
        assert kv is not None
        assert state is not None
        assert forward is not None
        prompt = call.prompt_on(state.device)
        self._turn()
        with ranges.prompt(call.batch, call.prompt):
            last = forward.prefill(kv, prompt)
        # Not sooner: it knows the model of an earlier call until then, and would put back what is no longer there.
        self.region = region
        attachment.refresh(region)
        self._turn()
        state.begin(prompt.ids, prompt.mask, prompt.positions, call.request.ignored)
        # The prompt's token is chosen eagerly by the code that the region compiles.
        # Rows that pad the key up have ended already.
        logits = pad_rows(last.float(), self.lease.rows)
        self._draw()
        scores = region.chooser.process(state.tokens_so_far(), logits)
        state.record(*region.chooser.choose(scores, state.noise, state.finished))
        self._keep(logits, scores)
        self.readback = Readback(
            state, call.batch, attachment.settings.stop_check_steps, self.streamer, shown=call.prompt
        )
        self.known = call.prompt + 1

    def _turn(self) -> None:
        """Makes the faces current that hold the whole call."""
        assert self.kv is not None
        assert self.state is not None
        window = self.lease.window(self.call.max_length)
        self.kv.turn(self.lease.rows, window)
        self.state.turn(self.lease.rows, window)

    def _draw(self) -> None:
        """Fresh noise for the next token, from torch's default generator; nothing where nothing is sampled."""
        state = self.state
        assert state is not None
        if state.noise is not None:
            # Only the caller's rows: how a key is padded must not move the generator.
            state.noise[: self.call.batch].exponential_()

    def _keep(self, logits: torch.Tensor | None, scores: torch.Tensor | None) -> None:
        """Copies what the caller wants of a step; the buffers are overwritten by the next."""
        assert self.call.request is not None
        selection, batch = self.call.request.selection, self.call.batch
        if selection.scores and scores is not None:
            self.scores.append(scores[:batch].clone())
        if selection.logits and logits is not None:
            self.logits.append(logits[:batch].clone())

    def _decode(self) -> Outcome:
        """Runs steps until every row has ended or the length is reached."""
        call, readback, lease, state, region = self.call, self.readback, self.lease, self.state, self.region
        assert region is not None
        assert state is not None
        assert readback is not None
        outcome = readback.after_step()
        run = ranges.steps(region)
        while self.known < call.max_length and not outcome.stops:
            self._draw()
            self.region_steps += run(RegionKey(lease.rows, lease.window(self.known + 1)))
            self._keep(state.logits, state.scores)
            self.known += 1
            outcome = readback.after_step()
        return outcome if outcome.stops else readback.finish()

    def _settle(self) -> None:
        assert self.region is not None
        self.region.settle()

    def _result(self, outcome: Outcome) -> Any:
        """What transformers would return, trimmed to where every row had ended."""
        call, state = self.call, self.state
        assert state is not None
        length = outcome.ended or self.known
        # The faces that are current need not hold the whole call: the region turns them as it likes.
        self._turn()
        # A copy: the caller's result must not change with later calls.
        sequences = state.sequences(call.batch, length).to(call.input_ids.device)
        result: Any = sequences
        if call.wants_dict:
            new = length - call.prompt
            assert call.request is not None
            selection = call.request.selection
            result = probes.generate_output(
                sequences,
                scores=tuple(self.scores[:new]) if selection.scores else None,
                logits=tuple(self.logits[:new]) if selection.logits else None,
                cache=self._returned_cache(sequences),
            )
        if self.streamer is not None:
            self.streamer.end()
        self.attachment.last_call = _last_call(call.input_ids, result, "fused", None, self.region_steps)
        return result

    def _returned_cache(self, sequences: torch.Tensor) -> Any:
        call, forward, state = self.call, self.attachment.forward, self.state
        assert forward is not None
        assert state is not None
        return forward.returned_cache(self.kv, call.prompt_on(state.device), sequences.to(state.device))

    def _recover(self, error: Exception, doing: str) -> Any:
        attachment = self.attachment
        if self.streamer is not None and self.streamer.raised is error:
            raise error
        if attachment.settings.strict:
            attachment.fail(error, doing)
            raise FailedError(
                f"hepatch: {doing} failed for {attachment.name}, and HEPATCH_STRICT=1 forbids to go on"
            ) from error
        # Where the original fails too the fault is the caller's, and what it raises is for the caller.
        needs_memory = isinstance(error, torch.OutOfMemoryError)
        if needs_memory:
            _let_go(error, self.handled)
        result = self._finish_eagerly(f"{doing} failed with {type(error).__name__}", needs_memory)
        attachment.fail(error, doing)
        return result

    def _finish_eagerly(self, reason: str, needs_memory: bool = False) -> Any:
        """Ends the call on the original path, from the tokens that are certain."""
        call, state = self.call, self.state
        ids, certain, seen = call.input_ids, self._certain(), 0
        if certain > call.prompt and state is not None:
            self._turn()
            ids = state.sequences(call.batch, certain).to(call.input_ids.device)
        new = certain - call.prompt
        self.attachment.counters.recoveries += 1
        if not needs_memory and self._start_again(ids, reason):
            return self._answer
        if self.streamer is not None:
            shown = call.prompt + self.streamer.puts
            for column in range(shown, certain):
                self.streamer.put(ids[:, column].cpu())
            seen = max(0, shown - certain)
        if needs_memory:
            self.kv = self.state = self.region = self.readback = None
            # Freed now, not at the next collection: the original is about to need it.
            self.attachment.release()
        with self.attachment.backend.own_layers():
            result = finish_eagerly(self.original, call, ids, self.scores[:new], self.logits[:new], seen)
        self.attachment.last_call = _last_call(call.input_ids, result, "eager", reason, self.region_steps)
        return result

    def _start_again(self, ids: torch.Tensor, reason: str) -> bool:
        """Where the backend can, lets transformers' loop make `_answer` from the prompt on, by what a region would run.

        Args:
            ids: int64 `[batch, known]`, prompt and certain tokens.
            reason: for the record.
        """
        call = self.call
        decoding = self.attachment.backend.from_the_prompt(call, self.streamer)
        if decoding is None:
            return False
        seen = 0 if self.streamer is None else self.streamer.puts
        try:
            with decoding as streamer:
                self._answer = start_again(
                    self.original, call, ids, self.scores[: ids.shape[1] - call.prompt], streamer, seen
                )
        except Exception as error:
            if self.streamer is not None and self.streamer.raised is error:
                raise
            logger.debug("hepatch: that fails outside a region too; the model's own layers go on", exc_info=error)
            return False
        self.attachment.last_call = _last_call(call.input_ids, self._answer, "eager", reason, self.region_steps)
        return True

    def _certain(self) -> int:
        """How long a sequence the original is to go on from."""
        state = self.state
        ended = 0 if state is None or self.known == self.call.prompt else int(state.status[0])
        if not 0 < ended <= self.known:
            ended = self.call.max_length
        # The original makes a token before it looks whether any is wanted, so the last of a call is its own.
        return min(self.known, ended - 1)


def _last_call(prompt: torch.Tensor, result: Any, path: Any, reason: str | None, region_steps: int) -> LastCall:
    """The record of a call for the report."""
    columns = int(prompt.shape[-1])
    new = int(getattr(result, "sequences", result).shape[-1]) - columns
    return LastCall(
        path=path,
        reason=reason,
        prompt_tokens=columns,
        new_tokens=new,
        region_steps=region_steps,
        eager_steps=max(0, new - region_steps),
    )


def _let_go(error: BaseException, callers: BaseException | None) -> None:
    """Takes the tracebacks off an error: their frames hold what has failed, activations and KV cache among it.

    Args:
        error: what was raised in this call.
        callers: what was handled when the call began, which ends the chain of contexts and stays as it is.
    """
    logger.debug("hepatch: out of memory; the traceback of that", exc_info=error)
    chained: list[BaseException | None] = [error]
    while chained:
        each = chained.pop()
        # Without a traceback it was met before: a chain may be a circle.
        if each is not None and each is not callers and each.__traceback__ is not None:
            each.__traceback__ = None
            chained += [each.__cause__, each.__context__]


def pad_rows(logits: torch.Tensor, rows: int) -> torch.Tensor:
    """Logits `[batch, vocabulary]` with rows of zeros behind them, `[rows, vocabulary]`."""
    return torch.nn.functional.pad(logits, (0, 0, 0, rows - logits.shape[0]))
