"""Process group of any size in one process, whose collectives run late on CUDA streams and deliver this rank's data.

A gather fills the output with copies of this rank's shard, and a reduction returns this rank's piece times the number
of ranks. The results have no meaning, but they depend on the inputs only. If work on another stream reads an output too
early, or writes to an input too early, the final weights differ from those of a run without delays.

A collective waits for the stream of the caller, as with NCCL. With delays, it first overwrites the output with NaN and
then sleeps on the device. ``wait()`` makes the current stream wait for an event. On a CPU, everything runs immediately.

:class:`ModeledNetwork` delivers no weights or gradients on a device. Its collectives take the time that they would take
in a modeled network.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.simulation.program import SimCollective
from benchmarks.simulation.simulator import SimMachine

__all__ = ["Loopback", "LoopbackWork", "ModeledNetwork"]


class LoopbackWork(dist.Work):
    def __init__(self, event: torch.cuda.Event | None, kept: Sequence[Tensor]) -> None:
        super().__init__()
        self._event = event
        self._kept = tuple(kept)  # a backend keeps the tensors of a collective until its wait

    def is_completed(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        self._kept = ()
        return True


class Loopback(dist.ProcessGroup):
    """See the module docstring. Registered as torch's "fake" backend, which layerzero accepts in a single process."""

    delays = False  # set on the class, for all groups
    _CYCLES = 2_000_000  # about a millisecond

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._random = random.Random(rank)
        self._stream: torch.cuda.Stream | None = None

    @classmethod
    def start(cls, *, rank: int, world_size: int) -> None:
        """Initialize torch.distributed with this backend, which replaces torch's own fake backend in this process."""
        dist.Backend._plugins.pop("FAKE", None)
        dist.Backend.register_backend("fake", cls, devices=["cpu", "cuda"])
        dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=world_size)

    def _launch(
        self,
        deliver: Callable[[], object],
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        opts: Any,
        passes: int = 1,
    ) -> Any:
        """Launch a collective.

        Args:
            deliver: function that fills the outputs.
            outputs: tensors that the collective writes.
            inputs: tensors that it reads.
            opts: torch's options of the collective.
            passes: how often the data travels around the group, which is 2 for an all-reduce.
        """
        if not outputs[0].is_cuda:
            deliver()
            return LoopbackWork(None, ())
        stream = self._stream_of(opts)
        with torch.cuda.stream(stream), torch.no_grad():
            if self.delays:
                sent = {tensor.data_ptr() for tensor in inputs}
                for output in outputs:
                    if output.data_ptr() not in sent and output.is_floating_point():
                        output.fill_(torch.nan)
                torch.cuda._sleep(self._random.randrange(self._CYCLES))
            deliver()
            return LoopbackWork(stream.record_event(), [*outputs, *inputs])

    def _stream_of(self, opts: Any) -> torch.cuda.Stream:
        """Return the stream of a collective. As with NCCL, this is the current stream if the call is synchronous."""
        current = torch.cuda.current_stream()
        if not opts.asyncOp:
            return current
        if self._stream is None:
            self._stream = torch.cuda.Stream(priority=-1)
        self._stream.wait_stream(current)
        return self._stream

    # Collectives

    def _allgather_base(self, output: Tensor, tensor: Tensor, opts: Any) -> Any:
        pieces = output.chunk(self.size())
        return self._launch(lambda: _copy(pieces, [tensor] * len(pieces)), pieces, [tensor], opts)

    def allgather(self, outputs: list[list[Tensor]], tensors: list[Tensor], opts: Any) -> Any:
        return self._launch(lambda: _copy(outputs[0], tensors * len(outputs[0])), outputs[0], tensors, opts)

    def _reduce_scatter_base(self, output: Tensor, tensor: Tensor, opts: Any) -> Any:
        own = tensor.chunk(self.size())[self.rank()]
        return self._launch(lambda: torch.mul(own, self.size(), out=output), [output], [tensor], opts)

    def alltoall_base(self, output: Tensor, tensor: Tensor, outputs: list[int], inputs: list[int], opts: Any) -> Any:
        received = output.split(outputs) if outputs else output.chunk(self.size())
        sent = tensor.split(inputs) if inputs else tensor.chunk(self.size())
        return self._launch(lambda: _copy(received, [sent[self.rank()]] * len(received)), received, [tensor], opts)

    def alltoall(self, outputs: list[Tensor], tensors: list[Tensor], opts: Any) -> Any:
        own = tensors[self.rank()]
        return self._launch(lambda: _copy(outputs, [own] * len(outputs)), outputs, tensors, opts)

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Any:
        factor = self.size() if opts.reduceOp == dist.ReduceOp.SUM else 1
        return self._launch(lambda: tensors[0].mul_(factor), tensors, tensors, opts, passes=2)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        return self._launch(lambda: None, tensors, tensors, opts)

    def barrier(self, opts: Any) -> Any:
        return LoopbackWork(None, ())

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any) -> Any:
        return self._allgather_base(output, tensor, opts)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any) -> Any:
        return self._reduce_scatter_base(output, tensor, opts)

    # Properties that torch asks for

    def getBackendName(self) -> str:
        return "fake"

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def options(self) -> Any:
        raise RuntimeError("this backend has no options")

    def _get_backend(self, device: torch.device) -> Any:
        return self


class ModeledNetwork(Loopback):
    """Process group of any size in one process, whose collectives take a modeled time on a CUDA stream.

    Weights and gradients on a device are not delivered: the outputs keep their contents. Everything else is delivered.
    Without a `machine`, collectives take no time.
    """

    machine: SimMachine | None = None  # set on the class, for all groups
    cycles_per_second = 0.0  # of `torch.cuda._sleep`

    @classmethod
    def calibrate(cls) -> None:
        """Measure the length of the cycles in which `torch.cuda._sleep` counts."""
        cycles = 100_000_000
        for _ in range(2):  # the first call loads the kernel
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            torch.cuda._sleep(cycles)
            end.record()
            end.synchronize()
        cls.cycles_per_second = cycles / begin.elapsed_time(end) * 1e3

    def _launch(
        self,
        deliver: Callable[[], object],
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        opts: Any,
        passes: int = 1,
    ) -> Any:
        if not (outputs[0].is_cuda and outputs[0].is_floating_point()):
            return super()._launch(deliver, outputs, inputs, opts, passes)
        if self.machine is None:
            return LoopbackWork(None, ())
        larger = max(sum(t.numel() * t.element_size() for t in tensors) for tensors in (outputs, inputs))
        seconds = self._seconds(passes * larger * (self.size() - 1) / self.size(), passes)
        stream = self._stream_of(opts)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(int(seconds * self.cycles_per_second))
            return LoopbackWork(stream.record_event(), [*outputs, *inputs])

    def _seconds(self, sent: float, passes: int) -> float:
        """Return the time of a collective in which each rank sends `sent` bytes, if no other uses its links."""
        assert self.machine is not None
        ranks = dist.get_process_group_ranks(self)
        consecutive = ranks == list(range(ranks[0], ranks[0] + len(ranks)))
        axis = "zero3" if consecutive else "replica"
        kind = "all-reduce" if passes == 2 else "gather"
        collective = SimCollective(kind, "", axis, "", self.size(), sent)
        return self.machine.latency(collective) + max(self.machine.demands(collective).values(), default=0.0)


def _copy(outputs: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy values to outputs. Where the sizes differ, as for unequal parts, copy the elements that fit."""
    for output, value in zip(outputs, values, strict=True):
        if output.data_ptr() != value.data_ptr():
            least = min(output.numel(), value.numel())
            output.view(-1)[:least].copy_(value.reshape(-1)[:least])
            if least < output.numel():
                output.view(-1)[least:].zero_()
