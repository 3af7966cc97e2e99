// Keys of config.json for functions of attention's scores, logits and an MLP's gates, and others of
// Gemma 2 and 3.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "engine/model/config.h"
#include "engine/model/config_family.h"

namespace tandem {

constexpr const char* kActivation = "hidden_act";

/// Calls visit(key, member) for Gemma's numbers, which are 0 without their function.
template <typename Config, typename Visit>
void for_each_function(Config& c, const Visit& visit) {
  visit("rope_local_base_freq", c.rope_local_theta);
  visit("attn_logit_softcapping", c.attention_softcap);
  visit("final_logit_softcapping", c.logits_softcap);
}

/// Reads the function of gates at `key`, if it is there.
void parse_activation(const nlohmann::ordered_json& root, const char* key, const std::string& file,
                      ModelConfig& config);

/// Factor of Gemma's embeddings.
double gemma_embedding_multiplier(int64_t hidden);
/// Integer whose inverse root is the factor of the products of q and k; 0: there is none.
int64_t query_pre_attn_scalar(const ModelConfig& config);

/// Calls visit(key) for keys that the parse functions read, and of an earlier form that has no
/// effect.
template <typename Visit>
void for_each_gemma_key(const GemmaFamily& family, const Visit& visit) {
  for (const char* key :
       {"hidden_activation", "query_pre_attn_scalar", "final_logit_softcapping",
        "sliding_window_pattern", "_sliding_window_pattern", "use_bidirectional_attention"}) {
    visit(key);
  }
  visit(family.rope_local_theta > 0 ? "rope_local_base_freq" : "attn_logit_softcapping");
}
/// Sets all but windows and rotation.
void parse_gemma(const nlohmann::ordered_json& root, const GemmaFamily& family,
                 const std::string& file, ModelConfig& config);
/// Sets the layers that have a window, unless layer_types does, and their rotary base: that of
/// rope_local_base_freq (transformers 4) or in rope_parameters by the type of layers (5), which it
/// then replaces by those of layers that attend to all tokens.
void parse_gemma_layers(nlohmann::ordered_json& root, const GemmaFamily& family,
                        const std::string& file, ModelConfig& config);
void write_gemma(const ModelConfig& config, nlohmann::ordered_json& root);

}  // namespace tandem
