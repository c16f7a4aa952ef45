"""Predictors of output lengths: classes, errors, what each kind says, training, and its file."""

from __future__ import annotations

import io
import json
import pickle
from pathlib import Path

import numpy as np
import pytest

from evenflow.config.build import Workload, build, load_workload
from evenflow.config.run import RunConfig
from evenflow.config.yaml_file import Document
from evenflow.errors import UsageError
from evenflow.sim import simulate
from evenflow.study.advice import changes
from evenflow.traces import predict, sample_trace
from evenflow.traces.formats import reader_of
from evenflow.traces.lines import Source
from evenflow.traces.trace import Ints, Trace, read_trace
from evenflow.types import Request
from tests.command_line import done, refusal

OUTPUTS = np.arange(1, 1001)


def of_lengths(prompts: Ints, outputs: Ints, texts: list[str] | None = None) -> Trace:
    return Trace("made", "made", None, prompts, outputs, {}, None, None, len(prompts), texts=texts)


def spoken(count: int = 200) -> Trace:
    """Prompts of equal length and of the same words; which comes first gives the output away."""
    rng = np.random.default_rng(0)
    words = ("yes", "why", "list", "essay")
    orders = [rng.permutation(4) for _ in range(count)]
    texts = [f"a {words[first]}, not a {words[second]}" for first, second, *_ in orders]
    outputs = 10 ** np.array([first for first, *_ in orders]) + rng.integers(1, 4, count)
    return of_lengths(np.full(count, 20), outputs, texts)


# -- classes and errors ---------------------------------------------------------------------------


def test_classes_are_the_percentile_ranges_and_their_means() -> None:
    classes = predict.LengthClasses.of(OUTPUTS)
    assert classes.edges.tolist() == [250.75, 500.5, 750.25, 990.01]
    assert classes.class_of(np.array([1, 250, 251, 500, 501, 750, 751, 990, 991])).tolist() == [
        0, 0, 1, 1, 2, 2, 3, 3, 4,
    ]  # fmt: skip
    assert classes.means.tolist() == [125.5, 375.5, 625.5, 870.5, 995.5]


def test_a_class_begins_at_its_percentile() -> None:
    classes = predict.LengthClasses.of(np.array([10, 10, 20, 20, 30]))
    assert classes.edges.tolist()[:3] == [10, 20, 20]
    assert classes.class_of(np.array([9, 10, 20, 30])).tolist() == [0, 1, 3, 4]
    assert classes.means[0] == 18, "no output is below the smallest: the mean of all stands in"


def test_accumulated_error_is_that_of_group_totals() -> None:
    true = np.full(64, 100)
    rng = np.random.default_rng(0)
    always_over = predict.accumulated_error(np.full(64, 110), true, rng)
    assert always_over == pytest.approx(dict.fromkeys([2, 4, 8, 16, 32, 64], 0.1))
    by_turns = np.where(np.arange(64) % 2, 150, 50)
    errors = predict.accumulated_error(by_turns, true, rng)
    assert errors[64] == 0
    assert errors[2] > errors[16] > errors[64], "errors cancel in larger groups"


# -- kinds ----------------------------------------------------------------------------------------


def test_the_oracle_and_the_mean() -> None:
    prompts = np.ones_like(OUTPUTS)
    assert (predict.make_predictor("oracle").predict(prompts, OUTPUTS, None) == OUTPUTS).all()
    assert set(predict.make_predictor({"kind": "mean"}).predict(prompts, OUTPUTS, None)) == {500}


@pytest.mark.parametrize("accuracy", [0.0, 0.52, 1.0])
def test_noisy_names_the_right_class_as_often_as_asked(accuracy: float) -> None:
    outputs = sample_trace("tdpipe-sharegpt-sample", 20_000).output_tokens
    spec = {"kind": "noisy", "accuracy": accuracy, "seed": 3}
    predicted = predict.make_predictor(spec).predict(outputs, outputs, None)
    classes = predict.LengthClasses.of(outputs)
    right = (classes.class_of(predicted) == classes.class_of(outputs)).mean()
    assert right == pytest.approx(accuracy, abs=0.01)
    again = predict.make_predictor(spec).predict(outputs, outputs, None)
    assert (predicted == again).all()
    other = predict.make_predictor(spec | {"seed": 4}).predict(outputs, outputs, None)
    assert accuracy == 1 or (predicted != other).any()


def test_a_noisy_total_is_near_the_true_one() -> None:
    outputs = sample_trace("sharegpt-sample", 20_000).output_tokens
    predicted = predict.make_predictor({"kind": "noisy", "accuracy": 0.0}).predict(
        outputs, outputs, None
    )
    assert predicted.sum() / outputs.sum() == pytest.approx(1, abs=0.1)
    alike = np.full(50, 7)
    assert (predict.make_predictor("noisy").predict(alike, alike, None) == 7).all(), (
        "no other class"
    )


def test_requests_are_filled_in_and_otherwise_unchanged() -> None:
    requests = [Request(7, 1.5, 30, 9), Request(8, 2.5, 40, 11)]
    filled = predict.with_predictions(requests, predict.make_predictor("oracle"))
    assert filled == [Request(7, 1.5, 30, 9, 9), Request(8, 2.5, 40, 11, 11)]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("oracel", 'predictor "oracel" is unknown; did you mean "oracle"?'),
        ({"accuracy": 0.5}, 'predictor: the key "kind" is missing; known: oracle, mean'),
        ({"kind": "noisy", "accuracy": 2}, "accuracy is 2; expected 0 to 1"),
        ({"kind": "noisy", "accuracy": "high"}, "accuracy is 'high'; expected 0 to 1"),
        ({"kind": "noisy", "seed": -1}, "seed is -1; expected a whole number"),
        ({"kind": "mean", "per_token_s": -1}, "per_token_s is -1; it must be a finite number, 0"),
        ({"kind": "oracle", "per_token_s": "x"}, "per_token_s is 'x'; it must be a finite number"),
        ({"kind": "classifier", "path": 3}, "path is 3; expected the path"),
        ({"kind": "mean", "accuracy": 0.5}, "predictor mean: .*accuracy"),
        ({"kind": "classifier", "path": "gone.json"}, "gone.json: cannot be read"),
    ],
)
def test_a_bad_predictor_is_one_clear_line(spec: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        predict.make_predictor(spec)


# -- the classifier -------------------------------------------------------------------------------


def test_a_classifier_learns_which_word_comes_first(tmp_path: Path) -> None:
    pytest.importorskip("torch").set_num_threads(1)  # several wait for each other on a busy machine
    trace = spoken()
    classifier, report = predict.train(trace)
    assert report["requests"] == {"train": 120, "test": 40}
    assert report["classifier"]["class_accuracy"] > report["largest_class_share"] + 0.3
    assert report["classifier"]["accumulated_error"][32] < 0.2
    assert report["seconds_per_prompt_token"] == classifier.per_token_s > 0
    predict.save_classifier(classifier, tmp_path / "model")
    loaded = predict.make_predictor({"kind": "classifier", "path": str(tmp_path / "model")})
    assert loaded.per_token_s == classifier.per_token_s
    asked = (trace.prompt_tokens, trace.output_tokens)
    assert (loaded.predict(*asked, trace.texts) == classifier.predict(*asked, trace.texts)).all()
    with pytest.raises(UsageError, match="reads prompt texts, and this trace holds none"):
        loaded.predict(*asked, None)


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


@pytest.mark.parametrize(
    ("count", "texts", "message"),
    [
        (20, True, "needs 50 or more"),
        (60, True, "one length cl"),
        (60, False, "has no prompt texts to learn from; predictor: {kind: noisy"),
    ],
)
def test_what_cannot_be_trained_on(count: int, texts: bool, message: str) -> None:
    pytest.importorskip("torch")
    words = ["same"] * count if texts else None
    with pytest.raises(UsageError, match=message):
        predict.train(of_lengths(np.arange(1, count + 1), np.full(count, 5), words))


# -- its file -------------------------------------------------------------------------------------

TOLD = {
    "edges": [10.0, 20.0, 30.0, 40.0],
    "means": [5.0, 15.0, 25.0, 35.0, 45.0],
    "vocabulary": ["a", "b"],
    "trained_on": {},
    "per_token_s": 0.5,
}


def store(path: Path, told: object = TOLD, bias: float = 1.0, **more: float) -> Path:
    """Write a classifier that always names the third class, by the `bias` of its head alone."""
    encoder = pytest.importorskip("evenflow.traces.encoder", exc_type=ImportError)
    torch = pytest.importorskip("torch")
    weights = {name: 0 * one for name, one in encoder.untrained(2, 5).state_dict().items()}
    weights["head.2.bias"][2] = bias
    weights |= {name: torch.tensor(value) for name, value in more.items()}
    about = {"evenflow-length-predictor": json.dumps(told)}
    path.write_bytes(pytest.importorskip("safetensors.torch").save(weights, about))
    return path


@pytest.mark.parametrize(
    ("told", "bias", "more", "message"),
    [
        (TOLD | {"means": [0.0]}, 1.0, {}, r"damaged \(.*means.*at least 5 items"),
        (TOLD | {"means": [float("nan")] * 5}, 1.0, {}, r"damaged \(.*means"),
        (TOLD | {"edges": ["x"] * 4}, 1.0, {}, r"damaged \(.*edges"),
        (TOLD | {"edges": [4.0, 3.0, 2.0, 1.0]}, 1.0, {}, r"damaged \(edges or means\)"),
        (TOLD | {"vocabulary": ["a"]}, 1.0, {}, r"damaged \(shapes of the weights\)"),
        (TOLD, 1.0, {"more": 1.0}, r"damaged \(shapes of the weights\)"),
        (TOLD, float("nan"), {}, r"damaged \(weights that are not finite\)"),
        ([], 1.0, {}, "damaged"),
    ],
)
def test_a_file_that_is_not_right_is_refused(
    told: object, bias: float, more: dict[str, float], message: str, tmp_path: Path
) -> None:
    path = store(tmp_path / "model", told, bias, **more)
    with pytest.raises(UsageError, match=message):
        predict.load_classifier(path)


class Trap:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("raise SystemExit('a pickle was run')",)


@pytest.mark.parametrize("content", [pickle.dumps(Trap()), b"", b"[1]", b"{", b"\xff\xfe"])
def test_an_untrusted_file_is_refused_and_never_run(content: bytes, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    path = tmp_path / "model.pkl"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="not a file of evenflow traces predict; refused"):
        predict.load_classifier(path)


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
    built = build(run, Path(), load_workload(run, Path()))
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
    store(tmp_path / "model")
    run = config(name="td_pipe", predictor={"kind": "classifier", "path": "model"})
    built = build(run, tmp_path, Workload([Request(0, 0.0, 10, 10)], {}, ["a c"]))
    assert built.world.requests[0].predicted_output_tokens == 25
    assert built.world.overheads.tokenize_s == 0.5


def test_requests_wait_for_their_predictor_one_after_the_other() -> None:
    run = config(name="td_pipe", predictor={"kind": "mean", "per_token_s": 0.25})
    requests = [Request(0, 0.0, 8, 2), Request(1, 0.0, 4, 2)]
    world = build(run, Path(), Workload(requests, {})).world
    assert simulate(world).first_scheduled_s.tolist() == [2.0, 3.0]


def test_layouts_are_tried_with_a_classifier_that_reads_words(tmp_path: Path) -> None:
    """Each is built for one request, whose prompt is read."""
    store(tmp_path / "model.json")
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
    pytest.importorskip("torch").set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({"?": 0}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save("tokenizer.json")
    answers = {"why": "so " * 9, "list": "one " * 90}
    talks = [[{"value": ask}, {"value": answers[ask]}] for ask in [*answers] * 30]
    Path("talk.json").write_text(json.dumps([{"conversations": talk} for talk in talks]))
    told = done("traces", "predict", "talk.json", "--tokenizer", "tokenizer.json", "--out", "model")
    report = json.loads(told)
    assert report["requests"] == {"train": 36, "test": 12}
    assert predict.load_classifier(Path("model")).trained_on["trace"] == "talk.json"
    Path("few.csv").write_text("num_prefill_tokens,num_decode_tokens\n1,2\n")
    told = refusal("traces", "predict", "few.csv")
    assert told == "trace few.csv: 1 requests; training needs 50 or more"
