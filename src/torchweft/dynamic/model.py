"""`Dynamic`: a model whose graph depends on its input, run batch by batch of equal ops.

    model = weft.dynamic(model)
    y = model(tree)                      one input: equal ops of one depth run together
    ys = model.map(trees)                many inputs: over all of them

The user's code is ordinary PyTorch with Python recursion and control flow. Where it needs numbers
(an early exit, a router), inputs of a `map` wait for each other, each in a thread of its own of
which one runs at a time, so that what they ask for still runs together.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from torchweft.dynamic.baton import run_in_turns
from torchweft.dynamic.local import Weights, flush_here
from torchweft.dynamic.recording import Recording
from torchweft.dynamic.state import State
from torchweft.errors import CaptureError, clip


class Dynamic:
    """A dynamic model: call it with one input, or `map` it over many."""

    def __init__(self, model: nn.Module, *, inline: Iterable[type[nn.Module]] = ()) -> None:
        if not isinstance(model, nn.Module):
            raise CaptureError(f"dynamic: {clip(model)} is no nn.Module.")
        self.state = State(model, tuple(inline))
        self.weights = Weights(self.state)
        self.num_groups = self.num_ops = 0
        self.state.flush = self._flush

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs of one input."""
        with self.state.record() as recording:
            outputs = self.state.model.forward(*args, **kwargs)
            return self._real(recording, outputs)

    def map(self, inputs: Iterable[Any]) -> list[Any]:
        """The outputs of each input (a tuple is taken as several arguments), in order."""
        given = [each if isinstance(each, tuple) else (each,) for each in inputs]
        forward = self.state.model.forward
        with self.state.record() as recording:
            if self.state.online and len(given) > 1:
                outputs = run_in_turns(self.state, [lambda a=a: forward(*a) for a in given])
            else:
                outputs = [forward(*args) for args in given]
            return self._real(recording, outputs)  # type: ignore[no-any-return]

    def close(self) -> None:
        """Give the model's modules back as they were."""
        self.state.close()

    def _real(self, recording: Recording, outputs: Any) -> Any:
        if recording.used or recording.inputs:
            self._flush(recording)
        return pytree.tree_map(self.state.real, outputs)

    def _flush(self, recording: Recording) -> None:
        groups = flush_here(recording, self.weights)
        self.num_groups += len(groups)
        self.num_ops += sum(group.num_rows for group in groups)
