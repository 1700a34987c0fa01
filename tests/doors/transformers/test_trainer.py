"""hodiff's optimizers and curvature in the Trainer of transformers, against loops written by hand."""

from functools import partial

import matplotlib as mpl
import pytest
import torch
import transformers
from doors.pages import run_example
from doors.training import OPTIMIZERS, assert_same, warm_up

import hodiff
from hodiff.doors import CurvatureMonitor
from hodiff.doors.transformers import CurvatureCallback


def classifier():
    """A small BERT with random weights, the same on every call, without dropout."""
    torch.manual_seed(0)
    configuration = transformers.BertConfig(
        vocab_size=20,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
    )
    return transformers.BertForSequenceClassification(configuration)


def examples(count=24):
    tokens = torch.randint(20, (count, 6), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row.sum() % 3} for row in tokens]


def batches(size=4):
    rows = examples()
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        yield {name: torch.stack([row[name] for row in part]) for name in part[0]}


class InOrder(transformers.Trainer):
    """A Trainer that does not shuffle."""

    def _get_train_sampler(self, train_dataset=None):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def trainer(folder, model, *, cls=InOrder, optimizers=(None, None), callbacks=None, **options):
    arguments = transformers.TrainingArguments(
        str(folder),
        **{
            "use_cpu": True,
            "per_device_train_batch_size": 4,
            "num_train_epochs": 2,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "logging_steps": 1,
            "max_grad_norm": 1.0,
            **options,
        },
    )
    return cls(model, arguments, train_dataset=examples(), optimizers=optimizers, callbacks=callbacks)


def by_hand(make, *, accumulate=1, warm=False, bfloat16=False):
    """Train by hand; accumulated losses add up, because this model says that it divides them, and does not."""
    model = classifier()
    model.train()
    optimizer = make(model.parameters())
    scheduler = warm_up(optimizer) if warm else None
    for _ in range(2):
        for index, batch in enumerate(batches()):
            with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
                loss = model(**batch).loss
            loss.backward()
            if (index + 1) % accumulate == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                if scheduler is not None:
                    scheduler.step()
                optimizer.zero_grad()
    return model


def constant(optimizer):
    return torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("loop", ["plain", "warm-up", "accumulated"])
def test_steps_are_those_of_the_loop(name, loop, tmp_path):
    model, make = classifier(), OPTIMIZERS[name]
    optimizer = make(model.parameters())
    schedule = warm_up(optimizer) if loop == "warm-up" else constant(optimizer)
    options = {"gradient_accumulation_steps": 3} if loop == "accumulated" else {}
    trainer(tmp_path, model, optimizers=(optimizer, schedule), **options).train()
    expected = by_hand(make, accumulate=3 if loop == "accumulated" else 1, warm=loop == "warm-up")
    assert_same(model, expected, rtol=2e-3, atol=2e-5)
    assert model.classifier.weight.sub(classifier().classifier.weight).abs().max() > 1e-3


class WithSophia(InOrder):
    """The hook by which a Trainer makes its own optimizer; the schedule is that of the arguments."""

    def create_optimizer(self, model=None):
        if self.optimizer is None:
            self.optimizer = hodiff.optim.SophiaH(self.model.parameters(), lr=self.args.learning_rate)
        return self.optimizer


def test_hook_and_schedule(tmp_path):
    model = classifier()
    made = trainer(tmp_path, model, cls=WithSophia, learning_rate=0.01, warmup_steps=4, lr_scheduler_type="cosine")
    result = made.train()
    rates = [each["learning_rate"] for each in made.state.log_history if "learning_rate" in each]
    assert max(rates) == pytest.approx(0.01, rel=0.1)
    assert rates[0] < 0.005
    assert rates[-1] < 0.005
    assert result.training_loss < 1.2


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resumed_from_a_checkpoint(name, tmp_path):
    def run(folder, **options):
        model = classifier()
        optimizer = OPTIMIZERS[name](model.parameters())
        made = trainer(folder, model, optimizers=(optimizer, warm_up(optimizer)), **options)
        return model, made

    model, made = run(tmp_path / "a", save_strategy="steps", save_steps=6)
    made.train()
    resumed, again = run(tmp_path / "b")
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-6"))
    assert_same(resumed, model, rtol=1e-4, atol=1e-6)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bfloat16(name, tmp_path):
    model, make = classifier(), OPTIMIZERS[name]
    optimizer = make(model.parameters())
    trainer(tmp_path, model, optimizers=(optimizer, constant(optimizer)), bf16=True, num_train_epochs=2).train()
    assert_same(model, by_hand(make, bfloat16=True), rtol=2e-3, atol=2e-5)


def test_curvature_callback(tmp_path):
    mpl.use("Agg")
    callback = CurvatureCallback(every=4, batches=3, measures=["sharpness", "noise"], plot=tmp_path / "plot.png")
    model, alone = classifier(), classifier()
    made = trainer(tmp_path, model, callbacks=[callback], eval_on_start=True)
    # Batches of an evaluation are no training batches.
    made.eval_dataset = examples()[8:]
    made.train()
    trainer(tmp_path, alone).train()
    assert_same(model, alone, rtol=0, atol=0)
    assert [record.step for record in callback.monitor.history] == [4, 8, 12]

    def loss(model, batch):
        return model(**batch).loss

    expected = CurvatureMonitor(model, loss, list(batches())[:3], measures=["sharpness", "noise"]).measure(12)
    record = callback.monitor.history[-1]
    assert record.sharpness == pytest.approx(expected.sharpness, rel=0.01)
    assert record.noise_scale == pytest.approx(expected.noise_scale, rel=1e-4)
    logged = [each["curvature/sharpness"] for each in made.state.log_history if "curvature/sharpness" in each]
    assert logged == [record.sharpness for record in callback.monitor.history]
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_curvature_callback_with_a_token_count(tmp_path):
    """A causal model divides its loss by the number of tokens of all accumulated batches; the callback does not."""
    torch.manual_seed(0)
    configuration = transformers.GPT2Config(
        vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    model = transformers.GPT2LMHeadModel(configuration)
    callback = CurvatureCallback(every=2, batches=2, measures=["noise"])
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        use_cpu=True,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=2,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    data = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in examples()]
    InOrder(model, arguments, train_dataset=data, callbacks=[callback]).train()
    parts = [{"input_ids": batch["input_ids"], "labels": batch["input_ids"]} for batch in batches()][:2]

    def loss(model, batch):
        return model(**batch).loss

    expected = CurvatureMonitor(model, loss, parts, measures=["noise"]).measure(0)
    assert callback.monitor.history[0].gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-5)


class Scaled(InOrder):
    def compute_loss(self, model, inputs, *args, **kwargs):
        return 100 * super().compute_loss(model, inputs, *args, **kwargs)


class Popping(InOrder):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        return torch.nn.functional.cross_entropy(model(**inputs).logits, labels, torch.tensor([1.0, 5.0, 2.0]))


def classes(model, batch, **options):
    return torch.nn.functional.cross_entropy(model(input_ids=batch["input_ids"]).logits, batch["labels"], **options)


def squares(outputs, labels, num_items_in_batch=None):
    return (outputs.logits - labels[:, None]).square().mean()


# Trainer, its arguments, the loss of the callback, and the expected loss.
LOSSES = {
    "override": (Scaled, {}, None, lambda model, batch: 100 * classes(model, batch)),
    "weights": (Popping, {}, None, lambda *args: classes(*args, weight=torch.tensor([1.0, 5.0, 2.0]))),
    "smoothed": (InOrder, {"label_smoothing_factor": 0.3}, None, lambda *args: classes(*args, label_smoothing=0.3)),
    "function": (
        partial(InOrder, compute_loss_func=squares),
        {},
        None,
        lambda model, batch: squares(model(input_ids=batch["input_ids"]), batch["labels"]),
    ),
    "given": (InOrder, {"label_smoothing_factor": 0.3}, classes, classes),
}


@pytest.mark.parametrize("case", LOSSES)
def test_curvature_callback_measures_the_loss_of_the_trainer(case, tmp_path):
    cls, options, loss, expected = LOSSES[case]
    callback = CurvatureCallback(loss, every=2, batches=2, measures=["sharpness", "noise"], iterations=40)
    model = classifier()
    made = trainer(tmp_path, model, cls=cls, callbacks=[callback], max_steps=2, **options)
    made.train()
    (record,) = callback.monitor.history
    by_hand = CurvatureMonitor(model, expected, list(batches())[:2], measures=["sharpness", "noise"], iterations=40)
    assert record.gradient_norm == pytest.approx(by_hand.measure(2).gradient_norm, rel=1e-4)
    assert record.sharpness == pytest.approx(by_hand.history[0].sharpness, rel=1e-2)
    assert "compute_loss" not in vars(made)


class Interrupted(InOrder):
    def training_step(self, *args, **kwargs):
        if self.state.global_step == 1:
            raise KeyboardInterrupt
        return super().training_step(*args, **kwargs)


def test_curvature_callback_starts_anew_in_each_training(tmp_path):
    callback = CurvatureCallback(every=2, batches=3, measures=["noise"])
    first = trainer(tmp_path, classifier(), cls=Interrupted, callbacks=[callback], max_steps=4)
    with pytest.raises(KeyboardInterrupt):
        first.train()
    model = classifier()
    model.classifier.weight.data.mul_(3)
    made = trainer(tmp_path, model, callbacks=[callback], max_steps=4)
    made.train()
    assert not any("compute_loss" in vars(each) for each in (first, made))
    assert [record.step for record in callback.monitor.history] == [4]
    by_hand = CurvatureMonitor(model, classes, list(batches())[:3], measures=["noise"]).measure(4)
    assert callback.monitor.history[0].gradient_norm == pytest.approx(by_hand.gradient_norm, rel=1e-4)


def test_curvature_callback_checks_at_the_start(tmp_path):
    with pytest.raises(hodiff.InputError, match="CurvatureCallback: plot: expected a file in an existing folder"):
        CurvatureCallback(plot=tmp_path / "missing" / "plot.png")
    with pytest.raises(hodiff.InputError, match=r"expected a call by the train method of a transformers\.Trainer"):
        CurvatureCallback().on_train_begin(None, None, None)


def test_example_of_the_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    setting = run_example("guides/training_loops.md", "DataLoader(data")
    known = {name: setting[name] for name in ("torch", "hodiff")}
    names = run_example("guides/training_loops.md", "transformers.BertConfig(", **known)
    predicted = names["trainer"].predict(names["examples"])
    right = (predicted.predictions.argmax(1) == predicted.label_ids).mean()
    assert right > 0.9


MODELS = {
    "GPT-2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=20, n_positions=8, n_embd=16, n_layer=1, n_head=2)
    ),
    "Llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=20, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
        )
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_example_of_a_second_optimizer(name, tmp_path):
    torch.manual_seed(0)
    model = MODELS[name]()
    rows = [each["input_ids"].sort().values for each in examples(64)]
    arguments = transformers.TrainingArguments(
        str(tmp_path), use_cpu=True, max_steps=24, logging_steps=4, save_strategy="no", report_to=[], disable_tqdm=True
    )
    known = {"torch": torch, "hodiff": hodiff, "transformers": transformers, "gpt": model, "arguments": arguments}
    known["sequences"] = [{"input_ids": row, "labels": row} for row in rows]
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    names = run_example("guides/training_loops.md", "class SecondOptimizer", **known)
    losses = [each["loss"] for each in names["trainer"].state.log_history if "loss" in each]
    assert losses[-1] < losses[0] - 0.3
    assert not any(torch.equal(p, before[key]) for key, p in model.named_parameters())
    assert len(names["own"]) + len(names["others"]) == len(before)
    optimizer = hodiff.optim.KFAC(model.parameters())
    pair = optimizer, constant(optimizer)
    alone = transformers.Trainer(model, arguments, train_dataset=known["sequences"], optimizers=pair)
    with pytest.raises(hodiff.InputError, match="KFAC: params: expected"):
        alone.train()
