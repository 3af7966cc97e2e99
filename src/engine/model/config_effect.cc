#include "engine/model/config_effect.h"

#include <algorithm>
#include <iterator>

namespace tandem {
namespace {

constexpr std::string_view kBookkeeping[] = {
    "bos_token_id", "eos_token_id", "pad_token_id",         "initializer_range", "torch_dtype",
    "dtype",        "use_cache",    "transformers_version", "_name_or_path"};

constexpr std::string_view kNoEffect[] = {
    // Other programs
    "auto_map", "custom_pipelines", "finetuning_task", "id2label", "label2id", "license",
    "model_max_length", "num_labels", "prefix", "problem_type", "processor_class", "region",
    "return_dict", "sep_token_id", "task_specific_params", "tf_legacy_loss", "tokenizer_class",
    "torchscript", "use_bfloat16", "use_flash_attn", "use_flash_attention_2", "attn_implementation",
    "max_sequence_length", "seq_length", "model_name", "unsloth_fixed", "unsloth_version",
    "unk_token_id", "mask_token_id", "decoder_start_token_id", "cache_implementation",
    // Training
    "gradient_checkpointing", "output_attentions", "output_hidden_states", "output_router_logits",
    "router_jitter_noise", "use_reentrant", "loss_type", "initializer_factor",
    // Generation
    "bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping",
    "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "forced_bos_token_id",
    "forced_eos_token_id", "length_penalty", "max_length", "max_new_tokens", "min_length",
    "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences", "output_scores",
    "remove_invalid_values", "repetition_penalty", "return_dict_in_generate", "suppress_tokens",
    "temperature", "top_k", "top_p", "typical_p"};

}  // namespace

bool is_bookkeeping(std::string_view key) {
  return std::ranges::find(kBookkeeping, key) != std::end(kBookkeeping);
}

bool has_no_effect(std::string_view key, const nlohmann::ordered_json& value, bool is_fixed) {
  if (is_bookkeeping(key) || std::ranges::find(kNoEffect, key) != std::end(kNoEffect)) return true;
  if (key.starts_with('_')) return true;  // of the Python object
  const bool is_dropout = key.ends_with("dropout") || key.ends_with("pdrop");
  if (is_dropout && value.is_number()) return true;  // there is none here
  if (is_fixed) return false;
  return value.is_null() || value == false || (value.is_structured() && value.empty());
}

}  // namespace tandem
