// Keys of a job: those of its sections, and names that they had once.
#include <fmt/format.h>

#include <functional>
#include <type_traits>

#include "engine/config/config.h"

namespace tandem {
namespace {

/// `section`: a member of TrainConfig, or a function that finds the section in one.
template <class Section>
void add(const char* table, Section section, std::vector<ConfigKey>& all) {
  using S = std::remove_reference_t<std::invoke_result_t<Section, TrainConfig&>>;
  for (const Key<S>& key : S::keys()) {
    all.push_back({fmt::format("{}.{}", table, key.name),
                   [&key, section](TrainConfig& c) { return key.value(std::invoke(section, c)); },
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
    add(
        "sync", [](TrainConfig& c) -> SyncConfig& { return c.parallel.sync; }, all);
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
