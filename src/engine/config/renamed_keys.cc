#include "engine/config/config.h"

namespace tandem {

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
