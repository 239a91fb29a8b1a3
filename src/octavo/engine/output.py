"""From sampled tokens to text, streamed pieces and finished outputs; finds stop strings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from octavo.engine.request import Request, Sequence
from octavo.engine.sampler import SamplerOutput
from octavo.engine.schedule import Schedule
from octavo.engine.scheduler import Scheduler
from octavo.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, StreamChunk
from octavo.text.detokenizer import Detokenizer
from octavo.text.stop import StopChecker
from octavo.text.tokenizer import Tokenizer


class _SequenceText:
    """The visible text of one sequence as it grows."""

    __slots__ = ("checker", "detokenizer", "pieces")

    def __init__(self, seq: Sequence, tokenizer: Tokenizer) -> None:
        params = seq.params
        self.detokenizer = Detokenizer(
            tokenizer,
            prompt_token_ids=seq.request.prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
        )
        self.checker = StopChecker(params.stop, include=params.include_stop_str_in_output)
        self.pieces: list[str] = []

    def push(self, token_ids: list[int], *, may_stop: bool) -> tuple[str, str | None]:
        """New visible text, and the stop string that ended it; see `StopChecker.push`."""
        return self.checker.push(self.detokenizer.push(token_ids), may_stop=may_stop)

    def finish(self) -> tuple[str, str | None]:
        """The text held back so far; the flushed tail may still complete a stop string."""
        visible, stop = self.checker.push(self.detokenizer.finish())
        return (visible, stop) if stop is not None else (visible + self.checker.finish(), None)


class OutputProcessor:
    """Turns the tokens of a step into text. Without a tokenizer every text is empty."""

    def __init__(self, scheduler: Scheduler, tokenizer: Tokenizer | None) -> None:
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._texts: dict[int, _SequenceText] = {}

    def process(
        self, plan: Schedule, sampled: SamplerOutput, counting: list[int], now: float
    ) -> list[Request]:
        """Text, stop strings and outputs of the samples that count, which were committed; returns the
        requests with news."""
        changed: dict[str, Request] = {}
        ended: dict[str, Request] = {}
        sequences, token_ids, logprobs, errors = (
            plan.sampled, sampled.token_ids, sampled.logprobs, sampled.errors,
        )  # fmt: skip
        for j in counting:
            seq = sequences[j]
            request = seq.request
            changed[request.request_id] = request
            if errors and (error := errors.get(j)) is not None:
                self._fail(seq, error)
            else:
                if request.first_token_s is None:
                    request.first_token_s = now
                if logprobs[j] is not None:
                    self._add_logprobs(seq, logprobs[j])
                self._emit(seq, [token_ids[j]])
            if seq.finish_reason is not None:
                ended[request.request_id] = request
        self._end_finished(ended.values(), now)
        return list(changed.values())

    def fail(self, request: Request, error: str, now: float, *, even_finished: bool = False) -> None:
        """End what is unfinished of a request with an error that its output carries.

        `even_finished`: the step broke after its tokens were committed, so that a sequence may have ended
        without its last text or log probabilities; those tokens are taken back.
        """
        for seq in request.sequences:
            if seq.finish_reason is not None and not even_finished:
                continue
            if seq.logprobs is not None:
                del seq.token_ids[seq.num_prompt_tokens + len(seq.logprobs) :]
                del seq.logprobs[len(seq.token_ids) - seq.num_prompt_tokens :]
            self._scheduler.finish(seq, "error")
            seq.finish_reason, seq.stop_reason, seq.error = "error", None, error
            self._emit(seq, [])
        self._end_finished([request], now)

    def abort(self, request: Request, now: float) -> None:
        """End a request as aborted; its output holds what was generated so far."""
        for seq in request.sequences:
            if seq.finish_reason is None:
                self._scheduler.finish(seq, "abort")
                self._emit(seq, [])
        self._end_finished([request], now)

    def _fail(self, seq: Sequence, error: str) -> None:
        seq.error = error
        self._scheduler.finish(seq, "error")
        self._emit(seq, [])

    def _emit(self, seq: Sequence, token_ids: list[int]) -> None:
        visible = self._new_text(seq, token_ids)
        if seq.request.stream:
            logprobs = seq.logprobs[-len(token_ids) :] if seq.logprobs and token_ids else None
            seq.request.chunks.append(
                StreamChunk(
                    seq.index,
                    visible,
                    token_ids,
                    seq.finish_reason,
                    seq.stop_reason,
                    logprobs,
                    error=seq.error,
                )
            )

    def _end_finished(self, requests: Iterable[Request], now: float) -> None:
        # Only when every sequence of the step has its text: siblings may end in the same step.
        for request in requests:
            if not request.is_finished or request.output is not None:
                continue
            request.finished_s = now
            request.output = self._request_output(request)
            if request.stream:
                request.chunks[-1] = replace(request.chunks[-1], output=request.output)

    def _new_text(self, seq: Sequence, token_ids: list[int]) -> str:
        if self._tokenizer is None:
            return ""
        text = self._texts.get(seq.seq_id)
        if text is None:
            text = self._texts[seq.seq_id] = _SequenceText(seq, self._tokenizer)
        params = seq.params
        # The token that ended a sequence is not part of its text, unless asked for.
        if (
            seq.finish_reason == "stop"
            and not params.include_stop_str_in_output
            and not seq.stop_ids.isdisjoint(token_ids)  # a grammar's last token is its text
        ):
            token_ids = []
        num_output_tokens = len(seq.token_ids) - seq.num_prompt_tokens
        visible, stop = text.push(token_ids, may_stop=num_output_tokens >= params.min_tokens)
        if stop is None and seq.finish_reason is not None:
            tail, late_stop = text.finish()
            visible += tail
            stop = late_stop if seq.finish_reason in ("stop", "length") else None
        if stop is not None:
            self._scheduler.finish(seq, "stop", stop)
            seq.finish_reason, seq.stop_reason = "stop", stop
        if visible:
            text.pieces.append(visible)
        return visible

    def _add_logprobs(self, seq: Sequence, logprobs: dict[int, Logprob] | None) -> None:
        if logprobs is not None:
            if seq.logprobs is None:
                seq.logprobs = []
            seq.logprobs.append(self._decoded(logprobs))

    def _decoded(self, logprobs: dict[int, Logprob]) -> dict[int, Logprob]:
        if self._tokenizer is None:
            return logprobs
        text = self._tokenizer.token_text
        return {
            token_id: Logprob(entry.logprob, entry.rank, text(token_id))
            for token_id, entry in logprobs.items()
        }

    def _request_output(self, request: Request) -> RequestOutput:
        prompt_logprobs = request.prompt_logprobs
        if prompt_logprobs is not None:
            prompt_logprobs = [entry and self._decoded(entry) for entry in prompt_logprobs]
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[self._completion(seq) for seq in request.sequences],
            num_cached_tokens=request.num_cached_tokens,
            metrics=_metrics(request),
            prompt_logprobs=prompt_logprobs,
            error=next((seq.error for seq in request.sequences if seq.error), None),
        )

    def _completion(self, seq: Sequence) -> CompletionOutput:
        text = self._texts.pop(seq.seq_id, None)
        token_ids = seq.output_token_ids
        cumulative = None
        if seq.logprobs is not None:
            cumulative = sum(
                entry[token_id].logprob for entry, token_id in zip(seq.logprobs, token_ids, strict=True)
            )
        return CompletionOutput(
            index=seq.index,
            text="".join(text.pieces) if text else "",
            token_ids=token_ids,
            finish_reason=seq.finish_reason,
            stop_reason=seq.stop_reason,
            logprobs=seq.logprobs,
            cumulative_logprob=cumulative,
        )


def _metrics(request: Request) -> RequestMetrics:
    arrival, first, end = request.arrival_s, request.first_token_s, request.finished_s
    assert end is not None
    num_later_tokens = max(len(seq.output_token_ids) for seq in request.sequences) - 1
    return RequestMetrics(
        queue_s=None if request.first_scheduled_s is None else request.first_scheduled_s - arrival,
        ttft_s=None if first is None else first - arrival,
        tpot_s=(end - first) / num_later_tokens if first is not None and num_later_tokens > 0 else None,
        e2e_s=end - arrival,
        num_preemptions=request.num_preemptions,
    )
