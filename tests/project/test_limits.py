"""Every row and bullet of docs/limits.md has a test, or a reason here why not."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "limits.md"

# Start of a row's first cell or of a bullet, and the tests that show its claim and its alternative.
COVERED: dict[str, tuple[str, ...]] = {
    "Tensor subclasses with `fsdp_pre_all_gather`": (
        "dtensor/test_extensions.py::test_what_does_not_keep_to_the_protocol_is_told_on_every_rank",
        "integrations/test_torchao.py::test_a_base_in_nf4_is_whole_on_every_rank_and_sharding_it_is_refused",
    ),
    "Tensor subclasses with all-gather extensions that pad": (
        "dtensor/test_extensions.py::test_what_does_not_keep_to_the_protocol_is_told_on_every_rank",
    ),
    "**Unnoticed:** `reshard_after_forward=8` and `Codecs.gather`": (
        "dtensor/test_extensions.py::test_what_it_takes_and_sends_is_counted",
        "integrations/test_torchao.py::test_float8_data_travel_and_scales_need_no_step_of_their_own",
    ),
    "Using parameters that were read from the model before": (
        "sharding/test_stale_parameters.py::test_every_use_of_a_stale_parameter_raises_and_names_it",
        "sharding/test_stale_parameters.py::test_a_module_that_reads_its_weight_from_a_list_raises",
        "sharding/test_stale_parameters.py::test_optimizers_and_groups_of_stale_parameters_are_sharded",
    ),
    "Parameters that share memory": (
        "sharding/test_overlapping_tensors.py::test_tensors_that_share_elements_are_refused_and_views_of_one_buffer_are_not",
    ),
    "Inside `layerzero.gathered`": (
        "engine/test_gathered.py::test_what_would_change_weights_is_refused_and_old_graphs_are",
    ),
    "A backward after the `layerzero.gathered` context": (
        "engine/test_gathered.py::test_ranks_that_disagree_get_an_error_that_names_both_orders",
    ),
    "Until a rank has exhausted or closed a generator": (
        "end_to_end/test_weight_stream.py::test_a_model_is_not_used_or_changed_while_it_is_streamed",
        "end_to_end/test_weight_stream.py::test_a_model_is_closed_after_its_streams",
    ),
    "A CUDA graph of a whole training step": ("device/test_accelerator.py::test_capture_of_a_whole_step_is_refused",),
    "Hyperparameters that differ": (
        "engine/test_hyperparameter_check.py::test_a_scheduler_that_follows_a_ranks_own_loss_is_refused_on_all_ranks_at_once",
    ),
    '`Codecs(refresh="lossless")` on accelerators': (
        "slow_links/test_encoded_refresh.py::test_devices_are_refused",
        "slow_links/test_encoded_refresh.py::test_settings_are_checked",
    ),
    "**Unnoticed:** with `Codecs(refresh=Int4Difference())`": (
        "slow_links/test_encoded_refresh.py::test_streams_have_the_weights_of_forward_passes",
        "slow_links/test_encoded_refresh.py::test_a_resumed_run_begins_with_the_cast_masters",
        "slow_links/test_encoded_refresh.py::test_fingerprints_compare_replicas_only",
        "slow_links/test_encoded_refresh.py::test_all_replicas_have_the_same_weights",
    ),
    "`checkpoint.on_signal` outside the main thread": (
        "checkpoint/test_preemption.py::test_a_thread_that_python_gives_no_signals_is_refused",
    ),
    "`Codecs.hop2` or `layerzero.Int4Difference()` with copies": (
        "optimizers/test_outer_steps.py::test_copies_on_tensor_parallel_ranks_stay_equal",
    ),
    "zstandard on some machines only": ("slow_links/test_encoded_refresh.py::test_settings_are_checked",),
    "`Codecs(hop2=Int4Blocks())` with fp16": (
        "slow_links/test_hop2_codec.py::test_settings_are_checked_and_one_replica_encodes_nothing",
    ),
    "`Offload(params=True)` copies weights": (
        "engine/test_offload_params.py::test_streams_of_a_device_order_every_copy_of_weights",
    ),
    "After `layerzero.close(model)`": (
        "sharding/test_closing.py::test_a_closed_model_has_released_everything_and_says_so",
    ),
    # --- models ---
    "A unit without parameters": ("sharding/test_errors.py::test_mistake_is_refused_with_the_value_and_the_way_out",),
    "Reading a parameter outside": (
        "engine/test_grad_attribute.py::test_a_loss_on_sharded_parameters_is_an_error",
        "project/test_limits_rows.py::test_a_weight_that_a_sibling_reads_belongs_to_the_parent",
        "sharding/test_forward_methods.py::test_methods_are_trained_as_in_one_process",
        "sharding/test_forward_methods.py::test_what_is_no_method_of_a_sharded_module_is_refused",
        "engine/test_gathered.py::test_gradients_and_weights_are_those_of_one_process",
    ),
    "A penalty on full parameters": (
        "engine/test_grad_attribute.py::test_a_loss_on_sharded_parameters_is_an_error",
        "engine/test_grad_attribute.py::test_a_penalty_on_a_sharded_parameter_is_refused_by_name_with_the_way_out",
        "engine/test_grad_attribute.py::test_a_penalty_on_local_rows_is_a_part_of_the_loss",
        "engine/test_grad_attribute.py::test_gradients_written_by_hand_count_like_those_of_a_backward",
    ),
    "Functions that combine the rows of two sharded parameters": (
        "dtensor/test_uneven_shards.py::test_rows_of_parameters_that_do_not_correspond_are_not_mixed",
    ),
    "A backward through `p.full_tensor()`": (
        "engine/test_grad_attribute.py::test_a_loss_on_sharded_parameters_is_an_error",
    ),
    "Changing a weight in place": (
        "sharding/test_errors.py::test_mistake_is_refused_with_the_value_and_the_way_out",
        "project/test_limits_rows.py::test_an_embedding_with_a_largest_norm_is_refused_and_is_renormalized_between_steps",
        "engine/test_master_writes.py::test_edit_between_training_steps_is_kept_by_the_next_step",
    ),
    "**Unnoticed:** the same through `weight.data`": (
        "verification/test_verify_model.py::test_models_that_are_wrong_when_sharded_are_named",
    ),
    "Integer, complex, 8-bit": (
        "sharding/test_errors.py::test_mistake_is_refused_with_the_value_and_the_way_out",
        "sharding/test_refusals.py::test_it_is_refused_on_every_rank",
        "sharding/test_refusals.py::test_ways_out_work",
        "sharding/test_quantized_weights.py::test_what_is_left_out_is_frozen",
    ),
    "`layerzero.checkpoint` of a model with tensor subclasses": (
        "sharding/test_quantized_weights.py::test_bases_that_say_what_they_are_made_of_go_into_checkpoints_and_out",
        "sharding/test_quantized_weights.py::test_a_checkpoint_of_what_is_of_a_class_of_its_own_is_refused",
        "sharding/test_quantized_weights.py::test_adapters_are_trained_on_bases_that_cannot_be",
    ),
    "Lazy parameters": ("project/test_limits_rows.py::test_lazy_parameters_and_sparse_buffers_have_their_ways_out",),
    "Quantized, sparse or wrapped buffers": (
        "sharding/test_refusals.py::test_it_is_refused_on_every_rank",
        "sharding/test_refusals.py::test_ways_out_work",
        "project/test_limits_rows.py::test_lazy_parameters_and_sparse_buffers_have_their_ways_out",
    ),
    "`DistributedDataParallel`, `DataParallel`": (
        "sharding/test_refusals.py::test_it_is_refused_on_every_rank",
        "project/test_limits_rows.py::test_fully_shard_around_a_sharded_part_and_pruning_afterwards_raise",
    ),
    "These wrappers inside a model": (
        "sharding/test_refusals.py::test_it_is_refused_on_every_rank",
        "sharding/test_refusals.py::test_ways_out_work",
    ),
    "`torch.func`, `torch.export`": (
        "sharding/test_refusals.py::test_it_is_refused_on_every_rank",
        "sharding/test_refusals.py::test_what_one_rank_does_alone_is_an_error_on_the_others_within_the_timeout",
        "project/test_limits_rows.py::test_transforms_work_on_an_unsharded_copy",
    ),
    "Sparse gradients": (
        "sharding/test_errors.py::test_mistake_is_refused_with_the_value_and_the_way_out",
        "end_to_end/test_parity.py::test_a_tied_transformer_under_adamw_follows_one_process_and_repeats_its_bits",
    ),
    "Changing parameters between": (
        "engine/test_grad_attribute.py::test_an_edit_between_forward_and_backward_is_an_error",
    ),
    "A forward with gradients inside": (
        "sharding/test_forward_methods.py::test_forwards_without_gradients_run_on_whole_parameters",
    ),
    "Inside `layerzero.unsharded(module)`, a forward of a unit": (
        "end_to_end/test_unsharded.py::test_forwards_inside_compute_with_what_is_full_there",
    ),
    "`layerzero.unsharded(rank0_only=True)` of parameters": (
        "end_to_end/test_unsharded.py::test_parts_that_tensor_parallelism_has_cut_are_not_shown_on_one_rank",
    ),
    "`layerzero.unsharded(with_grads=True)` after": (
        "end_to_end/test_unsharded.py::test_what_cannot_be_is_refused_on_every_rank",
    ),
    "A forward with gradients, or a backward, inside": (
        "engine/test_full_precision.py::test_what_it_cannot_do_is_refused_and_the_model_stays_usable",
        "engine/test_full_precision.py::test_replicas_that_call_other_units_are_told",
    ),
    "Restoring the precision that `buffer_dtype` has rounded away": (
        "engine/test_buffer_dtypes.py::test_states_hold_buffers_in_their_original_dtype",
    ),
    "Methods registered with `register_forward_method`": (
        "sharding/test_forward_methods.py::test_what_is_no_method_of_a_sharded_module_is_refused",
    ),
    "Generating sequences of different lengths": (
        "engine/test_varying_calls.py::test_an_order_that_differs_on_one_rank_is_an_error_that_names_both_orders",
        "sharding/test_forward_methods.py::test_forwards_without_gradients_run_on_whole_parameters",
    ),
    "Replacing parameters of a sharded model": (
        "sharding/test_errors.py::test_mistake_is_refused_with_the_value_and_the_way_out",
        "sharding/test_refusals.py::test_it_is_refused_on_every_rank",
        "sharding/test_refusals.py::test_what_one_rank_does_alone_is_an_error_on_the_others_within_the_timeout",
        "project/test_limits_rows.py::test_fully_shard_around_a_sharded_part_and_pruning_afterwards_raise",
        "end_to_end/test_full_state.py::test_load_state_dict_takes_this_ranks_rows_of_whole_tensors",
    ),
    "Trainable parameters added after": (
        "engine/test_module_checks.py::test_trainable_parameters_that_come_after_sharding_are_named_at_the_next_forward",
        "engine/test_module_checks.py::test_what_the_error_says_works",
        "engine/test_module_checks.py::test_a_module_that_goes_is_a_module_that_is_not_used",
    ),
    "A full tensor assigned to `p.data`": (
        "dtensor/test_moved_parameters.py::test_what_does_not_fit_the_rows_is_not_taken_for_data",
        "dtensor/test_moved_parameters.py::test_a_sharded_tensor_assigned_to_data_is_what_the_next_forward_computes_with",
        "project/test_limits_rows.py::test_values_that_are_assigned_are_copied_and_initializations_by_index_are_refused",
    ),
    "`nn.init.orthogonal_`": (
        "project/test_limits_rows.py::test_values_that_are_assigned_are_copied_and_initializations_by_index_are_refused",
        "dtensor/test_ops_random.py::test_draws_that_cannot_be_made_by_rows_are_refused",
        "dtensor/test_ops_random.py::test_random_numbers_are_those_of_one_process_with_the_seed",
    ),
    "**Unnoticed:** `generator=`": (
        "project/test_limits_rows.py::test_a_generator_is_ignored_by_torch_for_computed_tensors_and_heeded_for_ours",
    ),
    "`model.half()`": (
        "dtensor/test_moved_parameters.py::test_moves_that_change_nothing_pass_and_others_are_refused_before_they_do",
        "dtensor/test_moved_parameters.py::test_recurrent_layers_and_mixed_precision_may_be_moved_to_where_they_are",
    ),
    "`load_state_dict` of full tensors that differ": (
        "end_to_end/test_full_state.py::test_ranks_that_load_other_values_are_told_at_the_next_forward",
    ),
    "Loading full tensors on some ranks only": (
        "project/test_limits_rows.py::test_loading_on_one_rank_only_is_an_error_on_both",
    ),
    "`p.sum().item()`": (
        "dtensor/test_ops_reduction.py::test_reading_a_part_as_if_it_were_the_whole_is_an_error_without_other_ranks",
        "dtensor/test_ops_reduction.py::test_a_number_of_a_whole_parameter_is_that_of_one_process",
    ),
    "A mean of values computed": (
        "dtensor/test_ops_reduction.py::test_a_number_of_a_whole_parameter_is_that_of_one_process",
    ),
    "`p.numpy()`, `p.tolist()`": (
        "end_to_end/test_full_state.py::test_local_rows_are_read_as_arrays_and_a_part_is_not_taken_for_the_whole",
        "end_to_end/test_full_state.py::test_saving_a_part_as_if_it_were_the_whole_is_one_clear_error",
        "optimizers/test_torch_state_dict.py::test_whole_states_go_out_and_come_in_through_torchs_options",
    ),
    "Sharding a model twice": (
        "sharding/test_errors.py::test_mistake_is_refused_with_the_value_and_the_way_out",
        "sharding/test_expert_parallel.py::test_meshes_that_do_not_fit_are_one_error_on_all_ranks",
    ),
    "Full states and checkpoints of plain": ("sharding/test_expert_parallel.py::test_users_see_all_experts",),
    "A model on meta with modules": (
        "project/test_limits_rows.py::test_from_meta_all_ranks_start_there_and_every_module_is_initialized",
    ),
    "Parameters and buffers of a model on meta": (
        "sharding/test_meta_init.py::test_a_buffer_that_no_state_holds_and_nothing_has_written_is_refused_at_the_first_forward",
        "sharding/test_meta_init.py::test_parameters_that_nothing_has_written_are_refused_at_the_first_forward",
        "sharding/test_meta_init.py::test_recipes_that_write_everything_in_the_end_are_left_alone",
    ),
    "Ignored parameters on meta": (
        "sharding/test_refusals.py::test_it_is_refused_on_every_rank",
        "end_to_end/test_parity.py::test_ignored_parameters_are_stepped_as_they_are",
    ),
    "Real weights on rank 0 and meta tensors": (
        "project/test_limits_rows.py::test_from_meta_all_ranks_start_there_and_every_module_is_initialized",
    ),
    "`copy.deepcopy`, `pickle`": (
        "sharding/test_errors.py::test_mistake_is_refused_with_the_value_and_the_way_out",
        "optimizers/test_ema.py::test_misuse_is_refused_and_torchs_averaged_model_points_here",
        "end_to_end/test_full_state.py::test_deep_copies_of_states_keep_the_best_and_load_back",
    ),
    "bf16 or fp16 compute with modules": (
        "sharding/test_refusals.py::test_it_is_refused_on_every_rank",
        "sharding/test_refusals.py::test_ways_out_work",
        "project/test_limits_rows.py::test_batch_norm_beside_bf16_may_be_left_out",
    ),
    # --- graphs and loops ---
    "`torch.autograd.grad(loss, parameters)`": (
        "engine/test_grad_attribute.py::test_a_backward_reaches_the_parameters_that_it_is_given",
    ),
    "`create_graph=True`": ("engine/test_hooks.py::test_create_graph_is_an_error_that_says_what_to_do",),
    "Ranks of one ZeRO-3 group that call": (
        "engine/test_varying_calls.py::test_an_order_that_differs_on_one_rank_is_an_error_that_names_both_orders",
        "engine/test_varying_calls.py::test_experts_as_units_that_only_some_ranks_call_are_an_error_that_says_what_to_do",
        "engine/test_varying_calls.py::test_experts_without_tokens_on_some_ranks_train_like_one_process",
        "engine/test_autograd_graphs.py::test_graph_has_the_gradients_of_one_process",
    ),
    "Ranks of one ZeRO-3 group that store": (
        "comm/transport/test_post_forward_shard.py::test_ranks_that_keep_other_units_than_their_node_are_told_and_do_not_hang",
    ),
    "Units inside activation checkpoints with `use_reentrant=True`": (
        "comm/transport/test_post_forward_shard.py::test_units_inside_reentrant_checkpoints_have_no_post_forward_shard",
    ),
    "Different numbers of backward passes": (
        "comm/test_failure_report.py::test_ranks_that_run_different_operations_are_named_with_them",
        "project/test_limits_loops.py::test_nodes_may_accumulate_different_numbers_of_micro_batches",
        "project/test_limits_loops.py::test_other_numbers_of_micro_batches_are_an_error_in_local_mode",
    ),
    "Waiting for ranks that wait for each other in `dist.broadcast`": (
        "comm/test_waits.py::test_a_wait_in_a_barrier_of_the_program_is_found",
    ),
    "A first forward on some ranks only": (
        "project/test_limits_loops.py::test_the_first_forward_is_a_meeting_of_all_ranks_and_later_ones_need_not_be",
    ),
    "Using a graph from before": ("engine/test_details.py::test_a_graph_that_outlived_a_step_is_refused",),
    "`optimizer.step()` after a backward that raised": (
        "engine/test_failures.py::test_a_step_on_half_a_backward_is_refused",
        "engine/test_failures.py::test_after_a_failure_training_goes_on_with_the_bits_of_a_run_without",
    ),
    "Reading `.grad` in a hook that runs during a backward": (
        "engine/test_gradient_storage.py::test_a_kept_gradient_is_refused_inside_a_backward_and_shows_the_sum_after_it",
        "project/test_limits_loops.py::test_inside_a_backward_there_is_no_gradient_to_read",
    ),
    "Reading `.grad` after a backward inside `no_sync`": (
        "engine/test_accumulation.py::test_an_unreduced_gradient_refuses_to_be_used_and_is_not_lost",
        "engine/test_details.py::test_clipping_and_stepping_call_no_hook_for_gradients_that_were_final_before",
    ),
    "`scale_grads=True`": (
        "project/test_limits_loops.py::test_schedules_that_scale_gradients_themselves_are_an_error",
        "end_to_end/test_torch_pipelining.py::test_sharded_stages_train_like_one_process",
    ),
    "Code that skips reductions only for FSDP2 modules": (
        "engine/test_no_sync_names.py::test_who_reduces_every_micro_batch_hears_of_it_once",
        "engine/test_no_sync_names.py::test_the_model_has_no_sync_as_under_ddp_and_fsdp2",
    ),
    "`model.no_sync`": ("engine/test_no_sync_names.py::test_a_no_sync_of_the_models_own_stays_and_the_log_says_so",),
    "Freezing or unfreezing parameters": (
        "engine/test_trainability.py::test_unfreezing_on_one_rank_only_is_an_error_there",
        "project/test_limits_loops.py::test_freezing_on_one_rank_only_is_an_error_there",
        "engine/test_trainability.py::test_what_is_frozen_and_unfrozen_trains_like_one_process",
    ),
    "Unfreezing a parameter that was frozen, and in bf16 or fp16, when it was sharded": (
        "engine/test_trainability.py::test_a_frozen_bf16_master_is_too_coarse_to_be_unfrozen",
        "project/test_limits_loops.py::test_low_precision_weights_are_unfrozen_before_or_sharded_in_fp32",
    ),
    "Hooks on parameters": (
        "engine/test_hooks.py::test_parameter_hooks_change_whole_gradients_once_a_backward_until_removed",
        "engine/test_hooks.py::test_post_accumulate_hooks_see_final_gradients_once",
    ),
    "Units that are called only from reentrant activation checkpoints": (
        "project/test_limits_loops.py::test_units_under_checkpoints_alone_have_the_right_gradients",
    ),
    "Compiling across units": (
        "engine/test_details.py::test_torch_compile_does_not_look_into_the_schedule",
        "engine/test_modes.py::test_compiled_units_train_like_one_process_and_are_compiled_once",
    ),
    "`torch.distributed.checkpoint.async_save` of a sharded": (
        "project/test_limits_rows.py::test_storages_are_not_copied_and_objects_are_not_duplicated",
    ),
    "`copy.deepcopy` of a sharded model, parameter or optimizer": (
        "project/test_limits_rows.py::test_storages_are_not_copied_and_objects_are_not_duplicated",
    ),
    "A loss that depends on a unit only through an iterator": (
        "engine/test_side_results.py::test_results_that_no_hook_sees_are_an_error",
        "engine/test_side_results.py::test_a_loss_that_only_an_attribute_holds_has_the_gradients_of_one_process",
    ),
    "A unit that a forward pass calls first": (
        "project/test_limits_loops.py::test_a_first_unit_on_raw_data_stays_gathered_until_the_backward_ends",
    ),
    # --- optimizers ---
    "Optimizers that mix elements of different parameters": (
        "muon/test_owner_step.py::test_matrix_optimizers_have_the_bits_of_one_process",
        "optimizers/test_sharded_optimizer.py::test_an_optimizer_that_mixes_parameters_is_refused_with_the_reason",
        "optimizers/test_compatibility.py::test_an_optimizer_that_mixes_parameters_somewhere_is_refused",
        "optimizers/test_sharded_optimizer.py::test_every_element_wise_optimizer_follows_one_process_built_before_or_after_sharding",
        "end_to_end/test_parity.py::test_ignored_parameters_are_stepped_as_they_are",
    ),
    "`shard_optimizer` of an optimizer that needs full parameters": (
        "muon/test_owner_traffic.py::test_what_would_lose_or_misplace_rows_is_refused",
        "muon/test_owner_groups.py::test_a_second_optimizer_that_needs_more_comes_before_the_first_step",
    ),
    "With an optimizer that needs full parameters: its own methods": (
        "muon/test_owner_traffic.py::test_what_would_lose_or_misplace_rows_is_refused",
        "muon/test_owner_state.py::test_a_checkpoint_of_whole_parameters_loads_on_any_topology",
        "optimizers/test_torch_state_dict.py::test_an_optimizer_with_full_parameters_has_no_numbered_state",
        "muon/test_owner_state.py::test_objects_in_the_state_of_whole_parameters_are_refused_by_name",
    ),
    "Setting `.grad` of a full parameter": (
        "muon/test_owner_groups.py::test_a_gradient_that_is_missing_in_one_owner_group_is_an_error_on_all_ranks",
    ),
    "Passing an optimizer that wraps another optimizer": (
        "optimizers/test_wrapped_optimizer.py::test_an_optimizer_around_an_optimizer_belongs_around_the_sharded_one",
    ),
    "Full parameters that a model-parallel axis cuts unevenly": (
        "muon/test_owner_meshes.py::test_parts_that_cannot_be_put_together_are_one_error_on_all_ranks",
    ),
    "torch's own `clip_grad_norm_` where": ("sharding/test_expert_parallel.py::test_users_see_all_experts",),
    "Optimizers whose `step` needs a closure": (
        "optimizers/test_compatibility.py::test_the_users_word_is_not_asked_where_nothing_could_work",
    ),
    "**Unnoticed:** `elementwise=True`": (
        "optimizers/test_compatibility.py::test_the_users_word_is_not_asked_where_nothing_could_work",
        "optimizers/test_sharded_optimizer.py::test_an_optimizer_that_mixes_parameters_is_refused_with_the_reason",
    ),
    "**Unnoticed:** with `elementwise=True`, state that": (
        "project/test_limits_loops.py::test_state_that_is_quantized_in_blocks_depends_on_the_number_of_ranks",
    ),
    "An optimizer that steps the model without": (
        "optimizers/test_sharded_optimizer.py::test_an_optimizer_that_has_not_been_sharded_raises_when_it_steps_the_model",
    ),
    "Editing `param_groups`": (
        "optimizers/test_wrapped_optimizer.py"
        "::test_groups_that_were_edited_behind_the_wrapper_are_noticed_and_add_param_group_is_the_way_out",
        "engine/test_trainability.py::test_what_is_frozen_and_unfrozen_trains_like_one_process",
    ),
    "**Unnoticed:** a `step` that looks up": (
        "optimizers/test_custom_optimizers.py::test_tables_outside_of_the_optimizer_and_tensors_in_attributes_have_a_way_out",
    ),
    "Tensors in attributes of sharded parameters": (
        "optimizers/test_custom_optimizers.py::test_tables_outside_of_the_optimizer_and_tensors_in_attributes_have_a_way_out",
        "optimizers/test_custom_optimizers.py::test_tables_have_sharded_tensors_between_steps_and_rows_in_a_step",
    ),
    "DTensors of another framework": (
        "optimizers/test_wrapped_optimizer.py::test_dtensors_of_another_framework_are_stepped_beside_sharded_parameters",
    ),
    "torch's `get_optimizer_state_dict` of an optimizer with state": (
        "optimizers/test_shared_state.py::test_other_keys_are_where_torch_has_them_and_a_rollback_restores_them",
    ),
    "Loading optimizer state, as sharded tensors in memory": (
        "optimizers/test_kernels.py::test_state_that_is_sharded_in_another_order_is_refused",
        "checkpoint/test_save_and_load.py::test_a_run_resumed_on_any_topology_equals_one_that_never_stopped",
        "optimizers/test_torch_state_dict.py::test_torchs_recipe_resumes_on_any_topology",
    ),
    "**Unnoticed:** torch's `clip_grad_norm_`": (
        "project/test_limits_loops.py::test_torchs_infinite_norm_misses_a_nan_that_ours_finds",
        "optimizers/test_grad_scaler.py::test_a_gradient_that_is_not_finite_on_one_rank_gives_that_norm_on_all",
    ),
    "NVIDIA Apex's optimizers": (
        "optimizers/test_apex.py::test_element_wise_classes_of_apex_follow_torch_in_one_process",
        "optimizers/test_apex.py::test_what_cannot_work_is_refused_by_name_whatever_the_user_says",
        "optimizers/test_apex.py::test_the_host_and_dtypes_that_apex_does_not_update_are_refused_when_an_optimizer_is_wrapped",
    ),
    # --- settings and platforms ---
    'On Linux, `shared_memory="auto"` shares memory': (
        "comm/transport/test_shared_weights.py::test_an_edit_in_a_forward_is_an_error",
        "comm/transport/test_shared_memory.py::test_the_ranks_of_a_zero3_group_share_memory_unless_they_are_told_not_to",
    ),
    "Inside Megatron": ("megatron/test_unsupported.py::test_what_is_not_supported_is_refused_with_a_way_out",),
    "`Offload(optimizer=True)`": (
        "optimizers/test_offload_optimizer.py::test_what_cannot_be_updated_by_the_host_is_refused",
        "optimizers/test_offload_optimizer.py::test_masters_gradients_and_state_lie_in_the_host_and_each_moves_once_a_step",
    ),
    "`Offload(grads=True)`": (
        "engine/test_gradient_offload.py::test_every_accumulator_lies_in_the_host_and_two_units_on_the_device",
        "engine/test_gradient_offload.py::test_without_a_device_there_is_one_warning",
        "project/test_limits_loops.py::test_with_one_replica_there_are_no_accumulators_to_offload",
    ),
    "`accumulation_dtype` supports only": ("engine/test_accumulation_dtype.py::test_settings_are_checked",),
    "`accumulation_dtype` with": (
        "engine/test_accumulation_dtype.py::test_settings_are_checked",
        "engine/test_accumulation_dtype.py::test_units_with_local_accumulation_keep_their_final_gradient",
        "engine/test_accumulation_dtype.py::test_with_one_replica_the_accumulator_is_the_final_gradient",
    ),
    "`weight.main_grad`": (
        "engine/test_accumulation_dtype.py::test_parameters_have_no_main_grad",
        "engine/test_main_grad.py::test_what_kernels_add_counts_once_in_every_micro_batch",
        "engine/test_main_grad.py::test_what_cannot_be_counted_is_refused",
    ),
    "After a backward that raised": (
        "engine/test_failures.py::test_after_a_failure_training_goes_on_with_the_bits_of_a_run_without",
        "project/test_limits_loops.py::test_after_a_failure_the_model_is_used_once_and_zeroed",
    ),
    "Inside `no_sync`, from the second backward on: a penalty on `p.to_local()`": (
        "engine/test_grad_attribute.py::test_a_penalty_in_every_micro_batch",
        "project/test_limits_loops.py::test_a_penalty_computed_after_the_forward_is_an_error_inside_no_sync",
    ),
    "With a backend that runs on the CPU and is not gloo": (
        "comm/test_third_party_backend.py::test_all_ranks_launch_alike_however_late_each_collective_is",
    ),
    "After `init_process_group(device_id=...)`": (
        "comm/test_third_party_backend.py::test_groups_of_some_ranks_are_not_split_off_from_all",
    ),
    "If a backend does not report its timeout": (
        "comm/test_third_party_backend.py::test_groups_have_the_timeout_that_the_backend_tells_or_torchs",
    ),
    "**Unnoticed:** with `Codecs.gather`": (
        "slow_links/test_codecs.py::test_all_ranks_compute_with_the_same_decoded_weights",
        "slow_links/test_codecs.py::test_where_nothing_is_gathered_it_has_no_effect",
        "slow_links/test_codecs.py::test_coding_takes_scratch_for_some_rows_at_once",
        "slow_links/test_codecs.py::test_what_is_no_codec_or_has_nothing_to_encode_is_refused",
    ),
    "Each sharded model creates five process groups": (
        "project/test_limits_loops.py::test_each_model_makes_five_process_groups",
        "muon/test_owner_groups.py::test_owner_groups_are_made_once_and_before_rows_move",
    ),
    "Units whose calls layerzero cannot predict": (
        "project/test_limits_loops.py::test_a_surprise_in_the_order_of_units_costs_16_bytes",
        "engine/test_varying_calls.py::test_a_loop_that_repeats_itself_is_predicted",
    ),
    "`guard_corruption` does not detect": (
        "reliability/test_corruption_guard.py::test_a_step_is_refused_where_it_is_looked_at",
        "reliability/test_corruption_guard.py::test_a_flipped_bit_is_noticed_before_the_next_step_and_located",
        "comm/test_watchdog.py::test_who_is_in_time_is_not_told_of",
    ),
    "`checkpoint.Buddies` needs memory": (
        "checkpoint/test_buddy_snapshots.py::test_a_snapshot_is_loaded_without_the_memory_of_a_node",
        "checkpoint/test_buddy_snapshots.py::test_a_snapshot_that_is_not_whole_or_is_damaged_leaves_the_one_before",
        "checkpoint/test_buddy_snapshots.py::test_where_there_is_no_room_what_was_taken_stays",
    ),
}

# Claims that this suite cannot show, and why.
NOT_HERE = {
    "Reading `weight.main_grad` in the backward": "no kernel that reads main_grad in its backward runs on a CPU",
    "`layerzero.memory` predicts the memory of a step": "says what is not predicted; tests compare what is",
    "`torch.autocast` keeps cast copies": "the copies are in a cache of torch's own, which nothing else can look into",
    "Pinned host memory": "torch's allocator of pinned memory needs a device",
    "torch 2.14 gathers rows for `any()`": "true of another torch than the one that runs the tests",
    "torch 2.11 cannot move memory": "true of another torch than the one that runs the tests",
    "Tested with gloo on CPUs, and": "says what has not been tested, for want of several GPUs",
}


def lines_of(page: str) -> list[str]:
    """Return the first cells of all table rows, without headings and rules, and the first line of each bullet."""
    found = []
    lines = page.splitlines()
    for at, line in enumerate(lines):
        if line.startswith("|") and not re.match(r"\|[ -]+\|", line):
            is_heading = at + 1 < len(lines) and re.match(r"\|[ |-]+$", lines[at + 1])
            if not is_heading:
                found.append(line[1:].split(" | ")[0].strip())
        elif re.match(r"\s*[-*+] ", line):
            found.append(line.split(maxsplit=1)[1])
    return found


@cache
def _functions_of(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def problems(page: str, covered: dict[str, tuple[str, ...]], excused: dict[str, str]) -> list[str]:
    keys = [*covered, *excused]
    lines = lines_of(page)
    found = [f"{key!r} is there twice" for key in covered.keys() & excused.keys()]
    for line in lines:
        matching = [key for key in keys if line.startswith(key)]
        if len(matching) != 1:
            found.append(f"line {line!r} is matched by {matching} instead of one key")
    for key in keys:
        count = sum(line.startswith(key) for line in lines)
        if count != 1:
            found.append(f"{key!r} begins {count} lines")
    for key, tests in covered.items():
        if not tests:
            found.append(f"{key!r} names no test")
        for test in tests:
            file, _, name = test.partition("::")
            path = ROOT / "tests" / file
            if not (name.startswith("test_") and path.is_file() and name in _functions_of(path)):
                found.append(f"{key!r} names {test}, which does not exist")
    return found + [f"{key!r} has no reason" for key, reason in excused.items() if not reason]


def test_every_line_of_the_limits_is_shown_by_a_test() -> None:
    found = problems(PAGE.read_text(encoding="utf-8"), COVERED, NOT_HERE)
    assert not found, "\n".join(found)


def test_what_is_not_shown_or_not_there_is_noticed() -> None:
    page = "| not supported | instead |\n| --- | --- |\n| A `b` c | d |\n\n- Bullet one\n  goes on.\n- Bullet two.\n"
    assert lines_of(page) == ["A `b` c", "Bullet one", "Bullet two."]
    real = ("project/test_limits.py::test_what_is_not_shown_or_not_there_is_noticed",)
    right = {"A `b`": real, "Bullet one": real}
    assert not problems(page, right, {"Bullet two": "why"})
    assert "instead of one key" in problems(page, right, {})[0]
    wrong = {
        "begins 0 lines": {"Gone": real},
        "begins 2 lines": {"Bullet": real},
        "names no test": {"Bullet two": ()},
        "does not exist": {"Bullet two": ("project/test_limits.py::test_renamed",)},
    }
    for said, more in wrong.items():
        assert any(said in problem for problem in problems(page, {**right, **more}, {})), said
