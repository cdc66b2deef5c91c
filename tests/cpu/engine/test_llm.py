"""LLM, EngineRunner and the command line. Tests that expect a specific answer use the default model, SmolLM2."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("tokenizers")
pytest.importorskip("gguf")

from kvtier.cache.config import CacheConfig
from kvtier.cli.main import main
from kvtier.engine.engine import Engine, EngineConfig
from kvtier.engine.llm import LLM
from kvtier.engine.runner import EngineRunner
from kvtier.engine.sampling import SamplingParams
from kvtier.engine.sequence import FinishReason
from kvtier.errors import ArgumentError, CheckpointError, ClosedError
from scheduler_support import check_scheduler

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=1900, ignore_eos=True)
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def llm(tiny_model):
    instance = LLM(tiny_model, EngineConfig(16, CacheConfig(256)))
    yield instance
    instance.close()


def test_llm_answers_correctly_and_caches_the_prompt():
    with contextlib.closing(LLM(config=EngineConfig(16, CacheConfig(256)))) as llm:
        first, again = (llm.chat(QUESTION, SamplingParams(temperature=0.0, max_tokens=12)) for _ in range(2))
    assert first.text == again.text == "The capital of France is Paris."
    assert first.finish_reason is FinishReason.STOP
    assert first.num_prompt_tokens == 37
    assert again.num_cached_tokens >= 32


def test_llm_generate_uses_separate_params_for_each_prompt(llm):
    params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in (3, 1, 2)]
    answers = llm.generate(["One", "Two", "Three"], params)
    assert [len(each[0].token_ids) for each in answers] == [3, 1, 2]
    assert [each[0].finish_reason for each in answers] == [FinishReason.LENGTH] * 3
    with pytest.raises(ArgumentError, match="2 prompts and 1 SamplingParams"):
        llm.generate(["One", "Two"], params[:1])


def test_llm_accepts_single_prompt_as_text_or_token_ids(llm):
    tokens = llm.tokenizer.encode("Once upon")
    assert llm.generate("Once upon", GREEDY)[0][0].text == llm.generate(tokens, GREEDY)[0][0].text


def test_prompt_of_invalid_token_ids_raises(llm):
    for wrong in ([1.7, 2.0], [[1, 2], [3, 4]], [-1], [10**6]):
        with pytest.raises(ArgumentError, match=r"integers|token ids must be"):
            llm.engine.add(wrong, GREEDY)
    assert not llm.engine.has_work()


def test_invalid_prompt_cancels_all_requests_of_its_call(llm):
    with pytest.raises(ArgumentError, match="prompt is empty"):
        llm.generate(["One", []], GREEDY)
    assert not llm.engine.has_work()


def test_llm_answers_concurrent_threads_correctly(llm):
    prompts = [f"The number {number} is" for number in range(4)]
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    expected = [each[0].token_ids for each in llm.generate(prompts, params)]
    start = threading.Barrier(4)

    def generate(prompt):
        start.wait()
        return [llm.generate(prompt, params)[0][0].token_ids for _ in range(2)]

    with ThreadPoolExecutor(4) as threads:
        actual = list(threads.map(generate, prompts))
    assert actual == [[each] * 2 for each in expected]
    assert not llm.engine.has_work()


class InterruptsMain:
    """A constraint that forbids special tokens and interrupts the main thread at the third token."""

    def __init__(self):
        self.num_tokens = 0

    def forbid(self, logits):
        logits[256:] = -torch.inf  # special tokens
        if self.num_tokens == 2:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    def accept(self, _):
        self.num_tokens += 1


@pytest.fixture
def interrupt_handler():
    """Install Python's handler of SIGINT. Without it, tests in a background job of a shell would ignore the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupt_handler")
def test_llm_generate_cancels_its_requests_on_interrupt(llm):
    expected = llm.generate("Once upon", GREEDY)
    interrupts = SamplingParams(max_tokens=400, constraint=InterruptsMain)
    endless = SamplingParams(max_tokens=400, ignore_eos=True)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["Once", "upon", "a"], [endless, interrupts, endless])
    assert not llm.engine.has_work()
    assert llm.engine.manager.stats.num_allocations == 0
    check_scheduler(llm.engine.scheduler)
    assert llm.generate("Once upon", GREEDY)[0][0].text == expected[0][0].text


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_llm_in_forked_child_raises(llm):
    llm.generate("Once", GREEDY)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            llm.generate("Once", GREEDY)
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        assert "StateError: this LLM belongs to process" in answer.read()
    os.waitpid(child, 0)


def test_closed_llm_refuses_calls(tiny_model):
    instance = LLM(tiny_model, EngineConfig(16, CacheConfig(16)))
    instance.close()
    with pytest.raises(ClosedError, match="this LLM was closed"):
        instance.generate([1], GREEDY)


def test_llm_generate_shows_progress_only_if_enabled(llm, capsys):
    llm.generate(["One", "Two"], GREEDY, progress=True)
    assert "2/2 answers" in capsys.readouterr().err
    llm.generate(["One"], GREEDY, progress=False)
    assert capsys.readouterr().err == ""


def test_llm_with_unknown_model_raises():
    with pytest.raises(CheckpointError, match="downloads nothing"):
        LLM("no/such/model")


@pytest.fixture
def runner(llm):
    instance = EngineRunner(Engine(llm.engine.model, llm.tokenizer, EngineConfig(16, CacheConfig(128))))
    yield instance
    instance.close()


def test_runner_streams_answers_to_several_threads_at_once(runner):
    texts = ["Once upon a time", "The sky is"]

    def collect(text: str) -> str:
        return "".join(output.text for output in runner.stream(text, GREEDY))

    one_by_one = [collect(text) for text in texts]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(collect, texts)) == one_by_one
    assert all(one_by_one)


def test_runner_stream_closed_early_aborts_its_request(runner):
    stream = runner.stream("Once upon a time", ENDLESS, request_id="left")
    next(stream)
    stream.close()
    assert runner.call(lambda engine: engine.explain("left")).result().state == "abort"
    assert runner.call(lambda engine: engine.manager.stats.num_allocations).result() == 0


def test_cancelled_submit_does_not_stop_the_runner(runner):
    """Regression: a cancelled future in the queue of the runner stopped the runner."""
    holding, may_continue = threading.Event(), threading.Event()

    def hold(_: Engine) -> None:
        holding.set()
        assert may_continue.wait(60)

    runner.call(hold)
    assert holding.wait(60)
    added = runner.submit("Once upon a time", ENDLESS, lambda _: None)
    assert added.cancel()
    may_continue.set()
    assert runner.call(lambda _: 7).result() == 7
    assert runner.call(lambda engine: len(engine._live)).result() == 0
    assert list(runner.stream("Once", GREEDY))


def test_runner_stream_raises_errors_and_yields_n_answers(runner):
    with pytest.raises(ArgumentError, match="empty"):
        next(runner.stream([], GREEDY))
    params = SamplingParams(temperature=1.0, seed=1, n=3, max_tokens=4)
    outputs = list(runner.stream("Once", params))
    assert {output.index for output in outputs if output.finish_reason is not None} == {0, 1, 2}


def test_runner_call_error_does_not_end_streams(runner):
    stream = runner.stream("Once", ENDLESS)
    next(stream)
    done = []
    with pytest.raises(ZeroDivisionError):
        runner.call(lambda _: 1 // 0).result()
    runner.call(lambda _: done.append(1)).result()
    assert (len(list(itertools.islice(stream, 5))), done) == (5, [1])
    stream.close()


def test_engine_failure_ends_streams_and_calls_of_runner(runner):
    def broken(_: float) -> None:
        raise OSError("the power is off")

    stream = runner.stream("Once", ENDLESS)
    next(stream)
    runner.call(lambda engine: setattr(engine.scheduler, "schedule", broken)).result()
    with pytest.raises(ClosedError, match="engine failed") as caught:
        list(stream)
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(ClosedError):
        runner.call(lambda engine: engine.has_work())


def test_engine_failure_fails_calls_queued_in_runner(llm):
    errors = []
    engine = Engine(llm.engine.model, llm.tokenizer, EngineConfig(16, CacheConfig(64)))
    runner = EngineRunner(engine, errors.append)
    entered, may_fail = threading.Event(), threading.Event()

    def broken(_: float) -> None:
        entered.set()
        may_fail.wait(60)
        raise OSError("the power is off")

    runner.call(lambda engine: setattr(engine.scheduler, "schedule", broken)).result()
    runner.call(lambda engine: engine.add("Once", GREEDY)).result()
    assert entered.wait(60)
    waiting = runner.call(lambda engine: engine.has_work())  # queued behind the step that fails
    may_fail.set()
    with pytest.raises(ClosedError) as caught:
        waiting.result(60)
    assert isinstance(caught.value.__cause__, OSError)
    runner.close()
    assert [type(error) for error in errors] == [OSError]


def test_runner_close_ends_open_streams(runner):
    stream = runner.stream("Once", ENDLESS)
    next(stream)
    runner.close()
    runner.close()
    list(stream)
    with pytest.raises(ClosedError):
        runner.call(lambda engine: engine.has_work())


def test_cli_chat_and_generate_print_answers(capsys, monkeypatch):
    lines = iter(["What is the capital of France?", "And of Italy?", ""])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    assert main(["chat", "-v", "--max-tokens", "12"]) == 0
    output = capsys.readouterr()
    assert output.out.splitlines()[0] == "The capital of France is Paris."
    assert "37 tokens, 0 cached" in output.err
    # two full blocks of 16 tokens are cached, and perhaps 12 tokens of a third block
    assert "32 cached" in output.err or "44 cached" in output.err
    assert main(["generate", "Once upon a time", "--max-tokens", "4", "--draft-tokens", "3"]) == 0
    assert capsys.readouterr().out.startswith("Once upon a time,")


def test_cli_generate_reports_errors(capsys):
    assert main(["generate", "x", "--model", "nowhere"]) == 1
    assert "there is no model at nowhere" in capsys.readouterr().err
    assert main(["generate", "x", "--temperature", "-1"]) == 1
    assert "temperature" in capsys.readouterr().err
