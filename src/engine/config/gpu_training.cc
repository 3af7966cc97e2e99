#include "engine/config/gpu_training.h"

#include <fmt/format.h>

#include <utility>

#include "engine/model/codec_policy.h"
#include "engine/model/layout.h"
#include "engine/model/program/cost.h"
#include "tandem/error.h"

namespace tandem {
namespace {

void check_gpu_learners(const SyncConfig& sync) {
  if (sync.num_learners() == 1) return;
  // Messages are sent as soon as they are encoded, without the GPU telling the host their sizes.
  if (const Wire wire = Wire::parse(sync.codec); wire.is_exact() && !wire.is_none()) {
    throw ConfigError(fmt::format(
        "sync.codec = {}: expected a format of one size on GPUs, such as int8", wire.describe()));
  }
}

/// e4m3 products read rows of multiples of 16 bytes, of a weight and of its transpose.
void check_fp8(const ModelConfig& model, const RunConfig& train, const ParallelConfig& parallel) {
  const int64_t tp = parallel.tp, samples = train.microbatch > 0
                                                ? train.microbatch
                                                : train.batch / parallel.logical_replicas();
  if (!train.fp8_scales) {
    throw ConfigError("train.fp8_scales is false: expected true on GPUs");
  }
  if (tp == 1 && train.fp8_weight_gradients &&
      samples * train.seq % kFp8Unit != 0) {  // as operands of weight gradients
    throw ConfigError(
        fmt::format("train.dtype = fp8: a microbatch has {} x train.seq = {} tokens: expected a "
                    "multiple of {} on GPUs",
                    samples, train.seq, kFp8Unit));
  }
  for (const BranchLayout& branch : ModelLayout(model, int(tp), 0).branches) {
    for (const WeightMatrix& m : {branch.in, branch.out}) {
      if (m.rows % kFp8Unit == 0 && m.columns % kFp8Unit == 0) continue;
      throw ConfigError(fmt::format(
          "train.dtype = fp8: the model has a matrix {} x {} with parallel.tp = {}: expected "
          "multiples of {} on GPUs",
          m.rows, m.columns, tp, kFp8Unit));
    }
  }
}

}  // namespace

void check_gpu_passes(const ModelConfig& model, int64_t tp) {
  program::check_gpus(model, tp);
  const int64_t unit = 8 * tp;
  if (model.vocab % unit == 0) return;
  throw ConfigError(
      fmt::format("model.vocab = {}: expected a multiple of {} on GPUs", model.vocab, unit));
}

void check_gpu_training(const TrainConfig& config, bool ranks_share_gpu) {
  const auto& model = config.model;
  const auto& parallel = config.parallel;
  if (model.experts > 0 && config.train.dtype == "f32") {
    throw ConfigError("train.dtype = f32: expected bf16 on GPUs where model.experts is above 0");
  }
  if (model.experts > 0 && config.train.gradient_dtype != "f32") {
    throw ConfigError(fmt::format(
        "train.gradient_dtype = {}: expected f32 on GPUs where model.experts is above 0",
        config.train.gradient_dtype));
  }
  if (config.train.moe_save != "sorted") {
    throw ConfigError(
        fmt::format("train.moe_save = {}: expected sorted on GPUs", config.train.moe_save));
  }
  if (parallel.cp > 1) {
    throw ConfigError(fmt::format("parallel.cp = {}: expected 1 on GPUs", parallel.cp));
  }
  // Tensor-parallel groups wait for each other in kernels, and one context serializes the launches
  // of groups that do not know each other's.
  if (ranks_share_gpu && parallel.tp > 1 && parallel.dp * parallel.pp > 1) {
    throw ConfigError(fmt::format(
        "parallel.tp = {} with parallel.dp = {} and parallel.pp = {}: expected tp, or both others, "
        "to be 1 where ranks share a GPU, or ranks that are processes (tandem launch)",
        parallel.tp, parallel.dp, parallel.pp));
  }
  check_gpu_learners(parallel.sync);
  // A step with another number of microbatches allocates memory while other ranks may wait.
  if (ranks_share_gpu && config.train.batch_start > 0 && parallel.pp > 1) {
    throw ConfigError(
        fmt::format("train.batch_start = {} with parallel.pp = {}: expected 0, or one stage, where "
                    "ranks share a GPU",
                    config.train.batch_start, parallel.pp));
  }
  if (const int64_t shards = parallel.state_shards();
      parallel.dp_shard > 0 && shards > 1 && shards < parallel.learner_dp()) {
    throw ConfigError(fmt::format("parallel.dp_shard = {}: expected 0 or 1 on GPUs", shards));
  }
  if (config.check.action != "off") {
    throw ConfigError(fmt::format("check.action = {}: expected off on GPUs", config.check.action));
  }
  if (parallel.dp_host > 0 && parallel.dp_host < parallel.learner_dp()) {
    throw ConfigError(fmt::format("parallel.dp_host = {}: expected 0 on GPUs", parallel.dp_host));
  }
  const CodecPolicy codec = CodecPolicy::parse(parallel.codec);
  for (const auto& [site, wire] :
       {std::pair("gradients", codec.gradients), std::pair("weights", codec.weights)}) {
    if (wire.is_none() || parallel.learner_dp() == 1) continue;
    throw ConfigError(fmt::format("parallel.codec: {} = {}: expected no wire format of {} on GPUs",
                                  site, wire.describe(), site));
  }
  if (codec.stages.is_exact() && !codec.stages.is_none()) {
    throw ConfigError(fmt::format(
        "parallel.codec: stages = {}: expected a format of one size on GPUs, such as int8",
        codec.stages.describe()));
  }
  if (parallel.chunks != 0) {
    throw ConfigError(fmt::format(
        "parallel.chunks = {}: expected 0 on GPUs, where the tuner chooses", parallel.chunks));
  }
  check_gpu_passes(model, parallel.tp);
  if (config.train.is_fp8()) check_fp8(model, config.train, parallel);
}

}  // namespace tandem
