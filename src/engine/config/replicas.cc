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
  if (const int64_t shards = config.parallel.dp_shard; shards > 0 && shards < config.parallel.dp) {
    return "parallel.dp_shard = 0, which has the same bits";
  }
  if (const int64_t host = config.parallel.dp_host; host > 0 && host < config.parallel.dp) {
    return "parallel.dp_host = 0";
  }
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
  if (!replicates_state(config)) return;
  const bool sends_weights = !CodecPolicy::parse(config.parallel.codec).weights.is_none();
  if (!sends_weights && config.optimizer.name != "lamb") return;
  throw ConfigError(fmt::format(
      "{}: expected {}, or {}",
      config.parallel.zero == 0 ? "parallel.zero is 0" : "parallel.dp_shard is 1",
      sends_weights ? fmt::format("parallel.codec without weights, which are not sent, not \"{}\"",
                                  config.parallel.codec)
                    : "optimizer.name = \"adamw\"",
      config.parallel.zero == 0 ? "zero = 1" : "0"));
}

/// Throws ConfigError for a size of shard groups that others contradict.
void check_shard_groups(const TrainConfig& config) {
  const auto& parallel = config.parallel;
  if (parallel.dp_shard == 0 || parallel.dp_shard == parallel.dp) return;
  std::string expected;
  if (parallel.dp % parallel.dp_shard != 0) {
    expected = fmt::format("a divisor of parallel.dp = {}", parallel.dp);
  } else if (parallel.dp_shard % parallel.ep != 0) {
    expected = fmt::format("a multiple of parallel.ep = {}", parallel.ep);
  } else if (parallel.zero != 1) {
    expected = fmt::format("0 with parallel.zero = {}", parallel.zero);
  } else if (config.optimizer.name == "lamb") {
    expected = "0 with optimizer.name = \"lamb\"";
  }
  if (expected.empty()) return;
  throw ConfigError(
      fmt::format("parallel.dp_shard is {}: expected {}", parallel.dp_shard, expected));
}

/// Throws ConfigError for a number of a host's replicas that others contradict.
void check_host_groups(const TrainConfig& config) {
  const auto& parallel = config.parallel;
  // One group of all data-parallel ranks sums as no groups do, but not if more replicas had
  // several.
  const bool sums_all = parallel.dp_host == parallel.dp && parallel.replicas <= parallel.dp;
  if (parallel.dp_host == 0 || sums_all) return;
  const CodecPolicy codec = CodecPolicy::parse(parallel.codec);
  std::string expected;
  if (parallel.dp % parallel.dp_host != 0) {
    expected = fmt::format("a divisor of parallel.dp = {}", parallel.dp);
  } else if (parallel.dp_host % parallel.ep != 0) {
    expected = fmt::format("a multiple of parallel.ep = {}", parallel.ep);
  } else if (parallel.zero != 1) {
    expected = fmt::format("0 with parallel.zero = {}", parallel.zero);
  } else if (parallel.dp_shard > 0 && parallel.dp_shard < parallel.dp &&
             parallel.dp_shard != parallel.dp_host) {
    expected = fmt::format("0 or parallel.dp_shard = {}", parallel.dp_shard);
  } else if (parallel.replicas > parallel.dp) {
    expected = fmt::format("0 with parallel.replicas = {}", parallel.replicas);
  } else if (!codec.gradients.is_none() || !codec.weights.is_none()) {
    expected = fmt::format("0 with wire formats of gradients or weights, \"{}\"", parallel.codec);
  } else if (config.optimizer.name == "lamb") {
    expected = "0 with optimizer.name = \"lamb\"";
  }
  if (expected.empty()) return;
  throw ConfigError(fmt::format("parallel.dp_host is {}: expected {}", parallel.dp_host, expected));
}

}  // namespace

void check_replicas(const TrainConfig& config) {
  const auto& parallel = config.parallel;
  check_replicated_state(config);
  check_shard_groups(config);
  check_host_groups(config);
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
