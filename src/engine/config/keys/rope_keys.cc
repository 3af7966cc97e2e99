#include "engine/config/keys/rope_keys.h"

#include <algorithm>

#include "engine/config/config_slot.h"

namespace tandem {
namespace {

constexpr double kMinRatio = 1e-6, kMaxRatio = 1e9;

std::vector<ConfigKey> make_rope_keys() {
  return {
      {"model.rope_type",
       TANDEM_SLOT(model.rope_scaling.type),
       0,
       0,
       {"default", "linear", "dynamic", "llama3", "yarn"},
       "scaling of rotary frequencies, as rope_scaling of Hugging Face"},
      {"model.rope_factor",
       TANDEM_SLOT(model.rope_scaling.factor),
       1,
       kMaxRatio,
       {},
       "what a scaling divides frequencies by"},
      {"model.rope_original_max_seq",
       TANDEM_SLOT(model.rope_scaling.original_max_seq),
       0,
       kMaxRatio,
       {},
       "llama3, yarn: longest sequence before the scaling"},
      {"model.rope_low_freq_factor",
       TANDEM_SLOT(model.rope_scaling.low_freq_factor),
       kMinRatio,
       kMaxRatio,
       {},
       "llama3: wavelengths in that sequence below which all is scaled"},
      {"model.rope_high_freq_factor",
       TANDEM_SLOT(model.rope_scaling.high_freq_factor),
       kMinRatio,
       kMaxRatio,
       {},
       "llama3: wavelengths in that sequence above which nothing is scaled"},
      {"model.rope_beta_fast",
       TANDEM_SLOT(model.rope_scaling.beta_fast),
       kMinRatio,
       kMaxRatio,
       {},
       "yarn: rotations in that sequence above which nothing is scaled"},
      {"model.rope_beta_slow",
       TANDEM_SLOT(model.rope_scaling.beta_slow),
       kMinRatio,
       kMaxRatio,
       {},
       "yarn: rotations in that sequence below which all is scaled"},
      {"model.rope_truncate",
       TANDEM_SLOT(model.rope_scaling.truncate),
       0,
       0,
       {},
       "yarn: the ramp between these begins and ends at whole pairs"},
      {"model.rope_attention_factor",
       TANDEM_SLOT(model.rope_scaling.attention_factor),
       kMinRatio,
       kMaxRatio,
       {},
       "yarn: factor of cosines and sines"},
  };
}

}  // namespace

std::vector<ConfigKey> add_rope_keys(std::vector<ConfigKey> keys) {
  const std::vector<ConfigKey> rope = make_rope_keys();
  const auto next = std::ranges::find(keys, "model.norm_eps", &ConfigKey::name);
  keys.insert(next, rope.begin(), rope.end());
  return keys;
}

}  // namespace tandem
