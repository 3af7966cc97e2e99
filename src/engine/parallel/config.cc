#include "engine/parallel/config.h"

#include <fmt/format.h>

#include "core/system/printable.h"
#include "engine/config/section.h"
#include "engine/model/codec_policy.h"
#include "schedule/pipeline.h"
#include "tandem/error.h"

namespace tandem {
namespace {

constexpr Key<ParallelConfig> kParallelKeys[] = {
    {"tp", &ParallelConfig::tp, Range(1, 4096), "tensor parallel ranks (--tp)"},
    {"cp", &ParallelConfig::cp, Range(1, 4096),
     "context parallel ranks, which divide every sequence (--cp)"},
    {"dp", &ParallelConfig::dp, Range(1, 4096), "data parallel ranks (--dp)"},
    {"replicas", &ParallelConfig::replicas, Range(0, 4096),
     "replicas whose sums a run keeps at fewer ranks (0: parallel.dp, or a resumed run's)"},
    {"dp_shard", &ParallelConfig::dp_shard, Range(0, 4096),
     "consecutive replicas that divide the state; groups of them have copies (0: parallel.dp)"},
    {"dp_host", &ParallelConfig::dp_host, Range(0, 4096),
     "consecutive replicas, of a host, whose gradients are summed before those of hosts (0: all "
     "at once)"},
    {"ep", &ParallelConfig::ep, Range(1, 4096),
     "ranks that share the experts (--ep); divides parallel.dp"},
    {"zero", &ParallelConfig::zero, Range(0, 2),
     "divided among replicas: 0 nothing, 1 optimizer state, 2 gradients, too"},
    {"pp", &ParallelConfig::pp, Range(1, 4096), "pipeline parallel ranks (--pp)"},
    {"virtual_stages", &ParallelConfig::virtual_stages, Range(1, 64), "stages of a pipeline rank"},
    {"schedule", &ParallelConfig::schedule, kAny,
     "order of the pipeline's passes (docs/guide/pipelines.md)"},
    {"layers_per_stage", &ParallelConfig::layers_per_stage, Range(0, 4096),
     "layers of each stage, as [5, 6, 5] (empty: equal shares)"},
    {"dp_bucket_mib", &ParallelConfig::dp_bucket_mib, Range(0, 1e6),
     "MiB of gradients that leave together (0: 1, on GPUs and with DeMo 100)"},
    {"strategy", &ParallelConfig::strategy, one_of("automatic", "serial", "overlapped"),
     "of the overlap operators"},
    {"chunks", &ParallelConfig::chunks, Range(0, 4096),
     "transfers per shard when overlapped (0: chosen)"},
    {"link", &ParallelConfig::link, kAny,
     "emulated link between ranks that are threads, \"1GB/s,20us\""},
    {"codec", &ParallelConfig::codec, kAny,
     "what the forward pass's sums over tensor-parallel ranks travel as (--codec): \"int8\", "
     "\"mlp=int4:g32,attention=int8\"; also experts' rows and sums, embeddings' rows, gradients "
     "and weights between data-parallel ranks, rows between pipeline stages, and keys and values "
     "between context-parallel ranks: "
     "\"gradients=int4:g32,weights=lossless,stages=int8,keys=int8:g64\"; or a table of these"},
    {"error_feedback", &ParallelConfig::error_feedback, kAny,
     "what encoding a gradient loses is added to the next step's"},
};

/// Text of what is expected where ranks run several replicas; empty if they can.
std::string find_unsupported(const ParallelConfig& parallel, const CodecPolicy& codec) {
  if (!codec.gradients.is_exact() || !codec.weights.is_exact()) {
    return fmt::format("parallel.codec without lossy gradients or weights, not \"{}\"",
                       parallel.codec);
  }
  if (const int64_t shards = parallel.dp_shard; shards > 0 && shards < parallel.learner_dp()) {
    return "parallel.dp_shard = 0, which has the same bits";
  }
  if (const int64_t host = parallel.dp_host; host > 0 && host < parallel.learner_dp()) {
    return "parallel.dp_host = 0";
  }
  if (parallel.zero == 0) return "parallel.zero = 1, which has the same bits";
  return parallel.zero == 2 && parallel.pp > 1 ? "parallel.zero = 1 or pp = 1" : "";
}

/// Text of what is expected of the size of shard groups; empty if nothing contradicts it.
std::string find_shard_conflict(const ParallelConfig& parallel) {
  if (parallel.learner_dp() % parallel.dp_shard != 0) {
    return fmt::format("a divisor of {} = {}", parallel.learner_dp_key(), parallel.learner_dp());
  }
  if (parallel.dp_shard % parallel.ep != 0) {
    return fmt::format("a multiple of parallel.ep = {}", parallel.ep);
  }
  return parallel.zero != 1 ? fmt::format("0 with parallel.zero = {}", parallel.zero) : "";
}

/// Text of what is expected of the number of a host's replicas; empty if nothing contradicts it.
std::string find_host_conflict(const ParallelConfig& parallel, const CodecPolicy& codec) {
  if (parallel.learner_dp() % parallel.dp_host != 0) {
    return fmt::format("a divisor of {} = {}", parallel.learner_dp_key(), parallel.learner_dp());
  }
  if (parallel.dp_host % parallel.ep != 0) {
    return fmt::format("a multiple of parallel.ep = {}", parallel.ep);
  }
  if (parallel.zero != 1) return fmt::format("0 with parallel.zero = {}", parallel.zero);
  if (parallel.dp_shard > 0 && parallel.dp_shard < parallel.learner_dp() &&
      parallel.dp_shard != parallel.dp_host) {
    return fmt::format("0 or parallel.dp_shard = {}", parallel.dp_shard);
  }
  if (parallel.replicas > parallel.dp) {
    return fmt::format("0 with parallel.replicas = {}", parallel.replicas);
  }
  if (codec.gradients.is_none() && codec.weights.is_none()) return "";
  return fmt::format("0 with wire formats of gradients or weights, \"{}\"", parallel.codec);
}

void check_replicas(const ParallelConfig& parallel, const CodecPolicy& codec) {
  const auto reject = [](const char* key, int64_t value, const std::string& expected) {
    if (expected.empty()) return;
    throw ConfigError(fmt::format("parallel.{} is {}: expected {}", key, value, expected));
  };
  if (parallel.replicates_state() && !codec.weights.is_none()) {
    const bool is_zero = parallel.zero == 0;
    throw ConfigError(fmt::format(
        "{}: expected parallel.codec without weights, which are not sent, not \"{}\", or {}",
        is_zero ? "parallel.zero is 0" : "parallel.dp_shard is 1", parallel.codec,
        is_zero ? "zero = 1" : "0"));
  }
  if (parallel.has_shard_groups())
    reject("dp_shard", parallel.dp_shard, find_shard_conflict(parallel));
  if (parallel.has_host_groups())
    reject("dp_host", parallel.dp_host, find_host_conflict(parallel, codec));
  if (parallel.replicas == 0) return;
  if (parallel.replicas < parallel.dp) {
    reject("replicas", parallel.replicas,
           fmt::format("0, or at least parallel.dp = {}, so that every rank has one", parallel.dp));
  }
  if (parallel.replicas % parallel.ep != 0) {
    reject("replicas", parallel.replicas,
           fmt::format("a multiple of parallel.ep = {}", parallel.ep));
  }
  if (parallel.replicas == parallel.dp) return;
  if (const std::string expected = find_unsupported(parallel, codec); !expected.empty()) {
    throw ConfigError(fmt::format("parallel.replicas is {} with parallel.dp = {}: expected {}",
                                  parallel.replicas, parallel.dp, expected));
  }
}

/// Learners whose ranks each have the state of their own shard, and weights in f32.
void check_learners(const ParallelConfig& parallel, const CodecPolicy& codec) {
  const int64_t learners = parallel.sync.num_learners();
  if (learners == 1) return;
  const auto reject = [learners](std::string_view key, const std::string& value,
                                 const std::string& expected) {
    throw ConfigError(fmt::format("parallel.{} is {} with sync.learners = {}: expected {}", key,
                                  value, learners, expected));
  };
  if (parallel.zero == 0 && parallel.learner_dp() > 1) reject("zero", "0", "zero = 1");
  if (parallel.has_shard_groups()) {
    reject("dp_shard", fmt::format("{}", parallel.dp_shard), "dp_shard = 0");
  }
  if (!codec.weights.is_exact()) {
    reject("codec", fmt::format("\"{}\"", parallel.codec), "no lossy wire format of weights");
  }
  if (parallel.logical_replicas() % learners != 0) {
    reject("replicas", fmt::format("{}", parallel.replicas), "a multiple of them");
  }
  // Rows of tiles lie across the buckets that a window of gradients is made for.
  if (!parallel.sync.is_demo() || parallel.learner_dp() == 1) return;
  if (parallel.zero == 2) reject("zero", "2", "zero = 1 with sync.method = \"demo\"");
  if (parallel.replicas > parallel.dp) {
    reject("replicas", fmt::format("{}", parallel.replicas), "0 with sync.method = \"demo\"");
  }
}

CodecPolicy parse_codec(const std::string& text) {
  try {
    return CodecPolicy::parse(text);
  } catch (const InvalidArgument& error) {
    throw ConfigError(fmt::format("parallel.codec: {}", error.what()));
  }
}

}  // namespace

std::span<const Key<ParallelConfig>> ParallelConfig::keys() {
  return kParallelKeys;
}

void ParallelConfig::check() const {
  sync.check(dp);
  if (cp > 1 && sync.num_learners() > 1) {
    throw ConfigError(fmt::format("parallel.cp is {} with sync.learners = {}: expected cp = 1", cp,
                                  sync.num_learners()));
  }
  check_learners(*this, parse_codec(codec));
  check_replicas(*this, parse_codec(codec));
  if (learner_dp() % ep != 0) {
    throw ConfigError(fmt::format("parallel.ep is {}: expected a divisor of {} = {}", ep,
                                  learner_dp_key(), learner_dp()));
  }
  try {
    schedule::parse_pipeline_kind(schedule);
  } catch (const ConfigError& error) {
    throw ConfigError(fmt::format("parallel.schedule: {}", printable(error.what(), 300)));
  }
  if (pp == 1 && virtual_stages > 1) {
    throw ConfigError(fmt::format(
        "parallel.virtual_stages is {}: expected 1 where parallel.pp is 1", virtual_stages));
  }
}

}  // namespace tandem
