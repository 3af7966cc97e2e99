// Keys of config.json for functions of attention's scores, logits and an MLP's gates.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "engine/model/config.h"

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

}  // namespace tandem
