// Keys of a job: those of its sections, and names that they had once.
#include <fmt/format.h>

#include "engine/config/config.h"

namespace tandem {
namespace {

template <class S>
void add(const char* table, S TrainConfig::*section, std::vector<ConfigKey>& all) {
  for (const Key<S>& key : S::keys()) {
    all.push_back({fmt::format("{}.{}", table, key.name),
                   [&key, section](TrainConfig& config) { return key.value(config.*section); },
                   key.range, key.help});
  }
}

}  // namespace

std::span<const ConfigKey> config_keys() {
  static const std::vector<ConfigKey> keys = [] {
    std::vector<ConfigKey> all;
    add("train", &TrainConfig::train, all);
    add("model", &TrainConfig::model, all);
    add("optimizer", &TrainConfig::optimizer, all);
    add("parallel", &TrainConfig::parallel, all);
    add("data", &TrainConfig::data, all);
    add("trace", &TrainConfig::trace, all);
    add("checkpoint", &TrainConfig::checkpoint, all);
    add("check", &TrainConfig::check, all);
    return all;
  }();
  return keys;
}

std::span<const RenamedKey> renamed_keys() {
  static constexpr RenamedKey kRenamed[] = {
      {"model.tied_head", "model.tie_word_embeddings"},
      {"model.moe_every", "model.moe_layer_freq"},
      {"model.aux_loss", "model.aux_loss_coeff"},
      {"model.bias_rate", "model.router_bias_update_rate"},
      {"optimizer.clip", "optimizer.grad_clip"},
      {"parallel.bucket_mb", "parallel.dp_bucket_mib"},
      {"data.heldout", "data.val_fraction"},
  };
  return kRenamed;
}

std::string_view current_name(std::string_view old) {
  for (const RenamedKey& key : renamed_keys()) {
    if (key.old == old) return key.name;
  }
  return {};
}

}  // namespace tandem
