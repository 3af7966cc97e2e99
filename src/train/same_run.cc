#include "train/same_run.h"

#include <fmt/format.h>

#include "tandem/error.h"

namespace tandem {

void require_same_run(const Checkpoint& checkpoint, const TrainConfig& config,
                      const std::string& fingerprint) {
  const auto require = [&](const char* key, const auto& found, const auto& wanted) {
    if (found == wanted) return;
    throw ConfigError(fmt::format("{}: {} is {} in this checkpoint: expected {}", checkpoint.path,
                                  key, found, wanted));
  };
  const ModelConfig &found = checkpoint.model, &wanted = config.model;
  require("model.vocab", found.vocab, wanted.vocab);
  require("model.hidden", found.hidden, wanted.hidden);
  require("model.layers", found.layers, wanted.layers);
  require("model.heads", found.heads, wanted.heads);
  require("model.kv_heads", found.kv_heads, wanted.kv_heads);
  require("model.head_dim", found.head_dim, wanted.head_dim);
  require("model.ffn", found.ffn, wanted.ffn);
  require("model.experts", found.experts, wanted.experts);
  require("model.top_k", found.top_k, wanted.top_k);
  if (!(found == wanted)) {
    require("config.json", to_json(found), to_json(wanted));
  }
  require("train.seq", checkpoint.state.seq, config.train.seq);
  require("train.seed", checkpoint.state.seed, config.train.seed);
  require("the hash of the training text", checkpoint.state.data, fingerprint);
}

}  // namespace tandem
