"""Train a sharded model: units, handles, passes, and the hooks that call them.

The files are listed in reading order. Each file imports only files that appear below it in this list.

- `hooks`: hooks on modules and autograd graphs; `get_state` reads the state of a sharded model from these hooks
- `state`: `LayerZeroState`: units, settings and registries of one sharded model; builds and owns the objects below
- `scheduler`: `Scheduler`: decides when a unit is gathered, prefetched and freed, and when its gradients are reduced
- `micro_batches`: logs a message if a loop reduces gradients in each micro-batch
- `model_status`: checks that a model may compute, before each pass
- `param_view`: contexts that replace the parameters of a model, for example with unsharded parameters or averages
- `weight_refresh`: `WeightRefresher`, `RefreshRound`: decide when masters are copied to the weights of all replicas
- `passes`: `ForwardPass`, `BackwardPass`, `UnitCall`: one object per active pass, and the order of calls
- `unit`: `Unit`: modules and handles that are gathered together; installs their parameters and casts their inputs
- `gather_order`: `GatherOrderCheck`: checks that all ranks of a ZeRO-3 group gather the same units in the same order
- `module_checks`: `StructureCheck`: checks that modules and parameters did not change after `shard_model`
- `call_context`: runs hooks around methods, detects recursive calls and running backward passes, refuses transforms
- `buffers`: module buffers that `buffer_dtype` has cast, and their dtypes in state dicts
- `gradient_reducer`: `GradientReducer`: reduces the gradients of the full model, also if some parameters are frozen
- `used_params`: `UsedParamMap`: maximum over all ranks of one byte per parameter
- `hyperparameter_check`: compares learning rates and other optimizer settings between ranks
- `reduction_queue`: `ReductionQueue`: the same order of reductions on all ranks, and the number of in-flight reductions
- `handle`: `Handle`: parameters of one kind in a unit; owns their weights, their gradients and their ``.grad``
- `full_precision`: parameters gathered in the dtype of the masters, inside ``layerzero.full_precision``
- `grad_attribute`: `GradAttribute`: value of ``.grad``, errors on reads, and writes by the user
- `handle_gradients`: `HandleGradients`, `HandleReduction`: gradient buffers of a handle, and one in-flight reduction
- `weight_storage`: `WeightStorage`, `GatherState`: master, ZeRO-3 shard and full buffer; gather, wait, free, refresh
- `resources`: `ModelPools`, `MeshResources`: memory pools of a model, and the transport of each mesh
- `gradient_buffer`: `GradientBuffer`, `SlotState`: accumulation in a buffer that needs no clearing in advance
- `gradient_offload`: `AccumulatorAllocator`, `OffloadedStorage`: accumulators in pinned memory, two slabs on the device
- `gradient_storage`: `GradientStorage`: memory that is persistent, pooled, aliased or on the host
- `reduction_spec`: `ReductionSpec`, `ReductionStage`: stages of a reduction, their wire dtypes, and the division
- `gathered_params`: `GatheredParams`, `MainGradParameter`: autograd leaves in the full buffer, and ``main_grad``
- `managed_param`: `ManagedParam`, `ParamRegistry`: one parameter in its gathered, sharded and master forms
"""
