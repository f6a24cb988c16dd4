from __future__ import annotations

import importlib.util
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
if importlib.util.find_spec("torchax") is None:  # its own __init__ cannot be imported beside torch 2.13
    pytest.skip("torchax is not installed (the extra export)", allow_module_level=True)
from torch import nn  # noqa: E402

from converters.convert import prepare  # noqa: E402
from converters.exporters import TorchModel, export_torch, read_bundle_weights, torch_programs  # noqa: E402
from converters.exporters.torch_linear import FEW_ROWS  # noqa: E402
from nereid_backend.errors import ExportError  # noqa: E402

X = torch.linspace(-1, 1, 12).reshape(3, 4)


@pytest.fixture(autouse=True)
def _reproducible() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        yield


@pytest.fixture
def served(tmp_path: Path, run: Any) -> Any:
    """What an export gives once ``nereid-convert`` has written it into a repository, by output."""

    def outputs(written: Path, *inputs: Any) -> dict[str, np.ndarray]:
        prepared = prepare(written, allow_code=True)
        results = run(prepared, tmp_path / "repository", *map(np.asarray, inputs))
        return dict(zip((tensor.name for tensor in prepared.spec.outputs), results, strict=True))

    return outputs


def module(forward: Callable[..., Any], **parts: Any) -> Any:
    """A module of its forward, its buffers and its submodules."""

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, part in parts.items():
                if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                    self.register_buffer(name, part)
                else:
                    setattr(self, name, part)

    Module.forward = forward  # type: ignore[method-assign, assignment]
    return Module().eval()


def expected(model: Any, *inputs: Any) -> list[np.ndarray]:
    with torch.no_grad():
        results = model(*inputs)
    return [result.numpy() for result in (results if isinstance(results, tuple) else (results,))]


class Residual(nn.Module):
    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(width, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out))
        same = stride == 1 and width == out
        self.aside = nn.Identity() if same else nn.Sequential(nn.Conv2d(width, out, 1, stride), nn.BatchNorm2d(out))

    def forward(self, x: Any) -> Any:
        return torch.relu(self.second(self.first(x)) + self.aside(x))


def convolutional() -> tuple[Any, tuple[Any, ...]]:
    """A narrow, short ResNet, with statistics of a training that went before."""
    stem = nn.Sequential(nn.Conv2d(3, 4, 7, 2, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    stages = [Residual(4, 4, 1), Residual(4, 8, 2)]
    net = nn.Sequential(stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    net(torch.randn(8, 3, 24, 24))
    return net.eval(), (torch.randn(3, 3, 24, 24),)


def attentive() -> tuple[Any, tuple[Any, ...]]:
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, activation="gelu")
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model = module(lambda self, x, padding: self.encoder(x, src_key_padding_mask=padding).mean(1), encoder=encoder)
    return model, (torch.randn(3, 5, 16), torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False] * 5]))


def recurrent() -> tuple[Any, tuple[Any, ...]]:
    def forward(self: Any, x: Any) -> Any:
        steps, (last, _) = self.lstm(x)
        return self.gru(steps)[0][:, -1], last.transpose(0, 1)

    lstm = nn.LSTM(4, 6, 2, batch_first=True, bidirectional=True)
    return module(forward, lstm=lstm, gru=nn.GRU(12, 3, batch_first=True, bias=False)), (torch.randn(3, 6, 4),)


def linear() -> tuple[Any, tuple[Any, ...]]:
    """Products of few rows and of many, of one row that is no batch, and without a bias."""

    def forward(self: Any, x: Any) -> Any:
        rows = self.wide(x)
        return rows, self.narrow(rows.flatten(1)), x[:, 0] * self.wide(self.constant).sum()

    model = module(forward, wide=nn.Linear(4, 6), narrow=nn.Linear(6 * 100, 1, bias=False), constant=torch.randn(4))
    return model, (torch.randn(3, 100, 4),)


def of_integers() -> tuple[Any, tuple[Any, ...]]:
    def forward(self: Any, ids: Any, lengths: Any) -> Any:
        mask = torch.arange(ids.shape[1]) < lengths[:, None]
        rows = self.embedding(ids) * mask[..., None]
        return rows.sum(1) / lengths[:, None], self.codes[ids] * mask, rows.sum(-1).argmax(1)

    model = module(forward, embedding=nn.Embedding(20, 6), codes=torch.arange(20) * 2**40)
    return model, (torch.randint(0, 20, (3, 5)), torch.tensor([5, 2, 3], dtype=torch.int32))


@pytest.mark.parametrize("network", [convolutional, attentive, linear, recurrent])
def test_networks_agree_with_the_module(tmp_path: Path, network: Any) -> None:
    model, examples = network()
    done = export_torch(model, examples, tmp_path / "network", [2], provenance=None)
    assert max(done.differences.values()) < 1e-5


@pytest.mark.parametrize(("rows", "turned"), [(1, True), (FEW_ROWS, True), (FEW_ROWS + 1, False)])
def test_xla_multiplies_weights_as_torch_keeps_them_by_few_rows_without_turning_them(
    tmp_path: Path, rows: int, turned: bool
) -> None:
    done = export_torch(nn.Linear(4, 6), torch.randn(2, 4), tmp_path / "linear", [rows], provenance=None)
    (file,) = done.directory.glob("*.mlir")
    assert turned == (b"optimization_barrier" in file.read_bytes())


def test_integers_are_exact_at_every_batch_size_on_the_way_to_a_client(tmp_path: Path, served: Any) -> None:
    model, examples = of_integers()
    done = export_torch(model, examples, tmp_path / "network", [1, 3], provenance=None)
    assert done.batch_sizes == (1, 3)
    for rows in done.batch_sizes:
        inputs = [example.flip(0)[:rows] for example in examples]
        for got, want in zip(served(done.directory, *inputs).values(), expected(model, *inputs), strict=True):
            assert got.dtype == want.dtype
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6 if want.dtype.kind == "f" else 0)


def test_weights_have_the_modules_names_once_each_and_what_is_not_used_is_left_out(tmp_path: Path, served: Any) -> None:
    tied, shared = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
    embedding = nn.Embedding(4, 4, _weight=tied.weight)

    def forward(self: Any, x: Any, ids: Any, nothing: Any) -> dict[str, Any]:
        return {"out": self.b(torch.relu(self.a(self.tied(x)))) + self.embedding(ids), "steps": ids + self.steps}

    parts = {"tied": tied, "a": shared, "b": shared, "embedding": embedding, "unused": nn.Linear(2, 2)}
    model = module(forward, **parts, steps=torch.tensor(5))
    ids = torch.tensor([0, 3, 1])
    done = export_torch(model, (X, ids, X), tmp_path / "tied", [3], provenance=None)
    weights = read_bundle_weights(done.directory)
    assert {name: (w.shape, str(w.dtype)) for name, w in weights.items()} == {
        "tied.weight": ((4, 4), "float32"),
        "a.weight": ((4, 4), "float32"),
        "a.bias": ((4,), "float32"),
        "steps": ((), "int64"),
    }
    assert done.notes == ("parameters that forward does not use are left out: unused.weight, unused.bias",)
    assert [tensor.name for tensor in prepare(done.directory).spec.inputs] == ["x", "ids", "nothing"]
    results = served(done.directory, X, ids, X)
    np.testing.assert_allclose(results["out"], model(X, ids, X)["out"].detach(), rtol=1e-5, atol=1e-6)
    assert results["steps"].tolist() == [5, 8, 6]


def test_types_trees_and_constants_of_forward_are_kept(tmp_path: Path, served: Any) -> None:
    def forward(self: Any, pair: Any, *, double: bool, nothing: Any) -> Any:
        a, b = pair["a"], pair["b"]
        scale = torch.tensor([1.0, 2.0, 3.0, 4.0]) * (2 if double else 1)
        return a.double() * 0.1, b + len(b), a.bfloat16() * scale.bfloat16(), b > 0, 7

    examples = {"pair": {"a": X, "b": torch.tensor([2**40, -1, 3])}, "double": True, "nothing": None}
    model = module(forward)
    names = ["fine", "large", "coarse", "positive", "seven"]
    done = export_torch(model, examples, tmp_path / "typed", [3], output_names=names, provenance=None)
    spec = prepare(done.directory).spec
    assert [(t.name, t.dtype) for t in spec.inputs] == [("pair/a", "f32"), ("pair/b", "i64")]
    assert [t.dtype for t in spec.outputs] == ["f64", "i64", "bf16", "bool", "i64"]
    results = served(done.directory, X, examples["pair"]["b"])
    np.testing.assert_allclose(results["fine"], X.double().numpy() * 0.1, rtol=1e-15)
    assert results["large"].tolist() == [2**40 + 3, 2, 6]


def test_the_batch_may_lie_on_another_axis_and_shapes_may_vary(tmp_path: Path, served: Any) -> None:
    model = module(lambda self, x: self.dense(x).sum(0), dense=nn.Linear(4, 2))
    first, longer = torch.randn(2, 3, 4), torch.randn(5, 3, 4)
    done = export_torch(model, first, tmp_path / "turned", [3], axes={"x": "tnc"}, variants=[longer], provenance=None)
    for x in (first, longer):
        np.testing.assert_allclose(served(done.directory, x)["output"], *expected(model, x), rtol=1e-5, atol=1e-6)


def branches(self: Any, x: Any) -> Any:
    return x if x.sum() > 0 else -x


def in_place(self: Any, x: Any) -> Any:
    x.add_(1)
    return x * 2


def counting(self: Any, x: Any) -> Any:
    self.count += 1
    return x * 2


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (module(branches), {}, r"decides by the values of a tensor .*torch\.where"),
        (module(branches), {"format": "pt2"}, r"decides by the values of a tensor .*torch\.where"),
        (module(branches), {"format": "torchscript"}, r"test_torch_modules\.py:\d+\) .*another way"),
        (module(in_place), {}, "changes its input 'x' in place"),
        (module(counting, count=torch.zeros(())), {}, "changes the buffer 'count'"),
        (nn.BatchNorm1d(4).train(), {}, r"changes the buffer 'running_mean'.*module\.eval\(\)"),
        (nn.Dropout().train(), {}, r"gives other results for the same inputs .*module\.eval\(\)"),
        (module(lambda self, x: x + 0 * torch.rand_like(x)), {}, r"draws random numbers \(aten\.rand"),
        (module(lambda self, x: None), {}, "returns no tensor"),
        (nn.Linear(4, 2, device="meta"), {}, r"'weight' is on the device meta.*module\.cpu\(\)"),
        (module(lambda self, x: x), {"format": "onnx"}, "format is 'onnx', expected one of stablehlo, pt2"),
        (module(lambda self, x: x), {"format": "pt2", "layout": "legacy"}, "are for bundles"),
        (module(lambda self, x: x), {"format": "pt2", "axes": {"x": "cn"}}, "first axis of 'x' .* is not the batch"),
        (module(lambda self, x: x.T @ x), {"format": "pt2"}, "first axis of 'output' .* is not the batch"),
        (module(lambda self, x: x.reshape(3, 4) * 2), {"format": "pt2"}, "torch.export cannot follow the module"),
        (module(lambda self, x: x.sum()), {"format": "torchscript", "batch_sizes": None}, "'output' is one number"),
        (module(lambda self, x: torch.nonzero(x)), {}, "torchax|torch.export cannot follow"),
    ],
)  # fmt: skip
def test_what_cannot_be_exported_is_told_and_leaves_nothing(
    tmp_path: Path, model: Any, options: dict[str, Any], words: str
) -> None:
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with pytest.raises(ExportError, match=words):
        export_torch(model, X.clone(), tmp_path / "none", **{"batch_sizes": [3], "provenance": None, **options})
    assert list(tmp_path.iterdir()) == []
    assert all(
        torch.equal(buffer, before[name]) for name, buffer in model.named_buffers() if buffer.device.type == "cpu"
    )


def test_what_the_module_raises_itself_reaches_its_author(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        export_torch(nn.Linear(5, 2), X, tmp_path / "none")


@pytest.mark.parametrize("format", ["stablehlo", "pt2", "torchscript"])
def test_an_export_that_differs_from_its_module_is_refused_in_every_format(tmp_path: Path, format: Any) -> None:
    class Sly(nn.Module):
        """Another function while torch looks at it."""

        def forward(self, x: Any) -> Any:
            watched = torch.compiler.is_exporting() or torch.jit.is_tracing() or torch.jit.is_scripting()
            return x * 2 if watched else x * random.choice([2.001])

    with pytest.raises(ExportError, match="output 'output' of the bundle differs from the model"):
        export_torch(Sly(), X, tmp_path / "none", [3], format=format, provenance=None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("format", ["pt2", "torchscript"])
def test_torchs_own_files_are_served_for_any_number_of_rows_up_to_the_largest(
    tmp_path: Path, served: Any, format: Any
) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 3, batch_first=True)

        def forward(self, x):  # type: ignore[no-untyped-def]
            return self.lstm(x)[0].sum(1)

    model, examples = of_integers() if format == "pt2" else (Recurrent(), (torch.randn(3, 6, 4),))
    done = export_torch(model, examples, tmp_path / "file", [2, 5], format=format, force=True)
    assert (done.batch_sizes, max(done.differences.values()) < 1e-5) == ((), True)
    written = sorted(path.name for path in done.directory.iterdir())
    assert {"model_inference.textproto", "provenance.yaml", "model.pt2" if format == "pt2" else "model.pt"} <= {
        *written
    }
    assert prepare(done.directory, allow_code=True).spec.max_batch_size == 5
    for rows in (1, 3):
        inputs = [example[:rows] for example in examples]
        for got, want in zip(served(done.directory, *inputs).values(), expected(model, *inputs), strict=True):
            assert got.dtype == want.dtype
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6 if want.dtype.kind == "f" else 0)


def test_a_scripted_module_keeps_its_branches(tmp_path: Path, served: Any) -> None:
    class Branches(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if bool(x.sum() > 0):
                return x * 2
            return -x

    options: dict[str, Any] = {"format": "torchscript", "batch_sizes": None, "provenance": None}
    done = export_torch(Branches(), X + 2, tmp_path / "branches", **options)
    for x in (X + 2, X - 2):
        np.testing.assert_array_equal(served(done.directory, x)["output"], expected(Branches(), x)[0])


def test_the_process_is_the_users_again_after_an_export(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    before = torch.backends.mha.get_fastpath_enabled(), jax.config.values["jax_enable_x64"], torch.get_rng_state()
    packet = torch._ops.OpOverloadPacket.__getattr__
    TorchModel(model, X).export(tmp_path / "linear", [3])
    now = torch.backends.mha.get_fastpath_enabled(), jax.config.values["jax_enable_x64"], torch.get_rng_state()
    assert (now[:2], torch.equal(now[2], before[2])) == (before[:2], True)
    assert torch._ops.OpOverloadPacket.__getattr__ is packet
    assert model.training
    with torch.random.fork_rng():  # fails once torchax is imported as its authors mean it
        torch.rand(1)


def test_torchax_still_names_overloads_that_torch_no_longer_has() -> None:
    """When this fails, drop ``_removed_overloads`` from torch_operators.py."""
    with pytest.raises(AttributeError, match="prod"):
        _ = torch.ops.aten.prod.dim_Dimname


@pytest.mark.parametrize(("kind", "options"), [
    (nn.LSTM, {"num_layers": 2, "bidirectional": True}),
    (nn.LSTM, {"proj_size": 2, "batch_first": True, "bias": False}),
    (nn.GRU, {"num_layers": 2, "bidirectional": True, "batch_first": True}),
    (nn.GRU, {"bias": False}),
    (nn.RNN, {"bidirectional": True}),
    (nn.RNN, {"nonlinearity": "relu", "bias": False, "num_layers": 2}),
])  # fmt: skip
def test_recurrent_layers_are_torchs_in_every_form(kind: Any, options: dict[str, Any]) -> None:
    from converters.exporters import torch_recurrent

    layer = kind(4, 5, **options)
    directions = layer.num_layers * (2 if layer.bidirectional else 1)
    x, hidden = torch.randn(3, 6, 4), torch.randn(directions, 3 if layer.batch_first else 6, layer.proj_size or 5)
    cell = torch.randn(directions, hidden.shape[1], 5)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # oneDNN has no projections
        steps, last = layer(x, (hidden, cell) if kind is nn.LSTM else hidden)
    aten = torch.ops.aten
    operator = {
        nn.LSTM: aten.lstm.input,
        nn.GRU: aten.gru.input,
        nn.RNN: aten.rnn_relu.input if options.get("nonlinearity") == "relu" else aten.rnn_tanh.input,
    }[kind]
    states: Any = [hidden.numpy(), cell.numpy()] if kind is nn.LSTM else hidden.numpy()
    weights = [weight.detach().numpy() for weight in layer._flat_weights]
    flags = (layer.bias, layer.num_layers, 0.0, False, layer.bidirectional, layer.batch_first)
    results = torch_recurrent.lowerings(torch)[operator](x.numpy(), states, weights, *flags)
    wanted = [steps, *last] if kind is nn.LSTM else [steps, last]
    for got, want in zip(results, wanted, strict=True):
        np.testing.assert_allclose(got, want.numpy(), rtol=1e-4, atol=1e-5)


def test_without_torchax_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> None:
        return None

    monkeypatch.setattr(torch_programs.torch_operators.importlib.util, "find_spec", missing)
    torch_programs.torch_operators.open_operators.cache_clear()
    with pytest.raises(Exception, match=r"pip install 'nereid-triton\[export\]'.*format='pt2'"):
        export_torch(nn.Linear(4, 2), X, tmp_path / "none", [3])
    torch_programs.torch_operators.open_operators.cache_clear()
