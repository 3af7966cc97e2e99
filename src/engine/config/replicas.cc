#include "engine/config/replicas.h"

#include <fmt/format.h>

#include <string>

#include "engine/model/codec_policy.h"
#include "tandem/error.h"

namespace tandem {
namespace {

/// Text of what is expected where ranks run several replicas; empty if they can.
std::string find_unsupported(const TrainConfig& config) {
  const CodecPolicy codec = CodecPolicy::parse(config.parallel.codec);
  if (!codec.gradients.is_exact() || !codec.weights.is_exact()) {
    return fmt::format("parallel.codec without lossy gradients or weights, not \"{}\"",
                       config.parallel.codec);
  }
  if (config.optimizer.name == "lamb") return "optimizer.name = \"adamw\"";
  if (config.parallel.zero == 0) return "parallel.zero = 1, which has the same bits";
  if (config.parallel.zero == 2 && config.parallel.pp > 1) return "parallel.zero = 1 or pp = 1";
  const bool has_aux_loss = config.model.experts > 0 && config.model.aux_loss_coeff > 0;
  const int64_t samples = config.train.batch / config.parallel.replicas;
  const bool is_split = config.train.microbatch > 0 && config.train.microbatch < samples;
  return has_aux_loss && is_split && config.train.aux_loss_scope == "microbatch"
             ? "train.aux_loss_scope = \"step\""
             : "";
}

/// Throws ConfigError for keys that need divided state.
void check_replicated_state(const TrainConfig& config) {
  if (config.parallel.zero > 0) return;
  const bool sends_weights = !CodecPolicy::parse(config.parallel.codec).weights.is_none();
  if (!sends_weights && config.optimizer.name != "lamb") return;
  throw ConfigError(fmt::format(
      "parallel.zero is 0: expected {}, or zero = 1",
      sends_weights ? fmt::format("parallel.codec without weights, which are not sent, not \"{}\"",
                                  config.parallel.codec)
                    : "optimizer.name = \"adamw\""));
}

}  // namespace

void check_replicas(const TrainConfig& config) {
  const auto& parallel = config.parallel;
  check_replicated_state(config);
  if (parallel.replicas == 0) return;
  if (parallel.replicas < parallel.dp) {
    throw ConfigError(fmt::format(
        "parallel.replicas is {}: expected 0, or at least parallel.dp = {}, so that every rank has "
        "one",
        parallel.replicas, parallel.dp));
  }
  if (parallel.replicas % parallel.ep != 0) {
    throw ConfigError(
        fmt::format("parallel.replicas is {}: expected a multiple of parallel.ep = {}",
                    parallel.replicas, parallel.ep));
  }
  if (parallel.replicas == parallel.dp) return;
  if (const std::string expected = find_unsupported(config); !expected.empty()) {
    throw ConfigError(fmt::format("parallel.replicas is {} with parallel.dp = {}: expected {}",
                                  parallel.replicas, parallel.dp, expected));
  }
}

}  // namespace tandem
