"""The layers of one process: times by a clock that moves by hand, and training that is the same with them."""

from __future__ import annotations

import copy
import itertools
import pickle
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fake_device import FakeDevice
from torch import nn
from torch.utils.checkpoint import checkpoint

from traceml_ray.agent.device_use import DeviceUse
from traceml_ray.agent.instrument import Instrumentation
from traceml_ray.agent.patch.layer_calls import LayerCalls, MeasuredCalls
from traceml_ray.agent.patch.patcher import Patcher
from traceml_ray.agent.patch.root_modules import RootModules
from traceml_ray.agent.recorder import Recorder
from traceml_ray.agent.ring import StepRing
from traceml_ray.signals.layers.agent import LayerSampler
from traceml_ray.signals.layers.records import MAX_LAYERS, OTHERS, LayerWindow
from traceml_ray.signals.layers.table import LayerTable
from traceml_ray.wire import messages as wire
from traceml_ray.wire.messages import LayersCommand


class Clock:
    def __init__(self) -> None:
        self.now = 1000

    def __call__(self) -> int:
        return self.now


CLOCK = Clock()


class Work(torch.autograd.Function):
    """Takes so long, in its backward twice as long."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ns: int) -> torch.Tensor:
        CLOCK.now += ns
        ctx.ns = ns
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        CLOCK.now += 2 * ctx.ns
        return grad * 2, None


class Leaf(nn.Module):
    def __init__(self, ns: int) -> None:
        super().__init__()
        self.ns = ns
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Work.apply(x * self.weight, self.ns)


class Block(nn.Module):
    """Two leaves with work of its own between them, and a residual."""

    def __init__(self, *ns: int) -> None:
        super().__init__()
        self.first, self.second, self.own_ns = Leaf(ns[0]), Leaf(ns[2]), ns[1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(Work.apply(self.first(x), self.own_ns))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(10, 100, 30), Block(40, 200, 60)])
        self.head = Leaf(7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Measured:
    """The calls of one model."""

    def __init__(self, *roots: nn.Module) -> None:
        self.patcher = Patcher(debug=True)
        self.calls = LayerCalls(self.patcher.failed, CLOCK)
        self.calls.install(self.patcher)
        self.table = LayerTable(list(roots))
        self.calls.use(self.table)

    def step(self, run: Callable[[], object]) -> MeasuredCalls:
        self.calls.begin()
        began = CLOCK.now
        run()
        sample = self.calls.end()
        assert sample is not None and sum(sample.times) == CLOCK.now - began
        return sample

    def times(self, sample: MeasuredCalls) -> dict[str, tuple[int, int]]:
        n = len(self.table.layers)
        return {
            layer.name: (sample.times[index], sample.times[n + index])
            for index, layer in enumerate(self.table.layers)
            if sample.calls[index] or sample.times[n + index]
        }


@pytest.fixture
def measured() -> Iterator[Callable[..., Measured]]:
    made: list[Measured] = []

    def make(*roots: nn.Module) -> Measured:
        made.append(Measured(*roots))
        return made[-1]

    call = nn.Module.__call__
    yield make
    for one in reversed(made):
        one.patcher.restore()
    assert nn.Module.__call__ is call


def trained(model: nn.Module) -> torch.Tensor:
    x = torch.ones(2, 3, requires_grad=True)
    loss = model(x).sum()
    loss.backward()
    return loss


EXPECTED = {
    "": (0, 0),
    "blocks.0": (100, 200), "blocks.0.first": (10, 20), "blocks.0.second": (30, 60),
    "blocks.1": (200, 400), "blocks.1.first": (40, 80), "blocks.1.second": (60, 120),
    "head": (7, 14),
}  # fmt: skip


def test_time_is_divided_among_layers_without_rest(measured: Callable[..., Measured]) -> None:
    model = Model()
    ours = measured(model)
    for _ in range(2):
        times = ours.times(ours.step(lambda: trained(model)))
        assert {name: times[name] for name in EXPECTED} == EXPECTED


def test_gradients_are_the_same_with_hooks(measured: Callable[..., Measured]) -> None:
    class Odd(nn.Module):
        """Returns views that are changed in place afterwards, tuples, and nothing."""

        def __init__(self) -> None:
            super().__init__()
            self.one, self.relu = nn.Linear(3, 4), nn.ReLU(inplace=True)
            self.gru, self.norm = nn.GRU(2, 2, batch_first=True), nn.BatchNorm1d(4)
            self.flat = nn.Flatten()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.one(x)
            y += 1
            y = (self.relu(self.norm(y)) + 0).view(2, 2, 2)
            y[0] *= 2
            out, (state) = self.gru(y)
            return self.flat(out).sum() + state.sum() * self.flat(y).mean()

    def gradients(on: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, x = Odd(), torch.randn(2, 3, requires_grad=True)
        if on:
            ours = measured(model)
            ours.step(lambda: model(x).backward())
        else:
            model(x).backward()
        return [x.grad, *(p.grad for p in model.parameters())]  # type: ignore[list-item]

    pairs = zip(gradients(True), gradients(False), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_exception_in_forward_leaves_nothing_behind(measured: Callable[..., Measured]) -> None:
    model = Model()
    ours = measured(model)
    fails = [True]

    def forward(x: torch.Tensor, whole: Any = model.blocks[1].second.forward) -> torch.Tensor:
        if fails.pop():
            raise ValueError("mine")
        return whole(x)

    model.blocks[1].second.forward = forward  # type: ignore[method-assign]

    def step() -> None:
        with pytest.raises(ValueError, match="mine"):
            trained(model)
        CLOCK.now += 5000
        fails.append(False)
        trained(model)

    sample = ours.step(step)
    times = ours.times(sample)
    assert times["head"] == (7, 14) and times["blocks.1.first"] == (80, 80) and sample.times[-1] == 5000


def test_backward_that_fails_ends_where_the_next_call_begins(measured: Callable[..., Measured]) -> None:
    model = Model()
    ours = measured(model)

    def step() -> None:
        x = torch.ones(2, 3, requires_grad=True)
        y = model(x)
        y.register_hook(lambda _: None)
        z = model.blocks[0].first(x)
        z.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            (y.sum() + z.sum()).backward()
        trained(model)

    assert ours.times(ours.step(step))["head"][0] == 14


def test_evaluation_and_other_threads_do_not_count(measured: Callable[..., Measured]) -> None:
    model = Model()
    ours = measured(model)

    def step() -> None:
        with torch.no_grad():
            model(torch.ones(2, 3))
        other = threading.Thread(target=model, args=(torch.ones(2, 3),))
        other.start()
        other.join()
        trained(model)

    sample = ours.step(step)
    assert ours.times(sample)["head"] == (7, 14) and set(sample.calls) == {0, 1}


def test_shared_layer_counts_each_call(measured: Callable[..., Measured]) -> None:
    leaf = Leaf(5)
    model = nn.Sequential(leaf, nn.Sequential(leaf))
    ours = measured(model)
    sample = ours.step(lambda: trained(model))
    assert ours.times(sample)["0"] == (10, 20)
    assert sample.calls[ours.table.by_id[id(leaf)]] == 2 and ours.table.parameter_bytes[1] == 12


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_checkpointing_computes_again_is_backward(
    measured: Callable[..., Measured], reentrant: bool
) -> None:
    class Checkpointed(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return self.head(x)

    model, plain = Checkpointed(), Model()
    ours = measured(model)
    sample = ours.step(lambda: trained(model))
    trained(plain)
    assert all(
        torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True)
    )  # type: ignore[arg-type]
    n, times = len(ours.table.layers), ours.times(sample)
    index = ours.table.by_id[id(model.blocks[0].first)]
    assert (sample.calls[index], sample.calls[n + index]) == (1, 1)
    assert times["blocks.0.first"][0] == 10 and times["head"] == (7, 14)
    again = sum(backward for _, backward in times.values())
    assert again == 2 * 447 + 440 - (0 if reentrant else 90)  # it stops where nothing more is needed


def test_compiled_and_captured_layers_are_one(measured: Callable[..., Measured]) -> None:
    class OptimizedModule(nn.Module):
        def __init__(self, inside: nn.Module) -> None:
            super().__init__()
            self._orig_mod = inside

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self._orig_mod(x)

    def replay(x: torch.Tensor) -> torch.Tensor:
        return Work.apply(x, 9)

    replay.__module__ = "torch.cuda.graphs"
    captured = Block(1, 2, 3)
    captured.forward = replay  # type: ignore[method-assign]
    model = nn.Sequential(OptimizedModule(Block(1, 2, 3)), captured, Leaf(5))
    ours = measured(model)
    times = ours.times(ours.step(lambda: trained(model)))
    assert [(layer.name, layer.kind, layer.region) for layer in ours.table.layers[1:]] == [
        ("0", "Block", "compiled"), ("1", "Block", "graph"), ("2", "Leaf", ""),
    ]  # fmt: skip
    assert times == {"": (0, 0), "0": (6, 12), "1": (9, 18), "2": (5, 10)}
    root = OptimizedModule(Model())
    ours = measured(root._orig_mod)
    times = ours.times(ours.step(lambda: trained(root)))
    assert times == {"": (447, 894)} and ours.table.layers[0].region == "compiled"


def test_second_backward_of_a_graph_that_stays_is_not_measured(measured: Callable[..., Measured]) -> None:
    model = Model()
    ours = measured(model)
    kept = []

    def step() -> None:
        kept.append(model(torch.ones(2, 3)).sum())
        kept[0].backward(retain_graph=True)

    ours.step(step)
    kept[0].backward()
    ours.calls.use(LayerTable([model.head]))
    ours.calls.begin()
    kept[0] = None
    trained(model)
    assert ours.calls.end() is not None


def test_modules_are_pickled_and_copied_as_without(measured: Callable[..., Measured]) -> None:
    model = Model()
    ours = measured(model)
    before = pickle.dumps(model)

    def step() -> None:
        assert pickle.dumps(model) == before
        copy.deepcopy(model)(torch.ones(2, 3))

    assert not any(ours.step(step).calls)


def test_what_is_traced_is_as_without(measured: Callable[..., Measured]) -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.ones(4, 3)

    def traced() -> list[object]:
        graph = torch.jit.trace(model, x).inlined_graph  # it compares two of its own, too
        return [(node.kind(), [output.debugName() for output in node.outputs()]) for node in graph.nodes()]

    graphs = [traced()]
    ours = measured(model)
    sample = ours.step(lambda: graphs.append(traced()))
    assert graphs[0] == graphs[1] and not any(sample.calls)


def test_scripted_layer_is_measured(measured: Callable[..., Measured]) -> None:
    model = nn.Sequential(nn.Linear(3, 3), torch.jit.script(nn.Sequential(nn.Linear(3, 3))), Leaf(7))
    ours = measured(model)
    assert ours.times(ours.step(lambda: trained(model)))["2"] == (7, 14)


@pytest.mark.parametrize("marked", [False, True])
def test_stack_is_as_deep_as_without(measured: Callable[..., Measured], marked: bool) -> None:
    depths: list[int] = []

    class Deep(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            depths.append(len(traceback.extract_stack()))
            return x

    model = nn.Sequential(nn.Sequential(Deep()))
    model(torch.ones(1))
    roots = RootModules(Recorder(StepRing(16)), lambda *_: None)
    if marked:
        roots.add(model)
    try:
        ours = measured(model)
        model(torch.ones(1))
        ours.calls.begin()
        model(torch.ones(1))
        sample = ours.calls.end()
    finally:
        roots.restore()
    assert sample is not None and sample.calls[:3] == [1, 1, 1]
    assert len({*depths}) == 1 and len(depths) == 3


def test_names_are_without_wrappers_and_of_a_large_model_the_nearest() -> None:
    class DistributedDataParallel(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: torch.Tensor) -> Any:
            return self.module(x)

    table = LayerTable([DistributedDataParallel(Model())])
    assert [layer.name for layer in table.layers[:4]] == ["", "blocks", "blocks.0", "blocks.0.first"]
    assert table.layers[0].kind == "Model"
    table = LayerTable([Model()], most=5)
    assert [layer.name for layer in table.layers] == ["", "blocks", "blocks.0", "blocks.1", "head"]
    assert table.parameter_bytes == [0, 0, 24, 24, 12]
    two = LayerTable([Leaf(1), Block(1, 2, 3)])
    assert [layer.name for layer in two.layers] == ["Leaf", "Block", "Block.first", "Block.second"]


# -- which steps, and what is sent ------------------------------------------------------------------------


class Job:
    """A rank that trains a model, with its sampler."""

    def __init__(self, always: bool = True, layers: int = 2) -> None:
        self.recorder = Recorder(StepRing(4096), CLOCK)
        self.patches = Instrumentation(self.recorder, Patcher(debug=True))
        self.patches.install()
        self.model: nn.Module = nn.Sequential(*(Leaf(1000) for _ in range(layers)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        device = DeviceUse("0", self.patches, self.recorder.steps.rows.ring)
        self.sampler = LayerSampler(self.patches, device, always, CLOCK)
        self.windows: list[LayerWindow] = []

    def train(self, steps: int, ns: int = 20_000_000, turn_every: int = 1) -> None:
        for step in range(1, steps + 1):
            self.optimizer.zero_grad()
            trained(self.model)
            CLOCK.now += ns
            self.optimizer.step()
            self.recorder.replay()
            if step % turn_every == 0:
                self.windows += self.sampler.collect()

    def close(self) -> None:
        self.patches.remove()
        self.sampler.abandon()


@pytest.fixture
def job() -> Iterator[Callable[..., Job]]:
    made: list[Job] = []

    def make(*args: Any, **given: Any) -> Job:
        made.append(Job(*args, **given))
        return made[-1]

    call = nn.Module.__call__
    yield make
    for one in made:
        one.close()
        assert one.recorder.step_hook is None
    assert nn.Module.__call__ is call


def test_windows_have_the_steps_that_were_measured(job: Callable[..., Job]) -> None:
    rank = job()
    rank.train(600)
    first, *_ = rank.windows
    assert [window.number for window in rank.windows] == [*range(len(rank.windows))]
    assert first.first_step == 8 and first.clock == "host" and not first.waits and not first.asked
    one = next(layer for layer in first.layers if layer.name == "1")
    assert (one.kind, one.calls, one.forward_ns, one.backward_ns) == (
        "Leaf", first.steps, 1000 * first.steps, 2000 * first.steps,
    )  # fmt: skip
    assert one.squares == 3000.0**2 * first.steps
    assert (one.parameter_bytes, one.gradient_bytes, one.output_bytes) == (12, 12, 24)
    spans = [window.spent_ns for window in rank.windows]
    assert all(later > 1.5 * earlier for earlier, later in itertools.pairwise(spans))


def test_model_that_follows_another_one_is_measured(job: Callable[..., Job]) -> None:
    ours = job()
    for names in ({"", "0", "1"}, {"", "0", "1", "2"}):
        ours.model = nn.Sequential(*(Leaf(1000) for _ in range(len(names) - 1)))
        ours.optimizer = torch.optim.SGD(ours.model.parameters(), lr=0.1)
        ours.windows.clear()
        ours.train(600, ns=60_000_000)
        assert {layer.name for layer in ours.windows[-1].layers} == names


def test_more_is_measured_the_less_it_costs(job: Callable[..., Job]) -> None:
    cheap = job()
    cheap.train(40, 100_000_000)
    cheap.close()
    dear = job()
    dear.train(120, 20_000)  # a step of 26 µs, of which the hooks of 2 layers take several
    assert cheap.sampler.every == 1 and dear.sampler.every in (32, 64, 128)


def test_steps_are_measured_on_request_and_nothing_after(job: Callable[..., Job]) -> None:
    rank = job(always=False)
    call = nn.Module.__call__
    rank.train(5)
    assert nn.Module.__call__ is call and rank.recorder.step_hook is None
    command = wire.Command("layers", {"id": "a", "run": None, "ranks": "all", "steps": 6})
    assert LayersCommand(id="a", steps=6)
    for _ in range(3):  # it is repeated
        rank.sampler.handle_command(command)
        rank.train(60)
    (window,) = rank.windows
    assert (window.asked, window.steps) == ("a", 6)
    assert nn.Module.__call__ is call and rank.recorder.step_hook is None


@pytest.mark.parametrize("always", [False, True])
def test_as_many_steps_are_measured_as_were_asked_for(job: Callable[..., Job], always: bool) -> None:
    """The agent comes round once in many steps."""
    rank = job(always=always)
    begun, begin = [], rank.sampler._calls.begin
    rank.sampler._calls.begin = lambda: begun.append(begin())  # type: ignore[method-assign]
    rank.train(60, turn_every=20)
    for asked, steps in (("a", 5), ("b", 2), ("c", 45)):
        rank.sampler.handle_command(
            wire.Command("layers", {"id": asked, "run": None, "ranks": "all", "steps": steps})
        )
        rank.train(200, turn_every=20)
    assert [(w.asked, w.steps) for w in rank.windows if w.asked] == [("a", 5), ("b", 2), ("c", 45)]
    assert always or len(begun) == 5 + 2 + 45


@pytest.mark.parametrize("late", ["after", "before"])
def test_sample_that_begins_while_the_agent_stops_leaves_nothing_on(
    job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    """The model is another one when layers are measured for the next time."""
    monkeypatch.setattr("traceml_ray.signals.layers.agent.LOCK_S", 0.01)
    ours = job(always=False)
    sampler, begin = ours.sampler, ours.sampler._calls.begin

    def stops() -> None:
        monkeypatch.setattr(sampler._calls, "begin", begin)
        sampler._wanted = sampler._window = None
        thread = threading.Thread(target=sampler.collect)
        thread.start()
        thread.join()

    def begins() -> None:
        if late == "before":
            stops()
        begin()
        if late == "after":
            stops()

    monkeypatch.setattr(sampler._calls, "begin", begins)
    for asked, layers in (("a", 2), ("b", 3)):
        ours.model = nn.Sequential(*(Leaf(1000) for _ in range(layers)))
        ours.optimizer = torch.optim.SGD(ours.model.parameters(), lr=0.1)
        command = wire.Command("layers", {"id": asked, "run": None, "ranks": "all", "steps": 3})
        ours.sampler.handle_command(command)
        ours.train(60)
    assert [(window.asked, len(window.layers)) for window in ours.windows] == [("b", 4)]
    assert not sampler._calls.on and ours.recorder.step_hook is None


def test_layers_beyond_the_bound_are_one_row(job: Callable[..., Job]) -> None:
    rank = job(layers=MAX_LAYERS + 30)
    rank.train(60, 200_000_000)
    window = rank.windows[0]
    assert len(window.layers) == MAX_LAYERS + 1 and window.others == 31
    last = window.layers[-1]
    assert (last.name, last.kind, last.parameter_bytes) == ("", OTHERS, 30 * 12)
    total = sum(layer.forward_ns for layer in window.layers)
    assert total == window.steps * (MAX_LAYERS + 30) * 1000


def test_last_window_is_sent_at_the_end(job: Callable[..., Job]) -> None:
    rank = job()
    rank.train(30)
    assert not rank.windows
    (window,) = rank.sampler.collect(final=True)
    assert window.steps >= 3
    rank.sampler.abandon()
    assert rank.sampler.collect(final=True) == []


# -- on a device's clock ----------------------------------------------------------------------------------


class Launch(torch.autograd.Function):
    """Puts a kernel of so many ns on the stream, and does not wait for it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, device: FakeDevice, ns: int) -> torch.Tensor:
        device.launch(ns)
        device.wait(1000)
        ctx.device, ctx.ns = device, ns
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.device.launch(2 * ctx.ns)
        ctx.device.wait(1000)
        return grad * 2, None, None


class Kernel(nn.Module):
    def __init__(self, device: FakeDevice, ns: int) -> None:
        super().__init__()
        self.device, self.ns = device, ns
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Launch.apply(x * self.weight, self.device, self.ns)


class DeviceJob(Job):
    """The same on a device, whose clock is read; layers have a second way to it."""

    def __init__(self) -> None:
        self.device, self.layers_device = FakeDevice(), FakeDevice()
        self.layers_device.ends = self.device.ends
        self.recorder = Recorder(StepRing(4096), self.device)
        self.patches = Instrumentation(self.recorder, Patcher())
        self.patches.install()
        self.model = nn.Sequential(Kernel(self.device, 3_000_000), Kernel(self.device, 7_000_000))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.use = DeviceUse("1", self.patches, self.recorder.steps.rows.ring)
        self.sampler = LayerSampler(self.patches, self.use, True, self.device)
        self.windows = []

    def train(self, steps: int, ns: int = 1_000_000) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            trained(self.model)
            self.optimizer.step()
            self.device.wait(ns)
            self.device.item()
            self.layers_device.now = self.device.now
            self.recorder.replay()
            if self.use.clock is None and not self.recorder.steps.rows.first and not self.use._decided:
                self.use.begin(self.device, lambda: self.layers_device)
            self.use.tick()
            self.windows += self.sampler.collect()


@pytest.fixture
def on_device() -> Iterator[DeviceJob]:
    made = DeviceJob()
    yield made
    made.close()


def test_times_are_those_of_the_device(on_device: DeviceJob) -> None:
    on_device.train(600)
    window = on_device.windows[-1]
    assert window.clock == "device" and window.steps > 3
    times = {
        one.name: (one.forward_ns / window.steps, one.backward_ns / window.steps) for one in window.layers
    }
    assert times["0"] == pytest.approx((3e6, 6e6), rel=0.02)
    assert times["1"] == pytest.approx((7e6, 14e6), rel=0.02)
    assert not on_device.patches.errors


def test_device_that_fails_is_asked_no_more_and_times_are_those_of_the_host(on_device: DeviceJob) -> None:
    on_device.layers_device.fails = lambda name, count: name == "record" and count == 40
    on_device.train(600)
    assert on_device.patches.errors == {"layers: DeviceError": 1}
    assert on_device.windows[-1].clock == "host" and on_device.windows[-1].steps


def test_step_that_is_captured_is_not_measured(on_device: DeviceJob) -> None:
    on_device.layers_device.captures = lambda count: count > 30
    on_device.train(600)
    assert on_device.patches.errors["layers: no event inside a graph capture"] > 0
    assert all(window.clock == "device" for window in on_device.windows)
