"""Predictors of output lengths: classes, errors, what each kind says, training, and its file."""

from __future__ import annotations

import io
import json
import pickle
from pathlib import Path

import numpy as np
import pytest

from evenflow.config.build import build, load_workload
from evenflow.config.run import RunConfig
from evenflow.config.yaml_file import Document
from evenflow.errors import UsageError
from evenflow.study.advice import changes
from evenflow.traces import sample_trace
from evenflow.traces.formats import reader_of
from evenflow.traces.lines import Source
from evenflow.traces.predict import (
    NUM_CLASSES,
    WORD_BINS,
    LengthClasses,
    accumulated_error,
    load_classifier,
    make_predictor,
    save_classifier,
    train,
    with_predictions,
)
from evenflow.traces.trace import Ints, Trace, random_stream, read_trace
from evenflow.types import Request
from tests.command_line import done, refusal

OUTPUTS = np.arange(1, 1001)


def of_lengths(prompts: Ints, outputs: Ints, texts: list[str] | None = None) -> Trace:
    return Trace("made", "made", None, prompts, outputs, {}, None, None, len(prompts), texts=texts)


def spoken(count: int = 400) -> Trace:
    """Prompts of equal length whose one telling word gives the output away."""
    rng = np.random.default_rng(0)
    kinds = rng.integers(0, 4, count)
    words = ("yes", "why", "list", "essay")
    texts = [f"please {words[kind]} now" for kind in kinds]
    outputs = 10**kinds + rng.integers(1, 4, count)
    return of_lengths(np.full(count, 20), outputs, texts)


# -- classes and errors ---------------------------------------------------------------------------


def test_classes_are_the_percentile_ranges_and_their_means() -> None:
    classes = LengthClasses.of(OUTPUTS)
    assert classes.edges.tolist() == [250.75, 500.5, 750.25, 990.01]
    assert classes.class_of(np.array([1, 250, 251, 500, 501, 750, 751, 990, 991])).tolist() == [
        0, 0, 1, 1, 2, 2, 3, 3, 4,
    ]  # fmt: skip
    assert classes.means.tolist() == [125.5, 375.5, 625.5, 870.5, 995.5]


def test_a_class_begins_at_its_percentile() -> None:
    classes = LengthClasses.of(np.array([10, 10, 20, 20, 30]))
    assert classes.edges.tolist()[:3] == [10, 20, 20]
    assert classes.class_of(np.array([9, 10, 20, 30])).tolist() == [0, 1, 3, 4]
    assert classes.means[0] == 18, "no output is below the smallest: the mean of all stands in"


def test_accumulated_error_is_that_of_group_totals() -> None:
    true = np.full(64, 100)
    rng = np.random.default_rng(0)
    always_over = accumulated_error(np.full(64, 110), true, rng)
    assert always_over == pytest.approx(dict.fromkeys([2, 4, 8, 16, 32, 64], 0.1))
    by_turns = np.where(np.arange(64) % 2, 150, 50)
    errors = accumulated_error(by_turns, true, rng)
    assert errors[64] == 0
    assert errors[2] > errors[16] > errors[64], "errors cancel in larger groups"


# -- kinds ----------------------------------------------------------------------------------------


def test_the_oracle_and_the_mean() -> None:
    prompts = np.ones_like(OUTPUTS)
    assert (make_predictor("oracle").predict(prompts, OUTPUTS, None) == OUTPUTS).all()
    assert set(make_predictor({"kind": "mean"}).predict(prompts, OUTPUTS, None)) == {500}


@pytest.mark.parametrize("accuracy", [0.0, 0.52, 1.0])
def test_noisy_names_the_right_class_as_often_as_asked(accuracy: float) -> None:
    outputs = sample_trace("tdpipe-sharegpt-sample", 20_000).output_tokens
    spec = {"kind": "noisy", "accuracy": accuracy, "seed": 3}
    predicted = make_predictor(spec).predict(outputs, outputs, None)
    classes = LengthClasses.of(outputs)
    right = (classes.class_of(predicted) == classes.class_of(outputs)).mean()
    assert right == pytest.approx(accuracy, abs=0.01)
    again = make_predictor(spec).predict(outputs, outputs, None)
    assert (predicted == again).all()
    other = make_predictor(spec | {"seed": 4}).predict(outputs, outputs, None)
    assert accuracy == 1 or (predicted != other).any()


def test_a_noisy_total_is_near_the_true_one() -> None:
    outputs = sample_trace("sharegpt-sample", 20_000).output_tokens
    predicted = make_predictor({"kind": "noisy", "accuracy": 0.0}).predict(outputs, outputs, None)
    assert predicted.sum() / outputs.sum() == pytest.approx(1, abs=0.1)
    alike = np.full(50, 7)
    assert (make_predictor("noisy").predict(alike, alike, None) == 7).all(), "no other class"


def test_requests_are_filled_in_and_otherwise_unchanged() -> None:
    requests = [Request(7, 1.5, 30, 9), Request(8, 2.5, 40, 11)]
    filled = with_predictions(requests, make_predictor("oracle"))
    assert filled == [Request(7, 1.5, 30, 9, 9), Request(8, 2.5, 40, 11, 11)]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("oracel", 'predictor "oracel" is unknown; did you mean "oracle"?'),
        ({"accuracy": 0.5}, 'predictor "" is unknown'),
        ({"kind": "noisy", "accuracy": 2}, "accuracy is 2; expected 0 to 1"),
        ({"kind": "noisy", "accuracy": "high"}, "accuracy is 'high'; expected 0 to 1"),
        ({"kind": "noisy", "seed": -1}, "seed is -1; expected a whole number"),
        ({"kind": "classifier", "path": 3}, "path is 3; expected the path"),
        ({"kind": "mean", "accuracy": 0.5}, "predictor mean: .*accuracy"),
        ({"kind": "classifier", "path": "gone.json"}, "gone.json: cannot be read"),
    ],
)
def test_a_bad_predictor_is_one_clear_line(spec: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_predictor(spec)


# -- the classifier -------------------------------------------------------------------------------


def test_a_classifier_learns_from_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.setattr(
        "evenflow.traces.predict.STRENGTHS", (1.0,)
    )  # of thousands of words, seconds each
    trace = spoken()
    classifier, report = train(trace)
    assert report["features"] == "text and length"
    assert report["requests"] == {"train": 240, "test": 80}
    assert report["classifier"]["class_accuracy"] > report["largest_class_share"] + 0.3
    assert report["classifier"]["accumulated_error"][64] < 0.2
    save_classifier(classifier, tmp_path / "model.json")
    loaded = load_classifier(tmp_path / "model.json")
    predicted = classifier.predict(trace.prompt_tokens, trace.texts)
    assert (loaded.predict(trace.prompt_tokens, trace.texts) == predicted).all()
    with pytest.raises(UsageError, match="trained on prompt texts, and this trace holds none"):
        loaded.predict(trace.prompt_tokens)


def test_prompts_are_kept_where_asked_and_there_are_any() -> None:
    talk = [{"conversations": [{"value": text}, {"value": "fine"}]} for text in ("a b", "c")]
    lengths = [{"input_token_length": 3, "output_token_length": 4}]

    def read(entries: list[object], keep_text: bool) -> Trace:
        stream = io.StringIO(json.dumps(entries))
        source = Source(Path(__file__), stream, lambda text: len(text.split()))
        return read_trace(source, reader_of(source, "sharegpt"), None, None, keep_text)

    assert read([*talk], True).texts == ["a b", "c"]
    assert read([*talk], False).texts is None
    assert read([*talk, *lengths], True).texts is None, "not every request has a text"


def test_a_classifier_learns_from_lengths_where_there_is_no_text() -> None:
    pytest.importorskip("sklearn")
    prompts = random_stream(0, "test").integers(1, 2000, 500)
    classifier, report = train(of_lengths(prompts, prompts // 2 + 1))
    assert report["features"] == "length"
    assert report["classifier"]["class_accuracy"] > 0.7
    short, long = classifier.predict(np.array([10, 1900])).tolist()
    assert short < 300 < long


@pytest.mark.parametrize(("count", "message"), [(20, "needs 50 or more"), (60, "one length cl")])
def test_what_cannot_be_trained_on(count: int, message: str) -> None:
    pytest.importorskip("sklearn")
    with pytest.raises(UsageError, match=message):
        train(of_lengths(np.arange(1, count + 1), np.full(count, 5)))


# -- its file -------------------------------------------------------------------------------------


def stored() -> dict[str, object]:
    return {
        "format": "evenflow-length-predictor",
        "version": 1,
        "reads_text": False,
        "trained_on": {},
        "edges": [10.0, 20.0, 30.0, 40.0],
        "means": [5.0, 15.0, 25.0, 35.0, 45.0],
        "bias": [0.0, 0.0, 1.0, 0.0, 0.0],
        "weights": [[0.0] * 33] * 5,
    }


def test_a_stored_classifier_predicts(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps(stored()))
    assert load_classifier(path).predict(np.array([1, 100])).tolist() == [25, 25]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version 2, this is version 1; train it again"),
        ({"format": "other"}, "not a file of evenflow traces predict"),
        ({"bias": [0.0]}, r"damaged \(bias\)"),
        ({"bias": [float("nan")] * 5}, r"damaged \(bias\)"),
        ({"weights": [["x"] * 33] * 5}, "damaged"),
        ({"edges": [4.0, 3.0, 2.0, 1.0]}, r"damaged \(edges or means\)"),
        ({"reads_text": True}, r"damaged \(weights\)"),
    ],
)
def test_a_file_that_is_not_right_is_refused(
    change: dict[str, object], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps(stored() | change))
    with pytest.raises(UsageError, match=message):
        load_classifier(path)


class Trap:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("raise SystemExit('a pickle was run')",)


@pytest.mark.parametrize("content", [pickle.dumps(Trap()), b"", b"[1]", b"{", b"\xff\xfe"])
def test_an_untrusted_file_is_refused_and_never_run(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.pkl"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="not a file of evenflow traces predict; refused"):
        load_classifier(path)


# -- in a run -------------------------------------------------------------------------------------


def config(**scheduler: object) -> RunConfig:
    return RunConfig.model_validate(
        {
            "stages": 2,
            "costs": {"kind": "affine", "base_s": 0.005, "per_token_s": 2e-5},
            "kv": {"pages": 4000},
            "scheduler": scheduler,
            "workload": {
                "trace": "tdpipe-sharegpt-sample", "requests": 60, "arrivals": "offline",
            },
        }
    )  # fmt: skip


def predictions(**scheduler: object) -> list[tuple[int, int | None]]:
    run = config(**scheduler)
    built = build(run, load_workload(run, Path()).requests, Path())
    return [(r.output_tokens, r.predicted_output_tokens) for r in built.world.requests]


def test_a_policy_gets_the_predictor_it_names_and_others_see_no_prediction() -> None:
    oracle, mean, noisy = (
        predictions(name="td_pipe", predictor=predictor)
        for predictor in ("oracle", "mean", {"kind": "noisy", "accuracy": 0.5})
    )
    assert all(output == predicted for output, predicted in oracle)
    assert len({predicted for _, predicted in mean}) == 1
    assert len({predicted for _, predicted in noisy}) == 5
    assert {predicted for _, predicted in predictions(name="vllm")} == {None}


def test_a_classifier_file_is_found_beside_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text(json.dumps(stored()))
    run = config(name="td_pipe", predictor={"kind": "classifier", "path": "model.json"})
    built = build(run, [Request(0, 0.0, 10, 10)], tmp_path)
    assert built.world.requests[0].predicted_output_tokens == 25


def test_layouts_are_tried_with_a_classifier_that_reads_words(tmp_path: Path) -> None:
    """Each is built for one request, whose prompt is read."""
    of_words = {"reads_text": True, "weights": [[0.0] * (33 + WORD_BINS)] * NUM_CLASSES}
    (tmp_path / "model.json").write_text(json.dumps({**stored(), **of_words}))
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({"?": 0}, unk_token="?")
    tokenizers.Tokenizer(words).save(str(tmp_path / "tokenizer.json"))
    talk = {"conversations": [{"value": "why"}, {"value": "so"}]}
    (tmp_path / "talk.json").write_text(json.dumps([talk, talk]))
    predictor = {"kind": "classifier", "path": "model.json"}
    keys = {
        "model": "Qwen2.5-14B",
        "gpu": "L20",
        "stages": 4,
        "link": "pcie-l20",
        "costs": "roofline",
        "kv": {"pages": "auto"},
        "scheduler": {"name": "td_pipe", "predictor": predictor},
        "workload": {"trace": "talk.json", "tokenizer": "tokenizer.json", "arrivals": "offline"},
    }
    tried = [case.labels["change"] for case in changes(Document("a.yaml", keys, {}), tmp_path)]
    assert "layers: PP4, last -1" in tried


def test_the_command_trains_and_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.chdir(tmp_path)
    rows = [f"{prompt},{prompt // 2 + 1}" for prompt in range(1, 401)]
    Path("trace.csv").write_text("\n".join(["num_prefill_tokens,num_decode_tokens", *rows, ""]))
    report = json.loads(done("traces", "predict", "trace.csv", "--out", "model.json"))
    assert report["requests"] == {"train": 240, "test": 80}
    assert load_classifier(Path("model.json")).trained_on["trace"] == "trace.csv"
    Path("few.csv").write_text("\n".join(["num_prefill_tokens,num_decode_tokens", *rows[:9], ""]))
    told = refusal("traces", "predict", "few.csv")
    assert told == "trace few.csv: 9 requests; training needs 50 or more"
