"""Train a sharded model: units, handles, passes, and the hooks that call them.

The files are listed in reading order. Each file imports only files that appear below it in this list.

- `hooks`: hooks on modules and autograd graphs; `get_state` reads the state of a sharded model from these hooks
- `state`: `LayerZeroState`: units, settings and registries of one sharded model; builds and owns the objects below
- `scheduler`: `Scheduler`: decides when a unit is gathered, prefetched and freed, and when its gradients are reduced
- `no_sync`: describes `no_sync`, and logs a hint if a loop reduces gradients in each micro-batch
- `model_status`: contexts that replace the parameters of a model; checks, before each pass, that the model may run it
- `weight_refresh`: `WeightRefresher`, `RefreshRound`: decide when masters are copied to compute weights
- `side_results`: results of a forward pass that are not in its output, and the latest nodes of its graph
- `passes`: `ForwardPass`, `BackwardPass`, `UnitCall`: one object per active pass, and the order of calls
- `unit`: `Unit`: modules and handles that are gathered together; installs their parameters and casts their inputs
- `gather_order`: `GatherOrderCheck`: checks that all ranks of a ZeRO-3 group gather the same units in the same order
- `module_checks`: `StructureCheck`: checks that modules and parameters did not change after `shard_model`
- `call_context`: runs hooks around methods, detects recursive calls and running backward passes, refuses transforms
- `module_buffers`: module buffers that `buffer_dtype` has cast, and their dtypes in state dicts
- `gradient_reducer`: `GradientReducer`: reduces the gradients of the full model and publishes them as ``.grad``
- `used_params`: `UsedParamMap`: finds the parameters that any rank has used in a backward pass
- `hyperparameter_check`: compares learning rates and other optimizer settings between ranks
- `reduction_queue`: `ReductionQueue`: starts reductions in the same order on all ranks, and limits those in flight
- `handle`: `Handle`, `GatherState`: parameters that a unit stores together; owns their weights, gradients and ``.grad``
- `full_precision`: parameters gathered in the dtype of the masters, inside ``layerzero.full_precision``
- `grad_attribute`: `GradAttribute`: sets ``.grad``, refuses early reads, and applies the user's writes
- `handle_gradients`: `HandleGradients`, `HandleReduction`: gradient buffers of a handle, and one in-flight reduction
- `weight_storage`: `WeightStorage`: master, ZeRO-3 shard, full buffer and gathered parameters; gather, free, refresh
- `resources`: `ModelPools`, `MeshResources`: memory pools of a model, and the transport of each mesh
- `gradient_buffer`: `GradientBuffer`, `SlotState`: accumulate gradients in a buffer that need not be cleared first
- `gradient_offload`: `AccumulatorAllocator`, `OffloadedStorage`: accumulators that are kept in pinned host memory
- `gradient_storage`: `GradientStorage`: memory that is persistent, pooled, aliased or on the host
- `reduction_spec`: `ReductionSpec`, `ReductionStage`: stages of a reduction, their dtypes, divisors and buffers
- `rank_traits`: `RankTraits`: grid position and backend properties, from which buffers are predicted
- `gathered_params`: `GatheredParams`, `MainGradParameter`: autograd leaves that view the full buffer, and ``main_grad``
- `managed_param`: `ManagedParam`, `ParamRegistry`: one parameter in its gathered, sharded and master forms
"""
