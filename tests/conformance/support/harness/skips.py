"""The one list of tests of transformers that may skip on our classes, and why; any other skip is a failure.

transformers' mixins skip by themselves what they find does not apply, so a part that went missing would go unnoticed.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

# reason: names of tests
_BOTH_FAMILIES: dict[str, tuple[str, ...]] = {
    # What the architecture does not have.
    "a single model for text: no parts with configurations of their own, no images, no sound": (
        "test_attn_implementation_composite_models",
        "test_can_set_attention_dynamically_composite_model",
        "test_internal_model_config_and_subconfig_are_same",
        "test_multimodal_outputs_are_returned",
        "test_get_*_features_*",
        "test_vision_axial_rope",
    ),
    "a task for images, sound or tables": (
        "test_pipeline_any_to_any*",
        "test_pipeline_audio_classification*",
        "test_pipeline_automatic_speech_recognition*",
        "test_pipeline_depth_estimation*",
        "test_pipeline_document_question_answering*",
        "test_pipeline_image_*",
        "test_pipeline_mask_generation*",
        "test_pipeline_object_detection*",
        "test_pipeline_table_question_answering*",
        "test_pipeline_text_to_audio*",
        "test_pipeline_video_classification*",
        "test_pipeline_zero_shot_audio_classification*",
        "test_pipeline_zero_shot_image_classification*",
        "test_pipeline_zero_shot_object_detection*",
    ),
    "no experts": (
        "test_eager_matches_batched_and_grouped_inference*",
        "test_fsdp2_expert_parallel_*",
        "test_hsdp_grad_accumulation_vs_single_device_2_expert_parallel",
        "test_moe_models_record_router_logits",
        "test_output_router_logits_from_config",
    ),
    "no sequence-to-sequence head": ("test_encoder_decoder_loss_no_double_shift",),
    "weights are saved under the names they have in the model": (
        "test_reverse_loading_mapping",
        "test_can_load_from_already_mapped_keys",
    ),
    "no plan for tensor parallelism": ("test_tp_plan_matches_params",),
    # What the machine, or the installation, does not have.
    "needs an accelerator, or several": (
        "test_can_load_with_device_context_manager",
        "test_can_load_with_global_device_set",
        "test_cpu_offload",
        "test_disk_offload_*",
        "test_model_parallelism",
    ),
    "needs four processors": (
        "test_hsdp_save_load*",
        "test_hsdp_grad_accumulation_vs_single_device_0_replicate_and_shard",
    ),
    "needs DeepSpeed": ("test_resize_*_with_deepspeed*",),
    "needs compiled kernels from the Hub": ("test_kernels_can_load_without_crashing",),
    "needs an accelerator and RUN_SLOW=1": ("test_torch_compile_for_training",),
}

REFORMER_LSH: dict[str, tuple[str, ...]] = {
    **_BOTH_FAMILIES,
    "LSH and windowed attention are operators of their own: neither SDPA nor flash nor flex attention runs in them": (
        "test_eager_matches_sdpa_inference*",
        "test_flash_attn_*",
        "test_flex_attention_with_grads",
        "test_sdpa_can_*",
        "test_can_set_attention_dynamically",
        "test_sliding_window_mask",
    ),
    "rotary positions, where chosen, are plain: no scaling, no partial rotation": ("test_model_rope_*",),
    "every weight may be stored in half precision; the streams are float32 whatever the weights are": (
        "test_keep_in_fp32_modules*",
    ),
    "the bidirectional model has no head that shifts labels": ("test_causal_lm_loss_honors_shift_labels",),
    "a classifier takes no cache, and a bidirectional model returns none": ("test_bc_cache_name_forward",),
}

INFINITE_FORMER: dict[str, tuple[str, ...]] = {
    **_BOTH_FAMILIES,
    "short-term attention is always SDPA, and reading the memory an operator of its own: there is nothing to choose": (
        "test_eager_matches_sdpa_inference*",
        "test_flash_attn_*",
        "test_flex_attention_with_grads",
        "test_sdpa_can_*",
        "test_can_set_attention_dynamically",
        "test_sliding_window_mask",
    ),
    "an attention over a window that moves and a density over the past: there is no map from tokens to tokens": (
        "test_attention_outputs",
    ),
    "a layer runs once a segment; the model, and no hook on a layer, puts hidden states together": (
        "test_can_capture_specific_layers_hidden_states",
        "test_capture_outputs_decorator",
    ),
    "rotary positions count within the window, and are plain: no scaling, no partial rotation": ("test_model_rope_*",),
    "positions have no table": ("test_resize_position_vector_embeddings",),
    "every weight may be stored in half precision; the memory is float32 whatever the weights are": (
        "test_keep_in_fp32_modules*",
    ),
    "a causal model": ("test_pipeline_fill_mask*",),
    "takes and returns a cache class of its own, under either name: tests/models/infinite_former": (
        "test_bc_cache_name_forward",
    ),
}

_OF_FILE = {"test_infinite_former.py": INFINITE_FORMER, "test_reformer_lsh.py": REFORMER_LSH}


def reason_to_skip(test_file: str, test_name: str) -> str | None:
    """The listed reason for which a test may skip, None if there is none."""
    for reason, patterns in _OF_FILE.get(test_file, {}).items():
        if any(fnmatchcase(test_name, pattern) for pattern in patterns):
            return reason
    return None
