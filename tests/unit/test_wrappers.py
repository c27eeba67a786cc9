"""What takes the place of something keeps its type, attributes, length, signature and pickling."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import importlib.util
import inspect
import pickle
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sized
from types import GeneratorType, SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("ray.data")
pytest.importorskip("torch")


import ray.data.iterator as ray_iterator
import torch
from integration import loops
from ray import cloudpickle
from torch import Tensor
from torch.utils.data import DataLoader, SequentialSampler

import traceml_ray
from traceml_ray.agent import bootstrap
from traceml_ray.agent.instrument import Instrumentation
from traceml_ray.agent.patch.patcher import Patcher

# -- functions and methods of torch and Ray that are replaced ----------------------------------------


class Replacing(Patcher):
    """Keeps what was there before."""

    def __init__(self) -> None:
        super().__init__()
        self.replaced: dict[str, tuple[Any, str, Any]] = {}

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        self.replaced[f"{owner.__name__}.{name}"] = owner, name, getattr(owner, name)
        super().replace(owner, name, make)

    def when_imported(self, module: str, name: str, patch: Callable[[], object]) -> None:
        if importlib.util.find_spec(module.partition(".")[0]) is not None:  # others' engines may not be there
            importlib.import_module(module)
        super().when_imported(module, name, patch)


@contextlib.contextmanager
def installed() -> Iterator[Replacing]:
    patches = Replacing()
    instrumentation = Instrumentation(loops.Job().recorder, patches)
    instrumentation.install()
    try:
        yield patches
    finally:
        instrumentation.remove()


with installed() as all_patches:
    REPLACED = all_patches.replaced
assert not all_patches.missing and len(REPLACED) > 40


@pytest.fixture(scope="module")
def patches() -> Iterator[Replacing]:
    with installed() as patches:
        yield patches


def stored(value: Any, dumps: Callable[[Any], bytes] = pickle.dumps) -> bytes | None:
    with contextlib.suppress(Exception):
        return dumps(value)
    return None


def asked(value: Any, question: Callable[[Any], Any]) -> Any:
    """What a question is answered with, where there is an answer."""
    try:
        return question(value)
    except Exception:
        return None


@pytest.mark.parametrize("name", list(REPLACED))
def test_replaced_function_is_like_the_original(patches: Replacing, name: str) -> None:
    owner, attribute, original = patches.replaced[name]
    ours = getattr(owner, attribute)
    assert ours is not original
    questions = [
        inspect.signature,
        inspect.getdoc,
        lambda one: inspect.signature(functools.partial(one, None)),
    ]
    if not hasattr(original, "__wrapped__"):  # of a wrapper it tells nothing
        questions.append(inspect.getfullargspec)
    for question in questions:
        if (expected := asked(original, question)) is not None:
            assert asked(ours, question) == expected
    held = {name: value for name, value in getattr(original, "__dict__", {}).items() if name != "__wrapped__"}
    assert held.items() <= vars(ours).items()
    assert ours.__name__ == original.__name__
    assert copy.copy(ours) is copy.deepcopy(ours) is ours
    for dumps in (pickle.dumps, cloudpickle.dumps):
        if stored(original, dumps) is not None:
            assert pickle.loads(dumps(ours)) is ours
            assert b"traceml" not in dumps(ours)
    if inspect.isclass(owner):
        assert getattr(type("Sub", (owner,), {}), attribute) is ours


def test_signatures_of_classes_with_a_replaced_method_are_unchanged() -> None:
    classes = [owner for owner, _, _ in REPLACED.values() if inspect.isclass(owner)]
    before = [asked(cls, inspect.signature) for cls in classes]
    with installed():
        assert [asked(cls, inspect.signature) for cls in classes] == before


class Collator:
    """What a loader is given to collate with: it has attributes."""

    pad_to = 8

    def __init__(self) -> None:
        self.tokenizer = "theirs"

    def __call__(self, samples: list[Tensor]) -> Tensor:
        return torch.stack(samples)


def test_loader_and_its_iterator_keep_their_attributes(patches: Replacing) -> None:
    loader = DataLoader(loops.Numbers(4), batch_size=2, collate_fn=Collator())
    iterator = iter(loader)
    assert type(iterator).__module__ == "torch.utils.data.dataloader"
    assert len(iterator) == len(loader) == 2  # type: ignore[arg-type]
    fetcher = iterator._dataset_fetcher  # type: ignore[attr-defined]
    assert fetcher.collate_fn.tokenizer == "theirs"
    assert type(loader.collate_fn) is Collator
    assert inspect.signature(fetcher.collate_fn) == inspect.signature(Collator())
    assert len(list(pickle.loads(pickle.dumps(loader)))) == len(list(copy.deepcopy(loader))) == 2
    assert not patches.errors


# -- Ray Data ------------------------------------------------------------------------------------------


class Shard(ray_iterator.DataIterator):
    def _iter_batches(self, **_: Any) -> Any:
        return ray_iterator._IterableFromIterator(lambda: (number for number in range(3)))

    def _to_ref_bundle_iterator(self) -> Any: ...
    def stats(self) -> str:
        return ""

    def schema(self) -> Any: ...
    def get_context(self) -> Any: ...
    def materialize(self) -> Any: ...


@pytest.mark.usefixtures("patches")
@pytest.mark.parametrize("method", ["iter_batches", "iter_torch_batches"])
def test_ray_data_batches_are_of_their_original_type(method: str) -> None:
    batches = getattr(Shard(), method)()
    assert type(batches) is ray_iterator._IterableFromIterator
    assert traceml_ray.watch(batches) is batches, "it is timed already"
    assert type(iter(batches)) is GeneratorType
    assert callable(batches.iterator_gen)
    assert list(copy.copy(batches)) == list(batches) == [0, 1, 2]
    sent = cloudpickle.dumps(batches)
    assert b"traceml_ray" not in sent
    assert list(pickle.loads(sent)) == [0, 1, 2]


@pytest.mark.usefixtures("patches")
def test_huggingface_accepts_watched_batches_of_ray_data() -> None:
    transformers = pytest.importorskip("transformers")
    from ray.train.huggingface.transformers import prepare_trainer

    trainer = prepare_trainer(transformers.Trainer.__new__(transformers.Trainer))
    trainer.train_dataset = Shard().iter_torch_batches()
    assert list(trainer.get_train_dataloader()) == [0, 1, 2]


# -- what a script says itself -------------------------------------------------------------------------


@pytest.fixture(params=["watched", "not watched"])
def agent(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Both kinds of process."""
    if request.param == "not watched":
        return None
    job = loops.Job()
    made = SimpleNamespace(recorder=job.recorder, instrumentation=job.instrumentation)
    monkeypatch.setattr(bootstrap, "_agent", made)
    return made


class Unsized:
    def __iter__(self) -> Iterator[int]:
        return iter((1, 2))


SOURCES: dict[str, Callable[[], Any]] = {
    "list": lambda: [1, 2],
    "dict": lambda: {1: "a", 2: "b"},
    "range": lambda: range(1, 3),
    "loader": lambda: DataLoader([1, 2], batch_size=None),  # type: ignore[arg-type]
    "unsized": Unsized,
    "iterator": lambda: iter([1, 2]),
    "generator": lambda: (number for number in (1, 2)),
    "empty": list,
}
KINDS = (Sized, Iterable, Iterator, list, dict, DataLoader, GeneratorType)


@pytest.mark.usefixtures("agent")
@pytest.mark.parametrize("name", list(SOURCES))
def test_watched_object_behaves_like_its_source(name: str) -> None:
    source, watched = SOURCES[name](), traceml_ray.watch(SOURCES[name]())
    assert [isinstance(watched, kind) for kind in KINDS] == [isinstance(source, kind) for kind in KINDS]
    for question in (len, bool, dir, lambda one: one[0], lambda one: 1 in one):
        if not (isinstance(source, Iterator) and question not in (len, bool, dir)):
            assert str(asked(watched, question)) == str(asked(source, question))
    assert hasattr(watched, "__len__") == hasattr(source, "__len__")
    with pytest.raises(AttributeError, match="nothing_of_that_name"):
        watched.nothing_of_that_name  # noqa: B018
    if not isinstance(source, GeneratorType):
        for copied in (copy.copy(watched), copy.deepcopy(watched), pickle.loads(pickle.dumps(watched))):
            assert type(copied) is type(watched) and len(list(copied)) == len(list(SOURCES[name]()))
    again = not isinstance(source, Iterator)
    assert str(list(watched)) == str(list(source))
    assert str(list(watched)) == str(list(source) if again else []), "a second epoch"


def test_watched_iterator_goes_on_where_a_loop_has_left_it(agent: Any) -> None:
    watched = traceml_ray.watch(iter(range(4)))
    for _ in watched:
        break
    assert next(watched) == 1
    assert list(watched) == [2, 3]
    assert agent is None or not agent.instrumentation.errors


@pytest.mark.usefixtures("agent")
def test_watched_object_passes_changes_to_its_source() -> None:
    source = Unsized()
    watched: Any = traceml_ray.watch(source)
    watched.epoch = 3
    assert vars(source) == {"epoch": 3}
    del watched.epoch
    assert vars(source) == {}
    numbers = [1]
    traceml_ray.watch(numbers)[0] = 2
    assert numbers == [2]


class Own(DataLoader):  # type: ignore[type-arg]
    """A loader with iterators of its own, which are not timed by themselves."""

    def __iter__(self) -> Any:
        return iter((1, 2))


@pytest.mark.usefixtures("agent")
@pytest.mark.parametrize("kind", [DataLoader, Own])
def test_watched_loader_can_be_rebuilt_with_another_sampler(kind: Any) -> None:
    watched = traceml_ray.watch(kind([1, 2], batch_size=None))
    sampler = SequentialSampler([1, 2])
    made = type(watched)(watched.dataset, sampler=sampler, batch_size=None)
    assert isinstance(made, kind) and made.sampler is sampler
    assert [int(one) for one in made] == [1, 2]


@pytest.mark.usefixtures("agent")
@pytest.mark.parametrize("kind", [DataLoader, Own])
def test_watched_loader_gets_its_sampler_from_lightning(kind: Any) -> None:
    data = pytest.importorskip("lightning.fabric.utilities.data")
    sampler = SequentialSampler([1, 2])
    made = data._update_dataloader(traceml_ray.watch(kind([1, 2])), sampler)
    assert made.sampler is sampler and isinstance(made, kind)


def test_timed_loader_is_not_wrapped_again(agent: Any) -> None:
    loader, loader_of_ours = DataLoader([1, 2]), Own([1, 2])  # type: ignore[arg-type,var-annotated]
    if agent is not None:
        agent.instrumentation.install()
    assert traceml_ray.watch(loader) is loader
    once: Any = traceml_ray.watch(loader_of_ours)
    assert once is not loader_of_ours and traceml_ray.watch(once) is once
    if agent is not None:
        agent.instrumentation.remove()


@pytest.mark.usefixtures("agent")
def test_watched_object_supports_the_special_methods_of_its_type() -> None:
    class Stream(Unsized):
        left = False

        def __enter__(self) -> Stream:
            return self

        def __exit__(self, *_: object) -> None:
            self.left = True

        def __call__(self, first: int, *, last: int) -> list[int]:
            return [first, last]

    source = Stream()
    watched: Any = traceml_ray.watch(source)
    assert weakref.ref(watched)() is watched
    with watched as entered:
        assert entered is watched, "and so its items are timed"
        assert list(entered) == [1, 2]
    assert source.left
    assert callable(watched) and watched(1, last=2) == [1, 2]
    assert not callable(traceml_ray.watch([1]))
    with pytest.raises(TypeError, match="context manager"), cast("Any", traceml_ray.watch([1])):
        pass
    numbers = [1, 2]
    del traceml_ray.watch(numbers)[0]
    assert numbers == [2]


@pytest.mark.usefixtures("agent")
@pytest.mark.parametrize("block", [lambda: traceml_ray.stage("tokenize"), traceml_ray.trace_step])
def test_block_is_a_decorator_can_be_reused_and_is_pickled(block: Callable[[], Any]) -> None:
    def work(depth: int, *, more: int = 1) -> int:
        """Do it."""
        return depth if depth <= 0 else decorated(depth - 1, more=more) + more

    decorated = block()(work)
    assert decorated(3) == 3
    assert (decorated.__name__, decorated.__doc__) == ("work", "Do it.")
    assert inspect.signature(decorated) == inspect.signature(work)
    threads = [threading.Thread(target=decorated, args=(3,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    one = block()
    for _ in range(2):
        with one, one:
            pass
    for copied in (pickle.loads(pickle.dumps(one)), copy.deepcopy(one)):
        with copied:
            pass
    cloudpickle.loads(cloudpickle.dumps(decorated))  # as a train function's own: no module has it
    with pytest.raises(ZeroDivisionError), one:
        raise ZeroDivisionError
