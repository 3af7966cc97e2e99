// Families of models in Hugging Face's config.json: their fixed keys and the defaults of absent
// ones.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "engine/model/config.h"

namespace tandem {

/// Key whose value, if it is present, must be this one.
struct FixedKey {
  const char* key;
  const char* value;  ///< JSON
};

/// Defaults of Gemma's keys. All its models have norms of branches and their sums by 1 + weight,
/// and embeddings times the root of hidden.
struct GemmaFamily {
  double attention_softcap, logits_softcap;
  double rope_local_theta;  ///< 0: there is one rotary base
  int64_t window_pattern;   ///< of so many layers the last attends to all tokens
};

struct ModelFamily {
  std::string_view name;  ///< model_type
  std::span<const FixedKey> fixed;
  const char* experts;  ///< key of their number; nullptr: dense models only
  double rope_theta, aux_loss_coeff;
  int64_t sliding_window;
  /// Keys of windows: sliding_window; layer_types; use_sliding_window and max_window_layers.
  bool has_window, has_layer_types, has_window_switch;
  bool has_qkv_bias, has_qk_norm;  ///< in all its models
  bool has_qk_norm_all_heads;      ///< in all its models
  std::string_view norm_position;  ///< of all its models
  bool has_gated_expert;           ///< a shared expert with a gate, in all its models
  bool normalizes_top_k;           ///< default of norm_topk_prob
  bool requires_kv_heads;          ///< absent otherwise: as many as query heads
  bool ties_embeddings;            ///< default of tie_word_embeddings
  const char* bias_key;            ///< of biases of q, k, v and attention's output; nullptr: none
  bool has_mlp_bias;               ///< mlp_bias; else, with use_bias, the MLP has them too
  bool has_no_rope;                ///< no_rope_layers, no_rope_layer_interval
  bool has_partial_rotary;         ///< partial_rotary_factor
  bool has_factors;                ///< embedding_multiplier, …, logits_scaling
  bool has_fused_projections, has_interleaved_rope;  ///< in all its models
  /// Experts are clamped, biased and fused on disk, routers and attention have biases (GPT-OSS).
  bool has_clamped_experts;
  bool has_parallel_block;                   ///< writes it
  const GemmaFamily* gemma;                  ///< nullptr: another family
  std::span<const std::string_view> unused;  ///< its keys without effect
  bool has_all_keys;                         ///< of Tandem's own options, too
};

/// Family whose implementations compute the same as `config`.
const ModelFamily& find_family(const ModelConfig& config);
/// nullptr if there is none of this model_type.
const ModelFamily* find_family(std::string_view model_type);
/// "llama, mistral, … or tandem"
std::string family_names();

}  // namespace tandem
