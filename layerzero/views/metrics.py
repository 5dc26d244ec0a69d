"""What a sharded model holds, sends and waits for, as flat numbers for a logger: :func:`metrics`."""

from __future__ import annotations

from collections import Counter

from torch import nn

from layerzero.engine.hooks import runtime_of
from layerzero.views.report import measure

__all__ = ["metrics"]


def metrics(model: nn.Module, reset: bool = True) -> dict[str, float]:
    """This rank's numbers since the last call, with flat names, for TensorBoard, W&B or a log. Nothing is exchanged.

    - ``layerzero/memory/KIND``: bytes that are held now; the kinds of :class:`layerzero.MemoryReport`
    - ``layerzero/bytes/AXIS``: sent to ``zero3`` (the node), ``replica`` (other nodes), ``control``; ``across``: along
      axes of tensor parallelism
    - ``layerzero/wait_seconds/EXCHANGE``: that the host has waited for ``gather``, ``hop1``, ``hop2``, ``refresh``,
      ...; next to nothing on devices, whose streams wait. In shared memory ``hand_over`` takes the place of ``gather``
      and ``refresh``: for the others to have read the old weights, and written the new ones
    - ``layerzero/steps/taken``, ``layerzero/steps/skipped``: of the model's optimizers; a step is skipped where
      gradients are forgotten that nobody has stepped, as a ``GradScaler`` lets them be

    Args:
        model: from :func:`layerzero.shard_model`.
        reset: begin the next count at zero, that of :func:`layerzero.traffic` as well.

    Example::

        for name, value in layerzero.metrics(model).items():
            writer.add_scalar(name, value, step)
    """
    runtime = runtime_of(model)
    ledger = runtime.topology.ledger
    sent = Counter(dict.fromkeys(("zero3", "replica", "control"), 0))
    for (_, axis), nbytes in ledger.bytes.items():
        sent[axis] += nbytes
    found = {f"layerzero/memory/{kind}": float(nbytes) for kind, nbytes in measure(runtime).items()}
    found |= {f"layerzero/bytes/{axis}": float(nbytes) for axis, nbytes in sent.items()}
    found |= {f"layerzero/wait_seconds/{exchange}": seconds for exchange, seconds in sorted(ledger.waited.items())}
    found |= {f"layerzero/steps/{what}": float(ledger.steps[what]) for what in ("taken", "skipped")}
    if reset:
        ledger.reset()
    return found
