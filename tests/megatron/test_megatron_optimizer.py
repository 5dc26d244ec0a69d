"""layerzero.megatron compared with Megatron's data-parallel wrapper and optimizer on the same data."""

from __future__ import annotations

from tests.support.megatron_parallel import SequenceParallelNorm
from tests.support.megatron_ranks import Case, assert_same, make_ours, make_reference, megatron, run
from tests.support.ranks import run_ranks


def compare(*cases: Case, world_size: int = 4) -> None:
    # One layout per default process group: torch names a new group by the number of groups that a rank has joined. That
    # number must be equal on all members, but layouts differ in the ranks that hold embeddings.
    layouts = {(case.tp, case.pp) for case in cases}
    for layout in sorted(layouts):
        run_ranks(_compare, [case for case in cases if (case.tp, case.pp) == layout], world_size=world_size)


def _compare(rank: int, cases: list[Case]) -> None:
    for case in cases:
        with megatron(case), SequenceParallelNorm.used():
            theirs, ours = run(case, make_reference), run(case, make_ours)
        assert_same(ours, theirs, case)


DATA = Case(zero3_size=2)
PIPELINE = Case(pp=2, zero3_size=2)
INTERLEAVED = Case(pp=2, chunks=2, zero3_size=2)
TENSOR = Case(tp=2, zero3_size=2)


def test_data_parallel() -> None:
    cases = [DATA, DATA.but(zero3_size=1, accumulation="full"), DATA.but(zero3_size=4, tied=False, optimizer="sgd")]
    compare(*cases)


def test_1f1b() -> None:
    cases = [PIPELINE, PIPELINE.but(micro_batches=8, zero3_size=1, tied=False), PIPELINE.but(accumulation="full")]
    compare(*cases)


def test_interleaved() -> None:
    cases = [INTERLEAVED, INTERLEAVED.but(micro_batches=8, tied=False, accumulation="full")]
    compare(*cases)


def test_reductions_in_the_bubble_of_the_pipeline() -> None:
    cases = [PIPELINE.but(align=True, steps=3), INTERLEAVED.but(align=True, accumulation="full", steps=3)]
    compare(*cases)


def test_tensor_parallel() -> None:
    compare(TENSOR, TENSOR.but(pp=2, zero3_size=1, tied=False, dtype="bfloat16"))


def test_three_dimensions_and_four_replicas_on_eight_ranks() -> None:
    compare(TENSOR.but(pp=2), PIPELINE.but(micro_batches=8), world_size=8)


def test_losses_that_are_divided_by_tokens() -> None:
    cases = [PIPELINE.but(per_token=True, steps=3), DATA.but(per_token=True, distributed=True, steps=3)]
    compare(*cases)


def test_the_reference_may_be_the_distributed_optimizer() -> None:
    compare(TENSOR.but(distributed=True), PIPELINE.but(distributed=True, clip=0.1))


def test_fp16_skips_a_step_on_all_ranks_of_the_model_when_one_overflows() -> None:
    overflow = PIPELINE.but(dtype="float16", overflow_at=1, steps=5)  # after three finite steps the scale grows
    compare(overflow, overflow.but(tp=2, pp=1, zero3_size=1), overflow.but(chunks=2))


def test_sequence_parallel_norms_are_summed_over_tensor_ranks() -> None:
    normed = TENSOR.but(sequence_parallel=True, settings=(("qk_layernorm", True),), optimizer="sgd", steps=3)
    compare(normed, normed.but(tied=False, accumulation="full"))


def test_activations_may_be_recomputed() -> None:
    whole = (("recompute_granularity", "full"), ("recompute_method", "uniform"), ("recompute_num_layers", 1))
    cases = [PIPELINE.but(settings=whole, steps=3), PIPELINE.but(settings=whole, accumulation="full", steps=3)]
    compare(*cases, INTERLEAVED.but(settings=(("recompute_granularity", "selective"),), steps=3))
