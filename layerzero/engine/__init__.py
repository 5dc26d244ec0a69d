"""Training of a sharded model: units, handles, passes, and the hooks that call them.

The files are listed in reading order. Each file imports only files below it in this list.

- `hooks`: hooks on modules and autograd graphs; `get_state` reads the state of a sharded model from these hooks
- `state`: `LayerZeroState`: units, settings and registries of one sharded model; builds and owns the objects below
- `scheduler`: `Scheduler`: when a unit is gathered, prefetched and freed, and when its gradients are reduced
- `micro_batches`: log message if a loop reduces gradients in each micro-batch
- `model_status`: checks before a pass computes
- `param_view`: parameters that a context shows: unsharded parameters, averages
- `weight_refresh`: `WeightRefresher`, `RefreshRound`: when masters are copied to the compute weights of all replicas
- `passes`: `ForwardPass`, `BackwardPass`, `UnitCall`: one object per active pass, and the order of calls
- `unit`: `Unit`: modules and handles that are gathered together; installs their parameters, casts inputs
- `gather_order`: `GatherOrderCheck`: all ranks of a ZeRO-3 group gather the same units in the same order
- `module_checks`: `StructureCheck`: checks that modules and parameters did not change after `shard_model`
- `call_context`: context of a call: hooks around methods, recursive calls, running backwards, refused transforms
- `buffers`: module buffers that `buffer_dtype` has cast, and their dtype in state dicts
- `gradient_reducer`: `GradientReducer`: gradients of the full model, used parameters, frozen parameters
- `used_params`: `UsedParamMap`: one byte per parameter, maximum over all ranks
- `hyperparameter_check`: comparison of learning rates and other optimizer settings between ranks
- `reduction_queue`: `ReductionQueue`: one order of reductions on all ranks, and the number in flight
- `handle`: `Handle`: parameters of one kind in a unit; owns its weights, its gradients and their ``.grad``
- `full_precision`: gathered parameters in the dtype of the masters, inside ``layerzero.full_precision``
- `grad_attribute`: `GradAttribute`: value of ``.grad``, errors on reads, and user writes
- `handle_gradients`: `HandleGradients`, `HandleReduction`: gradient buffers of a handle, and one reduction in flight
- `weight_storage`: `WeightStorage`, `ShardState`: master, ZeRO-3 shard and full buffer; gather, wait, free, refresh
- `resources`: `ModelPools`, `MeshResources`: memory pools of a model, and the transport of each mesh
- `gradient_buffer`: `GradientBuffer`, `SlotState`: first write overwrites, later ones add, unwritten slots are zero
- `gradient_offload`: `AccumulatorAllocator`, `OffloadedStorage`: accumulators in pinned memory, two slabs on the device
- `gradient_storage`: `GradientStorage`: memory that is persistent, pooled, aliased or on the host
- `reduction_spec`: `ReductionSpec`, `ReductionStage`: dtypes in collectives, stages, and the stage that divides
- `gathered_params`: `GatheredParams`, `MainGradParameter`: autograd leaves over the full buffer, ``main_grad``
- `managed_param`: `ManagedParam`, `ParamRegistry`: one parameter and its forms
"""
